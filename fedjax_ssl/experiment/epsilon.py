"""How private a run with clipped and noisy updates is: epsilon by Google's `dp-accounting` (extra `privacy`)."""

from fedjax_ssl.experiment.settings import Settings


def epsilon(*, num_clients: int, cohort_size: int, noise: float, rounds: int, delta: float) -> float:
    """The epsilon of (epsilon, delta)-differential privacy, after so many rounds of a noise multiplier z = `noise`.

    Neighbors are two federations of K = `num_clients` that differ in all data of one client. Each round draws M = `cohort_size`
    clients uniformly without replacement and releases the sum of their updates, of norms up to S, plus N(0, (z S)^2): replacing
    a client changes the sum by up to 2 S, so that the noise is z / 2 of that. Rounds are composed by Renyi accounting.
    ImportError without the package.
    """
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    mechanism = dp_accounting.GaussianDpEvent(noise / 2)
    one = dp_accounting.SampledWithoutReplacementDpEvent(num_clients, cohort_size, mechanism)
    accountant.compose(dp_accounting.SelfComposedDpEvent(one, rounds))
    return float(accountant.get_epsilon(delta))


def privacy_line(settings: Settings) -> str:
    """A line that says how private the global model of a run is after its last round, at delta = 1 / (10 K)."""
    clients, delta = settings.data.num_clients, 1 / (10 * settings.data.num_clients)
    number, noise, rounds = settings.cohort_size, settings.privacy.noise, settings.rounds
    try:
        found = f"{epsilon(num_clients=clients, cohort_size=number, noise=noise, rounds=rounds, delta=delta):.3g}"
    except ImportError:
        return "differential privacy: for epsilon, install dp-accounting (the extra privacy)"
    after = f"after {settings.rounds} rounds, for all data of a client"
    return f"differential privacy: epsilon = {found} at delta = {delta:.3g} {after}"

"""Runs that end early: by a client whose results are not finite, and by weights that are not, with what to do."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl.experiment.divergence import divergence, remedy
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.methods import METHODS
from fedjax_ssl.simulation.round import FAULT
from tests import engine, tiny
from tests.average import AverageOptions, average
from tests.commands import CONFIG, launch, rows

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods")]


def fragile(*, task, client, server, options=AverageOptions()):
    """The method `average`, one of whose clients returns NaN from its round `scale` on."""
    base = average(task=task, client=client, server=server, options=AverageOptions())

    def client_update(shared, per_client, times, client_data, key):
        output = base.client_update(shared, per_client, times, client_data, key)
        return output._replace(weight=jnp.where((per_client == 4) & (times + 1 >= options.scale), jnp.nan, output.weight))

    return base._replace(client_update=client_update)


@pytest.fixture
def command(tmp_path):
    METHODS["fragile"] = fragile
    (tmp_path / "small.py").write_text(CONFIG.replace('"average"', '"fragile"'))
    return lambda workdir, *words: launch(f"--config={tmp_path / 'small.py'}", f"--workdir={tmp_path / workdir}", *words)


@pytest.mark.ci
@pytest.mark.parametrize(("times", "sound"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_client_that_is_not_finite_ends_the_run_which_then_goes_on_without_it(command, tmp_path, times, sound):
    given = f"--config.method.scale={times}", "--config.seed=4"
    assert command("usual", *given).returncode == 0
    usual, workdir = rows(tmp_path / "usual"), tmp_path / "run"
    assert [row["client/non_finite"] for row in usual][: sound + 1] == [0] * sound + [1]
    for _ in range(2):  # the second time from the checkpoint, with the same end
        done = command("run", *given, "--config.client.on_nonfinite=stop")
        assert done.returncode == 1
        said = f"error: round {sound + 1}: client 4 returned NaN or infinity in the weight; to go on without such clients, set"
        assert done.stderr.splitlines()[-1] == f"{said} client.on_nonfinite=skip"
        assert "Traceback" not in done.stderr
        assert rows(workdir) == usual[:sound]
        assert [path.name for path in (workdir / "checkpoints").iterdir()] == [f"{sound}"] * (sound > 0)
        assert not {"summary.json", "diverged.json"} & {path.name for path in workdir.iterdir()}
    assert command("run", *given).returncode == 0
    assert rows(workdir) == usual


RATE, CLIP = "client.optimizer.learning_rate", "client.optimizer.clip_norm"


@pytest.mark.parametrize(
    ("method", "overrides", "words"),
    [
        ("fixmatch", {}, f"lower {RATE}, or set {CLIP}"),
        ("fixmatch", {"client__optimizer__clip_norm": 1.0}, f"lower {RATE}"),
        ("fixmatch", {"client__optimizer__learning_rate": 30.0}, f"likely cause: {RATE}=30; lower it"),
        ("fedprox", {"method__prox_mu": 1e4}, "likely cause: method.prox_mu=10000; lower it"),
        ("fedprox", {"method__prox_mu": 1e4, "client__optimizer__name": "adam"}, f"lower {RATE}, or set {CLIP}"),
        (
            "fedprox",
            {"method__prox_mu": 1e4, "client__optimizer__name": "lion", "client__optimizer__weight_decay": 40.0},
            "likely cause: client.optimizer.weight_decay=40; lower it",
        ),
        ("fl2", {"method__rho": 50.0}, "likely cause: method.rho=50; lower it"),
        ("fedtrinet", {"method__labeled_rounds": 2.0}, f"lower {RATE}, or set {CLIP}"),  # a phase, of two rounds
        (
            "fixmatch",
            {"method__unlabeled_weight": 1e3, "client__optimizer__weight_decay": 40.0, "server__optimizer__learning_rate": 3.0},
            "likely causes: client.optimizer.weight_decay=40, server.optimizer.learning_rate=3, method.unlabeled_weight=1000; "
            "lower them",
        ),
    ],
)
def test_the_remedy_is_what_is_large_else_the_learning_rate(method, overrides, words):
    assert remedy(Settings.from_dict(tiny.config(method, **overrides)), ["client"]) == words


def found(server=0, clients=0, fault=0, cohort_size=5):
    sound = {"server/non_finite": server, "client/non_finite": clients, "client/participants": cohort_size - clients}
    return sound | ({FAULT: dict.fromkeys(range(clients), fault)} if clients else {})


def test_divergence_says_round_what_is_not_finite_and_what_to_do():
    settings, at_clients = (Settings.from_dict(tiny.config("fedavg", labels_at=at)) for at in ("server", "clients"))
    assert divergence(3, found(), settings) == divergence(3, found(clients=4, fault=1), settings) == ""
    both = f"lower {RATE} or server.training.optimizer.learning_rate, or set {CLIP} and server.training.optimizer.clip_norm"
    assert divergence(3, found(server=1), settings) == f"round 3: the global model holds NaN or infinity; {both}"
    assert divergence(3, found(server=1), at_clients).endswith(f"; lower {RATE}, or set {CLIP}")
    alone = {key: value for key, value in found(server=1).items() if key != "client/participants"}
    assert divergence(3, alone, settings).endswith(
        "; lower server.training.optimizer.learning_rate, or set server.training.optimizer.clip_norm"
    )
    of_all = divergence(2, found(clients=5, fault=0b1001), settings)
    assert of_all == f"round 2: all 5 clients returned NaN or infinity in the update, a metric; lower {RATE}, or set {CLIP}"
    of_weights = divergence(2, found(clients=5, fault=0b10010), settings)
    reason = "NaN or infinity in the weight and a negative weight"
    assert of_weights == f"round 2: all 5 clients returned {reason}; look at the weights of method.name=fedavg"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedmatch", "fedavg", "fedsiam_d", "fedlabel"])  # whose averages are their own
def test_a_round_in_which_nobody_counts_leaves_weights_and_optimizer_as_they_were(method):

    def idle(made):
        def init(key, spec):
            server, clients = made.init(key, spec)
            return server._replace(
                optimizer=jax.tree.map(jnp.ones_like, server.optimizer)
            ), clients  # so that there is momentum

        return engine.with_outputs(made._replace(init=init), lambda output: output._replace(weight=0 * output.weight))

    _, (before, after), (row,) = engine.simulate(tiny.experiment(method, labels_at="clients"), "scan", changed=idle)
    assert row["client/participants"] == row["comm/bytes_up"] == 0
    for part in ("weights", "optimizer"):
        assert engine.distance(getattr(before.server, part), getattr(after.server, part)) == 0

"""User-level differential privacy: clipped updates, noise of the stated scale, epsilon, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from fedjax_ssl.experiment.epsilon import epsilon, privacy_line
from fedjax_ssl.local import Weights
from fedjax_ssl.method import Aggregate, ClientOutput, Method
from fedjax_ssl.wrappers.privacy import with_privacy
from launch import config_file
from tests import engine, tiny

CLIP, NOISE, COHORT = 2.0, 1.5, 8


def wrapped(update=None, weight=3.0, noise=NOISE, **more):
    """A method whose client sends `update`, and whose server keeps the aggregate."""
    method = Method(
        init=None,
        broadcast=None,
        client_update=lambda *_: ClientOutput(Weights(update, more.get("stats", ())), jnp.float32(weight), (), {}),
        server_update=lambda server, aggregate, data, key: (aggregate, {}),
        predict={"global": None},
    )
    return with_privacy(method, CLIP, noise, COHORT)


@pytest.mark.parametrize("scale", [0.1, 0.5, 5.0])
def test_a_client_sends_at_most_the_clipped_norm_and_counts_as_one(scale):
    rng = np.random.default_rng(0)
    update = {"a": rng.standard_normal((2, 3)), "b": rng.standard_normal(4)}
    length = scale * np.sqrt(sum(np.sum(x**2) for x in update.values()))
    output = wrapped(jax.tree.map(lambda x: jnp.float32(scale * x), update)).client_update((), (), (), None, None)
    for name, x in update.items():
        np.testing.assert_allclose(output.update.params[name], scale * x * min(1, CLIP / length), rtol=1e-5)
    assert output.weight == 1
    assert output.metrics["client/clipped"].total == (length > CLIP)


@pytest.mark.parametrize(("update", "weight"), [(np.ones(3), 0.0), (np.array([1.0, np.nan, 1.0]), 2.0)])
def test_a_client_that_rests_or_is_not_finite_does_not_count(update, weight):
    output = wrapped({"w": jnp.float32(update)}, weight).client_update((), (), (), None, None)
    assert output.weight == 0
    assert not np.any(output.update.params["w"])


def test_noise_of_the_stated_scale_is_added_to_the_sum_over_the_whole_cohort():
    mean, present, shape = 0.3, 6, (200, 300)
    aggregate = Aggregate(Weights({"w": jnp.full(shape, mean), "b": jnp.full(30_000, mean)}, ()), jnp.float32(present))
    sent, _ = wrapped().server_update((), aggregate, None, jax.random.key(0))
    deviation = NOISE * CLIP / COHORT
    for x in sent.update.params.values():
        assert abs(np.mean(x) - mean * present / COHORT) < 5 * deviation / np.sqrt(x.size)
        assert abs(np.std(x) / deviation - 1) < 5 / np.sqrt(2 * x.size)
    w, b = (np.ravel(x)[:30_000] for x in (sent.update.params["w"], sent.update.params["b"]))
    assert abs(np.corrcoef(w, b)[0, 1]) < 5 / np.sqrt(30_000)
    again, _ = wrapped().server_update((), aggregate, None, jax.random.key(1))
    assert not np.array_equal(again.update.params["w"], sent.update.params["w"])


def test_one_clients_data_move_the_mean_by_twice_the_clipped_norm_over_the_cohort_at_most():
    rng = np.random.default_rng(0)
    updates = 10 * rng.standard_normal((COHORT, 5))
    other = updates.copy()
    other[3] *= -7

    def new(rows):
        clipped = [wrapped({"w": jnp.float32(row)}).client_update((), (), (), None, None).update.params["w"] for row in rows]
        total = Aggregate(Weights({"w": jnp.mean(jnp.stack(clipped), axis=0)}, ()), jnp.float32(COHORT))
        return wrapped(noise=0.0).server_update((), total, None, jax.random.key(0))[0].update.params["w"]

    assert np.linalg.norm(new(updates) - new(other)) == pytest.approx(2 * CLIP / COHORT, rel=1e-4)


def test_a_run_with_privacy_learns_where_noise_is_small_and_logs_what_was_clipped():
    run = {"method": "fedavg", "labels_at": "clients", "network": "linear", "privacy__clip": 1.0}
    found = [engine.simulate(tiny.experiment(**run, privacy__noise=noise), "scan", rounds=4)[2][-1] for noise in (0.01, 100.0)]
    assert found[0]["eval/accuracy"] > 0.5 > found[1]["eval/accuracy"]
    assert 0 <= found[0]["client/clipped"] <= 1


ORDERS = np.concatenate([1 + np.arange(1, 100) / 10, np.arange(11, 512)])


@pytest.mark.parametrize(("noise", "rounds"), [(4.0, 1), (20.0, 50)])
def test_epsilon_of_whole_rounds_is_that_of_the_gaussian_mechanism(noise, rounds):
    delta = 1e-5
    rdp = rounds * ORDERS / (2 * (noise / 2) ** 2)  # replacing a client moves the sum by twice the clipped norm
    expected = np.min(rdp + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1))
    found = epsilon(num_clients=100, cohort_size=100, noise=noise, rounds=rounds, delta=delta)
    assert found == pytest.approx(expected, rel=0.02)
    assert epsilon(num_clients=1000, cohort_size=10, noise=noise, rounds=rounds, delta=delta) < 0.5 * found


def test_the_columns_of_the_sweep_are_its_epsilons():
    of_all = {"num_clients": 100, "cohort_size": 20, "rounds": 40, "delta": 1e-3}
    cells = config_file.sweep("privacy", small=False).cells()
    for column, noise in {(cell.column, cell.overrides["privacy.noise"]) for cell in cells}:
        assert epsilon(noise=noise, **of_all) == pytest.approx(float(column), rel=0.04)  # which has two digits
    for cell in cells:
        config = digits.get_config(cell.config.removeprefix("digits:"))
        assert (cell.overrides["data.num_clients"], cell.overrides["cohort_size"], config.rounds) == (100, 20, 40)


def test_a_run_says_how_private_it_is(monkeypatch):
    settings = tiny.experiment("fedavg", labels_at="clients", privacy__clip=1.0, privacy__noise=2.0).settings
    found = epsilon(num_clients=8, cohort_size=5, noise=2.0, rounds=4, delta=1 / 80)
    assert privacy_line(settings).startswith(f"differential privacy: epsilon = {found:.3g} at delta = 0.0125 after 4 rounds")
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    assert privacy_line(settings) == "differential privacy: for epsilon, install dp-accounting (the extra privacy)"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"method": "fedsiam_d"}, "privacy.clip: got 1.0, accepted: 0 with a method whose server reads every client's update"),
        (
            {"method": "fedavg", "server__aggregation": "median"},
            "server.aggregation: got median with privacy.clip=1, accepted: mean",
        ),
        (
            {"method": "fedavg", "client__compression": "int8"},
            "client.compression: got int8 with privacy.clip=1, accepted: none",
        ),
        ({"method": "fl2"}, "method.aggregation: got lsaa with privacy.clip=1, accepted: uniform"),
        (
            {"method": "fixmatch", "network": "cnn"},
            "privacy.clip: got 1 where the server reads clients' data, accepted: a method that",
        ),
    ],
)
def test_what_would_tell_more_is_refused(given, line):
    with pytest.raises(ValueError) as error:
        tiny.experiment(**given, privacy__clip=1.0)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    "given",
    [
        {"method": "cbafed"},
        {"method": "fedavg", "labels_at": "clients", "network": "cnn", "model__norm": "running"},
    ],
)
def test_updates_with_more_than_parameters_are_refused_before_anything_is_compiled(given):
    with pytest.raises(
        ValueError, match=r"^privacy.clip: got 1.0, accepted: 0 where clients send more than changes of parameters"
    ):
        tiny.experiment(**given, privacy__clip=1.0).simulator.trace()

"""`diagnostics.clients_every`: what each client of a recorded round did, in files; and nothing of it in other rounds."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl.local import Weights
from fedjax_ssl.method import ClientOutput
from fedjax_ssl.metrics import PerClient, num_bytes
from fedjax_ssl.runs.clients import ClientsLog
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny, toy
from tests.commands import rows, succeeded

pytestmark = pytest.mark.usefixtures("own_methods")


@pytest.mark.ci
def test_records_survive_a_stop_and_a_resume_without_duplicates_and_change_no_result(tmp_path, config):
    plain, whole, parts = (tmp_path / name for name in ("plain", "whole", "parts"))
    for workdir, every, more in ((plain, 0, ()), (whole, 2, ()), (parts, 2, ("--stop_after=3",))):
        succeeded(config, f"--config.diagnostics.clients_every={every}", *more, f"--workdir={workdir}")
    ClientsLog(parts).append(5, {"client/id": np.zeros(1)})  # of a round that no checkpoint has
    succeeded(config, "--config.diagnostics.clients_every=2", f"--workdir={parts}")
    assert not (plain / "clients").exists()
    assert rows(plain) == rows(whole) == rows(parts)
    records = [ClientsLog(workdir).read() for workdir in (whole, parts)]
    assert records[0].keys() == records[1].keys() >= {"round", "client/id", "client/loss", "client/weight", "client/cosine"}
    for name, values in records[0].items():
        np.testing.assert_array_equal(values, records[1][name])
    np.testing.assert_array_equal(records[0]["round"], [2, 4, 6])
    np.testing.assert_allclose(records[0]["client/weight"].sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(abs(records[0]["client/cosine"]), 1)  # of one number
    record = whole / "clients" / "round_000004.npz"
    content = record.read_bytes()
    for number in range(0, len(content), 16):
        record.write_bytes(content[:number] + bytes([content[number] ^ 8]) + content[number + 1 :])
        with contextlib.suppress(ValueError):  # a bit that nothing reads changes nothing
            found = ClientsLog(whole).read()
            assert found.keys() == records[0].keys()
            assert all(np.array_equal(values, records[0][name], equal_nan=True) for name, values in found.items())
    record.write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"round_000004.npz cannot be read .*; remove it"):
        ClientsLog(whole).read()
    succeeded(config, "--config.diagnostics.clients_every=2", "--overwrite", "--config.rounds=1", f"--workdir={whole}")
    assert not (whole / "clients").exists()


def vectors(aggregator):
    """A method whose client k sends the parameters (k + 1, 1), and statistics, with weight |D_k|; client 3 sends NaN."""

    def client_update(shared, per_client, state, client_data, key):
        del shared, key
        first = jnp.where(per_client == 3, jnp.nan, per_client + 1.0)
        params = {"w": jnp.zeros(()), "v": jnp.stack([first, jnp.ones(())])}
        update = Weights(params, {"mean": jnp.full(3, 1000.0)})
        return ClientOutput(
            update, client_data.unlabeled.count.astype(jnp.float32), state, {"client/k": PerClient(per_client + 0.5)}
        )

    return toy.method(aggregator="sum")._replace(
        client_update=client_update, server_update=lambda server, aggregate, data, key: (server, {}), aggregator=aggregator
    )


@pytest.mark.parametrize("aggregator", ["sum", pytest.param("stack", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["vmap", "scan", "chunked", "sharded", "sharded_chunked", "host", "seeds"])
def test_norm_cosine_and_weight_are_those_of_the_updates(aggregator, name):
    seeds = (5, 0) if name == "seeds" else (0,)
    problem = toy.problem(made=vectors(aggregator), on_host=name == "host", seeds=seeds)
    simulator = Simulator(problem, toy.EXECUTIONS.get(name, Execution()))
    _, ((*_, row),) = simulator.dispatch(simulator.initialize(), [None] * len(seeds), record=True)
    found = row["clients"]
    ids = found["client/id"]
    assert 3 in ids  # of the first cohort
    bad = ids == 3
    weights = np.where(bad, 0, np.array(toy.SIZES)[ids])
    updates = np.where(bad[:, None], 0, np.stack([ids + 1.0, np.ones(5)], axis=1))
    mean = weights @ updates / weights.sum()
    norms = np.linalg.norm(updates, axis=1)
    with np.errstate(invalid="ignore"):
        cosines = updates @ mean / norms / np.linalg.norm(mean)
    np.testing.assert_allclose(found["client/weight"], weights / weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(found["client/update_norm"], norms, rtol=1e-6)
    np.testing.assert_allclose(found["client/cosine"], cosines, rtol=1e-6)
    np.testing.assert_allclose(found["client/k"], np.where(bad, np.nan, ids + 0.5))


@pytest.mark.slow
def test_norm_and_cosine_are_of_parameters_however_they_are_sent():
    """FedLabel's clients send both changes and a number of examples, and the server takes half their sum, or send the sum."""
    found = []
    for aggregation in ("sum", "halves"):
        options = {"method__aggregation": aggregation, "diagnostics__clients_every": 1, "rounds": 1}
        ((_, row),) = tiny.experiment("fedlabel", network="linear", **options).rounds()
        found.append(row["clients"])
    np.testing.assert_allclose(found[0]["client/update_norm"] / 2, found[1]["client/update_norm"], rtol=1e-4)
    np.testing.assert_allclose(found[0]["client/cosine"], found[1]["client/cosine"], atol=0.05)  # the weights differ


def traced(experiment):
    simulator = Simulator(experiment.problem, Execution())
    return str(jax.make_jaxpr(simulator._round._jitted)(simulator.template(), simulator._inputs, simulator._pools))


def test_rounds_that_are_not_recorded_are_the_same_program():
    off, on = (tiny.experiment("fl2", network="linear", diagnostics__clients_every=every) for every in (0, 5))
    assert traced(off) == traced(on)
    method = off.problem.method

    def without_records(number):
        def client_update(*args):
            output = method(number).client_update(*args)
            names = [name for name in output.metrics if name.startswith("example/") or name == "client/class_thresholds"]
            assert len(names) == 4
            return output._replace(metrics={key: value for key, value in output.metrics.items() if key not in names})

        return method(number)._replace(client_update=client_update)

    never = Simulator(off.problem._replace(method=without_records), Execution())
    assert traced(off) == str(jax.make_jaxpr(never._round._jitted)(never.template(), never._inputs, never._pools))


@pytest.mark.ci
def test_fl2s_thresholds_are_recorded_for_each_class_and_inspect_shows_the_pseudo_labels_of_the_round():
    experiment = tiny.experiment("fl2", network="linear", diagnostics__clients_every=1, rounds=1, method__consistency="none")
    state, _ = experiment.start()
    before = fedjax_ssl.copied(state)
    ((_, row),) = experiment.rounds(state)
    found = row["clients"]
    assert found["client/class_thresholds"].shape == (5, 10)
    np.testing.assert_allclose(found["client/class_thresholds"].max(1), found["client/threshold"], rtol=1e-6)
    shares = np.maximum(1 - found["client/threshold"], 1e-20)
    np.testing.assert_allclose(found["client/weight"], shares / shares.sum(), rtol=1e-5)
    for m, client in enumerate(found["client/id"]):
        shown = experiment.inspect(before, int(client))
        thresholds = found["client/class_thresholds"][m]
        np.testing.assert_array_equal(shown.accepted, shown.confidence > thresholds[shown.pseudo_label])
        assert shown.accepted.mean() == pytest.approx(found["client/mask_rate"][m])
        right = (shown.pseudo_label == shown.true_label)[shown.accepted]
        assert right.mean() == pytest.approx(found["diagnostics/pseudo_label_accuracy"][m])


@pytest.mark.slow
def test_inspect_of_data_on_the_host_sends_one_clients_data_and_state_and_shows_the_same():
    given = {"network": "linear", "data__num_clients": 200, "cohort_size": 5, "data__min_size": 0, "rounds": 2}
    sizes, shown = {}, {}
    for where in ("device", "host"):
        experiment = tiny.experiment("fedtrinet", execution__data=where, **given)
        state, _ = experiment.start()
        shown[where] = experiment.inspect(state, 3)
        sizes[where] = experiment._examples.memory_bytes()[1]
    per_client = num_bytes(state.clients) // 200
    server = num_bytes(state.server)
    images = experiment.problem.train.images.nbytes
    assert sizes["host"] < server + 2 * per_client + images / 4
    assert sizes["device"] > 100 * per_client
    for one, other in zip(shown["device"], shown["host"], strict=True):
        np.testing.assert_array_equal(one, other)

"""Robust averages and faulty clients against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local import Weights
from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, Cohort
from fedjax_ssl.wrappers.robust import AGGREGATIONS, Faults, with_aggregation, with_faulty_clients
from tests import engine, tiny, toy

WEIGHTS = np.float32([3, 0, 1, 2, 0, 5, 1])


def updates(seed: int = 0, clients: int = 7) -> dict[str, np.ndarray]:
    """Clients' updates: of those of weight 0, of which nothing counts, client 1 is far off and client 4 as client 3 is."""
    random = np.random.default_rng(seed)
    found = {"a": random.normal(size=(clients, 4, 3)), "b": random.normal(size=(clients, 5))}
    for x in found.values():
        x[1] = -1e6
        x[4:5] = x[3]
    return {key: x.astype(np.float32) for key, x in found.items()}


def of_numpy(aggregation: str, given: dict[str, np.ndarray], weights: np.ndarray, share: float) -> dict[str, np.ndarray]:
    present = {key: x[weights > 0].astype(np.float64) for key, x in given.items()}
    number = int((weights > 0).sum())
    assumed = int(share * number + 1e-6)
    if aggregation == "median":
        return {key: np.median(x, axis=0) for key, x in present.items()}
    if aggregation == "trimmed_mean":
        cut = min(assumed, (number - 1) // 2)
        return {key: np.sort(x, axis=0)[cut : number - cut].mean(axis=0) for key, x in present.items()}
    flat = np.concatenate([x.reshape(number, -1) for x in present.values()], axis=1)
    scores = []
    for i in range(number):
        others = sorted(((flat[i] - flat[j]) ** 2).sum() for j in range(number) if j != i)
        scores.append(sum(others[: max(number - assumed - 2, 1)]))
    return {key: x[int(np.argmin(scores))] for key, x in present.items()}


def seen_by_server(aggregation: str, given: dict[str, np.ndarray], weights: np.ndarray, share: float) -> Aggregate:
    """What a method's server gets in place of the mean."""
    base = toy.method()._replace(server_update=lambda server, aggregate, data, key: (aggregate, {}))
    method = with_aggregation(base, aggregation, share)
    assert method.aggregator == "stack"
    return method.server_update(None, Aggregate(given, jnp.asarray(weights)), None, None)[0]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.45])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_robust_averages_are_those_of_numpy_over_the_clients_that_sent_something(aggregation, share):
    for seed in range(3):
        for clients in (7, 6, 4):  # five, four and three of which sent something
            given, weights = updates(seed, clients), WEIGHTS[:clients]
            seen = seen_by_server(aggregation, given, weights, share)
            for key, expected in of_numpy(aggregation, given, weights, share).items():
                np.testing.assert_allclose(seen.update[key], expected, rtol=1e-6, atol=1e-6)
            assert float(seen.weight) == weights.sum()


def test_krum_takes_no_update_whose_squared_distances_overflow():
    given = {key: x * 1e-3 for key, x in updates().items()}
    given["b"][0] = 1e20
    seen = seen_by_server("krum", given, np.ones(7, np.float32), 0.2)
    assert np.abs(seen.update["b"]).max() < 1e19


def test_one_update_alone_is_krums_choice():
    given, weights = updates(), np.zeros(7, np.float32)
    weights[4] = 1
    np.testing.assert_array_equal(seen_by_server("krum", given, weights, 0.2).update["b"], given["b"][4])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_without_any_update_the_robust_average_is_zero(aggregation):
    seen = seen_by_server(aggregation, updates(), np.zeros(7, np.float32), 0.2)
    assert all(not np.any(x) for x in jax.tree.leaves(seen))


def output_of(fault: str, client: int, *, share: float = 0.5, scale: float = 2.0):
    """What one of seven clients sends, and what it would have sent, as its method's clients send 1 + the sum of labels."""

    def client_update(shared, per_client, state, data, key):
        output = toy.method().client_update(shared, per_client, state, data, key)
        labels = jnp.sum(jnp.where(data.labeled.mask, data.labeled.labels, 0))
        return output._replace(update={"w": 1.0 + labels, "v": jnp.full((400,), 0.1)})

    base = toy.method()._replace(client_update=client_update)
    wrong = with_faulty_clients(base, Faults(share, fault, scale), num_clients=7, num_classes=10)
    examples = toy.data().client_data
    labeled = jax.tree.map(lambda x: jnp.asarray(x[client]), examples)
    labels = jnp.full(labeled.index.shape, 2, jnp.int32)
    own = Examples(jnp.asarray(toy.data().train.images), labeled.index, labeled.count, labels)
    cohort = Cohort(jnp.arange(7), jnp.int32(0))
    found = []
    for method in (wrong, base):
        shared, per_client = method.broadcast({"w": jnp.float32(0)}, None, cohort)
        mine = jax.tree.map(lambda x: x[client], per_client)
        data = ClientData(own, own._replace(labels=None), labels)
        found.append(method.client_update(shared, mine, jnp.int32(0), data, jax.random.key(client)).update)
    return found


def test_clients_with_high_ids_flip_the_sign_of_their_update():
    for client in range(7):
        wrong, right = output_of("sign_flip", client)
        factor = -2.0 if client >= 3 else 1.0  # half of seven, rounded to an even number
        assert float(wrong["w"]) == factor * float(right["w"])
        np.testing.assert_array_equal(wrong["v"], factor * right["v"])


@pytest.mark.parametrize("fault", ["sign_flip", "noise"])
def test_batch_norm_statistics_of_faulty_clients_are_their_own(fault):
    """A mean of flipped variances would be negative."""
    sent = Weights({"w": jnp.ones(3)}, {"var": jnp.full(3, 2.0)})
    base = toy.method()._replace(client_update=lambda *_: ClientOutput(sent, jnp.float32(1), (), {}))
    wrong = with_faulty_clients(base, Faults(1.0, fault, 3.0), num_clients=7, num_classes=10)
    got = wrong.client_update(None, ((), jnp.bool_(True)), (), None, jax.random.key(0)).update
    np.testing.assert_array_equal(got.stats["var"], sent.stats["var"])
    assert not np.allclose(got.params["w"], sent.params["w"])


def test_noise_is_as_large_beside_the_update_as_its_scale_says():
    wrong, right = output_of("noise", 5)
    noise, norm = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (wrong, right))
    assert np.linalg.norm(noise - norm) / np.linalg.norm(norm) == pytest.approx(2.0, rel=0.1)
    same, right = output_of("noise", 1)
    assert jax.tree.all(jax.tree.map(np.array_equal, same, right))


def test_wrong_labels_are_counted_from_the_other_end():
    counts = toy.SIZES
    assert [float(output_of("labels", client)[0]["w"]) for client in (0, 6)] == [1 + 2 * counts[0], 1 + 7 * counts[6]]


@pytest.mark.parametrize(
    "aggregation", [pytest.param(name, marks=pytest.mark.ci if name == "krum" else pytest.mark.slow) for name in AGGREGATIONS]
)
def test_a_robust_average_is_the_same_in_chunks_on_several_devices(aggregation):
    experiment = tiny.experiment(
        "fixmatch", labels_at="clients", server__aggregation=aggregation, system__faulty=0.3, method__confidence=0.12,
        client__epochs=0, client__steps=2,
    )  # fmt: skip
    _, states, rows = engine.simulate(experiment, "scan", rounds=1, evaluated=False)
    _, others, got = engine.simulate(experiment, "sharded_chunked", rounds=1, evaluated=False, start=engine.copied(states[0]))
    assert rows[0]["client/participants"] == got[0]["client/participants"] > 0
    assert engine.distance(*(jax.device_get(each[1].server) for each in (states, others))) < 1e-5
    assert engine.distance(*(jax.device_get(each[1].server) for each in (states, [states[0]] * 2))) > 1e-4


def test_a_method_whose_server_reads_every_update_has_its_own_average_alone():
    with pytest.raises(ValueError, match=r"^server.aggregation: got krum with a method whose server reads every client's "):
        tiny.experiment("fedsiam_d", server__aggregation="krum")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_update_of_another_shape_is_refused_as_without_a_robust_average(aggregation):
    def client_update(shared, *_):
        return ClientOutput({"w": shared["w"][:1]}, jnp.float32(1), (), {})

    made = with_aggregation(toy.method()._replace(client_update=client_update), aggregation, 0.2)
    with pytest.raises(ValueError, match=r"^client_update: update: got float32\[1\] at \['w'\], accepted: float32\[3\]"):
        made.client_update({"w": jnp.ones(3)}, (), (), None, None)


def test_shares_that_are_no_client_are_named_and_cannot_vary(caplog):
    tiny.experiment("fixmatch", system__faulty=0.01, server__aggregation="krum", server__assumed_faulty=0.01)
    assert [line for line in caplog.messages if "so few clients" in line] == [
        "system.faulty=0.01: of so few clients none is faulty",
        "server.assumed_faulty=0.01: of so few clients a round none is assumed faulty",
    ]
    for share, is_too_large in ((0.2, False), (0.4, True)):  # f = 1 and 2 of 5
        caplog.clear()
        tiny.experiment("fixmatch", server__aggregation="krum", server__assumed_faulty=share)
        assert any("Krum needs more than 2 f + 2 clients" in line for line in caplog.messages) == is_too_large
    line = r"^values: got \(0.4, 0.41\) with vary=server.assumed_faulty, accepted: other values, as 0.4, 0.41 are ., . clients"
    with pytest.raises(ValueError, match=line):
        tiny.experiment("fixmatch", vary="server.assumed_faulty", values=(0.4, 0.41), server__aggregation="trimmed_mean")


def test_clients_without_labels_cannot_have_wrong_ones():
    with pytest.raises(ValueError, match=r"^system.fault: got labels with data.labels_at=server, accepted: sign_flip or noise"):
        tiny.experiment("fixmatch", system__faulty=0.2, system__fault="labels")

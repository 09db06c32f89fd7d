"""Compressed uploads: quantization without bias, the largest values with error feedback, and the bytes that are counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import Weights
from fedjax_ssl.method import ClientOutput, Method
from fedjax_ssl.metrics import Sum
from fedjax_ssl.wrappers import compression
from tests import engine, tiny

COUNTED = [case for case in tiny.WITH_CLIENTS if case[0] != "fedsiam_d"]


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_a_quantized_tensor_has_whole_steps_next_to_its_values_and_their_mean(bits, levels):
    rng = np.random.default_rng(0)
    tree = {"kernel": jnp.float32(rng.standard_normal((5, 7))), "bias": jnp.float32([0.3, -0.02, 0.0]), "zero": jnp.zeros(3)}
    found, size = compression.quantized(tree, bits, jax.random.key(0))
    assert size == sum(-(-x.size * bits // 8) + 4 for x in tree.values())
    many = jax.vmap(lambda key: compression.quantized(tree, bits, key)[0])(jax.random.split(jax.random.key(1), 4000))
    for name, x in tree.items():
        step = np.abs(x).max() / levels
        if step == 0:
            assert not np.any(many[name])
            continue
        whole = np.asarray(found[name]) / step
        np.testing.assert_allclose(whole, np.rint(whole), atol=1e-4)
        assert np.all(np.abs(found[name] - x) <= step * 1.0001)
        np.testing.assert_allclose(np.mean(many[name], axis=0), x, atol=5 * step / np.sqrt(4 * 4000))


def test_the_largest_values_are_sent_and_no_others():
    rng = np.random.default_rng(0)
    tree = {"a": rng.standard_normal((4, 3)), "b": rng.standard_normal(8)}
    found, size = compression.largest(jax.tree.map(jnp.float32, tree), 0.25)
    flat = np.concatenate([tree["a"].ravel(), tree["b"]])
    least = np.sort(np.abs(flat))[-5]
    assert size == 8 * 5
    for name, x in tree.items():
        np.testing.assert_allclose(found[name], np.where(np.abs(x) >= least, x, 0), rtol=1e-6)


def wrapped(kind, updates, share=0.3):
    """A method whose client sends the given updates, round after round, and has weight 0 where one is None."""

    def client_update(shared, per_client, state, data, key):
        update = {"w": jnp.stack([jnp.zeros(4) if u is None else jnp.float32(u) for u in updates])[state]}
        weight = jnp.array([0.0 if u is None else 1.0 for u in updates])[state]
        metrics = {"comm/bytes_up": Sum(jnp.int32(4 * 4 + 12)), "comm/bytes_down": Sum(jnp.int32(7))}
        return ClientOutput(Weights(update, {"mean": jnp.ones(3)}), weight, state + 1, metrics)

    method = Method(
        init=lambda key, spec: ((), jnp.zeros(2, jnp.int32)),
        broadcast=lambda server, clients, cohort: ((), ()),
        client_update=client_update,
        server_update=None,
        predict={"global": None},
    )
    return compression.with_compression(method, kind, share)


def test_what_was_not_sent_is_added_to_the_next_update():
    updates = [np.array([4.0, -3.0, 1.0, 0.5]), None, np.array([0.1, -1.0, 1.0, 0.6])]
    method = wrapped("topk", updates)  # two of four values
    state = compression.Compressed(jnp.int32(0), {"w": jnp.zeros(4)})
    sent, unsent = [], np.zeros(4)
    for number, update in enumerate(updates):
        output = method.client_update((), (), state, None, jax.random.key(number))
        if update is None:
            np.testing.assert_allclose(output.client_state.unsent["w"], unsent)
        else:
            wanted = update + unsent
            kept = np.abs(wanted) >= np.sort(np.abs(wanted))[-2]
            np.testing.assert_allclose(output.update.params["w"], np.where(kept, wanted, 0), rtol=1e-6)
            unsent = np.where(kept, 0, wanted)
            sent.append(np.asarray(output.update.params["w"]))
            np.testing.assert_allclose(output.client_state.unsent["w"], unsent, rtol=1e-6)
        assert output.update.stats["mean"].tolist() == [1, 1, 1]
        assert int(output.metrics["comm/bytes_up"].total) == 8 * 2 + 12
        assert int(output.metrics["comm/bytes_down"].total) == 7
        assert output.client_state.own == number + 1
        state = output.client_state
    np.testing.assert_allclose(sum(sent) + unsent, updates[0] + updates[2], rtol=1e-6)


@pytest.mark.parametrize(("kind", "size"), [("int8", 4 + 4), ("int4", 2 + 4)])
def test_quantized_parameters_are_counted_with_their_step_and_statistics_as_they_are(kind, size):
    output = wrapped(kind, [np.array([4.0, -3.0, 1.0, 0.5])]).client_update((), (), jnp.int32(0), None, jax.random.key(0))
    assert int(output.metrics["comm/bytes_up"].total) == size + 12
    assert output.update.params["w"][0] == 4.0  # the largest value is a whole step
    assert output.client_state == 1


def test_a_method_whose_server_counts_what_is_sent_is_refused():
    with pytest.raises(
        ValueError, match=r"^client.compression: got int8, accepted: none with a method whose clients do not count"
    ):
        next(tiny.experiment("fedsiam_d", client__compression="int8").rounds())


@pytest.mark.parametrize("case", tiny.params(COUNTED, fast=[("fedavg", "clients")]))
def test_every_method_may_be_compressed(case):
    method, labels_at = case
    whole, small = (
        tiny.experiment(
            method, labels_at=labels_at, client__compression=kind, client__compression_share=0.1, **tiny.confident(method)
        )
        for kind in ("none", "topk")
    )
    _, states, rows = engine.simulate(small, "scan", rounds=2)
    _, _, before = engine.simulate(whole, "scan", rounds=2)
    assert engine.distance(states[0].server, states[2].server) > 0
    assert np.isfinite(rows[-1]["eval/loss"])
    if method != "fedmatch":  # which sends a part
        assert rows[1]["comm/bytes_up"] < 0.4 * before[1]["comm/bytes_up"]
    assert rows[1]["comm/bytes_down"] == before[1]["comm/bytes_down"]

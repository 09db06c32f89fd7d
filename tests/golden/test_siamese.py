"""FedSiam's layer selection and its distances of outputs, against NumPy and numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import ServerState, Weights
from fedjax_ssl.local.networks import Networks
from fedjax_ssl.method import Aggregate
from fedjax_ssl.methods.fedsiam_d import FedSiamDOptions, Upload, choose, upload_share
from fedjax_ssl.ssl import losses, siamese
from tests.golden.linear_clients import softmax


def test_the_squared_distance_of_outputs_is_eq_4():
    rng = np.random.default_rng(0)
    target, online = 2 * rng.standard_normal((2, 6, 4))
    t, s = softmax(target), softmax(online)
    np.testing.assert_allclose(losses.squared_error(target, online), ((t - s) ** 2).sum(1), rtol=1e-5)
    by_target, by_online = jax.grad(lambda a, b: losses.squared_error(a, b).sum(), (0, 1))(*map(jnp.float32, (target, online)))
    assert not np.any(by_target)
    d = s - t
    np.testing.assert_allclose(by_online, 2 * s * (d - (d * s).sum(1, keepdims=True)), rtol=1e-4, atol=1e-6)


def network(rng) -> dict:
    """Parameters of three layers, one of them nested, one with a kernel alone."""
    return {
        "Conv_0": {"kernel": np.float32(rng.standard_normal((2, 3))), "bias": np.float32(rng.standard_normal(3))},
        "Block_0": {"Conv_0": {"kernel": np.float32(rng.standard_normal((4, 1)))}},
        "BatchNorm_0": {"scale": np.float32(rng.standard_normal(3)), "bias": np.float32(rng.standard_normal(3))},
    }


def test_fsm_is_a_relative_distance_of_a_module_with_all_its_parameters():
    rng = np.random.default_rng(1)
    target, online = network(rng), network(rng)
    names = siamese.layers(jax.tree.map(jnp.asarray, online))
    assert names == ("['BatchNorm_0']", "['Block_0']['Conv_0']", "['Conv_0']")

    def flat(tree):
        parts = [tree["BatchNorm_0"].values(), tree["Block_0"]["Conv_0"].values(), tree["Conv_0"].values()]
        return [np.concatenate([leaf.ravel() for leaf in part]) for part in parts]

    expected = [np.linalg.norm(t - s) / np.linalg.norm(s) for t, s in zip(flat(target), flat(online), strict=True)]
    got = siamese.layer_distances(jax.tree.map(jnp.asarray, target), jax.tree.map(jnp.asarray, online))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert siamese.layer_bytes(names, online).tolist() == [24, 16, 36]
    assert siamese.layer_bytes(names, online, {"BatchNorm_0": {"mean": np.zeros(3, np.float32)}}).tolist() == [36, 16, 36]


def test_fsm_of_equal_layers_and_of_a_layer_of_zeros_is_finite():
    zeros, ones = {"a": {"kernel": jnp.zeros(2)}}, {"a": {"kernel": jnp.ones(2)}}
    assert siamese.layer_distances(zeros, zeros).tolist() == [0]
    assert 1e6 < float(siamese.layer_distances(ones, zeros)[0]) < np.inf


def linear(number: int, mu: float, phi: int, rounds: int) -> float:
    """Eq. 11 as printed, cut to [0, 1]."""
    return 0.0 if number <= phi else float(np.clip(-2 * (1 - mu) * rounds / (rounds - phi) ** 2 * (number - rounds), 0, 1))


def rectangle(number: int, mu: float, phi: int, varphi: int, rounds: int) -> float:
    """Eq. 12, cut to [0, 1]."""
    return min((1 - mu) * rounds / (varphi - phi), 1) if phi < number < varphi else 0.0


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.8, 1.0])
def test_tau_follows_its_curve(mu):
    for rounds, phi, varphi in ((50, 3, 40), (12, 5, 11), (4, 0, 3)):
        for number in range(1, rounds + 1):
            options = {"saved": mu, "pi_rounds": phi, "end_round": varphi}
            got = [
                upload_share(FedSiamDOptions(curve=c).model_copy(update=options), rounds, jnp.int32(number))
                for c in ("linear", "rectangle")
            ]
            expected = [linear(number, mu, phi, rounds), rectangle(number, mu, phi, varphi, rounds)]
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_all_layers_are_uploaded_at_tau_1_none_at_0_and_none_of_an_empty_window():
    distances = jnp.array([[0.1, 0.5], [0.3, 0.2]])
    window = siamese.remember(siamese.empty_window(1, 2, 2), jnp.int32(0), distances, jnp.ones(2, bool))
    for tau, expected in ((0.0, 0), (1.0, 4)):
        assert int(siamese.uploaded(distances, siamese.boundary(window, jnp.float32(tau)), jnp.float32(tau)).sum()) == expected
    empty = siamese.boundary(siamese.empty_window(1, 2, 2), jnp.float32(1))
    assert not np.any(siamese.uploaded(distances, empty, jnp.float32(1)))


CHOOSE = jax.jit(choose)
NO_STATS = Networks({}, {})


class Round:
    """A round of D with three clients and three layers a, b, c of 8, 8 and 12 bytes; the third client is broken."""

    shapes: dict = {"a": {"kernel": (2,)}, "b": {"bias": (1,), "kernel": (1,)}, "c": {"kernel": (3, 1)}}  # noqa: RUF012
    sizes = (2.0, 1.0, 0.0)

    def __init__(self):
        rng = np.random.default_rng(4)

        def draw(*lead):
            return {layer: {n: rng.standard_normal((*lead, *s)) for n, s in own.items()} for layer, own in self.shapes.items()}

        self.sent, self.local = Networks(draw(), draw()), Networks(draw(3), draw(3))
        for tree in self.local:
            for own in tree.values():
                for leaf in own.values():
                    leaf[2] = np.nan

    def state(self, rounds: int, stats=NO_STATS) -> ServerState:
        params = jax.tree.map(jnp.float32, self.sent)
        own = siamese.empty_window(rounds, 3, 3)
        return ServerState(Weights(params, stats), (), (), own)

    def stacked(self, distances, stats=()) -> Aggregate:
        update = jax.tree.map(lambda sent, local: jnp.float32(sent - local), self.sent, self.local)
        return Aggregate(Upload(Weights(update, stats), jnp.float32(distances)), jnp.array(self.sizes))

    def expected(self, chosen):
        """The two networks after averaging: layer j of client k is the online one's where chosen[k][j], else the target's."""
        online, target = {}, {}
        for j, layer in enumerate(self.shapes):
            for name in self.shapes[layer]:
                s, t = (tree[layer][name] for tree in self.local)
                taken = [s[k] if chosen[k][j] else t[k] for k in (0, 1)]
                online[layer, name] = (2 * taken[0] + taken[1]) / 3
                target[layer, name] = (2 * t[0] + t[1]) / 3
        return online, target


DISTANCES = [[0.1, 0.4, 0.2], [0.3, 0.0, 0.6], [np.nan] * 3]
# tau = .5: the median of (0, .1, .2, .3, .4, .6) is .25.
CHOSEN = [[0, 1, 0], [1, 0, 1], [0, 0, 0]]


def test_d_takes_the_targets_layers_under_the_boundary_and_averages_by_size():
    example = Round()
    _, aggregate, metrics = CHOOSE(
        example.state(2), example.stacked(DISTANCES), jnp.float32(0.5), round=jnp.int32(3), both_sent=jnp.array(True)
    )
    assert aggregate.weight == 3
    for sent, update, expected in zip(example.sent, aggregate.update.params, example.expected(CHOSEN), strict=True):
        for (layer, name), value in expected.items():
            np.testing.assert_allclose(sent[layer][name] - update[layer][name], value, rtol=1e-4, atol=1e-6)
    # The target's 28 bytes, three distances, and layers b; a and c; none.
    assert metrics["comm/bytes_up"].total.tolist() == [28 + 12 + 8, 28 + 12 + 20, 28 + 12]
    assert [float(x) for x in metrics["client/upload_fraction"]] == [3, 6]
    np.testing.assert_allclose(metrics["client/upload_bytes_fraction"], [(20 + 32) / 28, 2], rtol=1e-6)  # of two clients


def test_while_one_network_travels_the_target_alone_is_sent_and_becomes_both():
    example = Round()
    state, aggregate, metrics = CHOOSE(
        example.state(2), example.stacked(np.zeros((3, 3))), jnp.float32(0), round=jnp.int32(0), both_sent=jnp.array(False)
    )
    assert metrics["comm/bytes_up"].total.tolist() == [28, 28, 28]
    assert metrics["client/upload_fraction"].total == 0
    assert not np.any(state.own.used)
    online, target = example.expected(np.zeros((3, 3)))
    for sent, update in zip(example.sent, aggregate.update.params, strict=True):
        for (layer, name), value in target.items():
            np.testing.assert_allclose(sent[layer][name] - update[layer][name], value, rtol=1e-4, atol=1e-6)
    assert online.keys() == target.keys()


def test_batch_norm_statistics_go_with_their_layer_where_they_travel():
    example = Round()
    sent = Networks({"b": {"mean": jnp.array([1.0])}}, {"b": {"mean": jnp.array([2.0])}})
    local = Networks({"b": {"mean": jnp.array([[10.0], [20.0], [5.0]])}}, {"b": {"mean": jnp.array([[11.0], [22.0], [5.0]])}})
    update = jax.tree.map(jnp.subtract, sent, local)
    _, aggregate, metrics = CHOOSE(
        example.state(1, sent),
        example.stacked(DISTANCES, update),
        jnp.float32(0.5),
        round=jnp.int32(0),
        both_sent=jnp.array(True),
    )
    got = [s["b"]["mean"] - u["b"]["mean"] for s, u in zip(sent, aggregate.update.stats, strict=True)]
    np.testing.assert_allclose(got, [[(2 * 10 + 22) / 3], [(2 * 11 + 22) / 3]], rtol=1e-5)
    assert metrics["comm/bytes_up"].total.tolist() == [32 + 12 + 12, 32 + 12 + 20, 32 + 12]


def test_clients_of_weight_zero_leave_the_model_alone():
    example = Round()
    stacked = example.stacked(np.full((3, 3), np.nan))._replace(weight=jnp.zeros(3))
    state, aggregate, metrics = CHOOSE(example.state(2), stacked, jnp.float32(1), round=jnp.int32(0), both_sent=jnp.array(True))
    assert aggregate.weight == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(aggregate.update.params))
    assert metrics["client/upload_fraction"].weight == 0
    assert np.all(np.isfinite(state.own.values))

"""FedSiam-D against NumPy: distances of layers, the boundary, and how layers are chosen and averaged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import ServerState, Weights
from fedjax_ssl.method import Aggregate, DataSpec, ServerData
from fedjax_ssl.methods.fedsiam import Networks
from fedjax_ssl.methods.fedsiam_d import FedSiamDOptions, Upload, choose, upload_share
from fedjax_ssl.ssl import siamese
from tests import toy
from tests.golden import linear_clients as lc
from tests.golden.test_fedsiam_client import CLASSES, KEY, SIDE, TASK, Data, build, close


def test_the_boundary_of_d_looks_back_on_as_many_rounds_as_pi_has():
    """phi_g = 2: in every round after them the boundary is a quantile of that round's distances and of the one's before."""
    rounds, rng = 6, np.random.default_rng(3)
    options = toy.options(FedSiamDOptions, rounds=rounds, pi_rounds=2, saved=0.4, curve="rectangle", end_round=rounds + 1)
    tau = 0.6 * rounds / (rounds + 1 - 2)  # Eq. 12
    method = build("fedsiam_d", options, task=TASK._replace(labels_at=("clients",)))
    data, sizes, window = Data(), np.array([2.0, 5.0, 3.0]), []
    nets = [data.online, data.target]
    state = jax.jit(lambda: method.init(KEY, DataSpec((SIDE, SIDE, 1), CLASSES, 3, 3)))()[0]
    state, update = state._replace(weights=data.weights(*nets)), jax.jit(method.server_update)
    told_apart = np.zeros(2, bool)
    # The distances rise, then fall: a longer memory or a shorter one chooses otherwise.
    for number, distances in ((3, [0.1, 0.2, 0.3]), (4, [0.6, 0.5, 0.4]), (5, [0.25, 0.45, 0.35])):
        window.append(distances)
        chosen, *others = (distances >= np.quantile(window[-length:], 1 - tau) for length in (2, 1, 3))
        told_apart |= [np.any(other != chosen) for other in others]
        online, target = ({key: rng.standard_normal((3, *leaf.shape)) for key, leaf in net.items()} for net in nets)
        moves = ({key: net[key] - own[key] for key in net} for net, own in zip(nets, (online, target), strict=True))
        upload = Upload(data.weights(*moves)._replace(stats=()), jnp.float32(distances)[:, None])  # the network is one layer
        server = ServerData(None, None, None, None, jnp.int32(number - 1), rounds)
        state, metrics = update(state, Aggregate(upload, jnp.float32(sizes)), server, KEY)
        assert metrics["client/upload_fraction"] == (chosen.sum(), 3)
        taken = {key: np.stack([(online if own else target)[key][k] for k, own in enumerate(chosen)]) for key in online}
        nets = [{key: np.average(leaf, 0, sizes) for key, leaf in own.items()} for own in (taken, target)]  # Eq. 2
        for got, expected in zip(state.weights.params, nets, strict=True):
            close(got, expected)
    assert told_apart.all()


def test_fsm_is_a_relative_distance_of_a_module_with_all_its_parameters():
    rng = np.random.default_rng(1)
    shapes = {
        "Conv_0": {"kernel": (2, 3), "bias": 3},
        "Block_0": {"Conv_0": {"kernel": (4, 1)}},
        "BatchNorm_0": {"scale": 3, "bias": 3},
    }
    target, online = (
        jax.tree.map(lambda shape: jnp.float32(rng.standard_normal(shape)), shapes, is_leaf=lambda x: not isinstance(x, dict))
        for _ in range(2)
    )
    names = siamese.layers(online)
    assert names == ("['BatchNorm_0']", "['Block_0']['Conv_0']", "['Conv_0']")

    def flat(tree):
        parts = [tree["BatchNorm_0"].values(), tree["Block_0"]["Conv_0"].values(), tree["Conv_0"].values()]
        return [np.concatenate([leaf.ravel() for leaf in part]) for part in parts]

    expected = [np.linalg.norm(t - s) / np.linalg.norm(s) for t, s in zip(flat(target), flat(online), strict=True)]
    np.testing.assert_allclose(siamese.layer_distances(target, online), expected, rtol=1e-5)
    assert siamese.layer_bytes(names, online).tolist() == [24, 16, 36]
    stats = {"BatchNorm_0": {"mean": np.zeros(3, np.float32)}}
    assert siamese.layer_bytes(names, online, stats).tolist() == [36, 16, 36]
    alone = {"BatchNorm_1": {"mean": np.zeros((2, 3), np.float32)}}  # without scale and bias: statistics of no layer
    assert siamese.layer_bytes(names, online, alone).tolist() == [24, 16, 36]
    ones = jax.tree.map(np.ones_like, alone)
    assert siamese.select_layers(names, np.ones((2, 3), bool), alone, ones)["BatchNorm_1"]["mean"].tolist() == [[1.0] * 3] * 2


def test_fsm_of_equal_layers_and_of_a_layer_of_zeros_is_finite():
    zeros, ones = {"a": {"kernel": jnp.zeros(2)}}, {"a": {"kernel": jnp.ones(2)}}
    assert siamese.layer_distances(zeros, zeros).tolist() == [0]
    assert 1e6 < float(siamese.layer_distances(ones, zeros)[0]) < np.inf


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.8, 1.0])
def test_tau_follows_its_curve(mu):
    for rounds, phi, varphi in ((50, 3, 40), (12, 5, 11), (4, 0, 3)):
        for number in range(1, rounds + 1):
            # Eqs. 11 and 12 as printed, cut to [0, 1] below.
            expected = {"linear": -2 * (1 - mu) * rounds / (rounds - phi) ** 2 * (number - rounds) * (number > phi)}
            expected["rectangle"] = (1 - mu) * rounds / (varphi - phi) * (phi < number < varphi)
            for curve, tau in expected.items():
                given = {"curve": curve, "saved": mu, "pi_rounds": phi, "end_round": varphi}
                options = FedSiamDOptions().model_copy(update=given)
                got = upload_share(options, rounds, jnp.int32(number))
                np.testing.assert_allclose(got, np.clip(tau, 0, 1), rtol=1e-5, atol=1e-7)


def test_all_layers_are_uploaded_at_tau_1_none_at_0_and_none_of_an_empty_window():
    distances = jnp.array([[0.1, 0.5], [0.3, 0.2]])
    window = siamese.remember(siamese.empty_window(1, 2, 2), jnp.int32(0), distances, jnp.ones(2, bool))
    for tau, expected in ((0.0, 0), (1.0, 4)):
        assert int(siamese.uploaded(distances, siamese.boundary(window, jnp.float32(tau)), jnp.float32(tau)).sum()) == expected
    empty = siamese.boundary(siamese.empty_window(1, 2, 2), jnp.float32(1))
    assert not np.any(siamese.uploaded(distances, empty, jnp.float32(1)))


class Round:
    """A round of D with three clients and three layers a, b, c of 8, 8 and 12 bytes; the third client is broken."""

    def __init__(self):
        rng = np.random.default_rng(4)

        def draw(*lead):
            shapes = {"a": {"kernel": (2,)}, "b": {"bias": (1,), "kernel": (1,)}, "c": {"kernel": (3, 1)}}
            return {layer: {n: rng.standard_normal((*lead, *s)) for n, s in own.items()} for layer, own in shapes.items()}

        self.sent, self.local = Networks(draw(), draw()), Networks(draw(3), draw(3))
        for leaf in jax.tree.leaves(self.local):
            leaf[2] = np.nan

    def choose(self, distances, tau=0.5, *, sizes=(2.0, 1.0, 0.0), both_sent=True, stats=Networks({}, {}), update_stats=()):
        """(state, aggregate, metrics) of `choose` in a round after none."""
        update = jax.tree.map(lambda sent, local: jnp.float32(sent - local), self.sent, self.local)
        state = ServerState(Weights(lc.float32(self.sent), stats), (), (), siamese.empty_window(2, 3, 3))
        aggregate = Aggregate(Upload(Weights(update, update_stats), jnp.float32(distances)), jnp.array(sizes))
        return CHOOSE(state, aggregate, jnp.float32(tau), round=jnp.int32(0), both_sent=jnp.array(both_sent))

    def assert_averaged(self, update, chosen):
        """Layer j of client k is the online one's where chosen[k][j], else the target's; both networks are averaged by size."""
        for layer, taken in zip("abc", np.transpose(chosen), strict=True):
            online, target = (network[layer] for network in self.local)
            online = lc.combine(lambda s, t, own=taken: [s[k] if own[k] else t[k] for k in (0, 1)], online, target)
            for sent, moved, of_clients in zip(self.sent, update, (online, target), strict=True):
                expected = lc.combine(lambda x: (2 * x[0] + x[1]) / 3, of_clients)
                lc.assert_same(lc.combine(np.subtract, sent[layer], moved[layer]), expected)


CHOOSE = jax.jit(choose)
DISTANCES = [[0.1, 0.4, 0.2], [0.3, 0.0, 0.6], [np.nan] * 3]
# tau = .5: the median of (0, .1, .2, .3, .4, .6) is .25.
CHOSEN = [[0, 1, 0], [1, 0, 1], [0, 0, 0]]


def test_d_takes_the_targets_layers_under_the_boundary_and_averages_by_size():
    example = Round()
    _, aggregate, metrics = example.choose(DISTANCES)
    assert aggregate.weight == 3
    example.assert_averaged(aggregate.update.params, CHOSEN)
    # The target's 28 bytes, three distances, and layers b; a and c; none.
    assert metrics["comm/bytes_up"].total.tolist() == [28 + 12 + 8, 28 + 12 + 20, 28 + 12]
    assert [float(x) for x in metrics["client/upload_fraction"]] == [3, 6]
    np.testing.assert_allclose(metrics["client/upload_bytes_fraction"], [(20 + 32) / 28, 2], rtol=1e-6)  # of two clients


def test_while_one_network_travels_the_target_alone_is_sent_and_becomes_both():
    example = Round()
    state, aggregate, metrics = example.choose(np.zeros((3, 3)), 0.0, both_sent=False)
    assert metrics["comm/bytes_up"].total.tolist() == [28, 28, 28]
    assert metrics["client/upload_fraction"].total == 0
    assert not np.any(state.extra.used)
    example.assert_averaged(aggregate.update.params, np.zeros((3, 3)))


def test_batch_norm_statistics_go_with_their_layer_where_they_travel():
    sent = Networks({"b": {"mean": jnp.array([1.0])}}, {"b": {"mean": jnp.array([2.0])}})
    local = Networks({"b": {"mean": jnp.array([[10.0], [20.0], [5.0]])}}, {"b": {"mean": jnp.array([[11.0], [22.0], [5.0]])}})
    _, aggregate, metrics = Round().choose(DISTANCES, stats=sent, update_stats=jax.tree.map(jnp.subtract, sent, local))
    got = [s["b"]["mean"] - u["b"]["mean"] for s, u in zip(sent, aggregate.update.stats, strict=True)]
    np.testing.assert_allclose(got, [[(2 * 10 + 22) / 3], [(2 * 11 + 22) / 3]], rtol=1e-5)
    assert metrics["comm/bytes_up"].total.tolist() == [32 + 12 + 12, 32 + 12 + 20, 32 + 12]


def test_clients_of_weight_zero_leave_the_model_alone():
    state, aggregate, metrics = Round().choose(np.full((3, 3), np.nan), 1.0, sizes=(0.0, 0.0, 0.0))
    assert aggregate.weight == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(aggregate.update.params))
    assert metrics["client/upload_fraction"].weight == 0
    assert np.all(np.isfinite(state.extra.values))

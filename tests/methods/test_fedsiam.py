"""FedSiam by its edge cases, ablations, and what Pi, MT and D have in common."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedjax_ssl.methods.local import Step

from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local.task import Weights
from fedjax_ssl.method import Cohort, DataSpec
from fedjax_ssl.methods import fedsiam, mean_teacher
from tests import tiny
from tests.golden.test_fedsiam_client import CLASSES, KEY, SIDE, TASK, Data, build


def norm(tree) -> float:
    return float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))


def distance(a, b) -> float:
    return norm(jax.tree.map(jnp.subtract, a, b)) / norm(a)


def test_d_with_labels_at_the_clients_is_pi_at_first_then_mt_and_learns():
    # One network in rounds 1 and 2, and all layers uploaded in round 3.
    curve = {"method__curve": "rectangle", "method__saved": 1 / 3, "method__pi_rounds": 2, "method__end_round": 4, "rounds": 3}
    data = {"data__num_clients": 6, "data__labels_at": "clients", "data__num_labels": 60}
    training = {"cohort_size": 3, "client__epochs": 3, "client__batch_size": 16, "server__momentum": 0.0}
    experiment = tiny.experiment("fedsiam_d", network="linear", eval_every=1, **curve, **data, **training)
    rows = []
    for state, row in experiment.rounds():
        rows.append(row)
        online, target = mean_teacher.networks(state.server.weights)
        assert (distance(online, target) == 0) == (row["round"] < 3)
        assert (row["eval/accuracy"] == row["eval/accuracy_online"]) == (row["round"] < 3)
    assert [row["client/upload_fraction"] for row in rows] == [0, 0, 1]
    size = 4 * experiment.num_params
    up, down = ([row[key] for row in rows] for key in ("comm/bytes_up", "comm/bytes_down"))
    assert np.diff([0, *up]).tolist() == [3 * size, 3 * size, 3 * (2 * size + 4)]  # and one layer's distance
    assert np.diff([0, *down]).tolist() == [3 * size, 3 * size, 3 * (2 * size + 4)]  # and the boundary
    assert [row["client/upload_bytes_fraction"] for row in rows] == pytest.approx([0, 0, (size + 4) / size])
    assert rows[-1]["client/loss"] < rows[0]["client/loss"]
    same = {"network": "linear", "eval_every": 1} | curve | data | training
    others = [list(tiny.experiment("fedsiam_d", seed=seed, **same).rounds())[-1][1] for seed in (1, 2, 3)]
    assert np.mean([row["eval/accuracy"] for row in (rows[-1], *others)]) > 0.4  # chance is 0.1
    assert not any("server/loss" in row for row in rows)


@pytest.fixture(scope="module")
def client():
    """(labeled, unlabeled examples, mangle) -> what a client of MT returns, compiled once."""
    data = Data()
    method = build("fedsiam_mt", fedsiam.FedSiamMTOptions())
    state = jax.jit(lambda: method.init(KEY, DataSpec((SIDE, SIDE, 1), CLASSES, 1)))()[0]
    state = state._replace(weights=data.weights(data.online, data.target))
    shared, _ = method.broadcast(state, (), Cohort(jnp.zeros(1, jnp.int32), jnp.int32(0)))
    update = jax.jit(method.client_update)

    def call(num_labeled, num_unlabeled, pool=None):
        shard = data.shard(num_labeled, num_unlabeled)
        if pool is not None:
            examples = (part._replace(images=jnp.asarray(pool)) for part in (shard.labeled, shard.unlabeled))
            shard = shard._replace(**dict(zip(("labeled", "unlabeled"), examples, strict=True)))
        return update(shared, (), fedsiam.ClientState(jnp.int32(0), jnp.int32(0), ()), shard, KEY)

    return call


def test_a_client_without_data_takes_no_part(client):
    output = client(0, 0)
    assert output.weight == 0
    assert norm(output.update) == 0
    assert (output.client_state.steps, output.client_state.epochs) == (0, 0)
    assert output.metrics["client/loss"].weight == output.metrics["client/consistency_loss"].weight == 0


@pytest.mark.parametrize(("num_labeled", "num_unlabeled"), [(3, 0), (0, 1)])
def test_a_client_of_labeled_or_of_unlabeled_data_alone_trains(client, num_labeled, num_unlabeled):
    output = client(num_labeled, num_unlabeled)
    assert output.weight == num_labeled + num_unlabeled
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((output.update, output.metrics)))
    assert norm(output.update.params.online) > 0
    assert output.metrics["client/loss"].weight == 2 * num_labeled  # two epochs
    assert output.client_state.epochs == 2


def test_images_beyond_the_counts_change_nothing(client):
    data = Data()
    beyond = data.pool.copy()
    beyond[[data.labeled[2], *data.unlabeled[2:4]]] = 255
    before, after = client(2, 2), client(2, 2, beyond)
    assert jax.tree.all(jax.tree.map(np.array_equal, before.update, after.update))


def test_without_siamese_networks_unlabeled_images_do_not_train():
    data = Data()
    other = data.pool.copy()
    other[data.unlabeled[:2]] = 255 - other[data.unlabeled[:2]]
    method = build("fedsiam_pi", fedsiam.FedSiamPiOptions(consistency_weight=0.0))
    shared = fedsiam.Broadcast(data.weights(data.online), jnp.float32(0.1), jnp.zeros(()))
    update, outputs = jax.jit(method.client_update), []
    for pool in map(jnp.asarray, (data.pool, other)):
        shard = data.shard(2, 2)
        shard = shard._replace(**{k: getattr(shard, k)._replace(images=pool) for k in ("labeled", "unlabeled")})
        outputs.append(update(shared, (), fedsiam.ClientState(jnp.int32(0), jnp.int32(0), ()), shard, KEY))
    one, two = outputs
    assert distance(one.update.params, two.update.params) == 0 < norm(one.update.params)
    assert "client/consistency_loss" not in one.metrics
    assert one.metrics["cost/forward_passes"] == one.metrics["cost/backward_passes"]  # no pass for a target


def test_the_target_tracks_statistics_of_its_own_but_where_it_is_the_online_network():
    online, target = (
        Weights({"w": jnp.ones(2)}, {"mean": jnp.full(2, 3.0)}),
        Weights({"w": jnp.zeros(2)}, {"mean": jnp.ones(2)}),
    )
    batch = Batch(jnp.arange(2), jnp.ones(2, bool))
    met, task = {"mean": jnp.full(2, 11.0)}, TASK._replace(norm="running")
    for alpha, teacher_stats, params, stats in ((0.75, met, 0.25, 2), (0.75, (), 0.25, 1), (0.0, met, 1, 3)):
        step = Step((), {}, {}, teacher_stats=teacher_stats)
        got = mean_teacher.following(task, lambda _, a=alpha: jnp.float32(a))(target, online, step, batch)
        np.testing.assert_allclose(got.params["w"], params)
        np.testing.assert_allclose(got.stats["mean"], stats)


def test_a_server_without_labels_keeps_no_state_of_a_training_and_has_no_loss():
    simulator = tiny.experiment("fedsiam_mt", labels_at="clients").simulator
    state, _ = simulator.initialize(0)
    assert state.server.fine_tune == ()
    assert "server/loss" not in simulator.round(state)[1]


def test_the_server_trains_after_the_clients():
    with pytest.raises(ValueError, match=r"server\.training: got parallel"):
        tiny.experiment("fedsiam_mt", server__training="parallel")


@pytest.mark.parametrize(
    ("method", "option", "words"),
    [
        ("fedsiam_pi", {"consistency": "l1"}, ["method.consistency", "mse, kl"]),
        ("fedsiam_pi", {"consistency_weight": -1.0}, ["method.consistency_weight", ">= 0"]),
        ("fedsiam_pi", {"labeled_repeats": 0}, ["method.labeled_repeats", ">= 1"]),
        ("fedsiam_mt", {"alpha_max": 1.0}, ["method.alpha_max", "(0, 1)"]),
        ("fedsiam_d", {"saved": 1.5}, ["method.saved", "[0, 1]"]),
        ("fedsiam_d", {"pi_rounds": -1}, ["method.pi_rounds", ">= 0"]),
        ("fedsiam_d", {"pi_rounds": 4}, ["method.pi_rounds", "got 4", "rounds = 4", "linear"]),
        ("fedsiam_d", {"pi_rounds": 4, "curve": "rectangle", "end_round": 4}, ["method.end_round", "got 4", "pi_rounds = 4"]),
        ("fedsiam_d", {"saved": 0.25, "curve": "rectangle", "end_round": 2}, ["method.end_round", "got 2", "saved", "= 3 "]),
        ("fedsiam_d", {"curve": "rectangle", "end_round": 6}, ["method.end_round", "got 6", "rounds + 1 = 5"]),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(method, option, words):
    with pytest.raises(ValueError) as error:
        tiny.experiment(method, **{f"method__{key}": value for key, value in option.items()})
    assert all(word in str(error.value) for word in words)

"""FedLabel by its edge cases: clients without labels, without unlabeled images, without either; nobody sure; burn-in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import build
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.method import Cohort, Shard
from fedjax_ssl.methods.fedlabel import FedLabelOptions
from tests import tiny

TAU, STEPS, BATCH = 3, 4, 8


class Client:
    """One client of a tiny experiment with a linear network, jitted once per setting."""

    def __init__(self, **overrides):
        options = {"client__epochs": 0, "client__steps": TAU, "method__unlabeled_steps": STEPS} | overrides
        experiment = tiny.experiment("fedlabel", network="linear", **options)
        method, data, spec, _ = experiment.problem
        self.server, clients = jax.jit(lambda key: method.init(key, spec))(jax.random.key(0))
        # A model of clear opinions, so that some pseudo-labels are accepted.
        self.server = self.server._replace(weights=jax.tree.map(lambda x: 4 * x, self.server.weights))
        self.broadcast = lambda round: method.broadcast(self.server, clients, Cohort(jnp.arange(5), jnp.int32(round)))[0]
        self.kept = jax.tree.map(lambda x: x[0], clients)
        self.images, self.labels = jnp.asarray(data.train.images), jnp.asarray(data.train.labels)
        self.labeled, self.unlabeled = (jnp.asarray(table.index[0]) for table in (data.labeled, data.unlabeled))
        self.update = jax.jit(method.client_update)

    def __call__(self, labeled=20, unlabeled=30, round=0):
        rows = Examples(self.images, self.labeled, jnp.int32(labeled), self.labels[self.labeled])
        others = Examples(self.images, self.unlabeled, jnp.int32(unlabeled), None)
        shard = Shard(rows, others, self.labels[self.unlabeled])
        return self.update(self.broadcast(round), (), self.kept, shard, jax.random.key(1))


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def finite(output) -> bool:
    return bool(np.isfinite(flat((output.update, output.client_state, output.metrics))).all())


@pytest.fixture(scope="module")
def client():
    return Client(method__burn_in=5, rounds=8)


def test_r_counts_labeled_draws_and_kept_ones(client):
    output = client(round=5)
    kept, drawn = output.metrics["client/mask_rate"]
    assert 0 < kept < drawn == STEPS * BATCH
    assert output.weight == TAU * BATCH + kept
    assert output.metrics["perf/client_images"].total == TAU * BATCH + drawn
    assert output.metrics["client/loss"].weight == TAU * BATCH
    assert output.metrics["client/consistency_loss"].weight <= kept
    assert finite(output)


def test_a_client_of_few_examples_uses_all_of_them_in_every_step(client):
    output = client(labeled=3, unlabeled=2, round=5)
    assert output.metrics["client/loss"].weight == TAU * 3
    assert output.metrics["client/mask_rate"].weight == STEPS * 2


def test_w_u_is_not_trained_before_the_burn_in_is_over(client):
    output = client(round=4)
    assert output.weight == TAU * BATCH
    assert output.metrics["client/mask_rate"] == (0, 0)
    np.testing.assert_array_equal(flat(output.update), flat(client(unlabeled=0).update))
    assert np.any(flat(output.client_state.labeled))
    assert not np.any(flat(output.client_state.unlabeled))


def test_a_client_without_labels_learns_from_what_it_and_the_global_model_agree_on(client):
    output = client(labeled=0, round=5)
    assert output.weight == output.metrics["client/mask_rate"].total > 0
    assert output.metrics["client/loss"] == (0, 0)
    # The local expert is the global one: they agree on all, and it is a tie.
    assert output.metrics["client/local_expert_rate"].total == 0
    agreed, drawn = output.metrics["client/agreement_rate"]
    assert agreed == drawn
    assert np.any(flat(output.update))
    assert finite(output)


def test_a_client_of_labels_alone_trains_on_them(client):
    output = client(unlabeled=0, round=5)
    assert output.weight == TAU * BATCH
    assert output.metrics["client/unlabeled_loss"] == (0, 0)
    assert np.any(flat(output.update))
    assert finite(output)


def test_a_client_without_data_takes_no_part(client):
    output = client(labeled=0, unlabeled=0, round=5)
    assert output.weight == 0
    assert not np.any(flat(output.update))
    assert not np.any(flat(output.client_state))


def test_what_lies_beyond_the_counts_changes_nothing(client):
    before, images, labels = client(round=5), client.images, client.labels
    client.images = images.at[client.labeled[20:]].set(255).at[client.unlabeled[30:]].set(255)
    client.labels = (labels + 1).at[client.labeled[:20]].set(labels[client.labeled[:20]])
    after = client(round=5)
    client.images, client.labels = images, labels
    np.testing.assert_array_equal(flat(before.update), flat(after.update))
    assert before.weight == after.weight


def test_where_nobody_is_sure_w_u_stays_and_labels_train_alone_and_in_halves_half_as_far():
    released = {"counts": "passing", "aggregation": "halves", "normalize": "passing", "proximity": 10.0}
    client = Client(method__confidence=1.0, **{f"method__{key}": value for key, value in released.items()})
    output = client()
    assert (output.weight, output.update.used) == (1, 1)
    assert np.any(flat(output.update.labeled))
    assert not np.any(flat(output.update.unlabeled))
    assert not np.any(flat(output.client_state.unlabeled))
    assert finite(output)
    assert client(labeled=0, unlabeled=0).weight == 0


def test_a_confidence_that_equals_the_threshold_is_not_enough():
    client = Client(method__confidence=0.1)
    # Every output is uniform, over ten classes.
    client.server = client.server._replace(weights=jax.tree.map(jnp.zeros_like, client.server.weights))
    output = client(labeled=0)
    assert output.metrics["client/mask_rate"] == (0, STEPS * BATCH)
    assert finite(output)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("confidence", 1.5, r"a number in \[0, 1\]"),
        ("measure", "var", "variance, entropy"),
        ("experts", "none", "both, local, global"),
        ("unlabeled_rate", 0.0, "a number > 0"),
        ("unlabeled_steps", 0, "a number >= 1"),
        ("consistency_weight", -1.0, "a number >= 0"),
        ("proximity", -1.0, "a number >= 0"),
        ("burn_in", -1, "a number >= 0"),
        ("counts", "all", "draws, distinct, passing"),
    ],
)
def test_wrong_options_are_refused(key, value, accepted):
    with pytest.raises(ValueError, match=rf"^method.{key}: got {value!r}, accepted: {accepted}$"):
        dataclasses.replace(FedLabelOptions(), **{key: value})


def test_a_burn_in_that_leaves_no_round_is_refused():
    with pytest.raises(ValueError, match=r"^method.burn_in: got 4, accepted: a number < rounds = 4$"):
        build(tiny.config("fedlabel", method__burn_in=4))

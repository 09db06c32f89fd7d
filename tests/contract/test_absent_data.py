"""Clients of all methods that lack labeled examples, unlabeled ones or both, and what lies beyond a client's counts.

What only a kind of examples teaches stays as it is, bit for bit, where a client has none of that kind: weight decay, penalties,
momentum, moving averages and personal state rest, too.
"""

from operator import attrgetter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import build
from tests import tiny
from tests.methods.clients import Client, finite, flat, same

AT_CLIENTS = [case for case in tiny.WITH_CLIENTS if case[1] == "clients"]
OFTEN = ("fixmatch", "fedlabel", "fedmatch")
WITH_LABELS = tiny.params(
    AT_CLIENTS,
    fast=[case for case in AT_CLIENTS if case[0] in OFTEN],
    ci=[case for case in AT_CLIENTS if case[0] not in (*OFTEN, *tiny.ALIKE)],
)
LABELS_ALONE = ("fedavg", "fedavg_pp", "fedprox")
OWN = {
    **{method: {"network": "mlp"} for method in ("fedcon", "twinsight")},
    "fedlabel": {"method__burn_in": 0.0},
    "fedsiam_d": {"method__pi_rounds": 0.0},
    "fl2": {"method__confidence": 0.2},
    "semifl": {"method__confidence": 0.05},
}
EARLY, ROUND = 2, 20  # a second phase has begun, and pseudo-labels are made in it; FedTriNet's alpha is 0, or above 0
BY_LABELS = {
    "fedmatch": ("update.params.sigma", "client_state.optimizer[0]"),
    "fedlabel": ("client_state.labeled",),
    "feddure": ("client_state.w", "client_state.w_optimizer"),
    **dict.fromkeys(LABELS_ALONE, ("update", "client_state")),
}
"""The parts of a client's output that need labeled examples to change, in methods that have such parts."""
BY_OTHERS = {
    "fedmatch": ("update.params.psi", "client_state.optimizer[1]"),
    "fedlabel": ("client_state.unlabeled",),
    "feddure": ("client_state.w", "client_state.w_optimizer"),
    **dict.fromkeys(("fedsem", "fedtrinet"), ("client_state.pseudo",)),
}
"""The parts that need unlabeled examples to change."""
WITH_PARTS = [[case for case in AT_CLIENTS if case[0] in parts] for parts in (BY_LABELS, BY_OTHERS)]


def client_of(method, labels_at, **more):
    """Nine labeled examples, where clients have labels, and 18 others, no multiple of a batch; a network of clear opinions.

    Where some clients have all labels it is one of these.
    """
    labeled = 9 if labels_at != "server" or method in LABELS_ALONE else 0
    unlabeled = 18 if labels_at != "some_clients" else 0
    scale = 1.0 if method == "fedcon" else 4.0  # whose clients start with the first weights as their target
    overrides = {"network": "linear", "client__epochs": 2, "client__batch_size": 8} | OWN.get(method, {}) | more
    return Client(method, labeled, unlabeled, scale=scale, labels_at=labels_at, **overrides)


def part(output, path):
    """A part of a client's output, by its path of attributes; an index ends it."""
    path, _, index = path.partition("[")
    found = attrgetter(path)(output)
    return found[int(index[:-1])] if index else found


def assert_rests(client, paths, **counts):
    """Parts of the output are zeros in the update, and in the state what they were, also after a round with all data."""
    received = jax.tree.map(lambda x: 2 * x, client.weights)
    for kept in (client.kept, client(round=ROUND - 1).client_state):
        output = client(**counts, round=ROUND, kept=kept, weights=received)
        zeros = output._replace(update=jax.tree.map(jnp.zeros_like, output.update), client_state=kept)
        for path in paths:
            assert same(part(output, path), part(zeros, path)), path


def name_of(client) -> str:
    return client.experiment.settings.method.name


AT_ONCE = [one for one in tiny.UNLIKE if one in tiny.FEW or one[0] in ("fedmatch", "fedcon", "sage", "twinsight")]


@pytest.fixture(
    scope="module", params=tiny.params(tiny.WITH_CLIENTS, fast=AT_ONCE, ci=[x for x in tiny.SOME if x not in AT_ONCE])
)
def client(request):
    return client_of(*request.param)


def test_a_client_without_data_takes_no_part(client):
    assert_rests(client, ("update", "client_state"), labeled=0, unlabeled=0)
    output = client(labeled=0, unlabeled=0, round=ROUND)
    assert output.weight == 0
    assert finite(output)
    assert output.metrics["comm/bytes_down"].total > 0  # it receives, and then has nothing to do
    for name in ("perf/client_images", "cost/backward_passes"):
        assert output.metrics[name].total == 0
    assert all(metric.weight == 0 for name, metric in output.metrics.items() if name.endswith("loss"))


def test_what_lies_beyond_the_counts_changes_nothing(client):
    before, after = client(round=ROUND), client.without_what_lies_beyond(round=ROUND)
    assert np.linalg.norm(flat(before.update)) > 1e-3
    assert same((before.update, before.weight, before.client_state), (after.update, after.weight, after.client_state))


def test_the_parameters_of_an_update_are_those_of_networks_and_nothing_else(client):
    update = client.trace().update
    shapes = {x.shape for x in jax.tree.leaves(client.weights.params)}
    found = jax.tree.leaves(jax.eval_shape(client.method.parameters, update))
    assert found
    assert {x.shape for x in found} <= shapes


@pytest.mark.parametrize("client", WITH_LABELS, indirect=True)
def test_a_client_of_labels_alone_trains_on_them(client):
    output = client(unlabeled=0, round=ROUND)
    assert output.weight > 0
    assert np.any(flat(output.update))
    assert finite(output)
    assert output.metrics["client/loss"].weight > 0
    for name in ("client/unlabeled_loss", "client/mask_rate", "client/reward"):
        assert output.metrics.get(name, (0, 0)) == (0, 0)


@pytest.mark.parametrize("client", WITH_LABELS, indirect=True)
def test_a_client_without_labels_trains_on_unlabeled_examples_if_the_method_does(client):
    output = client(labeled=0, round=ROUND)
    trains = name_of(client) not in LABELS_ALONE
    assert (output.weight > 0) == np.any(flat(output.update)) == trains
    assert finite(output)


@pytest.mark.parametrize("client", tiny.params(WITH_PARTS[0]), indirect=True)
def test_what_labels_alone_teach_rests_without_them(client):
    assert_rests(client, BY_LABELS[name_of(client)], labeled=0)


@pytest.mark.parametrize("client", tiny.params(WITH_PARTS[1]), indirect=True)
def test_what_unlabeled_examples_alone_teach_rests_without_them(client):
    assert_rests(client, BY_OTHERS[name_of(client)], unlabeled=0)


UNWEIGHTED = {"fixmatch": "unlabeled_weight", "uda": "unlabeled_weight", "fedsiam_mt": "consistency_weight"}


@pytest.mark.parametrize("method", [pytest.param(name, marks=pytest.mark.ci if name == "uda" else ()) for name in UNWEIGHTED])
def test_a_client_without_labels_rests_where_its_other_examples_have_no_weight(method):
    client = client_of(method, "clients", **{f"method__{UNWEIGHTED[method]}": 0.0})
    assert np.any(flat(client(round=ROUND).update))
    assert_rests(client, ("update", "client_state"), labeled=0)


@pytest.mark.parametrize("client", tiny.params([("fedtrinet", "clients")]), indirect=True)
def test_fedtrinets_pairs_teach_nothing_without_labels_as_long_as_alpha_is_0(client):
    momentum = jax.tree.map(jnp.ones_like, client.kept.optimizer)
    kept = client.kept._replace(seen=jnp.array(True), last=client.weights, weighed=jnp.array(True), optimizer=momentum)
    kept = kept._replace(pseudo=jnp.zeros_like(kept.pseudo))
    output = client(labeled=0, round=EARLY, kept=kept)
    assert output.metrics["perf/client_images"].total > 0
    assert not np.any(flat(output.update))
    assert same(output.client_state.optimizer, momentum)


FAST = ("fl2",)
OTHERS = [
    pytest.param(name, marks=pytest.mark.ci if name == "fedcon" else pytest.mark.slow)
    for name in ("fedcon", "feddure", "fedtrinet", "semifl", "fedsiam_pi", "fedlabel", "fedsem")
]


@pytest.mark.parametrize("method", [*FAST, *OTHERS])
def test_the_proximal_term_pulls_towards_the_broadcast_model(method):
    """Of methods whose whole client updates are not computed with it elsewhere."""
    labels_at = tiny.LABELS_AT.get(method, ("server",))[0]
    free, pulled = (
        np.linalg.norm(flat(client_of(method, labels_at, method__prox_mu=mu)(round=ROUND).update)) for mu in (0.0, 20.0)
    )
    assert 0 < pulled < 0.8 * free


class BareNorm(nn.Module):
    """Batch norm without scale and bias: a layer that has statistics alone."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train, features_only=False):
        x = nn.Dense(4)(x.reshape(len(x), -1))
        x = nn.relu(nn.BatchNorm(use_running_average=not train, use_scale=False, use_bias=False)(x))
        return x if features_only else nn.Dense(self.num_classes)(x)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsiam_d", "fedcon"])
def test_a_layer_may_have_statistics_alone(method):
    config = tiny.config(method, rounds=3, network="linear", model__norm="running")
    row = [row for _, row in build(config, model=BareNorm).rounds()][-1]
    assert (row["round"], np.isfinite(row["eval/loss"])) == (3, True)

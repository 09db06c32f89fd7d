"""Clients of all methods that lack labeled examples, unlabeled ones or both, and what lies beyond a client's counts."""

import flax.linen as nn
import numpy as np
import pytest

from fedjax_ssl import build
from tests import tiny
from tests.methods.clients import Client, finite, flat, same

AT_CLIENTS = [case for case in tiny.WITH_CLIENTS if case[1] == "clients"]
WITH_LABELS = tiny.params(AT_CLIENTS, fast=[case for case in AT_CLIENTS if case[0] not in tiny.ALIKE])
LABELS_ALONE = ("fedavg", "fedavg_pp", "fedprox")
OWN = {
    "fedcon": {"network": "mlp"},
    "fedlabel": {"method__burn_in": 0.0},
    "fedsiam_d": {"method__pi_rounds": 0.0},
    "fl2": {"method__confidence": 0.2},
    "semifl": {"method__confidence": 0.05},
}
ROUND = 2  # a second phase has begun, and pseudo-labels are made in it


def client_of(method, labels_at, **more):
    """Nine labeled examples, where clients have labels, and 18 others, no multiple of a batch; a network of clear opinions."""
    labeled = 9 if labels_at == "clients" or method in LABELS_ALONE else 0
    scale = 1.0 if method == "fedcon" else 4.0  # whose clients start with the first weights as their target
    overrides = {"network": "linear", "client__epochs": 2, "client__batch_size": 8} | OWN.get(method, {}) | more
    return Client(method, labeled, 18, scale=scale, labels_at=labels_at, **overrides)


@pytest.fixture(scope="module", params=tiny.params(tiny.WITH_CLIENTS, fast=tiny.UNLIKE))
def client(request):
    return client_of(*request.param)


def test_a_client_without_data_takes_no_part(client):
    output = client(labeled=0, unlabeled=0, round=ROUND)
    assert output.weight == 0
    assert not np.any(flat(output.update))
    assert same(output.client_state, client.kept)
    assert finite(output)
    for name in ("perf/client_images", "cost/backward_passes"):
        assert output.metrics[name].total == 0
    assert all(metric.weight == 0 for name, metric in output.metrics.items() if name.endswith("loss"))


def test_what_lies_beyond_the_counts_changes_nothing(client):
    before, after = client(round=ROUND), client.without_what_lies_beyond(round=ROUND)
    assert np.linalg.norm(flat(before.update)) > 1e-3
    assert same((before.update, before.weight, before.client_state), (after.update, after.weight, after.client_state))


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
    trains = client.experiment.settings.method["name"] not in LABELS_ALONE
    assert (output.weight > 0) == np.any(flat(output.update)) == trains
    assert finite(output)


FAST = ("fl2", "fedcon")
OTHERS = [
    pytest.param(name, marks=pytest.mark.ci) for name in ("fedtrinet", "semifl", "fedsiam_pi", "feddure", "fedlabel", "fedsem")
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


@pytest.mark.ci
@pytest.mark.parametrize("method", ["fedsiam_d", "fedcon"])
def test_a_layer_may_have_statistics_alone(method):
    config = tiny.config(method, rounds=3, network="linear", model__norm="running")
    row = [row for _, row in build(config, model=BareNorm).rounds()][-1]
    assert (row["round"], np.isfinite(row["eval/loss"])) == (3, True)

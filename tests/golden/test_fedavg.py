"""FedAvg, FedAvg++ and FedProx against NumPy: whole client updates and their weights."""

import jax.numpy as jnp
import pytest

from fedjax_ssl import local
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local.task import Task
from fedjax_ssl.method import Shard
from fedjax_ssl.methods.fedavg import fedavg, fedavg_pp, fedprox
from tests.golden import linear_clients as lc


@pytest.mark.parametrize(("method", "mu"), [(fedavg, 0.0), (fedprox, 0.4), (fedavg_pp, 0.0)])
def test_a_client_update_is_what_the_equations_say(method, mu):
    """Two epochs over five labels in batches of 3: the last of each holds 2, and its mean is over 2."""
    client, loss = lc.Client(), []
    weak = lc.plain(client.pool[client.labeled_index[: lc.LABELED]].astype(float)).reshape(lc.LABELED, -1)
    images = weak if method is fedavg_pp else client.labeled

    def gradients(w, labeled, _):
        x, y = images[labeled], lc.LABELS[labeled]
        p = lc.outputs(w, x)
        loss.extend(lc.cross_entropy(p, y))
        return [(x, lc.residual(p, y) / len(y))]

    update, momentum = client.trained(gradients, prox_mu=mu)
    got_update, got_weight, got_momentum, metrics = client.got(method, prox_mu=mu)
    lc.assert_same(got_update, update)
    lc.assert_same(got_momentum, momentum)
    assert got_weight == lc.LABELED + lc.UNLABELED
    seen = sum(len(labeled) for labeled, _ in lc.STEPS)
    passes = len(lc.STEPS) * lc.BATCH
    lc.assert_metrics(metrics, {"client/loss": (sum(loss), seen), **lc.costs(lc.BYTES, lc.BYTES, seen, passes, passes)})


@pytest.mark.parametrize(("labeled", "unlabeled"), [(5, 7), (0, 7), (5, 0), (0, 0)])
def test_clients_weigh_by_their_data_where_they_hold_labels_and_alike_where_not(labeled, unlabeled):
    def examples(count):
        return Examples(None, None, jnp.int32(count), None)

    shard = Shard(examples(labeled), examples(unlabeled), None)
    at = {place: Task(None, None, 2, "static", labels_at=place) for place in (("server",), ("clients",))}
    assert local.data_weight(at["clients",], shard) == labeled + unlabeled
    assert local.data_weight(at["server",], shard) == (1 if labeled + unlabeled else 0)

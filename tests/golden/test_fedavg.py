"""FedAvg, FedAvg++ and FedProx against NumPy: whole client updates and their weights."""

import jax
import jax.numpy as jnp
import optax
import pytest

from fedjax_ssl import local
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local.task import Task
from fedjax_ssl.method import ClientData, Cohort, DataSpec
from fedjax_ssl.methods import METHODS, options_class
from fedjax_ssl.methods.fedavg import FedAvgOptions, fedavg, fedavg_pp, fedprox
from tests.golden import linear_clients as lc


@pytest.mark.parametrize(
    ("method", "mu", "below"), [(fedavg, 0.0, 1.0), (fedprox, 0.4, 0.0), (fedavg_pp, 0.0, 0.42), (fedavg_pp, 0.0, 0.41)]
)
def test_a_client_update_is_what_the_equations_say(method, mu, below, monkeypatch):
    """Two epochs over five labels in batches of 3: the last of each holds 2, and its mean is over 2.

    Three repeats make six epochs of them where 5 of 12 examples are fewer than a share of `below`.
    """
    monkeypatch.setattr(lc, "STEPS", lc.STEPS * (3 if below > 5 / 12 else 1))
    client, loss = lc.Client(), []
    weak = lc.plain(client.pool[client.labeled_index[: lc.LABELED]].astype(float)).reshape(lc.LABELED, -1)
    images = weak if method is fedavg_pp else client.labeled

    def gradients(w, labeled, _):
        x, y = images[labeled], lc.LABELS[labeled]
        p = lc.outputs(w, x)
        loss.extend(lc.cross_entropy(p, y))
        return [(x, lc.residual(p, y) / len(y))]

    update, momentum = client.trained(gradients, prox_mu=mu)
    got_update, got_weight, got_momentum, metrics = client.got(
        method, FedAvgOptions(labeled_repeats=3, repeats_below=below), prox_mu=mu
    )
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

    client_data = ClientData(examples(labeled), examples(unlabeled), None)
    at = {place: Task(None, None, 2, "static", labels_at=place) for place in (("server",), ("clients",))}
    assert local.data_weight(at["clients",], client_data) == labeled + unlabeled
    assert local.data_weight(at["server",], client_data) == (1 if labeled + unlabeled else 0)


@pytest.mark.parametrize(
    ("name", "below", "labeled", "images"),
    [
        ("fixmatch", 0.41, 5, 20),
        ("fixmatch", 0.42, 5, 58),
        pytest.param("uda", 0.42, 5, 58, marks=pytest.mark.ci),
        pytest.param("fedmatch", 0.42, 5, 58, marks=pytest.mark.ci),
        ("uda", 1.0, 0, 14),
    ],
)
def test_methods_whose_labels_count_the_epochs_take_more_of_them_where_labels_repeat(name, below, labeled, images):
    """2 or 3 x 2 epochs of 5 labels, in 4 or 12 steps, whose unlabeled batches hold 3, 3, 1, 3, ... of 7 examples.

    Without labels there is nothing to repeat: 2 epochs of 7 examples.
    """
    client, kind = lc.Client(), options_class(METHODS[name])
    options = kind(labeled_repeats=3, repeats_below=below, **({"pseudo_labels": "local"} if name == "fixmatch" else {}))
    training = local.Training(lc.torch_sgd(), lambda _: jnp.float32(0.1), lc.BATCH, lc.EPOCHS)
    method = METHODS[name](
        task=lc.linear_task(), client=training, server=local.Server(optax.sgd(1.0), training, 0, None), options=options
    )
    server, clients = method.init(jax.random.key(0), DataSpec((lc.SIDE, lc.SIDE, 1), lc.CLASSES, 1, 1))
    shared, per_client = method.broadcast(server, clients, Cohort(jnp.zeros(1, jnp.int32), jnp.int32(0)))
    state, per_client = (jax.tree.map(lambda x: x[0], tree) for tree in (clients, per_client))
    output = jax.jit(method.client_update)(shared, per_client, state, client.client_data(labeled), jax.random.key(1))
    assert output.metrics["perf/client_images"].total == images

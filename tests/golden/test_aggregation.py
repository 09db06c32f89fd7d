"""The server's momentum and static batch norm against NumPy, through the functions that the methods use."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import models
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local import Task, Weights, networks, server
from fedjax_ssl.method import Aggregate, ServerData
from fedjax_ssl.methods import fedsiam
from tests.golden.normalizing import normalize

SETTINGS = server.Server(optax.sgd(1.0, momentum=0.5), None, 0, None)
step = server.server_work(Task(None, None, 2, "static"), SETTINGS).step


def test_server_momentum_is_v_half_v_plus_d_and_w_minus_v_and_rests_without_clients():
    rng = np.random.default_rng(1)
    w, v = rng.standard_normal(4), np.zeros(4)
    state = server.ServerState(Weights({"w": jnp.float32(w)}, {}), SETTINGS.optimizer.init({"w": jnp.zeros(4)}), ())
    for _ in range(4):
        d = rng.standard_normal(4)
        v = 0.5 * v + d
        w = w - v
        state = step(state, Aggregate(Weights({"w": jnp.float32(d)}, ()), jnp.float32(1.0)))
        np.testing.assert_allclose(state.weights.params["w"], w, rtol=1e-5)
    same = step(state, Aggregate(Weights({"w": jnp.zeros(4)}, ()), jnp.float32(0.0)))  # nobody took part
    jax.tree.map(np.testing.assert_array_equal, same, state)


def norm_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The statistics of one batch [B, F], as PyTorch stores them: mean and unbiased variance."""
    return x.mean(0), x.var(0, ddof=1)


def norm_of_scaled(params, stats, images, *, mask=None, train=False, key=None):
    """A network that is one batch norm on pixels times a number: its statistics are those of the images, times that number."""
    return normalize(stats, params["scale"] * images, mask, train)


def norm_task(labels_at: str) -> Task:
    plain = Views(lambda images: images.astype(jnp.float32), None, None, None)
    return Task(models.ModelFns(None, norm_of_scaled), plain, 2, "static", 4, labels_at=(labels_at,))


def norm_weights(scale: float) -> Weights:
    return Weights({"scale": jnp.float32(scale)}, {"mean": jnp.zeros(3), "var": jnp.ones(3)})


@pytest.mark.parametrize("weighting", ["examples", "batches"])
@pytest.mark.parametrize(
    ("data", "labels_at"), [("cohort", "server"), ("all", "server"), ("labeled", "server"), ("cohort", "clients")]
)
def test_static_norm_is_the_cumulative_average_over_labeled_and_client_batches(data, labels_at, weighting):
    settings = server.StaticNorm(data, weighting, labeled_batch_size=3, unlabeled_batch_size=4)
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, (40, 1, 3, 1)).astype(np.uint8)
    labeled, pooled = np.arange(5), np.arange(5, 40)  # batches of 3 and 2, and of 4 with a last one of 3
    cohort = [np.array([7, 9, 30]), np.array([11, 12, 13, 14, 15, 16]), np.array([20])]
    index = np.zeros((3, 6), np.int32)
    for k, row in enumerate(cohort):
        index[k, : len(row)] = row

    def examples(rows: np.ndarray, counts) -> Examples:
        return Examples(jnp.asarray(images), jnp.int32(rows), jnp.int32(counts), None)

    padded = np.concatenate([labeled, [0, 0]])
    own = examples(padded, 5 if labels_at == "server" else 0)
    given = ServerData(own, examples(pooled, 35), None, examples(index, [3, 6, 1]), jnp.int32(0))
    got = server.with_statistics(norm_task(labels_at), settings, norm_weights(1.0), given).stats

    pixels = images.reshape(40, 3).astype(float)
    clients = {"cohort": np.concatenate(cohort), "all": pooled, "labeled": np.zeros(0, int)}[data]
    labeled_batches = np.split(pixels[labeled], [3]) if labels_at == "server" else []
    batches = labeled_batches + np.split(pixels[clients], np.arange(4, len(clients), 4))
    batches = [b for b in batches if len(b)]
    share = np.array([len(b) if weighting == "examples" else 1 for b in batches], float)
    share /= share.sum()
    mean = sum(s * norm_of(b)[0] for s, b in zip(share, batches, strict=True))
    var = sum(s * norm_of(b)[1] for s, b in zip(share, batches, strict=True))
    np.testing.assert_allclose(got["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(got["var"], var, rtol=1e-4)


def test_both_networks_of_a_mean_teacher_have_static_norm_of_their_own():
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (7, 1, 3, 1)).astype(np.uint8)
    data = ServerData(Examples(jnp.asarray(images), jnp.arange(7), jnp.int32(7), None), None, None, None, jnp.int32(0))
    settings = SETTINGS._replace(static_norm=server.StaticNorm("labeled", "examples", 7, 7))
    scales = (2.0, -0.5)  # of the online network and of the target
    state = server.ServerState(networks.join(*map(norm_weights, scales)), (), ())
    got = fedsiam.server_work(norm_task("server"), settings, lambda _: 0.99).statistics(state, data).weights
    for stats, scale in zip(got.stats, scales, strict=True):
        mean, var = norm_of(scale * images.reshape(7, 3))
        np.testing.assert_allclose(stats["mean"], mean, rtol=1e-5)
        np.testing.assert_allclose(stats["var"], var, rtol=1e-4)

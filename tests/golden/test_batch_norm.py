"""Batch norm and the policies for its statistics, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_ssl import models
from fedjax_ssl.data import sources, split
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.data.settings import DataSettings
from fedjax_ssl.local import Task, Trained, Weights, output_of, server
from fedjax_ssl.method import ServerData
from fedjax_ssl.methods import fedsiam
from fedjax_ssl.metrics import whole
from fedjax_ssl.models.flax_layers import aware_of
from fedjax_ssl.models.norm import add, finish, moments, running, start
from tests import tiny
from tests.golden.normalizing import normalize

B, REAL, H, W, F = 6, 4, 3, 5, 2
MASK = np.arange(B) < REAL


def batch(seed=0, garbage=np.nan):
    """Examples of mean 3 and deviation 2, of which the first REAL ones are real."""
    x = np.random.default_rng(seed).normal(3, 2, (B, H, W, F)).astype(np.float32)
    x[REAL:] = garbage
    return x


def layer():
    rng = np.random.default_rng(1)
    params = {"scale": rng.uniform(0.5, 2, F).astype(np.float32), "bias": rng.normal(size=F).astype(np.float32)}
    stats = {"mean": rng.normal(size=F).astype(np.float32), "var": rng.uniform(0.5, 2, F).astype(np.float32)}
    return params, stats


def apply(params, stats, x, mask, train):
    with nn.intercept_methods(aware_of(mask, "xla")):
        return nn.BatchNorm(not train).apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])


def train(params, stats, x, mask):
    out, updated = apply(params, stats, x, mask, True)
    return out, updated["batch_stats"]


def expected_training(params, real):
    """The real rows normalized, and the batch's statistics as PyTorch stores them."""
    values = real.reshape(-1, F).astype(np.float64)
    mean, biased, unbiased = values.mean(0), values.var(0), values.var(0, ddof=1)
    return params["scale"] * (real - mean) / np.sqrt(biased + 1e-5) + params["bias"], {"mean": mean, "var": unbiased}


@pytest.mark.parametrize("garbage", [0.0, 1e6, np.nan, np.inf, None])
def test_training_normalizes_by_the_real_examples(garbage):
    params, stats = layer()
    mask, real = (None, B) if garbage is None else (MASK, REAL)  # no mask is a mask of all
    x = batch(garbage=1.0 if garbage is None else garbage)
    out, batch_stats = jax.jit(train)(params, stats, x, mask)
    expected_out, expected_stats = expected_training(params, x[:real])
    np.testing.assert_allclose(out[:real], expected_out, atol=2e-5)
    np.testing.assert_array_equal(out[real:], 0)
    np.testing.assert_allclose(batch_stats["mean"], expected_stats["mean"], rtol=1e-5)
    np.testing.assert_allclose(batch_stats["var"], expected_stats["var"], rtol=1e-5)


def test_evaluation_normalizes_by_the_statistics():
    params, stats = layer()
    x = batch()
    out, updated = apply(params, stats, x, MASK, False)
    assert updated == {"batch_stats": stats}
    expected = params["scale"] * (x[:REAL] - stats["mean"]) / np.sqrt(stats["var"] + 1e-5) + params["bias"]
    np.testing.assert_allclose(out[:REAL], expected, atol=2e-5)
    np.testing.assert_array_equal(out[REAL:], 0)


def test_gradient_is_that_of_the_unpadded_batch():
    params, stats = layer()
    weights = np.random.default_rng(2).normal(size=(REAL, H, W, F)).astype(np.float32)

    def loss(x, mask):
        return jnp.sum(weights * train(params, stats, x, mask)[0][:REAL])

    x = batch(garbage=1e3)
    padded, unpadded = jax.grad(loss)(x, MASK), jax.grad(loss)(x[:REAL], None)
    np.testing.assert_allclose(padded[:REAL], unpadded, atol=1e-5)
    np.testing.assert_array_equal(padded[REAL:], 0)
    # By finite differences, along one direction.
    direction = np.random.default_rng(3).normal(size=(REAL, H, W, F))
    up, down = (np.sum(weights * expected_training(params, x[:REAL] + s * 1e-4 * direction)[0]) for s in (1, -1))
    np.testing.assert_allclose(np.sum(unpadded * direction), (up - down) / 2e-4, rtol=1e-3)


def numpy_gradient(x, g, scale):
    """The gradient of sum(g y) for x [n, F], y = scale (x - mean) / sqrt(var + 1e-5), by the whole Jacobian of each channel."""
    n, out = len(x), np.zeros_like(x)
    for f in range(F):
        centered = x[:, f] - x[:, f].mean()
        root = np.sqrt(x[:, f].var() + 1e-5)
        jacobian = (np.eye(n) - 1 / n) / root - np.outer(centered, centered) / (n * root**3)
        out[:, f] = scale[f] * jacobian @ g[:, f]
    return out


@pytest.mark.parametrize("garbage", [0.0, np.nan])
def test_gradients_are_those_of_the_jacobian_and_second_derivatives_those_of_its_differences(garbage):
    params, stats = layer()
    x, (g, direction) = batch(2, garbage), np.random.default_rng(3).normal(size=(2, B, H, W, F)).astype(np.float32)

    def loss(x, scale, bias, g):
        y, _ = train({"scale": scale, "bias": bias}, stats, x, MASK)
        return jnp.sum(y * g)

    def gradient(x, g):
        return jax.grad(loss, (0, 1, 2))(x, params["scale"], params["bias"], g)

    got = gradient(x, g)
    real, cotangent, along = (np.float64(a[:REAL].reshape(-1, F)) for a in (x, g, direction))
    expected = numpy_gradient(real, cotangent, params["scale"])
    np.testing.assert_allclose(got[0][:REAL].reshape(-1, F), expected, rtol=1e-4, atol=1e-6)
    assert not np.any(got[0][REAL:])
    z = (real - real.mean(0)) / np.sqrt(real.var(0) + 1e-5)
    np.testing.assert_allclose(got[1], (cotangent * z).sum(0), rtol=1e-4)
    np.testing.assert_allclose(got[2], cotangent.sum(0), rtol=1e-4)
    x = np.where(MASK[:, None, None, None], x, np.float32(9))  # second derivatives are not free of padded NaN
    second = jax.grad(lambda x: jnp.sum(gradient(x, g)[0] * direction))(x)
    ends = [numpy_gradient(real + step * along, cotangent, params["scale"]) for step in (1e-4, -1e-4)]
    np.testing.assert_allclose(second[:REAL].reshape(-1, F), (ends[0] - ends[1]) / 2e-4, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("real", [0, 1])
def test_no_nan_where_the_batch_has_at_most_one_example(real):
    params, stats = layer()
    x = np.random.default_rng(0).normal(size=(3, F)).astype(np.float32)  # one value a channel and example
    mask = np.arange(3) < real

    def loss(params, x):
        out, batch_stats = train(params, stats, x, mask)
        return jnp.sum(jnp.where(mask[:, None], out, 0.0)), batch_stats

    gradients, batch_stats = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((gradients, batch_stats)))
    expected = {"mean": x[0], "var": np.zeros(F)} if real else stats
    jax.tree.map(np.testing.assert_array_equal, batch_stats, expected)


def test_statistics_carry_no_gradient():
    params, stats = layer()
    x = batch()

    def reported(x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(train(params, stats, x, MASK)[1]))

    def evaluated(stats):
        return jnp.sum(apply(params, stats, x[:REAL], None, False)[0])

    np.testing.assert_array_equal(jax.grad(reported)(x), 0)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(jax.grad(evaluated)(stats)))


def test_bfloat16_activations_have_float32_statistics():
    x = batch(garbage=0).astype(jnp.bfloat16)
    mean, var, count = moments(x, MASK[:, None, None, None])
    values = np.asarray(x[:REAL], np.float64).reshape(-1, F)
    assert mean.dtype == var.dtype == jnp.float32
    np.testing.assert_allclose(mean, values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(var, values.var(0), rtol=1e-5)
    assert count == REAL * H * W
    params, stats = layer()
    out, batch_stats = train(params, stats, x, MASK)
    assert out.dtype == jnp.bfloat16
    assert batch_stats["var"].dtype == jnp.float32


def test_a_task_tracks_statistics_as_pytorch_does_with_its_own_momentum_where_it_tracks_any():
    old, new = {"mean": np.float32([1.0])}, {"mean": np.float32([3.0])}
    for mode, expected in (("running", 1.0 + 0.001 * 2.0), ("static", 1.0), ("batch", 1.0)):
        task = Task(model=None, views=None, num_classes=2, norm=mode, norm_momentum=0.001)
        np.testing.assert_allclose(task.update_stats(old, new)["mean"], [expected], rtol=1e-6)
    np.testing.assert_allclose(running(old, new)["mean"], [0.9 * 1.0 + 0.1 * 3.0], rtol=1e-6)


def test_cumulative_average_leaves_out_a_batch_of_weight_zero():
    _, stats = layer()
    cumulative = add(start(stats), jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), stats), 0.0)
    jax.tree.map(np.testing.assert_array_equal, finish(cumulative, stats), stats)
    one = {"mean": np.float32([1, 2]), "var": np.float32([3, 4])}
    jax.tree.map(np.testing.assert_array_equal, finish(add(cumulative, one, 2.0), stats), one)


def norm_of_scaled(params, stats, images, *, mask=None, train=False, key=None):
    """A network that is one batch norm on pixels times a number: its statistics are those of the images, times that number."""
    return normalize(stats, params["scale"] * images, mask, train)


def norm_task(labels_at: str) -> Task:
    plain = Views(lambda images: images.astype(jnp.float32), None, None, None)
    return Task(models.ModelFns(None, norm_of_scaled), plain, 2, "static", 4, labels_at=(labels_at,))


def norm_weights(scale: float) -> Weights:
    return Weights({"scale": jnp.float32(scale)}, {"mean": jnp.zeros(3), "var": jnp.ones(3)})


@pytest.mark.parametrize(("mode", "up"), [("static", 4), ("running", 28)])
def test_clients_receive_statistics_and_send_those_that_training_changes(mode, up):
    received, trained = norm_weights(1.0), Weights({"scale": jnp.float32(3)}, {"mean": jnp.ones(3), "var": jnp.ones(3)})
    task, steps = norm_task("clients")._replace(norm=mode), Trained((), {}, whole(5), jnp.int32(1))
    output = output_of(task, received, trained, steps, jnp.float32(2), "state")
    assert (output.update.params["scale"], output.weight, output.client_state) == (-2, 2, "state")
    assert output.update.stats == () if mode == "static" else output.update.stats["mean"].tolist() == [-1] * 3
    sums = {name: int(metric.total) for name, metric in output.metrics.items()}
    assert sums == {"comm/bytes_down": 28, "comm/bytes_up": up, "perf/client_images": 5}


@pytest.mark.parametrize("order", ["apart", "joined", "class"])
@pytest.mark.parametrize("weighting", ["examples", "batches"])
@pytest.mark.parametrize(
    ("data", "labels_at"), [("cohort", "server"), ("all", "server"), ("labeled", "server"), ("cohort", "clients")]
)
def test_static_norm_is_the_cumulative_average_over_labeled_and_client_batches(data, labels_at, weighting, order):
    settings = server.StaticNorm(data, weighting, labeled_batch_size=3, unlabeled_batch_size=4, order=order)
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, (40, 1, 3, 1)).astype(np.uint8)
    labeled, pooled = np.arange(5), np.arange(5, 40)  # batches of 3 and 2, and of 4 with a last one of 3
    cohort = [np.array([7, 9, 30]), np.array([11, 12, 13, 14, 15, 16]), np.array([20])]
    index = np.array([np.pad(row, (0, 6 - len(row))) for row in cohort])

    def examples(rows: np.ndarray, counts) -> Examples:
        return Examples(jnp.asarray(images), jnp.int32(rows), jnp.int32(counts), None)

    own = examples(np.append(labeled, [0, 0]), 5 if labels_at == "server" else 0)
    own = own._replace(labels=jnp.int32([1, 0, 1, 0, 0, -1, -1]))
    given = ServerData(own, examples(pooled, 35), None, examples(index, [3, 6, 1]), jnp.int32(0))
    got = server.with_statistics(norm_task(labels_at), settings, norm_weights(1.0), given).stats

    pixels = images.reshape(40, 3).astype(float)
    clients = {"cohort": np.concatenate(cohort), "all": pooled, "labeled": np.zeros(0, int)}[data]
    if order != "apart":
        labeled = labeled[[1, 3, 4, 0, 2]]  # by class
    labeled_batches = np.split(pixels[labeled], [3]) if labels_at == "server" else []
    batches = labeled_batches + np.split(pixels[clients], np.arange(4, len(clients), 4))
    if order == "joined" and data != "labeled":
        sequence = np.concatenate([labeled, clients]) if labels_at == "server" else clients
        batches = np.split(pixels[sequence], np.arange(4, len(sequence), 4))
    batches = [b for b in batches if len(b)]
    share = [len(b) if weighting == "examples" else 1 for b in batches]
    np.testing.assert_allclose(got["mean"], np.average([b.mean(0) for b in batches], 0, share), rtol=1e-5)
    np.testing.assert_allclose(got["var"], np.average([b.var(0, ddof=1) for b in batches], 0, share), rtol=1e-4)


@pytest.mark.parametrize("order", ["apart", "joined", "class"])
def test_the_pool_is_by_class_where_the_codes_is_and_the_servers_examples_stay_in_the_order_that_training_draws_from(order):
    given = tiny.experiment("fl2", server__static_norm__order=order, server__static_norm__data="all")
    tables, labels = given.problem.tables[0], np.asarray(given.problem.train.labels)
    of_class = labels[tables["pooled"].index[0, : tables["pooled"].count[0]]]
    assert bool(np.all(np.diff(of_class) >= 0)) == (order == "class")
    usual = tiny.experiment("fl2").problem.tables[0]["server"]
    np.testing.assert_array_equal(tables["server"].index, usual.index)


def test_batches_by_class_hold_the_classes_that_the_specification_counts():
    """CIFAR-10, 40 labels: of 25 batches of 2,048 unlabeled images 16 hold one class and 9 two; 10 labeled ones hold 3."""
    labels = np.random.default_rng(0).permutation(np.arange(50_000) % 10)
    images = np.zeros((50_000, 1, 1, 1), np.uint8)
    dataset = sources.from_arrays(train_images=images, train_labels=labels, test_images=images[:10], test_labels=np.arange(10))
    tables = split.tables(dataset, split.draw(dataset, DataSettings(), 0), pooled_by_class=True)
    pooled = labels[tables.pooled.index[0]]
    found = [len(set(pooled[i : i + 2048].tolist())) for i in range(0, 49_960, 2048)]
    assert sorted(found) == [1] * 16 + [2] * 9
    index = jnp.asarray(tables.server.index[0])
    by_class = server._by_class(Examples(None, index, jnp.int32(40), jnp.asarray(labels, jnp.int32)[index])).index
    assert len(set(labels[np.asarray(by_class[:10])].tolist())) == 3


def test_both_networks_of_a_mean_teacher_have_static_norm_of_their_own():
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (7, 1, 3, 1)).astype(np.uint8)
    data = ServerData(Examples(jnp.asarray(images), jnp.arange(7), jnp.int32(7), None), None, None, None, jnp.int32(0))
    settings = server.Server(None, None, 0, server.StaticNorm("labeled", "examples", 7, 7))
    scales = (2.0, -0.5)  # of the online network and of the target
    state = server.ServerState(fedsiam.join(*map(norm_weights, scales)), (), ())
    got = fedsiam.server_work(norm_task("server"), settings, lambda _: 0.99).statistics(state, data).weights
    for stats, scale in zip(got.stats, scales, strict=True):
        inputs = scale * images.reshape(7, 3)
        np.testing.assert_allclose(stats["mean"], inputs.mean(0), rtol=1e-5)
        np.testing.assert_allclose(stats["var"], inputs.var(0, ddof=1), rtol=1e-4)

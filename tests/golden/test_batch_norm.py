"""Batch norm and the policies for its statistics, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local.task import Task
from fedjax_ssl.models.norm import BatchNorm, add, finish, moments, running, start

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


def train(params, stats, x, mask):
    out, updated = BatchNorm().apply({"params": params, "batch_stats": stats}, x, mask, True, mutable=["batch_stats"])
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
    out = BatchNorm().apply({"params": params, "batch_stats": stats}, x, MASK, False)
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
        return jnp.sum(BatchNorm().apply({"params": params, "batch_stats": stats}, x[:REAL], None, False))

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


def test_cumulative_average_weighs_batches():
    params, stats = layer()
    batches, weights = [batch(seed)[:REAL] for seed in range(3)], [1.0, 3.0, 0.5]
    cumulative = start(stats)
    for x, weight in zip(batches, weights, strict=True):
        cumulative = add(cumulative, train(params, stats, x, None)[1], weight)
    static = finish(cumulative, stats)
    means = [x.reshape(-1, F).mean(0) for x in batches]
    variances = [x.reshape(-1, F).var(0, ddof=1) for x in batches]
    np.testing.assert_allclose(static["mean"], np.average(means, axis=0, weights=weights), rtol=1e-5)
    np.testing.assert_allclose(static["var"], np.average(variances, axis=0, weights=weights), rtol=1e-5)
    # A batch of weight 0 is left out.
    garbage = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), stats)
    cumulative = add(start(stats), garbage, 0.0)
    jax.tree.map(np.testing.assert_array_equal, finish(cumulative, stats), stats)
    one = {"mean": np.float32([1, 2]), "var": np.float32([3, 4])}
    jax.tree.map(np.testing.assert_array_equal, finish(add(cumulative, one, 2.0), stats), one)

"""Several batches in one training pass, one of them without gradient, with and without batch norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import Task
from fedjax_ssl.models import registry
from fedjax_ssl.simulation.costs import with_passes
from tests import tiny
from tests.golden.linear_clients import VIEWS

LABELED, WEAK, STRONG = 3, 5, 4


@pytest.mark.parametrize(("network", "back"), [("cnn", LABELED + WEAK + STRONG), ("mlp", LABELED + STRONG)])
def test_a_fixed_batch_has_no_gradient_and_goes_back_for_batch_norm_alone(network, back):
    task = Task(registry.build(network, num_classes=10, **tiny.NETWORKS[network]), VIEWS, 10, "running")
    weights = task.init(jax.random.key(0), (8, 8, 1))
    key, sizes = jax.random.key(1), (LABELED, WEAK, STRONG)
    views = [jax.random.normal(jax.random.fold_in(key, n), (n, 8, 8, 1)) for n in sizes]
    masks = [jnp.arange(n) < n - 1 for n in sizes]

    def together(params):
        logits, stats = task.train_logits_together(weights._replace(params=params), views, masks, key, fixed=1)
        return sum(jnp.sum(m @ z**2) for m, z in zip(masks, logits, strict=True)), (logits, stats)

    def by_hand(params):
        joined, mask = jnp.concatenate(views), jnp.concatenate(masks)
        logits, stats = task.model.apply(params, weights.stats, joined, mask=mask, train=True, key=None)
        logits = jnp.split(logits, [LABELED, LABELED + WEAK])
        logits[1] = jax.lax.stop_gradient(logits[1])
        return sum(jnp.sum(m @ z**2) for m, z in zip(masks, logits, strict=True)), (tuple(logits), stats)

    got, passes = with_passes(jax.grad(together, has_aux=True))(weights.params)
    expected = jax.grad(by_hand, has_aux=True)(weights.params)
    assert (int(passes.forward), int(passes.backward)) == (LABELED + WEAK + STRONG, back)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, expected)

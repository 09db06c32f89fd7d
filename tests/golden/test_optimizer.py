"""What decays, LARS against NumPy, and traced numbers. SGD is compared in `test_server_training` and in all clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local.optimizers import is_on, lars, torch_sgd
from tests.golden import linear_clients as lc


def test_weight_decay_on_kernels_leaves_out_biases_and_batch_norm():
    params = {"Dense_0": {"kernel": np.float32([[2.0]]), "bias": np.float32([4.0])}}
    params["Block_0"] = {
        "Conv_0": {"kernel": np.float32([8.0])},
        "BatchNorm_0": {"scale": np.float32([16.0]), "bias": np.float32([32.0])},
    }
    grad = jax.tree.map(np.ones_like, params)
    for on, factor in (("kernels", 0.0), ("all", 1.0)):
        optimizer = torch_sgd(weight_decay=0.5, decay=on)
        got, _ = optimizer.update(grad, optimizer.init(params), params)
        assert got["Dense_0"] == {"kernel": 2.0, "bias": 1 + 2 * factor}
        assert got["Block_0"]["Conv_0"]["kernel"] == 5.0
        assert got["Block_0"]["BatchNorm_0"] == {"scale": 1 + 8 * factor, "bias": 1 + 16 * factor}


@pytest.mark.parametrize(("decay", "nesterov"), [(0.5, False), (0.5, True), (0.0, False)])
def test_lars_scales_and_decays_kernels_alone_over_five_steps(decay, nesterov):
    rng = np.random.default_rng(0)
    shapes = {"layer": {"kernel": (3, 2), "bias": (2,)}, "norm": {"scale": (2,), "bias": (2,)}, "new": {"kernel": (2, 2)}}
    w = {layer: {name: rng.standard_normal(shape) for name, shape in leaves.items()} for layer, leaves in shapes.items()}
    w["new"]["kernel"][:] = 0  # its norm is 0 in the first step: no ratio
    grads = [jax.tree.map(lambda x: rng.standard_normal(x.shape), w) for _ in range(5)]
    expected, m, rate = jax.tree.map(np.copy, w), jax.tree.map(np.zeros_like, w), 0.1
    for grad in grads:
        for layer, leaves in expected.items():
            g = lc.lars_gradient(leaves, grad[layer], decay)
            expected[layer], m[layer] = lc.sgd(leaves, g, m[layer], rate, nesterov=nesterov)

    optimizer = lars(momentum=lc.MOMENTUM, nesterov=nesterov, weight_decay=decay)
    params = jax.tree.map(jnp.float32, w)
    state = optimizer.init(params)
    for grad in grads:
        direction, state = optimizer.update(jax.tree.map(jnp.float32, grad), state, params)
        params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
    # What a kernel changes by is 1e-4 of it: compare the changes.
    for layer, leaves in w.items():
        for name, start in leaves.items():
            np.testing.assert_allclose(params[layer][name] - start, expected[layer][name] - start, rtol=2e-3, atol=1e-6)


TRACED = [(lars, "momentum"), (lars, "weight_decay"), *((torch_sgd, key) for key in ("momentum", "weight_decay", "clip_norm"))]


@pytest.mark.parametrize(("optimizer", "varied"), TRACED)
def test_numbers_that_are_traced_do_what_they_do_as_constants(optimizer, varied):
    rng = np.random.default_rng(0)
    params = {"kernel": np.float32(rng.standard_normal((3, 2))), "bias": np.float32(rng.standard_normal(2))}
    grads = [jax.tree.map(lambda x: np.float32(rng.standard_normal(x.shape)), params) for _ in range(2)]

    def two_steps(number):
        transformation = optimizer(**{"momentum": 0.9, "weight_decay": 0.1, varied: number})
        kept = transformation.init(params)
        for grad in grads:
            direction, kept = transformation.update(grad, kept, params)
        return direction

    many = jax.vmap(two_steps)(jnp.float32([0.3, 0.7]))
    for place, number in enumerate((0.3, 0.7)):
        expected = two_steps(number)
        for name in params:
            np.testing.assert_allclose(many[name][place], expected[name], rtol=1e-6)
    assert np.any(many["kernel"][0] != many["kernel"][1])


def test_zero_switches_off_and_what_is_traced_is_on():
    assert [is_on(number) for number in (0, 0.0, 0.1)] == [False, False, True]
    assert jax.jit(lambda x: jnp.array(is_on(x)))(0.0)

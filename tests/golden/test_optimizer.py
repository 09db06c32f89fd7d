"""What decays, adaptive optimizers, LARS and factors of layers against NumPy, and traced numbers.

SGD is compared in `test_server_training` and in all clients.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.experiment.arguments import training_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.local.optimizers import adaptive, is_on, lars, torch_sgd, with_factors
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


B1, B2, EPS, CLIP, DECAY = 0.8, 0.95, 0.05, 1.5, 0.3


def adam(g, w, state, t, decay):
    """Kingma and Ba 2015, Algorithm 1, whose gradient has the weight decay in it."""
    m, v = state
    g = g + decay * w
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
    return m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS), (m, v)


def adamw(g, w, state, t, decay):
    """Loshchilov and Hutter 2019, Algorithm 2: the decay is beside Adam's step."""
    step, state = adam(g, w, state, t, 0)
    return step + decay * w, state


def lion(g, w, state, t, decay):
    """Chen et al. 2023, Algorithm 2: the sign of one average of gradients, of which another is kept."""
    (m,) = state
    return np.sign(B1 * m + (1 - B1) * g) + decay * w, (0.99 * m + 0.01 * g,)


def rmsprop(g, w, state, t, decay):
    """Tieleman and Hinton 2012, with eps within the root, as optax has it."""
    (v,) = state
    g = g + decay * w
    v = 0.9 * v + 0.1 * g**2
    return g / np.sqrt(v + EPS), (v,)


FACTORS = {"Dense_0/kernel": 0.5, "Dense_0/bias": 0.0, "Conv_0/kernel": 1.0, "Conv_0/bias": 3.0}


@pytest.mark.parametrize("decay", ["all", "kernels"])
@pytest.mark.parametrize(("rule", "moments"), [(adam, 2), (adamw, 2), (lion, 1), (rmsprop, 1)])
def test_adaptive_optimizers_from_a_config_follow_their_rule_over_five_steps(rule, moments, decay):
    rng = np.random.default_rng(0)
    w = {path: rng.standard_normal((3, 2)) for path in FACTORS}
    given = {"name": rule.__name__, "b1": B1, "b2": B2, "eps": EPS, "clip_norm": CLIP, "weight_decay": DECAY, "decay": decay}
    given["layers"] = "Dense_0/k.*l=0.5, ^Dense=0, bias=3"  # the first pattern that is found counts
    settings = Settings.from_dict({"client": {"optimizer": given}})
    optimizer = training_of(settings, settings.client).optimizer

    def nested(leaves):
        tree = {}
        for path, leaf in leaves.items():
            layer, name = path.split("/")
            tree.setdefault(layer, {})[name] = jnp.float32(leaf)
        return tree

    params, kept = nested(w), {path: (np.zeros((3, 2)),) * moments for path in w}
    start, state = params, optimizer.init(params)
    for t in range(1, 6):
        grad = {path: rng.standard_normal((3, 2)) for path in w}
        direction, state = optimizer.update(nested(grad), state, params)
        params = jax.tree.map(lambda p, d: p - 0.1 * d, params, direction)
        length = lc.norm({path: g for path, g in grad.items() if FACTORS[path]})
        assert length > CLIP  # clipping acts
        for path, factor in FACTORS.items():
            own = DECAY if decay == "all" or path.endswith("kernel") else 0.0
            step, kept[path] = rule(grad[path] * CLIP / length, w[path], kept[path], t, own)
            w[path] = w[path] - 0.1 * factor * step
    assert np.array_equal(params["Dense_0"]["bias"], start["Dense_0"]["bias"])
    for path, leaf in w.items():
        layer, name = path.split("/")
        np.testing.assert_allclose(params[layer][name], leaf, rtol=1e-4, atol=1e-5, err_msg=path)


def test_what_has_the_factor_0_has_no_state_no_step_and_no_gradient_in_the_program():
    tree = {"a": {"kernel": jnp.float32([2.0, jnp.nan])}, "b": {"kernel": jnp.float32([2.0])}}
    optimizer = with_factors(torch_sgd(momentum=0.9), [("^a", 0.0), ("kernel", 0.5)])
    got, state = optimizer.update(tree, optimizer.init(tree), tree)
    assert got["a"]["kernel"].tolist() == [0, 0]
    assert got["b"]["kernel"].tolist() == [1]
    assert [x.shape for x in jax.tree.leaves(state)] == [(1,)]

    def step(params):
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(jnp.ones((4, 2)) @ p["a"]) @ p["b"]))(params)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    optimizer = with_factors(torch_sgd(), [("^a", 0.0)])
    text = jax.jit(step).lower({"a": jnp.ones((2, 3)), "b": jnp.ones((3, 1))}).compile().as_text()
    assert text.count(" dot(") + text.count("custom-call") <= 2  # not the products for the gradient of `a`


TRACED = [
    (lars, "momentum"),
    (lars, "weight_decay"),
    *((torch_sgd, key) for key in ("momentum", "weight_decay", "clip_norm")),
    *((partial(adaptive, "adamw"), key) for key in ("b1", "b2", "eps", "weight_decay", "clip_norm")),
    (partial(adaptive, "rmsprop"), "eps"),
]


@pytest.mark.parametrize(("optimizer", "varied"), TRACED)
def test_numbers_that_are_traced_do_what_they_do_as_constants(optimizer, varied):
    rng = np.random.default_rng(0)
    params = {"kernel": np.float32(rng.standard_normal((3, 2))), "bias": np.float32(rng.standard_normal(2))}
    grads = [jax.tree.map(lambda x: np.float32(rng.standard_normal(x.shape)), params) for _ in range(2)]

    def two_steps(number):
        momentum = {} if isinstance(optimizer, partial) else {"momentum": 0.9}
        transformation = optimizer(**(momentum | {"weight_decay": 0.1, varied: number}))
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

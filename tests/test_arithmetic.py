"""The count of arithmetic against counts by hand.

An array of ones convolved with one of ones has in each place the number of products that were added up there: none of a zero
that pads or dilates. So the sum of the result is how many multiplications there are.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from fedjax_ssl import models
from fedjax_ssl.arithmetic import Arithmetic, count

A, B = jnp.ones((2, 3)), jnp.ones((3, 5))
ONE = Arithmetic(2 * 2 * 3 * 5, 4 * (2 * 3 + 3 * 5 + 2 * 5))  # of A @ B


@pytest.mark.parametrize(
    ("images", "kernel", "options"),
    [
        ((2, 6, 7, 3), (3, 3, 3, 4), {"padding": "VALID"}),
        ((2, 6, 7, 3), (3, 2, 3, 4), {"padding": [(1, 2), (0, 3)]}),
        ((2, 9, 8, 3), (3, 3, 3, 4), {"padding": "SAME", "window_strides": (2, 3)}),
        ((2, 6, 6, 6), (3, 3, 2, 9), {"padding": "SAME", "feature_group_count": 3}),
        ((4, 6, 6, 3), (3, 3, 3, 8), {"padding": "SAME", "batch_group_count": 2}),
        ((2, 6, 6, 3), (3, 3, 3, 4), {"padding": [(2, 1), (-1, 3)], "lhs_dilation": (2, 3)}),
        ((2, 9, 9, 3), (3, 3, 3, 4), {"padding": [(4, 0), (1, 0)], "rhs_dilation": (2, 3), "window_strides": (2, 1)}),
    ],
)
def test_a_convolution(images, kernel, options):
    strides = options.pop("window_strides", (1, 1))

    def convolve(x, k):
        return lax.conv_general_dilated(x, k, strides, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    x, k = jnp.ones(images), jnp.ones(kernel)
    out = convolve(x, k)
    assert count(convolve, x, k) == (2 * float(jnp.sum(out)), 4 * (x.size + k.size + out.size))


def test_a_convolution_by_its_formula():
    x, k = jnp.ones((32, 16, 16, 8)), jnp.ones((3, 3, 8, 20))
    valid = count(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")), x, k
    )
    assert valid.flops == 2 * 32 * 14 * 14 * 20 * 3 * 3 * 8
    transposed = count(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID"), x.transpose(0, 3, 1, 2), k.transpose(3, 2, 0, 1)
    )
    assert transposed == valid


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("stride", [1, 2])
def test_each_gradient_of_a_convolution_takes_what_the_convolution_takes(stride, padding):
    def convolve(x, k):
        return models.convolution.grouped_conv(x, k, stride, padding)

    x, k = jnp.ones((4, 8, 8, 3)), jnp.ones((3, 3, 3, 6))
    once = count(convolve, x, k).flops
    for gradients in (0, 1, (0, 1)):
        back = count(lambda x, k, g=gradients: jax.grad(lambda *args: jnp.sum(convolve(*args) ** 2), g)(x, k), x, k).flops
        assert back == once * (1 + len(np.atleast_1d(gradients)))
    clients = jnp.ones((5, *k.shape))  # with a kernel of their own each: one grouped convolution
    assert count(jax.vmap(convolve), jnp.ones((5, *x.shape)), clients).flops == 5 * once


def test_matrix_products():
    assert count(jnp.matmul, A, B) == ONE
    left, right = jnp.ones((7, 2, 4, 3)), jnp.ones((7, 3, 4, 6))
    assert count(lambda a, b: jnp.einsum("nijk,nkjl->nil", a, b), left, right).flops == 2 * 7 * 2 * 6 * 4 * 3
    assert count(lambda a, b: a.astype("bfloat16") @ b.astype("bfloat16"), A, B) == (ONE.flops, ONE.bytes / 2)
    assert count(lambda a: jnp.sum(a * a), A) == (0, 0)


@jax.custom_vjp
def own_gradient(a, b):
    return a @ b


own_gradient.defvjp(lambda a, b: (a @ b, (a, b)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (jax.jit(jnp.matmul), 1),
        (lambda a, b: jax.jit(jnp.matmul)(a, b) + jax.jit(jnp.matmul)(a, b), 2),
        (jax.checkpoint(jnp.matmul), 1),
        (own_gradient, 1),
        (lambda a, b: jax.vjp(own_gradient, a, b)[1](a @ b), 4),
        (lambda a, b: lax.scan(lambda s, _: (s + a @ b, None), jnp.zeros((2, 5)), length=6)[0], 6),
        (lambda a, b: lax.fori_loop(0, 6, lambda _, s: lax.fori_loop(0, 4, lambda _, s: s + a @ b, s), jnp.zeros((2, 5))), 24),
        (lambda a, b: lax.fori_loop(0, jnp.int32(a[0, 0]), lambda _, s: s + a @ b, jnp.zeros((2, 5))), 1),
        (lambda a, b: lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: jnp.zeros((2, 5))), 1),
        (lambda a, b: lax.switch(1, [lambda: a @ b, lambda: a @ b + a @ b, lambda: jnp.zeros((2, 5))]), 2),
        (lambda a, b: lax.map(lambda x: x @ b, jnp.stack([a] * 3)), 3),
    ],
)
def test_in_loops_branches_and_calls(function, times):
    assert count(function, A, B) == ONE.times(times)


def test_over_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))
    assert mesh.size == 2
    split, whole = PartitionSpec("clients"), PartitionSpec()
    over = jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(split, whole), out_specs=split)
    assert count(over, A, B).flops == ONE.flops


def test_a_network_of_shapes_alone():
    model = models.build("cnn", num_classes=10, width=4, conv="grouped")
    params, stats = jax.eval_shape(lambda key: model.init(key, (8, 8, 1)), jax.random.key(0))
    images = jax.ShapeDtypeStruct((3, 8, 8, 1), jnp.float32)
    # 8, then 4, then 2 places along an axis, each meeting three entries, but for those at a padded side.
    of_image = 22 * 22 * 1 * 4 + 11 * 11 * 4 * 8 + 5 * 5 * 8 * 16 + 16 * 10
    assert count(model.apply, params, stats, images).flops == 2 * 3 * of_image

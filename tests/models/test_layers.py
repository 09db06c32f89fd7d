"""Every lowering is the same convolution: values and gradients against loops in NumPy. Max pooling and dropout."""

import functools
import itertools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from fedjax_ssl.models import convolution
from fedjax_ssl.models.convolution import LOWERINGS, resolve_conv
from fedjax_ssl.models.flax_layers import aware_of
from fedjax_ssl.models.initializers import INITIALIZATIONS
from fedjax_ssl.models.layers import Conv, dense, dropout, max_pool
from fedjax_ssl.simulation.program import ONEDNN, compiler_options
from tests.jaxprs import products

FLOAT32 = ("xla", "cpu", "gpu")  # in which `onednn` is `cpu`
# (batch, height, width, kernel size, stride, padding)
SHAPES = [(3, 8, 8, 3, 1, 1), (3, 9, 7, 3, 2, 1), (3, 8, 8, 3, 2, 1), (2, 8, 7, 1, 1, 0), (2, 9, 8, 1, 2, 0)]
SHAPES += [(2, 7, 9, 5, 1, 2), (2, 6, 16, 5, 1, 0)]  # in the second the banded form's tiles: two of six columns
SHAPES += [(2, 4, 5, 3, 1, 3), (2, 4, 5, 1, 1, 1)]  # windows that see padding alone
TILED = [(3, 8, 8, 3, 1, 1), (2, 5, 8, 3, 1, 0), (2, 3, 6, 3, 1, 2), (2, 6, 3, 3, 1, 1)]  # Winograd's tiles, whole or not
TILED += [(2, 4, 4, 3, 1, 1)]  # too small for them


def numpy_conv(images, kernel, stride, padding):
    """Cross-correlation, one window at a time."""
    images = np.pad(np.asarray(images, np.float64), ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    size = kernel.shape[0]
    height, width = ((length - size) // stride + 1 for length in images.shape[1:3])
    out = np.zeros((images.shape[0], height, width, kernel.shape[3]))
    for h, w in np.ndindex(height, width):
        window = images[:, h * stride : h * stride + size, w * stride : w * stride + size]
        out[:, h, w] = np.tensordot(window, kernel, 3)
    return out


def numpy_conv_gradients(images, kernel, cotangent, stride, padding):
    """Gradients of sum(cotangent * conv(images, kernel)), one window at a time."""
    padded = np.pad(np.asarray(images, np.float64), ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    size = kernel.shape[0]
    d_images, d_kernel = np.zeros_like(padded), np.zeros(kernel.shape)
    for h, w in np.ndindex(cotangent.shape[1:3]):
        rows, columns = slice(h * stride, h * stride + size), slice(w * stride, w * stride + size)
        d_images[:, rows, columns] += np.einsum("bf,ijcf->bijc", cotangent[:, h, w], kernel)
        d_kernel += np.einsum("bijc,bf->ijcf", padded[:, rows, columns], cotangent[:, h, w])
    height, width = images.shape[1:3]
    return d_images[:, padding : padding + height, padding : padding + width], d_kernel


def random_case(shape, clients=1, channels=3):
    batch, height, width, size, stride, padding = shape
    rng = np.random.default_rng(0)
    images = rng.normal(size=(clients, batch, height, width, channels)).astype(np.float32)
    kernels = rng.normal(size=(clients, size, size, channels, 5)).astype(np.float32)
    expected = np.stack([numpy_conv(x, k, stride, padding) for x, k in zip(images, kernels, strict=True)])
    cotangents = rng.normal(size=expected.shape).astype(np.float32)
    pairs = [numpy_conv_gradients(x, k, g, stride, padding) for x, k, g in zip(images, kernels, cotangents, strict=True)]
    d_images, d_kernels = (np.stack(gradients) for gradients in zip(*pairs, strict=True))
    return images, kernels, cotangents, (expected, d_images, d_kernels)


def value_and_gradients(lowering, stride, padding, images, kernel, cotangent):
    out, pullback = jax.vjp(lambda x, k: LOWERINGS[lowering](x, k, stride, padding), images, kernel)
    return out, *pullback(cotangent)


def assert_all_close(got, expected, tolerance=2e-6):
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0)


@pytest.mark.parametrize(
    ("lowering", "channels", "shape"), [*itertools.product(FLOAT32, [3], SHAPES), *(("cpu", 91, shape) for shape in TILED)]
)
def test_lowering_is_the_convolution_also_with_one_kernel_per_client(lowering, channels, shape):
    *arguments, expected = random_case(shape, 3, channels)
    function = functools.partial(value_and_gradients, lowering, *shape[4:])
    tolerance = 2e-6 if channels == 3 else 4e-6  # sums of thirty times as many numbers
    assert_all_close(jax.jit(function)(*(x[0] for x in arguments)), [e[0] for e in expected], tolerance)
    assert_all_close(jax.jit(jax.vmap(function))(*arguments), expected, tolerance)


@pytest.mark.parametrize(
    ("image", "size", "stride", "dtype", "convolutions"),
    [
        ((8, 8, 91), 3, 1, "float32", 6),  # Winograd's products
        ((9, 2, 91), 3, 1, "float32", 1),  # two columns: six products in place of six
        ((4, 4, 91), 3, 1, "float32", 0),  # im2col's products of matrices
        ((8, 8, 512), 3, 1, "float32", 0),
        ((8, 8, 90), 3, 1, "float32", 1),
        ((8, 8, 91), 5, 1, "float32", 1),
        ((8, 8, 91), 3, 2, "float32", 1),
        ((8, 8, 91), 3, 1, "bfloat16", 1),
        ((8, 8, 3), 3, 1, "float32", 0),  # the banded form is a product of matrices
        ((8, 8, 3), 3, 2, "float32", 1),
        ((8, 17, 3), 3, 1, "float32", 1),
        ((8, 8, 7), 3, 1, "float32", 1),
    ],
)
def test_forms_of_their_own_are_where_they_pay(image, size, stride, dtype, convolutions):
    images, kernel = jnp.zeros((2, *image), dtype), jnp.zeros((size, size, image[-1], 5), dtype)
    program = str(jax.make_jaxpr(lambda x, k: LOWERINGS["cpu"](x, k, stride, 1))(images, kernel))
    assert program.count("conv_general_dilated[") == convolutions


@pytest.mark.parametrize(("precision", "patches"), [(None, 1), (jax.lax.Precision.HIGHEST, 0)])
def test_a_convolution_of_flax_with_a_precision_of_its_own_keeps_it(precision, patches):
    images, layer = jnp.zeros((2, 8, 8, 4)), nn.Conv(5, (3, 3), precision=precision)
    variables = layer.init(jax.random.key(0), images)
    with nn.intercept_methods(aware_of(None, "gpu")):
        program = str(jax.make_jaxpr(layer.apply)(variables, images))
    assert ("conv_general_dilated[" not in program) == patches  # patches and a product in its place
    assert ("HIGHEST" in program) == (precision is not None)


@pytest.mark.parametrize(("lowering", "channels"), [("cpu", 3), ("cpu", 91)])
@pytest.mark.parametrize("shape", [(7, 8, 8, 3, 1, 1), (7, 9, 7, 3, 2, 1), (8, 8, 8, 3, 1, 1)])
def test_kernel_gradient_in_chunks_of_the_batch(monkeypatch, shape, lowering, channels):
    monkeypatch.setattr(convolution, "_CHUNK_POSITIONS", 50 if shape[4] == 2 else 128)  # several, the last one padded or not
    images, kernels, cotangents, expected = random_case(shape, channels=channels)
    assert_all_close(value_and_gradients(lowering, *shape[4:], images[0], kernels[0], cotangents[0]), [e[0] for e in expected])


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("lowering", "channels"), [("cpu", 3), pytest.param("gpu", 3, marks=pytest.mark.ci), ("cpu", 91)])
def test_second_derivatives(lowering, channels, stride):
    images, kernels, cotangents, _ = random_case((3, 8, 8, 3, stride, 1), channels=channels)
    kernels /= np.sqrt(9 * channels)  # outputs of about 1, of whose sine there is a derivative

    def penalty(kernel, lowering):
        d_kernel = jax.grad(lambda k: jnp.sum(jnp.sin(LOWERINGS[lowering](images[0], k, stride, 1)) * cotangents[0]))(kernel)
        return jnp.sum(d_kernel**2)

    got, expected = (jax.grad(penalty)(kernels[0], name) for name in (lowering, "xla"))
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("lowering", "channels", "dtype"), [("cpu", 7, "float32"), ("cpu", 91, "float32"), ("onednn", 7, "bfloat16")]
)
def test_derivatives_of_gradients_convolve_by_the_usual_axes(lowering, channels, dtype):
    """As XLA computes other convolutions number by number on a CPU: FedDure's meta-gradient is such a derivative."""
    images, kernel = jnp.zeros((2, 8, 9, channels), dtype), jnp.zeros((3, 3, channels, 5), dtype)

    def directional(images, kernel, cotangent, direction):
        _, pullback = jax.vjp(lambda *both: LOWERINGS[lowering](*both, 1, 1), images, kernel)
        return jax.vjp(pullback, cotangent)[1](direction)

    cotangent = jnp.zeros((2, 8, 9, 5), dtype)
    program = str(jax.make_jaxpr(directional)(images, kernel, cotangent, (images, kernel)))
    specs = set(re.findall(r"rhs_spec=\(([\d, ]*)\)", program))
    assert specs == {"3, 2, 0, 1"}


@pytest.mark.parametrize(("lowering", "channels"), [*((name, 3) for name in FLOAT32), ("cpu", 91)])
def test_gradient_steps_inside_shard_map_and_a_loop(lowering, channels):
    images, kernels, _, _ = random_case((3, 8, 8, 3, 1, 1), channels=channels)
    kernels *= np.sqrt(3 / channels)  # outputs of one size

    def steps(images, kernel):
        def loss(kernel):
            return jnp.mean(LOWERINGS[lowering](images[0], kernel, 1, 1) ** 2)

        return lax.fori_loop(0, 2, lambda _, k: k - 0.1 * jax.grad(loss)(k), kernel[0])[None]

    clients = PartitionSpec("clients")
    mesh = jax.make_mesh((1,), ("clients",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(steps, mesh=mesh, in_specs=clients, out_specs=clients)
    np.testing.assert_allclose(jax.jit(sharded)(images, kernels), steps(images, kernels), atol=1e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    ("shape", "channels"),
    [((2, 8, 8, 3, 1, 1), 64), ((2, 9, 7, 3, 2, 1), 64), ((2, 9, 8, 5, 1, 0), 64), ((2, 6, 16, 5, 1, 0), 3)],
)
def test_results_and_gradients_of_bfloat16_are_rounded_once(lowering, shape, channels):
    given = [x[0].astype(jnp.bfloat16) for x in random_case(shape, channels=channels)[:3]]
    lowered = jax.jit(functools.partial(value_and_gradients, lowering, *shape[4:])).lower(*given)
    got = lowered.compile(ONEDNN if lowering == "onednn" else {})(*given)
    x, k, g = (np.asarray(a, np.float64) for a in given)
    expected = (numpy_conv(x, k, *shape[4:]), *numpy_conv_gradients(x, k, g, *shape[4:]))
    assert [a.dtype for a in got] == [jnp.bfloat16] * 3
    for a, b in zip(got, expected, strict=True):
        once = np.asarray(jnp.asarray(b, jnp.bfloat16), np.float64)
        assert np.linalg.norm(np.asarray(a, np.float64) - b) < 1.01 * np.linalg.norm(once - b)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("stride", [1, 2])
def test_all_factors_of_bfloat16_are_of_bfloat16_also_in_second_derivatives(lowering, stride):
    images, kernel = jnp.zeros((2, 8, 8, 3), "bfloat16"), jnp.zeros((3, 3, 3, 5), "bfloat16")

    def penalty(kernel, images):
        gradients = jax.grad(lambda *both: jnp.sum(LOWERINGS[lowering](*both, stride, 1) ** 2), (0, 1))(images, kernel)
        return sum(jnp.sum(x**2) for x in gradients)

    program = jax.make_jaxpr(jax.grad(penalty, (0, 1)))(kernel, images)
    found = products(program.jaxpr)
    assert len(found) >= 6
    assert {factor.aval.dtype for eqn in found for factor in eqn.invars} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("lowering", FLOAT32)
@pytest.mark.parametrize("shape", [(2, 9, 8, 5, 1, 0), (3, 9, 7, 3, 2, 1), (2, 9, 8, 1, 2, 0)])
def test_conv_bias_is_added_and_gets_its_gradient(lowering, shape):
    images, kernels, cotangents, (expected, _, d_kernels) = random_case(shape)
    size, stride, padding = shape[3:]
    conv = Conv(5, size, stride, padding, lowering, use_bias=True)
    params = {"kernel": kernels[0], "bias": np.arange(5, dtype=np.float32)}
    out, pullback = jax.vjp(jax.jit(lambda p: conv.apply({"params": p}, images[0])), params)
    (gradient,) = pullback(cotangents[0])
    assert_all_close((out, gradient["kernel"]), (expected[0] + params["bias"], d_kernels[0]))
    np.testing.assert_allclose(gradient["bias"], cotangents[0].sum((0, 1, 2)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("height", "width", "window"), [(8, 6, 2), (7, 9, 2), (9, 8, 4)])
def test_max_pool_takes_each_windows_maximum_and_sends_the_gradient_there(height, width, window):
    rng = np.random.default_rng(0)
    images = rng.permutation(2 * height * width * 3).reshape(2, height, width, 3).astype(np.float32)  # no ties
    expected, places = np.zeros((2, height // window, width // window, 3)), np.zeros(images.shape)
    cotangent = rng.normal(size=expected.shape).astype(np.float32)
    for b, i, j, c in np.ndindex(*expected.shape):
        rows, columns = slice(i * window, (i + 1) * window), slice(j * window, (j + 1) * window)
        expected[b, i, j, c] = images[b, rows, columns, c].max()
        places[b, rows, columns, c] = cotangent[b, i, j, c] * (images[b, rows, columns, c] == expected[b, i, j, c])
    out, pullback = jax.vjp(functools.partial(max_pool, window=window), images)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(pullback(cotangent)[0], places)


def test_max_pool_shares_the_gradient_among_equal_values():
    images = jnp.asarray([[5.0, 5, 1, 2, 0, 0], [5, 3, 2, 2, 0, -jnp.inf]]).reshape(1, 2, 6, 1)
    images = jnp.concatenate([images, jnp.full_like(images, -jnp.inf)], axis=-1)
    weights = jnp.asarray([8.0, 12.0, 4.0]).reshape(1, 1, 3, 1)
    gradient = jax.grad(lambda x: jnp.sum(weights * max_pool(x)))(images)
    # Rows are compared first: in the first window the left column's two have a quarter each, the right column's one a half.
    np.testing.assert_array_equal(gradient[0, ..., 0], [[2, 4, 0, 3, 1, 2], [2, 0, 6, 3, 1, 0]])
    np.testing.assert_array_equal(gradient[0, ..., 1], np.repeat([[2, 2, 3, 3, 1, 1]], 2, axis=0))


def test_max_pool_has_second_derivatives():
    images = jnp.asarray([[3.0, 1], [2, 0]]).reshape(1, 2, 2, 1)
    second = jax.hessian(lambda x: jnp.sum(max_pool(x) ** 3))(images).reshape(4, 4)
    np.testing.assert_array_equal(second, np.diag([18.0, 0, 0, 0]))


class Layer(nn.Module):
    function: Callable

    @nn.compact
    def __call__(self, x):
        return self.function(self, x)


def linear(features):
    return Layer(lambda _, x: dense(x, features, INITIALIZATIONS["torch"]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("examples", "inputs", "features", "one_pass"),
    [(16, 2**10, 2**8, True), (1, 2**10, 2**8, True), (17, 2**10, 2**8, False), (16, 2**10, 2**8 - 1, False), (3, 5, 4, False)],
)
def test_linear_layer_and_its_gradients_in_one_pass_where_examples_are_few(examples, inputs, features, one_pass, dtype):
    rng = np.random.default_rng(0)
    x, cotangent = (rng.normal(size=(examples, width)).astype(np.float32) for width in (inputs, features))
    params = linear(features).init(jax.random.key(0), x)["params"]["Dense_0"]
    params = {"kernel": params["kernel"], "bias": rng.normal(size=features).astype(np.float32)}

    def of(params, x):
        return linear(features).apply({"params": {"Dense_0": params}}, x.astype(dtype))

    @jax.jit
    def value_and_gradients(params, x, cotangent):
        out, pullback = jax.vjp(of, params, x)
        return out, *pullback(cotangent.astype(dtype))

    program = value_and_gradients.lower(params, x, cotangent).as_text()
    assert program.count("stablehlo.dot_general") == (2 if one_pass and dtype == "float32" else 3)
    out, d_params, d_x = value_and_gradients(params, x, cotangent)
    assert out.dtype == dtype
    assert d_params["kernel"].dtype == d_x.dtype == np.float32
    kernel = np.float64(params["kernel"])
    expected = [x @ kernel + params["bias"], cotangent @ kernel.T, np.float64(x).T @ cotangent, cotangent.sum(0)]
    tolerance = 2e-6 if dtype == "float32" else 2e-2
    assert_all_close([np.float32(out), d_x, d_params["kernel"], d_params["bias"]], expected, tolerance)
    both = jax.tree.map(lambda *leaves: np.stack(leaves), (params, x, cotangent), (params, -2 * x, cotangent))
    clients = jax.vmap(value_and_gradients)(*both)
    assert_all_close([clients[1]["kernel"][1]], [-2 * np.float32(d_params["kernel"])], tolerance)
    on_gpu = value_and_gradients.trace(params, x, cotangent).lower(lowering_platforms=("cuda",)).as_text()
    assert on_gpu.count("stablehlo.dot_general") == 3


@pytest.mark.parametrize(
    ("layer", "shape"), [(linear(3), (512, 4)), (Conv(3, 1, padding=0, dtype="bfloat16", use_bias=True), (2, 16, 16, 4))]
)
def test_gradients_of_bfloat16_layers_are_sums_of_float32(layer, shape):
    x = jnp.ones(shape, "bfloat16")  # 512 positions: a sum of bfloat16 would end at 256
    out, pullback = jax.vjp(jax.jit(lambda p: layer.apply(p, x)), layer.init(jax.random.key(0), x))
    assert out.dtype == jnp.bfloat16
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 512), pullback(jnp.ones_like(out))[0])


def dropped(x, rate, key, per_channel=False):
    rngs = {} if key is None else {"dropout": jax.random.key(key)}
    layer = Layer(lambda module, x: dropout(module, x, rate, per_channel=per_channel))
    return np.asarray(layer.apply({}, x, rngs=rngs))


def test_dropout_zeros_a_share_and_scales_the_rest_but_without_a_key_or_a_rate_nothing():
    x = np.random.default_rng(0).uniform(1, 2, (4, 10, 10, 50)).astype(np.float32)
    out = dropped(x, 0.3, 0)
    kept = out != 0
    np.testing.assert_allclose(kept.mean(), 0.7, atol=0.01)
    np.testing.assert_allclose(out[kept], x[kept] / 0.7, rtol=1e-6)
    np.testing.assert_allclose(out.mean(), x.mean(), rtol=0.02)
    assert 0.2 < kept[0, :, :, 0].mean() < 0.95  # values, not channels
    np.testing.assert_array_equal(out, dropped(x, 0.3, 0))
    assert not np.array_equal(out, dropped(x, 0.3, 1))
    for rate, key in ((0.3, None), (0.0, 0)):
        np.testing.assert_array_equal(dropped(x, rate, key), x)


def test_dropout_per_channel_keeps_or_drops_an_examples_channel_whole():
    x = np.ones((40, 3, 2, 50), np.float32)
    out = dropped(x, 0.25, 0, per_channel=True)
    np.testing.assert_array_equal(out, np.broadcast_to(out[:, :1, :1], x.shape))
    assert set(np.unique(out)) == {np.float32(0), np.float32(1 / 0.75)}
    np.testing.assert_allclose(out.mean(), 1, atol=0.05)
    assert len(np.unique(out[:, 0, 0], axis=0)) == 40  # examples draw apart


def test_a_lowering_that_is_asked_for_is_taken_or_refused():
    assert [resolve_conv(conv, "cpu") for conv in LOWERINGS] == list(LOWERINGS)
    with pytest.raises(ValueError, match=r"execution\.conv: got im2col, accepted: auto, xla, cpu, gpu"):
        resolve_conv("im2col", "cpu")
    for lowering in ("cpu", "onednn"):
        with pytest.raises(ValueError, match=rf"execution\.conv: got {lowering} on gpu, accepted: auto, xla, gpu"):
            resolve_conv(lowering, "gpu")


@pytest.mark.parametrize("has_units", [False, True])
def test_bfloat16_goes_to_the_matrix_units_of_a_cpu_that_has_them(monkeypatch, has_units):
    monkeypatch.setattr(convolution, "multiplies_bfloat16", lambda: has_units)
    assert resolve_conv("auto", "cpu", dtype="bfloat16") == ("onednn" if has_units else "cpu")
    assert resolve_conv("auto", "cpu", dtype="float32") == "cpu"
    assert resolve_conv("auto", "gpu", dtype="bfloat16", kernels_vmapped=True) == "gpu"
    options = [compiler_options("cpu", conv) for conv in ("onednn", "cpu")]
    assert ["xla_cpu_experimental_onednn_custom_call" in one for one in options] == [True, False]

"""Each network: sizes, topology against NumPy, gradients, padding, dropout and dtypes, on small images with few channels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl.models import MODELS, build
from fedjax_ssl.models.layers import Conv
from fedjax_ssl.models.network import pure
from fedjax_ssl.models.resnet import ResidualBlock
from tests.engine import distance
from tests.jaxprs import equations, products
from tests.models.test_layers import numpy_conv

KEY = jax.random.key(0)

IMAGES = {
    "mnist_cnn": (16, 16, 1),
    "rsc_cnn": (16, 16, 3),
    "emnist_cnn": (9, 8, 3),
    "cifar_cnn": (9, 8, 3),
}  # (8, 8, 3) for the others
VARIANTS = ["mnist_cnn released", "emnist_cnn plain", "cifar_cnn released", "resnet9 fedmatch", "resnet9 semifl"]


def described(name):
    """(name in MODELS, options, a small image) of a network, whose variant may follow its name."""
    model, _, variant = name.partition(" ")
    options = ({"depth": 10} if model == "wide_resnet" else {}) | ({"variant": variant} if variant else {})
    return model, options, IMAGES.get(model, (8, 8, 3))


NETWORKS = {name: described(name) for name in (*MODELS, *VARIANTS, "wide_resnet fixmatch")}
DROPS = {  # the shapes that dropout draws for
    "mnist_cnn released": [(1, 1, 4), (50,)],
    "emnist_cnn": [(16,), (128,)],
    "cifar_cnn": [(2, 2, 8), (1024,), (512,)],
    "cifar_cnn released": [(1, 1, 8), (16,), (512,)],
}


def slim_conv(features, **settings):
    return Conv(max(4, features // 16), **settings)


def network(name):
    """The network with slim convolutions; residual blocks then see a change of channels everywhere: all have shortcuts."""
    model, options, _ = NETWORKS[name]
    return pure(MODELS[model].module(num_classes=5, conv=slim_conv, **options))


@functools.cache
def weights(name):
    return drawn(network(name), NETWORKS[name][2])


def drawn(model, image_shape):
    """Parameters and statistics drawn by NumPy, which needs no program for it."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        scale = np.sqrt(2 / np.prod(leaf.shape[:-1])) if path[-1].key == "kernel" else 0.2
        value = scale * rng.standard_normal(leaf.shape) + (path[-1].key == "scale")
        return np.float32(np.abs(value) + 0.5 if path[-1].key == "var" else value)

    return jax.tree_util.tree_map_with_path(draw, shapes(model, image_shape))


def shapes(model, image_shape):
    return jax.eval_shape(lambda key: model.init(key, image_shape), KEY)


def batch(name):
    rng = np.random.default_rng(1)
    return rng.normal(size=(6, *NETWORKS[name][2])).astype(np.float32), rng.integers(0, 5, 6)


MASK = np.arange(6) < 4


def padded(images):
    """The batch with NaN in place of the examples that MASK leaves out."""
    return np.where(MASK[:, None, None, None], images, np.float32(np.nan))


def training_step(apply, labels):
    """(params, stats, images, mask, key) -> gradient of the first four examples' mean cross-entropy, (logits, batch_stats)."""

    def loss(params, stats, images, mask=None, key=None):
        logits, batch_stats = apply(params, stats, images, mask=mask, train=True, key=key)
        ce = optax.softmax_cross_entropy_with_integer_labels(logits[:4], labels[:4])
        return jnp.mean(ce), (logits[:4], batch_stats)

    return jax.jit(jax.grad(loss, has_aux=True))


COUNTS = [  # besides those of 10 classes in the networks' README, which `test_shipped` compares
    ("wide_resnet", {"depth": 28, "width": 8}, 100, (32, 32, 3), 23_401_012),
    ("mnist_cnn", {"variant": "released"}, 10, (28, 28, 1), 21_840),
    ("resnet9", {}, 10, (32, 32, 1), 6_574_218),
    ("resnet", {"depth": 8}, 100, (32, 32, 3), 1_250_724),
    ("rsc_cnn", {}, 100, (32, 32, 3), 115_756),
    ("resnet", {"depth": 18}, 62, (28, 28, 1), 11_199_486),
    ("resnet", {"depth": 18}, 11, (28, 28, 1), 11_173_323),
    ("resnet", {"depth": 18}, 8, (28, 28, 3), 11_172_936),
    ("resnet", {"depth": 50}, 100, (32, 32, 3), 23_705_252),
    ("cnn", {}, 10, (32, 32, 3), 24_346),
]


@pytest.mark.parametrize(("name", "options", "num_classes", "image_shape", "expected"), COUNTS)
def test_parameter_counts_are_the_papers(name, options, num_classes, image_shape, expected):
    params, _ = shapes(build(name, num_classes=num_classes, **options), image_shape)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


@pytest.mark.parametrize(("name", "options", "image_shape"), NETWORKS.values())
def test_leaves_have_the_names_that_sharpness_relies_on(name, options, image_shape):
    params, stats = shapes(build(name, num_classes=4, **options), image_shape)
    paths = [(path[-1].key, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    wanted = {"kernel"} if options.get("variant") == "fedmatch" else {"kernel", "bias"}
    assert {key for key, _ in paths} == (wanted | {"scale"} if stats else wanted)
    assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(stats)} == ({"mean", "var"} if stats else set())
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((params, stats)))
    assert {leaf.ndim for key, leaf in paths if key == "kernel"} <= {2, 4}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 3), (64,)])
def test_networks_take_the_shapes_they_promise_and_refuse_the_others_in_one_line(name, shape):
    model = build(name, num_classes=4, **({"depth": 10} if name == "wide_resnet" else {}))
    inputs = jax.ShapeDtypeStruct((2, *shape), jnp.float32)

    def logits():
        return jax.eval_shape(lambda key, images: model.apply(*model.init(key, shape), images, train=True)[0], KEY, inputs)

    if (shape == (64,) and name not in ("mlp", "linear")) or (shape == (8, 8, 1) and name in ("mnist_cnn", "rsc_cnn")):
        with pytest.raises(ValueError, match=rf"^{name}: got inputs of shape .*, accepted: images .* with H, W >= ") as error:
            logits()
        assert "\n" not in str(error.value)
    else:
        assert (logits().shape, logits().dtype) == ((2, 4), jnp.float32)


class Numpy:
    """A network's layers in evaluation mode, in NumPy; each call takes the next parameters of its kind, as Flax names them."""

    def __init__(self, params, stats):
        self.params, self.stats, self.used = params, stats, {}

    def take(self, kind):
        number = self.used[kind] = self.used.get(kind, -1) + 1
        name = f"{kind}_{number}"
        return self.params[name], self.stats.get(name)

    def conv(self, x, stride=1, padding=1):
        layer, _ = self.take("Conv")
        return numpy_conv(x, layer["kernel"], stride, padding) + layer.get("bias", 0)

    def norm(self, x):
        p, s = self.take("BatchNorm")
        return p["scale"] * (x - s["mean"]) / np.sqrt(s["var"] + 1e-5) + p["bias"]

    def dense(self, x):
        layer, _ = self.take("Dense")
        return x.reshape(len(x), -1) @ layer["kernel"] + layer.get("bias", 0)

    def block(self, kind):
        return Numpy(*self.take(kind))


def relu(x):
    return np.maximum(x, 0)


def pool(x):
    b, h, w, c = x.shape
    return x[:, : h // 2 * 2, : w // 2 * 2].reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4))


def numpy_two_convolutions(net, x, pools):
    x = relu(net.conv(x, padding=0))
    x = pool(relu(net.conv(pool(x) if pools == 2 else x, padding=0)))
    return net.dense(relu(net.dense(x)))


def numpy_rsc(net, x):
    for _ in range(2):
        x = pool(relu(net.conv(x, padding=0)))
    for _ in range(3):
        x = relu(net.dense(x))
    return net.dense(net.dense(x))


def numpy_cifar(net, x):
    for _ in range(3):
        x = relu(net.norm(net.conv(x)))
        x = pool(relu(net.conv(x)))
    return net.dense(relu(net.dense(relu(net.dense(x)))))


def numpy_feddure(net, x, normed=True):
    def layer(x):
        x = net.conv(x)
        return relu(net.norm(x) if normed else x)

    x = layer(x)
    x = pool(layer(x))
    x = layer(layer(x)) + x
    x = pool(layer(x))
    x = pool(layer(x))
    x = layer(layer(x)) + x
    return net.dense(x.max((1, 2)))


def numpy_preactivation(net, x, strides=(1, 2, 2, 2), slope=0.0, raw=()):
    """The shortcuts of the blocks in `raw` see the raw input."""

    def activation(x):
        return np.where(x > 0, x, slope * x)

    x = net.conv(x)
    for i, stride in enumerate(strides):
        block = net.block("Block")
        activated = activation(block.norm(x))
        y = block.conv(activated, stride)
        y = block.conv(activation(block.norm(y)))
        x = y + block.conv(x if i in raw else activated, stride, 0)
    return net.dense(activation(net.norm(x)).mean((1, 2)))


def numpy_cnn(net, x):
    for stride in (1, 2, 2):
        x = relu(net.norm(net.conv(x, stride)))
    return net.dense(x.mean((1, 2)))


NUMPY = {
    "mnist_cnn": functools.partial(numpy_two_convolutions, pools=2),
    "emnist_cnn": functools.partial(numpy_two_convolutions, pools=1),
    "rsc_cnn": numpy_rsc,
    "cifar_cnn": numpy_cifar,
    "resnet9": numpy_feddure,
    "resnet9 fedmatch": functools.partial(numpy_feddure, normed=False),
    "resnet9 semifl": numpy_preactivation,
    "wide_resnet": functools.partial(numpy_preactivation, strides=(1, 2, 2)),
    "wide_resnet fixmatch": functools.partial(numpy_preactivation, strides=(1, 2, 2), slope=0.1, raw=(1, 2)),
    "cnn": numpy_cnn,
    "mlp": lambda net, x: net.dense(relu(net.dense(x))),
    "linear": lambda net, x: net.dense(x),
}


@pytest.mark.parametrize("name", NUMPY)
def test_in_evaluation_a_network_is_the_numpy_network_of_the_real_examples_and_leaves_the_statistics(name):
    images, _ = batch(name)
    params, stats = weights(name)
    logits, returned = network(name).apply(params, stats, padded(images), mask=MASK)
    expected = NUMPY[name](Numpy(params, stats), images[:4])
    np.testing.assert_allclose(logits[:4], expected, atol=2e-5 * np.abs(expected).max())
    jax.tree.map(np.testing.assert_array_equal, returned, stats)


def numpy_block(net, x, bottleneck, stride, shortcut):
    if bottleneck:
        y = relu(net.norm(net.conv(x, padding=0)))
        y = net.norm(net.conv(relu(net.norm(net.conv(y, stride))), padding=0))
    else:
        y = net.norm(net.conv(relu(net.norm(net.conv(x, stride)))))
    return relu(y + (net.norm(net.conv(x, stride, 0)) if shortcut else x))


@pytest.mark.parametrize(("bottleneck", "stride", "channels"), [(False, 1, 8), (False, 2, 4), (True, 1, 32), (True, 2, 8)])
def test_residual_block_is_the_numpy_block(bottleneck, stride, channels):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 6, channels)).astype(np.float32)
    block = ResidualBlock(8, stride, bottleneck, functools.partial(Conv, lowering="xla"))
    variables = jax.eval_shape(lambda key: block.init(key, x, False), KEY)
    variables = jax.tree.map(lambda leaf: rng.uniform(0.1, 1, leaf.shape).astype(np.float32) - 0.3 * (leaf.ndim > 1), variables)
    out = jax.jit(block.apply, static_argnums=2)(variables, x, False)
    shortcut = stride == 2 or channels != (32 if bottleneck else 8)
    expected = numpy_block(Numpy(variables["params"], variables["batch_stats"]), x, bottleneck, stride, shortcut)
    np.testing.assert_allclose(out, expected, atol=2e-5 * np.abs(expected).max())


OFTEN = ("cnn", "linear", "mlp", "mnist_cnn released", "emnist_cnn", "cifar_cnn", "wide_resnet", "resnet9")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
        for name in sorted(set(NETWORKS) - {"resnet", "wide_resnet fixmatch"})
    ],
)
def test_a_training_step_is_finite_ignores_padding_and_drops_by_its_key(name):
    images, labels = batch(name)
    step = functools.partial(training_step(network(name).apply, labels), *weights(name))
    got, expected, other = (step(x, MASK, jax.random.key(key)) for x, key in ((padded(images), 1), (images, 1), (images, 2)))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(got))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(got[0]))
    assert (name in DROPS) != jax.tree.all(jax.tree.map(np.array_equal, other, expected))
    if name in ("wide_resnet", "cnn", "mlp", "linear"):  # small ones, in another program
        gradient, others = step(images[:4])
        assert max(map(distance, (gradient, *others), (got[0], *got[1]))) < 1e-5
    empty = step(padded(images), np.zeros(6, bool), jax.random.key(1))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(empty))
    jax.tree.map(np.testing.assert_array_equal, empty[1][1], weights(name)[1])
    if name in ("wide_resnet", "cnn"):  # zeros arrive at the last layer
        np.testing.assert_array_equal(empty[1][0], np.tile(weights(name)[0]["Dense_0"]["bias"], (4, 1)))


@pytest.mark.parametrize("name", [*DROPS, "mnist_cnn", "emnist_cnn plain", "resnet9"])
def test_dropout_is_where_each_variant_has_it_and_in_training_with_a_key_alone(name):
    def masks(**call):
        program = jax.make_jaxpr(functools.partial(network(name).apply, **call))(*weights(name), batch(name)[0])
        return [eqn.outvars[0].aval.shape for eqn in equations(program.jaxpr) if eqn.primitive.name == "random_bits"]

    drawn = [(3, *shape) for shape in DROPS.get(name, [])]  # a word of bits draws for two of the six images
    assert masks(train=True, key=KEY) == drawn
    assert masks(train=True) == masks(train=False, key=KEY) == []


@pytest.mark.parametrize("name", NETWORKS)
def test_bfloat16_computes_all_but_the_last_layer_and_keeps_the_rest_in_float32(name):
    model, options, shape = NETWORKS[name]
    built = build(model, num_classes=5, dtype="bfloat16", **options)
    apply, (params, stats) = built.apply, shapes(built, shape)
    images = jax.ShapeDtypeStruct((6, *shape), jnp.float32)
    step = jax.eval_shape(training_step(apply, np.zeros(6, int)), params, stats, images)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, stats, step))} == {jnp.dtype("float32")}
    program = jax.make_jaxpr(lambda *args: apply(*args, train=True)[0])(params, stats, images)
    dtypes = [eqn.invars[0].aval.dtype for eqn in products(program.jaxpr)]
    assert dtypes == [jnp.bfloat16] * (len(dtypes) - 1) + [jnp.float32]


def test_resnet_18_runs_forward_and_ignores_padding():
    images, _ = batch("resnet")
    apply = functools.partial(network("resnet").apply, *weights("resnet"), mask=MASK, train=True)
    (logits, batch_stats), (same, same_stats) = apply(images), apply(padded(images))
    jax.tree.map(np.testing.assert_array_equal, (logits[:4], batch_stats), (same[:4], same_stats))
    assert np.all(np.isfinite(logits))

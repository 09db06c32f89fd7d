"""The small networks and WideResNet: their topology against NumPy, masks, batch norm's modes, and clear errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

from fedjax_ssl.models import build
from fedjax_ssl.models.convolution import LOWERINGS
from fedjax_ssl.models.mlp import MLP
from tests.models.test_layers import numpy_conv

KEY = jax.random.key(0)
SHAPE = (8, 8, 3)
SMALL = {"wide_resnet": {"depth": 10, "width": 2}, "cnn": {"width": 8}, "mlp": {"hidden": 16}, "linear": {}}


@functools.cache
def small(name):
    """A small network (its apply jitted), with parameters and statistics that are no longer the initial zeros and ones."""
    model = build(name, num_classes=5, conv="xla", **SMALL[name])
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda leaf: leaf + rng.uniform(0, 0.2, leaf.shape).astype(np.float32), model.init(KEY, SHAPE))
    return jax.jit(model.apply, static_argnames="train"), *variables


def training_step(apply, stats, labels):
    """(params, images, mask) -> gradient, (logits, batch_stats) of the cross-entropy of the first len(labels) examples."""

    def loss(params, images, mask):
        logits, batch_stats = apply(params, stats, images, mask=mask, train=True)
        logits = logits[: len(labels)]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (logits, batch_stats)

    return jax.jit(jax.grad(loss, has_aux=True))


def images_and_labels(count=6):
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, *SHAPE)).astype(np.float32), rng.integers(0, 5, count)


def relative_error(got, expected):
    got, expected = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (got, expected))
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def relu(x):
    return np.maximum(x, 0)


def numpy_wide_resnet(params, stats, x, *, slope=0.0, raw=(False, False, False)):
    """WRN-10 in evaluation: one block a stage, strides 1, 2, 2, each changing the number of channels."""

    def activation(x):
        return np.where(x > 0, x, slope * x)

    def norm(name, x, params=params, stats=stats):
        p, s = params[name], stats[name]
        return p["scale"] * (x - s["mean"]) / np.sqrt(s["var"] + 1e-5) + p["bias"]

    x = numpy_conv(x, params["Conv_0"]["kernel"], 1, 1)
    for i, stride in enumerate((1, 2, 2)):
        p, s = params[f"Block_{i}"], stats[f"Block_{i}"]
        activated = activation(norm("BatchNorm_0", x, p, s))
        y = numpy_conv(activated, p["Conv_0"]["kernel"], stride, 1)
        y = numpy_conv(activation(norm("BatchNorm_1", y, p, s)), p["Conv_1"]["kernel"], 1, 1)
        x = numpy_conv(x if raw[i] else activated, p["Conv_2"]["kernel"], stride, 0) + y
    pooled = activation(norm("BatchNorm_0", x)).mean((1, 2))
    return pooled @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]


@pytest.mark.parametrize(("variant", "slope", "raw"), [("fl2", 0.0, (False,) * 3), ("fixmatch", 0.1, (False, True, True))])
def test_wide_resnet_is_the_numpy_network(variant, slope, raw):
    """FixMatch's has leaky ReLUs, and raw shortcuts but for the first."""
    _, params, stats = small("wide_resnet")
    images, _ = images_and_labels()
    model = build("wide_resnet", num_classes=5, conv="xla", variant=variant, **SMALL["wide_resnet"])
    expected = numpy_wide_resnet(*jax.tree.map(np.asarray, (params, stats)), images, slope=slope, raw=raw)
    np.testing.assert_allclose(jax.jit(model.apply)(params, stats, images)[0], expected, rtol=1e-4, atol=1e-4)


def test_wide_resnet_adds_the_raw_input_where_channels_agree():
    model = build("wide_resnet", num_classes=5, conv="xla", depth=10, width=1)  # its first stage keeps the stem's 16 channels
    params, stats = model.init(KEY, SHAPE)
    assert "Conv_2" not in params["Block_0"]
    assert "Conv_2" in params["Block_1"]
    images, _ = images_and_labels()
    apply = jax.jit(model.apply)
    # Without its convolutions the first block is the identity: what it is fed no longer passes through its batch norm.
    params["Block_0"] = jax.tree.map(jnp.zeros_like, params["Block_0"])
    logits = apply(params, stats, images)[0]
    params["Block_0"]["BatchNorm_0"]["bias"] += 7.0
    np.testing.assert_array_equal(logits, apply(params, stats, images)[0])
    assert np.std(logits) > 0.01


@pytest.mark.parametrize("name", SMALL)
def test_padded_examples_never_matter(name):
    apply, params, stats = small(name)
    images, labels = images_and_labels()
    padded = np.concatenate([images, np.full((3, *SHAPE), np.nan, np.float32)])
    mask = np.arange(9) < 6
    step = training_step(apply, stats, labels)
    (gradient, (logits, batch_stats)), expected = step(params, padded, mask), step(params, images, None)
    assert relative_error(gradient, expected[0]) < 1e-5
    assert relative_error(logits, expected[1][0]) < 1e-5
    if stats:
        assert relative_error(batch_stats, expected[1][1]) < 1e-5
    evaluated, _ = apply(params, stats, padded, mask=mask)
    np.testing.assert_allclose(evaluated[:6], apply(params, stats, images)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["wide_resnet", "cnn"])
def test_a_batch_without_real_examples_is_harmless(name):
    apply, params, stats = small(name)
    images, labels = images_and_labels()
    gradient, (logits, batch_stats) = training_step(apply, stats, labels)(params, images, np.zeros(6, bool))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    np.testing.assert_array_equal(logits, np.tile(params["Dense_0"]["bias"], (6, 1)))  # zeros arrive at the last layer
    jax.tree.map(np.testing.assert_array_equal, batch_stats, stats)


@pytest.mark.parametrize("name", SMALL)
def test_evaluation_reads_the_statistics_and_returns_them(name):
    apply, params, stats = small(name)
    images, _ = images_and_labels()
    logits, returned = apply(params, stats, images)
    assert jax.tree.structure(returned) == jax.tree.structure(stats)
    jax.tree.map(np.testing.assert_array_equal, returned, stats)
    assert logits.shape == (6, 5)
    alone, _ = apply(params, stats, images[:1])
    np.testing.assert_allclose(alone, logits[:1], rtol=1e-4, atol=1e-4)
    if stats:
        shifted = jax.tree.map(lambda leaf: leaf + 0.5, stats)
        assert relative_error(apply(params, shifted, images)[0], logits) > 0.01


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_lowerings_agree_on_a_training_step_also_in_bfloat16_which_keeps_the_rest_in_float32(lowering):
    _, params, stats = small("cnn")
    images, labels = images_and_labels()

    def step(**options):
        apply = build("cnn", num_classes=5, **options, **SMALL["cnn"]).apply
        return training_step(apply, stats, labels)(params, images, None)

    expected = step(conv="xla")
    for got, reference in zip(step(conv=lowering), expected, strict=True):
        assert relative_error(got, reference) < 2e-5
    gradient, (logits, batch_stats) = step(conv=lowering, dtype="bfloat16")
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((gradient, logits, batch_stats)))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    assert 1e-5 < relative_error(logits, expected[1][0]) < 0.05


def test_linear_and_mlp_are_the_numpy_networks():
    images, _ = images_and_labels()
    flat = images.reshape(6, -1)
    apply, params, stats = small("linear")
    dense = jax.tree.map(np.asarray, params["Dense_0"])
    np.testing.assert_allclose(apply(params, stats, images)[0], flat @ dense["kernel"] + dense["bias"], rtol=1e-4, atol=1e-4)
    apply, params, stats = small("mlp")
    first, second = (jax.tree.map(np.asarray, params[name]) for name in ("Dense_0", "Dense_1"))
    expected = relu(flat @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"]
    np.testing.assert_allclose(apply(params, stats, images)[0], expected, rtol=1e-4, atol=1e-4)


def test_cnn_learns_the_digits():
    digits = load_digits()
    images, labels = (digits.images[..., None] / 8 - 1).astype(np.float32), digits.target
    model = build("cnn", num_classes=10, conv="cpu")
    params, stats = model.init(KEY, (8, 8, 1))
    optimizer = optax.sgd(0.03, momentum=0.9, nesterov=True)

    def step(carry, rows):
        def loss(params):
            logits, _ = model.apply(params, stats, jnp.asarray(images)[rows], train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels)[rows]).mean()

        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    rows = jax.random.randint(jax.random.key(1), (150, 32), 0, 1400)
    (params, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, rows))((params, optimizer.init(params)))
    apply = jax.jit(model.apply, static_argnames="train")
    _, static = apply(params, stats, images[:1400], train=True)
    logits, _ = apply(params, static, images[1400:])
    assert np.mean(np.argmax(logits, -1) == labels[1400:]) > 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "wide_resnt"}, "name='wide_resnt': unknown; .*nearest: 'wide_resnet'"),
        ({"name": "cnn", "widht": 8}, "widht=8: no option of cnn; accepted: width"),
        ({"name": "linear", "width": 8}, "width=8: no option of linear; accepted: none"),
        ({"name": "cnn", "conv": "auto"}, "conv='auto': unknown"),
        ({"name": "cnn", "dtype": "float16"}, "dtype='float16': unknown; .*nearest: '.*float"),
        ({"name": "cnn", "width": 0}, "width=0 for cnn: accepted: an integer >= 1"),
        ({"name": "mlp", "hidden": 1.5}, "hidden=1.5 for mlp: accepted: an integer >= 1"),
        ({"name": "mlp", "hidden": True}, "hidden=True for mlp: accepted: an integer >= 1"),
        ({"name": "resnet", "depth": 20}, "depth=20 for resnet: accepted: one of 18, 34, 50"),
        ({"name": "resnet", "depth": 18.0}, "depth=18.0 for resnet: accepted: one of 18, 34, 50"),
        (
            {"name": "resnet9", "variant": "fedmach"},
            "variant='fedmach' for resnet9: accepted: one of feddure, fedmatch, se",
        ),
        ({"name": "mnist_cnn", "variant": 1}, "variant=1 for mnist_cnn: accepted: one of paper, released"),
        (
            {"name": "cifar_cnn", "initialization": "paper"},
            "initialization='paper' for cifar_cnn: accepted: one of torch, fl",
        ),
        (
            {"name": "cifar_cnn", "initialisation": "torch"},
            "no option of cifar_cnn; accepted: variant, initialization",
        ),
        ({"name": "wide_resnet", "depth": 27}, "depth=27 for wide_resnet: accepted: 6 n "),
    ],
)
def test_wrong_arguments_are_one_clear_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        build(num_classes=10, **arguments)
    assert "\n" not in str(error.value)


def test_a_program_that_applies_a_network_often_traces_it_once(monkeypatch):
    calls = []
    layer = MLP.__call__
    monkeypatch.setattr(MLP, "__call__", lambda *args, **options: calls.append(1) or layer(*args, **options))
    model = build("mlp", num_classes=5, conv="xla", hidden=16)
    params, stats = model.init(KEY, SHAPE)
    images = jnp.ones((2, *SHAPE))
    calls.clear()

    def total(params):
        once = jnp.sum(model.apply(params, stats, images, train=True)[0])
        return once + jnp.sum(jax.vmap(lambda x: model.apply(params, stats, x, train=True)[0])(images[None]))

    gradient, twice = jax.jit(jax.grad(total))(params), jax.jit(lambda p: total(p) + total(p))(params)
    assert len(calls) == 1
    assert np.isfinite(twice)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))

"""Initial parameters: moments and ranges against what PyTorch, Flax and Keras document, worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.models import build
from fedjax_ssl.models.initializers import INITIALIZATIONS, kaiming_fan_out, lecun_normal, torch_bias, torch_uniform

KEY = jax.random.key(0)


def drawn(initializer, shape):
    values = np.asarray(initializer(KEY, shape, jnp.float32))
    assert values.shape == shape
    return values.ravel()


# PyTorch's kaiming_uniform_ with a = sqrt(5) has the bound sqrt(3 / fan_in) times its gain, sqrt(2 / (1 + a^2)).
@pytest.mark.parametrize(
    ("initializer", "shape"),
    [*((torch_uniform, shape) for shape in [(3, 3, 16, 64), (5, 5, 10, 20), (144, 100)]), (torch_bias(400), (400, 50))],
)
def test_pytorchs_defaults_are_uniform(initializer, shape):
    bound = np.sqrt(2 / (1 + 5)) * np.sqrt(3 / np.prod(shape[:-1]))
    values = drawn(initializer, shape)
    assert np.abs(values).max() <= bound
    quartiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(quartiles, bound * np.array([-1, -0.5, 0, 0.5, 1]), atol=0.05 * bound)


# Keras's VarianceScaling() has 1 / fan_in and is cut off, PyTorch's kaiming_normal_ 2 / fan_out and is not.
@pytest.mark.parametrize(
    ("initializer", "shape", "variance"),
    [(lecun_normal, (3, 3, 16, 64), 1 / 144), (lecun_normal, (144, 100), 1 / 144), (kaiming_fan_out, (3, 3, 16, 64), 2 / 576)],
)
def test_normal_ones_have_the_variance_of_their_libraries(initializer, shape, variance):
    values = drawn(initializer, shape) / np.sqrt(variance)
    np.testing.assert_allclose(values.std(), 1, rtol=0.03)
    np.testing.assert_allclose(values.mean(), 0, atol=0.04)
    cut = 2 / 0.87962566103423978  # a standard normal cut off at 2 has this standard deviation
    if initializer is lecun_normal:
        assert 0.98 * cut < np.abs(values).max() <= cut * (1 + 1e-6)
    else:
        assert np.abs(values).max() > 3


# name, its options, (kh kw ch of the first convolution, inputs of the last linear layer), the initialization to be found
CASES = [
    ("mnist_cnn", {}, (75, 50), "torch"),
    ("mnist_cnn", {"initialization": "flax"}, (75, 50), "flax"),
    ("cifar_cnn", {}, (27, 512), "torch"),
    ("resnet", {}, (27, 512), "torch"),
    ("resnet", {"initialization": "kaiming"}, (27, 512), "kaiming"),
    ("resnet9", {}, (27, 512), "torch"),
    ("resnet9", {"variant": "fedmatch"}, (27, 512), "flax"),
    ("resnet9", {"variant": "semifl"}, (27, 512), "kaiming"),
    ("resnet9", {"variant": "semifl", "initialization": "torch"}, (27, 512), "torch"),
]


@pytest.mark.parametrize(("name", "options", "fans", "expected"), CASES)
def test_each_network_starts_as_its_option_says(name, options, fans, expected):
    assert set(INITIALIZATIONS) == {"torch", "flax", "kaiming"}
    model = build(name, num_classes=40, **options)

    def layers(key):
        params, _ = model.init(key, (16, 16, 3))
        return params["Conv_0"], params[max(layer for layer in params if layer.startswith("Dense"))]

    conv, linear = jax.tree.map(np.asarray, jax.jit(layers)(KEY))
    fan_out = conv["kernel"].size / 3  # of three channels
    std = {
        "torch": (np.sqrt(1 / (3 * fans[0])), np.sqrt(1 / (3 * fans[1]))),
        "flax": (np.sqrt(1 / fans[0]), np.sqrt(1 / fans[1])),
        "kaiming": (np.sqrt(2 / fan_out), np.sqrt(1 / (3 * fans[1]))),
    }[expected]
    np.testing.assert_allclose([conv["kernel"].std(), linear["kernel"].std()], std, rtol=0.08)
    for layer, fan_in in zip((conv, linear), fans, strict=True):
        if "bias" not in layer:
            continue
        if expected == "torch":
            assert 0.6 < np.abs(layer["bias"]).max() * np.sqrt(fan_in) <= 1
        else:
            np.testing.assert_array_equal(layer["bias"], 0)
    assert ("bias" in linear) == (options.get("variant") != "fedmatch")

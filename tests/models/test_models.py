"""How networks are built: options, clear errors, lowerings, one trace; what WideResNet adds; a network that learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from sklearn.datasets import load_digits

from fedjax_ssl.models import build
from fedjax_ssl.models.convolution import LOWERINGS
from fedjax_ssl.models.mlp import MLP
from tests.engine import distance
from tests.models.test_networks import KEY, batch, drawn, training_step

SHAPE = (8, 8, 3)


def test_wide_resnet_adds_the_raw_input_where_channels_agree():
    model = build("wide_resnet", num_classes=5, depth=10, width=1)  # its first stage keeps the stem's 16 channels
    params, stats = model.init(KEY, SHAPE)
    assert "Conv_2" not in params["Block_0"]
    assert "Conv_2" in params["Block_1"]
    images, _ = batch("wide_resnet")
    # Without its convolutions the first block is the identity: what it is fed no longer passes through its batch norm.
    params["Block_0"] = jax.tree.map(jnp.zeros_like, params["Block_0"])
    logits = model.apply(params, stats, images)[0]
    params["Block_0"]["BatchNorm_0"]["bias"] += 7.0
    np.testing.assert_array_equal(logits, model.apply(params, stats, images)[0])
    assert np.std(logits) > 0.01


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_lowerings_agree_on_a_training_step_also_in_bfloat16(lowering):
    images, labels = batch("cnn")

    def step(**options):
        model = build("cnn", num_classes=5, width=8, **options)
        gradient, (logits, batch_stats) = training_step(model.apply, labels)(*drawn(model, SHAPE), images)
        return gradient, logits, batch_stats

    expected = step(conv="xla")
    assert max(map(distance, expected, step(conv=lowering))) < 2e-5
    gradient, logits, _ = step(conv=lowering, dtype="bfloat16")
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    assert 1e-5 < distance(expected[1], logits) < 0.05


def test_cnn_learns_the_digits():
    digits = load_digits()
    images, labels = jnp.asarray(digits.images[..., None] / 8 - 1, jnp.float32), jnp.asarray(digits.target)
    model = build("cnn", num_classes=10, conv="cpu")
    params, stats = model.init(KEY, (8, 8, 1))
    optimizer = optax.sgd(0.03, momentum=0.9, nesterov=True)

    def loss(params, rows):
        logits, _ = model.apply(params, stats, images[rows], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows]).mean()

    def step(carry, rows):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, rows), state)
        return (optax.apply_updates(params, updates), state), None

    rows = jax.random.randint(jax.random.key(1), (150, 32), 0, 1400)
    (params, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, rows))((params, optimizer.init(params)))
    _, static = model.apply(params, stats, images[:1400], train=True)
    logits, _ = model.apply(params, static, images[1400:])
    assert np.mean(np.argmax(logits, -1) == labels[1400:]) > 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "wide_resnt"}, "name='wide_resnt': unknown; .*nearest: 'wide_resnet'"),
        ({"name": "cnn", "widht": 8}, "widht: unknown key; did you mean width"),
        ({"name": "linear", "width": 8}, "width: unknown key; accepted: none"),
        ({"name": "cnn", "conv": "auto"}, "conv='auto': unknown"),
        ({"name": "cnn", "dtype": "float16"}, "dtype='float16': unknown; .*nearest: '.*float"),
        ({"name": "cnn", "width": 0}, "width: got 0, accepted: a whole number >= 1"),
        ({"name": "mlp", "hidden": 1.5}, "hidden: got 1.5, accepted: a whole number >= 1"),
        ({"name": "mlp", "hidden": True}, "hidden: got True, accepted: a whole number >= 1"),
        ({"name": "resnet", "depth": 20}, "depth: got 20, accepted: 18, 34, 50"),
        ({"name": "resnet9", "variant": "fedmach"}, "variant: got 'fedmach', accepted: feddure, fedmatch, se"),
        ({"name": "mnist_cnn", "variant": 1}, "variant: got 1, accepted: paper, released"),
        ({"name": "cifar_cnn", "initialization": "paper"}, "initialization: got 'paper', accepted: torch, fl"),
        ({"name": "cifar_cnn", "initialisation": "torch"}, "initialisation: unknown key; did you mean initialization"),
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


def test_batch_norm_without_train_is_refused():
    class Always(nn.Module):
        num_classes: int

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.num_classes)(nn.BatchNorm(use_running_average=False)(x.reshape(len(x), -1)))

    with pytest.raises(ValueError, match=r"Always.__call__: got no argument train, accepted: \(x, train\), with use_running"):
        build(Always, num_classes=2).init(jax.random.key(0), (2, 2, 1))

"""How networks are built: options, clear errors, lowerings, one trace; what WideResNet adds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_ssl.models import build
from fedjax_ssl.models.mlp import MLP
from tests.jaxprs import equations
from tests.models.test_networks import KEY, batch, drawn

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


def test_convolutions_have_the_lowering_that_is_asked_for():
    images, _ = batch("cnn")

    def convolutions(conv):
        model = build("cnn", num_classes=5, width=8, conv=conv)
        program = jax.make_jaxpr(model.apply)(*drawn(model, SHAPE), images)
        return [eqn.primitive.name for eqn in equations(program.jaxpr)].count("conv_general_dilated")

    assert convolutions("gpu") == 0  # patches and products in their place
    assert convolutions("xla") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "wide_resnt"}, r"name: got 'wide_resnt', accepted: .* \(did you mean 'wide_resnet'"),
        ({"name": "linear", "width": 8}, "width: unknown key; accepted: none"),
        ({"name": "cnn", "conv": "auto"}, "conv: got 'auto', accepted: "),
        ({"name": "cnn", "dtype": "float16"}, r"dtype: got 'float16', accepted: .* \(did you mean '.*float"),
        ({"name": "resnet", "depth": 20}, "depth: got 20, accepted: 8, 18, 34, 50"),
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

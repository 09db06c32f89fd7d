"""What comes before each network's classifier: how many features, of which layers, and that the classifier goes on from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local.task import Task, Weights, join
from fedjax_ssl.models import MODELS, ModelFns, build, predictor
from tests.models.test_models import small
from tests.models.test_paper_networks import KEY, Numpy, batch, network, relu, shapes, weights

# name, options, image, features, layers of the classifier
CASES = [
    ("cifar_cnn", {}, (32, 32, 3), 4096, {"Dense_0", "Dense_1", "Dense_2"}),
    ("cifar_cnn", {"variant": "released"}, (32, 32, 3), 4096, {"Dense_0", "Dense_1", "Dense_2"}),
    ("mnist_cnn", {}, (28, 28, 1), 320, {"Dense_0", "Dense_1"}),
    ("emnist_cnn", {}, (32, 32, 3), 12_544, {"Dense_0", "Dense_1"}),
    ("cnn", {"width": 32}, (8, 8, 1), 128, {"Dense_0"}),
    ("mlp", {"hidden": 7}, (8, 8, 1), 7, {"Dense_1"}),
    ("mlp", {"hidden": 7}, (20,), 7, {"Dense_1"}),
    ("linear", {}, (8, 8, 3), 192, {"Dense_0"}),
    ("wide_resnet", {"depth": 10, "width": 2}, (32, 32, 3), 128, {"Dense_0"}),
    ("resnet", {}, (8, 8, 1), 512, {"Dense_0"}),
    *(("resnet9", {"variant": variant}, (8, 8, 3), 512, {"Dense_0"}) for variant in ("feddure", "fedmatch", "semifl")),
]


def parts(model, all_weights):
    """(backbone, classifier) of (params, stats)."""
    return Task(model, None, 5, "static", 4).split(Weights(*all_weights))


@pytest.mark.parametrize(("name", "options", "image_shape", "num_features", "classifier"), CASES)
def test_features_need_the_backbone_alone(name, options, image_shape, num_features, classifier):
    model = build(name, num_classes=5, **options)
    whole = shapes(model, image_shape)
    backbone, rest = parts(model, whole)
    assert set(rest.params) == classifier
    assert rest.stats == {}
    assert join(backbone, rest) == Weights(*whole)
    images = jax.ShapeDtypeStruct((2, *image_shape), jnp.float32)
    features, batch_stats = jax.eval_shape(lambda w, x: model.features(*w, x, train=True), backbone, images)
    assert (features.shape, features.dtype) == ((2, num_features), jnp.float32)
    assert batch_stats == whole[1]


FIRST = {
    "cifar_cnn": {"Conv_0", "BatchNorm_0", "Conv_1"},
    "mnist_cnn": {"Conv_0", "Conv_1"},
    "emnist_cnn": {"Conv_0", "Conv_1"},
    "cnn": {"Conv_0", "BatchNorm_0", "Conv_1", "BatchNorm_1"},
    "mlp": {"Dense_0"},
    "linear": set(),
    "wide_resnet": {"Conv_0", "Block_0"},  # depth 10: one block a stage
    "resnet": {"Conv_0", "BatchNorm_0", "ResidualBlock_0", "ResidualBlock_1"},
    "resnet9 feddure": {f"{layer}_{i}" for layer in ("Conv", "BatchNorm") for i in range(4)},
    "resnet9 fedmatch": {f"Conv_{i}" for i in range(4)},
    "resnet9 semifl": {"Conv_0", "Block_0"},
}


@pytest.mark.parametrize(("name", "options", "image_shape", "num_features", "classifier"), CASES)
def test_first_blocks_are_layers_of_the_network(name, options, image_shape, num_features, classifier):
    model = build(name, num_classes=5, **options)
    expected = FIRST[f"{name} {options['variant']}" if name == "resnet9" else name]
    assert model.first_blocks() == expected
    whole = Weights(*shapes(model, image_shape))
    first, rest = Task(model, None, 5, "static", 4).split(whole, model.first_blocks())
    assert set(first.params) == expected
    assert set(first.stats) == {layer for layer in expected if layer in whole.stats}
    assert join(first, rest) == whole
    assert expected.isdisjoint(classifier)


def test_every_network_is_among_the_cases():
    assert {name for name, *_ in CASES} == set(MODELS)


def test_the_last_layer_turns_features_into_logits():
    apply, params, stats = small("cnn")
    model = build("cnn", num_classes=5, conv="xla", width=8)
    images = np.random.default_rng(2).normal(size=(6, 8, 8, 3)).astype(np.float32)
    mask = np.arange(6) < 4
    backbone, classifier = parts(model, (params, stats))
    features, batch_stats = jax.jit(lambda w, x: model.features(*w, x, mask=mask, train=True))(backbone, images)
    (last,) = classifier.params.values()
    logits, expected_stats = apply(params, stats, images, mask=mask, train=True)
    np.testing.assert_allclose(features @ last["kernel"] + last["bias"], logits, rtol=1e-4, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), batch_stats, expected_stats)


@pytest.mark.parametrize("name", ["mnist_cnn", "cifar_cnn released"])
def test_all_linear_layers_turn_features_into_logits(name):
    model, images = network(name), batch(name)[0]
    params, stats = weights(name)
    backbone, classifier = parts(model, (params, stats))
    x, _ = jax.jit(model.features)(*backbone, images)
    layers = Numpy(classifier.params, {})
    for _ in classifier.params:
        last = x = layers.dense(np.asarray(relu(x)))  # the features lie behind a ReLU already
    logits, _ = jax.jit(model.apply)(params, stats, images)
    np.testing.assert_allclose(last, logits, atol=2e-5 * np.abs(logits).max())


def test_what_is_dropped_before_the_classifier_is_not_of_the_features():
    # `released` drops channels in the backbone, and values just before the first linear layer.
    model, images = network("cifar_cnn released"), batch("cifar_cnn released")[0]
    params, stats = weights("cifar_cnn released")
    for key, drawn in ((KEY, 1), (None, 0)):
        program = jax.make_jaxpr(functools.partial(model.features, train=True, key=key))(params, stats, images)
        assert str(program).count("random_bits") == drawn


def test_a_network_of_ones_own_may_be_all_classifier():
    model = ModelFns(lambda key, shape: ({"w": jnp.ones(2)}, {}), lambda *args, **kwargs: None)
    assert model.backbone() == frozenset()
    features, stats = model.features({}, {}, jnp.ones((2, 3, 3, 1)))
    assert (features.shape, stats) == ((2, 9), {})


def test_fedcons_predictor_has_the_papers_size():
    params, _ = shapes(predictor(3 * 4096), (4096,))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 100_704_256
    assert params["Dense_0"]["kernel"].shape == (4096, 12288)
    assert params["Dense_1"]["kernel"].shape == (12288, 4096)

"""What comes before each network's classifier: how many features, of which layers, and that the classifier goes on from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local.task import Task, Weights, join
from fedjax_ssl.models import MODELS, ModelFns, Predictor, build, pure
from tests.models.test_networks import KEY, MASK, Numpy, batch, network, relu, shapes, weights


def numbered(**counts):
    return {f"{layer}_{i}" for layer, count in counts.items() for i in range(count)}


CNN = {"Conv_0", "BatchNorm_0", "Conv_1"}
# Name, options, image, features, layers of the classifier, of the first blocks.
CASES = [
    ("cifar_cnn", {}, (32, 32, 3), 4096, numbered(Dense=3), CNN),
    ("cifar_cnn", {"variant": "released"}, (32, 32, 3), 4096, numbered(Dense=3), CNN),
    ("mnist_cnn", {}, (28, 28, 1), 320, numbered(Dense=2), numbered(Conv=2)),
    ("rsc_cnn", {}, (32, 32, 3), 256, {"Dense_4"}, numbered(Conv=2)),
    ("emnist_cnn", {}, (32, 32, 3), 12_544, numbered(Dense=2), numbered(Conv=2)),
    ("cnn", {"width": 32}, (8, 8, 1), 128, numbered(Dense=1), numbered(Conv=2, BatchNorm=2)),
    ("mlp", {"hidden": 7}, (8, 8, 1), 7, {"Dense_1"}, {"Dense_0"}),
    ("mlp", {"hidden": 7}, (20,), 7, {"Dense_1"}, {"Dense_0"}),
    ("linear", {}, (8, 8, 3), 192, {"Dense_0"}, set()),
    ("wide_resnet", {"depth": 10, "width": 2}, (32, 32, 3), 128, {"Dense_0"}, {"Conv_0", "Block_0"}),  # one block a stage
    ("resnet", {"depth": 8}, (8, 8, 1), 256, {"Dense_0"}, numbered(Conv=1, BatchNorm=1, ResidualBlock=1)),
    ("resnet", {}, (8, 8, 1), 512, {"Dense_0"}, numbered(Conv=1, BatchNorm=1, ResidualBlock=2)),
    ("resnet9", {"variant": "feddure"}, (8, 8, 3), 512, {"Dense_0"}, numbered(Conv=4, BatchNorm=4)),
    ("resnet9", {"variant": "fedmatch"}, (8, 8, 3), 512, {"Dense_0"}, numbered(Conv=4)),
    ("resnet9", {"variant": "semifl"}, (8, 8, 3), 512, {"Dense_0"}, {"Conv_0", "Block_0"}),
]


def parts(model, all_weights):
    """(backbone, classifier) of (params, stats)."""
    return Task(model, None, 5, "static", 4).split(Weights(*all_weights))


@pytest.mark.parametrize(("name", "options", "image_shape", "num_features", "classifier", "first"), CASES)
def test_features_need_the_backbone_and_first_blocks_are_of_it(name, options, image_shape, num_features, classifier, first):
    model = build(name, num_classes=5, **options)
    whole = Weights(*shapes(model, image_shape))
    backbone, rest = parts(model, whole)
    assert (set(rest.params), rest.stats) == (classifier, {})
    assert join(backbone, rest) == whole
    images = jax.ShapeDtypeStruct((2, *image_shape), jnp.float32)
    features, batch_stats = jax.eval_shape(lambda w, x: model.features(*w, x, train=True), backbone, images)
    assert (features.shape, features.dtype) == ((2, num_features), jnp.float32)
    assert batch_stats == whole.stats
    assert model.first_blocks() == first
    blocks, rest = Task(model, None, 5, "static", 4).split(whole, model.first_blocks())
    assert (set(blocks.params), set(blocks.stats)) == (first, {layer for layer in first if layer in whole.stats})
    assert join(blocks, rest) == whole
    assert first.isdisjoint(classifier)


def test_every_network_is_among_the_cases():
    assert {name for name, *_ in CASES} == set(MODELS)


@pytest.mark.parametrize("name", ["cnn", "mnist_cnn", "cifar_cnn released"])
def test_the_linear_layers_turn_features_into_logits(name):
    model, images = network(name), batch(name)[0]
    params, stats = weights(name)
    backbone, classifier = parts(model, (params, stats))
    x, batch_stats = model.features(*backbone, images, mask=MASK, train=True)
    layers = Numpy(classifier.params, {})
    for _ in classifier.params:
        x = layers.dense(np.asarray(relu(x)))  # the features lie behind a ReLU already
    logits, expected_stats = model.apply(params, stats, images, mask=MASK, train=True)
    np.testing.assert_allclose(x, logits, atol=2e-5 * np.abs(logits).max())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), batch_stats, expected_stats)


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
    params, _ = shapes(pure(Predictor(3 * 4096)), (4096,))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 100_704_256
    assert [params[f"Dense_{i}"]["kernel"].shape for i in (0, 1)] == [(4096, 12288), (12288, 4096)]


@pytest.mark.parametrize("name", ["cnn", "mnist_cnn released", "linear"])
def test_logits_and_features_of_one_pass_are_those_of_two(name):
    model, images = network(name), batch(name)[0]
    params, stats = weights(name)
    given = {"mask": MASK, "train": True, "key": KEY}
    (logits, features), new = model.both(params, stats, images, **given)
    for got, (expected, others) in (
        (logits, model.apply(params, stats, images, **given)),
        (features, model.features(params, stats, images, **given)),
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert all(np.allclose(new[layer][key], x) for layer, tree in others.items() for key, x in tree.items())
    for both in (model.both, None):
        task = Task(model._replace(both=both), None, 5, "static", 4)
        found, _ = task.train_outputs(Weights(params, stats), images, MASK, KEY)
        np.testing.assert_allclose(found[0], logits, rtol=1e-5)
        np.testing.assert_allclose(found[1], features, rtol=1e-5)

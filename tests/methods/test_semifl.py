"""SemiFL's client by its edge cases and ablations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import local, models
from fedjax_ssl.data import sources
from fedjax_ssl.data.augment import Views, feature_views
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.experiment.build import build
from fedjax_ssl.local.task import Task, Weights
from fedjax_ssl.method import Shard
from fedjax_ssl.methods.semifl import SemiFLOptions, batch_gradient, fix_gradient
from fedjax_ssl.ssl import mixup
from tests import tiny
from tests.methods.test_dropout import client_shard, task_of
from tests.methods.test_fl2 import Client, norm

SURE = {"network": "linear", "method__confidence": 0.25}  # at random weights some images pass, some do not
BATCH = {"method__pseudo_labels": "batch", "method__mix": "none"}


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.fixture(scope="module")
def client():
    return Client("semifl", **SURE)


def test_a_client_without_a_confident_image_is_left_out_and_sends_nothing(client):
    output = client(weights=client.biased(0.0))  # every confidence is .1
    assert output.weight == 0
    assert norm(output.update) == 0
    assert output.metrics["comm/bytes_up"].total == 0
    assert output.metrics["comm/bytes_down"].total > 0
    assert output.metrics["perf/client_images"].total == 0
    assert output.metrics["client/loss"] == output.metrics["client/mix_loss"] == (0, 0)
    assert same(output.client_state, client.kept)


def test_a_client_without_images_takes_no_part(client):
    output = client(count=0)
    assert output.weight == norm(output.update) == 0
    assert output.metrics["client/mask_rate"].weight == 0


def test_a_client_of_one_image_mixes_it_with_itself(client):
    output = client(count=1, weights=client.biased(5.0))  # whose confidence is .94
    assert output.weight == 1
    assert norm(output.update) > 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((output.update, output.client_state, output.metrics)))
    assert output.metrics["perf/client_images"].total == 1


def test_the_fix_set_alone_is_drawn_and_images_beyond_the_count_are_not(client):
    before = client(count=20)
    used = int(before.metrics["diagnostics/label_ratio"].total)
    assert 0 < used < 20
    assert before.metrics["perf/client_images"].total == before.metrics["client/mix_loss"].weight == used
    images = client.images
    client.images = images.at[client.index[20:]].set(255)
    after = client(count=20)
    client.images = images
    assert same(before.update, after.update)


def test_a_confidence_of_exactly_tau_passes(client):
    even = client.biased(0.0)
    (name,) = even.params
    even.params[name]["bias"] = jnp.zeros(10).at[4:].set(-1e9)  # four classes of .25
    output = client(weights=even)
    assert output.weight == 1
    assert output.metrics["client/mask_rate"] == (len(client.index), len(client.index))


def test_without_global_labels_a_client_takes_part_though_it_takes_no_step():
    client = Client("semifl", **SURE, **BATCH)
    output = client(weights=client.biased(0.0))
    assert output.weight == 1
    assert norm(output.update) == 0
    assert same(output.client_state, client.kept)
    assert output.metrics["comm/bytes_up"].total > 0
    assert client(count=0).weight == 0
    assert norm(client().update) > 0


def test_the_fix_set_alone_is_fixmatch_bit_for_bit_and_has_no_padding():
    everything = {"network": "linear", "method__confidence": 0.0}
    clients = (
        Client("semifl", **everything, method__mix="none"),
        Client("fixmatch", **everything, method__strict=False, method__batches="accepted"),
    )
    with jax.disable_jit():  # two programs would each be fused in a way of its own
        alone, fixmatch = (client(count=20) for client in clients)
    assert alone.metrics["perf/client_images"].total == 20
    assert alone.metrics.keys() == fixmatch.metrics.keys()
    assert same(alone, fixmatch)


class Stream:
    """Steps on image 0 alone, eight times in a batch, of a client of ten images: image i is of value i, two rows are padding.

    In place of gradients: what the network would be given, the strong views first.
    """

    def __init__(self, monkeypatch, ratio=None):
        if ratio is not None:
            monkeypatch.setattr(mixup, "ratio", lambda key, alpha: jnp.float32(ratio))
        monkeypatch.setattr(local, "loss_step", lambda task, w, views, *_: local.Gradients(views, (), {"loss": ()}))
        images = jnp.arange(12.0)[:, None, None]
        self.unlabeled = Examples(images, jnp.arange(12), jnp.int32(10), None)
        self.batch = Batch(jnp.zeros(8, jnp.int32), jnp.ones(8, bool))

    def __call__(self, weak, steps=400):
        views = Views(None, weak, lambda key, images: jnp.zeros(len(images)), None)
        gradient = fix_gradient(Task(None, views, 10, "static", 8), SemiFLOptions(), self.unlabeled, jnp.arange(12))
        keys = jax.random.split(jax.random.key(0), steps)
        return np.asarray(jax.jit(jax.vmap(lambda key: gradient(None, self.batch, key).grad))(keys))


def values(key, images):
    return images[:, 0, 0]


def test_partners_are_any_of_the_clients_images_and_a_batch_has_one_ratio(monkeypatch):
    with monkeypatch.context() as patch:
        partners = Stream(patch, ratio=0.0)(values)
    counts = np.bincount(partners.astype(int).ravel(), minlength=12)
    assert counts.sum() == 400 * 8
    assert (counts[10:] == 0).all()
    assert np.abs(counts[:10] - 320).max() < 4.5 * np.sqrt(320 * 0.9)  # uniform over the ten
    assert np.mean([len(set(row)) < 8 for row in partners]) > 0.95  # with replacement

    mixtures = Stream(monkeypatch)(values)  # (1 - lambda) partner
    ratios = [1 - row[p > 0] / p[p > 0] for row, p in zip(mixtures, partners, strict=True)]
    assert max(np.ptp(r) for r in ratios) < 1e-5
    ratios = np.array([r[0] for r in ratios])
    assert len(np.unique(ratios)) > 300
    np.testing.assert_allclose([ratios.mean(), ratios.var()], [0.5, 0.1], atol=0.04)


def test_an_image_and_its_partner_are_augmented_apart(monkeypatch):
    def coin(key, images):
        return jax.random.rademacher(key, (len(images),), jnp.float32)

    assert set(Stream(monkeypatch, ratio=0.5)(coin).ravel()) == {-1.0, 0.0, 1.0}


def test_strong_views_and_mixtures_pass_the_network_apart(monkeypatch):
    passes = []
    original = Task.train_logits

    def recorded(self, weights, images, mask, key=None):
        passes.append((images.shape, mask))
        return original(self, weights, images, mask, key)

    monkeypatch.setattr(Task, "train_logits", recorded)
    experiment = tiny.experiment("semifl", network="cnn")
    shard, task = client_shard(experiment), task_of(experiment)
    gradient = fix_gradient(task, SemiFLOptions(), shard.unlabeled, shard.truth)
    batch = Batch(jnp.arange(4), jnp.arange(4) < 3)
    jax.eval_shape(gradient, jax.eval_shape(lambda key: task.init(key, (8, 8, 1)), jax.random.key(0)), batch, jax.random.key(0))
    assert [shape for shape, _ in passes] == [(4, 8, 8, 1)] * 2
    assert all(mask is not None for _, mask in passes)


def test_in_a_batch_of_its_own_labels_the_confident_alone_pass_the_network_and_none_is_no_step(monkeypatch):
    def cross_entropy_step(task, weights, views, labels, used, mask, key):
        return local.Gradients((mask, used), (), {})

    def apply(params, stats, views, *, mask, train, key=None):
        assert not train
        return views + params, stats  # the local model's logits: its bias, and the features themselves

    monkeypatch.setattr(local, "cross_entropy_step", cross_entropy_step)
    task = Task(models.ModelFns(None, apply), feature_views(), 3, "static", 8)
    features = jnp.float32([[9, 0, 0], [1, 0, 0], [0, 0, 9], [0, 9, 0]])[:, None]
    shard = Shard(None, Examples(features, jnp.arange(4), jnp.int32(4), None), jnp.array([0, 0, 0, 0]))
    gradient = batch_gradient(task, SemiFLOptions(pseudo_labels="batch", mix="none"), shard)
    batch = Batch(jnp.arange(4), jnp.array([True, True, True, False]))
    for bias, sure in (
        ([0, 0, 0], [1, 0, 1, 0]),
        ([8, 0, 0], [1, 1, 0, 0]),
        ([0, 8, 8], [0, 0, 1, 0]),
        ([8, 8, 8.5], [1, 0, 1, 0]),
    ):
        step = gradient(Weights(jnp.float32(bias), ()), batch, jax.random.key(0))
        assert [which.astype(int).tolist() for which in step.grad] == [sure, sure]
        assert step.taken
    nothing = gradient(Weights(jnp.zeros(3), ()), Batch(jnp.array([1, 1]), jnp.ones(2, bool)), jax.random.key(0))
    assert not nothing.taken


@pytest.mark.parametrize("mix", ["mixup", "none"])
def test_features_of_texts_are_mixed_as_vectors(mix):
    rng = np.random.default_rng(0)
    train, strong, test = rng.standard_normal((3, 60, 5)).astype(np.float32)
    dataset = sources.from_features(
        train_features=train, train_labels=np.arange(60) % 4, test_features=test, test_labels=np.arange(60) % 4,
        train_strong_features=strong,
    )  # fmt: skip
    overrides = {"data__num_labels": 4, "data__weak": "default", "data__strong": "default", "method__mix": mix}
    simulator = build(tiny.config("semifl", network="linear", **overrides), dataset).simulator
    state, _, metrics = simulator._round.eval_shape(simulator.template(0), simulator._data)
    (layer,) = state.server.weights.params.values()
    assert layer["kernel"].shape == (5, 4)
    assert ("client/mix_loss" in metrics) == (mix == "mixup")


def test_bad_options_are_named():
    for key, value, accepted in (
        ("confidence", 1.5, "a number in [0, 1]"),
        ("mixup_alpha", 0.0, "a number > 0"),
        ("mix", "mixed", "mixup, none"),
        ("pseudo_labels", "local", "global, batch"),
    ):
        with pytest.raises(ValueError) as error:
            SemiFLOptions(**{key: value})
        assert str(error.value) == f"method.{key}: got {value!r}, accepted: {accepted}"
    with pytest.raises(ValueError, match=r"method\.mix: got 'mixup' with method\.pseudo_labels=batch, accepted: none"):
        SemiFLOptions(pseudo_labels="batch")

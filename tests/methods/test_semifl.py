"""SemiFL's client by its edge cases and ablations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import local
from fedjax_ssl.data import sources
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.experiment.build import build
from fedjax_ssl.local import Gradients, Task
from fedjax_ssl.methods.semifl import SemiFLOptions, fix_gradient
from fedjax_ssl.ssl import mixup
from tests import tiny
from tests.methods.clients import Client, finite, flat, norm, recorded_passes, same, traced_round


@pytest.fixture(scope="module")
def client():
    return Client("semifl", network="linear", method__confidence=0.25)  # at random weights some images pass


@pytest.mark.ci
def test_a_client_without_a_confident_image_is_left_out(client):
    output = client(weights=client.biased(0.0))  # every confidence is .1
    assert output.weight == 0
    assert norm(output.update) == 0
    assert output.metrics["comm/bytes_down"].total > 0
    assert output.metrics["perf/client_images"].total == 0
    assert output.metrics["client/loss"] == output.metrics["client/mix_loss"] == (0, 0)
    assert same(output.client_state, client.kept)


@pytest.mark.ci
def test_a_client_of_one_image_mixes_it_with_itself(client):
    output = client(unlabeled=1, weights=client.biased(5.0))  # whose confidence is .94
    assert output.weight == 1
    assert norm(output.update) > 0
    assert finite(output)
    assert output.metrics["perf/client_images"].total == 1


def test_a_confidence_of_exactly_tau_passes(client):
    even = client.biased(0.0)
    (name,) = even.params
    even.params[name]["bias"] = jnp.zeros(10).at[4:].set(-1e9)  # four classes of .25
    output = client(weights=even)
    assert output.weight == 1
    assert output.metrics["client/mask_rate"] == (len(client.unlabeled), len(client.unlabeled))


@pytest.mark.ci
def test_the_fix_set_alone_is_fixmatch_and_has_no_padding():
    everything = {"network": "linear", "method__confidence": 0.0}
    alone = Client("semifl", **everything, method__mix="none")(unlabeled=20)
    fixmatch = Client("fixmatch", **everything, method__strict=False, method__batches="accepted")(unlabeled=20)
    assert alone.metrics["perf/client_images"].total == 20
    assert alone.metrics.keys() == fixmatch.metrics.keys()
    assert norm(alone.update) > 1e-2
    for got, expected in zip(alone, fixmatch, strict=True):
        np.testing.assert_allclose(flat(got), flat(expected), rtol=1e-5, atol=1e-7)


class Stream:
    """Steps on image 0 alone, eight times in a batch, of a client of ten images: image i is of value i, two rows are padding.

    In place of gradients: what the network is given of mixtures.
    """

    def __init__(self, monkeypatch, ratio=None):
        if ratio is not None:
            monkeypatch.setattr(mixup, "ratio", lambda key, alpha: jnp.float32(ratio))
        none, given = Gradients(0.0, (), {}), {"loss": ()}
        monkeypatch.setattr(local, "cross_entropy_gradients", lambda *_: none)
        monkeypatch.setattr(local, "loss_gradients", lambda task, weights, views, *_: Gradients(views, (), given))
        images = jnp.arange(12.0)[:, None, None]
        self.unlabeled = Examples(images, jnp.arange(12), jnp.int32(10), None)
        self.batch = Batch(jnp.zeros(8, jnp.int32), jnp.ones(8, bool))

    def __call__(self, weak, steps=400):
        views = Views(None, weak, lambda key, images: jnp.zeros(len(images)), None)
        gradient = fix_gradient(Task(None, views, 10, "static"), SemiFLOptions(), self.unlabeled, jnp.arange(12))
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
    client = Client("semifl", network="cnn", client__batch_size=4)
    passes = recorded_passes(monkeypatch)
    client.trace()
    assert [rows for rows, _, _ in passes] == [4, 4]
    assert passes[0][1] is passes[1][1] is not None


@pytest.mark.parametrize("mix", ["mixup", "none"])
def test_features_of_texts_are_mixed_as_vectors(mix):
    rng = np.random.default_rng(0)
    train, strong, test = rng.standard_normal((3, 60, 5)).astype(np.float32)
    dataset = sources.from_features(
        train_features=train, train_labels=np.arange(60) % 4, test_features=test, test_labels=np.arange(60) % 4,
        train_strong_features=strong,
    )  # fmt: skip
    overrides = {"data__num_labels": 4, "data__weak": "default", "data__strong": "default", "method__mix": mix}
    _, state, metrics = traced_round(build(tiny.config("semifl", network="linear", **overrides), dataset))
    (layer,) = state.server.weights.params.values()
    assert layer["kernel"].shape == (5, 4)
    assert ("client/mix_loss" in metrics) == (mix == "mixup")

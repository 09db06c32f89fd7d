"""What a method trains: a network, its views of the data, and the weights that travel."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.augment import Views
from fedjax_ssl.local.marks import mark
from fedjax_ssl.models import ModelFns, norm

PyTree = Any
NORMS = ("static", "running", "batch")
NORM_DEFAULTS: dict[str, Any] = {"norm": "static", "norm_momentum": 0.1}
"""The config's keys of batch norm, beside the network's own, with their defaults."""


def substream(key: jax.Array, name: str) -> jax.Array:
    """The key of a named part of a training step, from the key of the step, whose first view is drawn from `key` itself."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def dropout_key(key: jax.Array) -> jax.Array:
    """The key of a training step's dropout masks: a network's views are the same with dropout and without."""
    return substream(key, "dropout")


class Weights(NamedTuple):
    """A network's weights.

    Attributes:
        params: float32 pytree.
        stats: batch-norm statistics, a float32 pytree like `ModelFns.init` returns it; `()` in an update without them.
    """

    params: PyTree
    stats: PyTree


def join(first: Weights, rest: Weights) -> Weights:
    """A network's weights from the two parts that `Task.split` gives."""
    return Weights({**first.params, **rest.params}, {**first.stats, **rest.stats})


class Task(NamedTuple):
    """A network and its inputs.

    Attributes:
        model: the network's pure functions.
        views: how uint8 images become the network's inputs: plain, weakly and strongly augmented.
        num_classes: C.
        norm: which statistics batch norm uses outside of training: `static` (sBN: collected by the server after each of its
            steps, over labeled and client data), `running` (tracked in training, averaged over clients) or `batch` (the
            evaluated batch's own). Training always normalizes by the batch.
        norm_momentum: a new batch's share in `running` statistics (PyTorch's convention).
        labels_at: who holds labels: the `server`, the `clients`, or both (labels at the server, and those of the clients'
            examples revealed). A static fact, so that no program is compiled that trains on labels that are not there.
    """

    model: ModelFns
    views: Views
    num_classes: int
    norm: str
    norm_momentum: float = 0.1
    labels_at: tuple[str, ...] = ("server",)

    def init(self, key: jax.Array, image_shape: tuple[int, ...]) -> Weights:
        """Fresh weights."""
        return Weights(*self.model.init(key, image_shape))

    def train_logits(
        self, weights: Weights, images: jax.Array, mask: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        """Outputs in training mode: (logits [B, C], the batch's statistics).

        Args:
            weights: the network's weights.
            images: views, float32 [B, H, W, ch].
            mask: bool [B], the real examples.
            key: of the dropout masks (`dropout_key`); None: no dropout, for passes that only collect statistics.
        """
        logits, stats = self.model.apply(weights.params, weights.stats, images, mask=mask, train=True, key=key)
        return mark(logits), stats

    def train_logits_together(
        self, weights: Weights, views: Sequence[jax.Array], masks: Sequence[jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, ...], PyTree]:
        """Outputs of several batches in one forward pass, which batch norm sees as one: (logits of each, statistics of all).

        As `train_logits`; a batch may be empty.
        """
        ends = list(itertools.accumulate(len(mask) for mask in masks))[:-1]
        logits, stats = self.train_logits(weights, jnp.concatenate(views), jnp.concatenate(masks), key)
        return tuple(jnp.split(logits, ends)), stats

    def train_features(
        self, weights: Weights, images: jax.Array, mask: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        """What comes before the classifier, in training mode: (features [B, F], the batch's statistics).

        As `train_logits`; the classifier's weights may be left out.
        """
        features, stats = self.model.features(weights.params, weights.stats, images, mask=mask, train=True, key=key)
        return mark(features), stats

    def split(self, weights: Weights, names: frozenset[str] | None = None) -> tuple[Weights, Weights]:
        """The weights of the layers `names` and those of all others; `join` puts them together.

        Without names: those of the backbone, which makes features, and those of the classifier.
        """
        first = self.model.backbone() if names is None else names

        def only(tree: PyTree, of_first: bool) -> PyTree:
            return {name: layer for name, layer in tree.items() if (name in first) == of_first}

        named, others = (Weights(*(only(tree, which) for tree in weights)) for which in (True, False))
        return named, others

    def eval_logits(self, weights: Weights, images: jax.Array, mask: jax.Array) -> jax.Array:
        """Outputs [B, C] outside of training, of views [B, H, W, ch], mask bool [B]."""
        logits, _ = self.model.apply(weights.params, weights.stats, images, mask=mask, train=self.norm == "batch")
        return mark(logits)

    def predict(self, weights: Weights, images: jax.Array, mask: jax.Array) -> jax.Array:
        """Logits [B, C] of uint8 images [B, H, W, ch], mask bool [B]."""
        return self.eval_logits(weights, self.views.plain(images), mask)

    def track(self, stats: PyTree, batch_stats: PyTree) -> PyTree:
        """Statistics after a training step on a batch with `batch_stats`."""
        return norm.running(stats, batch_stats, self.norm_momentum) if self.norm == "running" else stats

    def in_turn(self, stats: PyTree, first: PyTree, second: PyTree) -> PyTree:
        """The statistics of one batch with which `track` ends where it would with those of two, one after the other."""
        return jax.tree.map(lambda s, a, b: b + (1.0 - self.norm_momentum) * (a - s), stats, first, second)

    def update(self, broadcast: Weights, local: Weights) -> Weights:
        """The pseudo-gradient broadcast - local; statistics travel only where clients track them."""

        def subtract(a: PyTree, b: PyTree) -> PyTree:
            return jax.tree.map(lambda x, y: x - y, a, b)

        stats = subtract(broadcast.stats, local.stats) if self.norm == "running" else ()
        return Weights(subtract(broadcast.params, local.params), stats)

"""What a method trains: a network, its views of the data, and its weights."""

import contextlib
import contextvars
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from fedjax_ssl.arrays import Array, Inputs, Key, Logits, Mask, Outputs, PyTree
from fedjax_ssl.data.augment import Views
from fedjax_ssl.local.counters import count_outputs
from fedjax_ssl.models import ModelFns, norm


def substream(key: Key, name: str) -> Key:
    """A key for one named purpose, derived from `key`; a training step draws its first view from `key` itself."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def dropout_key(key: Key) -> Key:
    """The key of a training step's dropout masks, apart from that of its views."""
    return substream(key, "dropout")


class Weights(NamedTuple):
    """A network's parameters and batch-norm statistics, float32 pytrees; an update without statistics has `()` for them."""

    params: PyTree
    stats: PyTree


_evaluated: contextvars.ContextVar[list[Weights] | None] = contextvars.ContextVar("_evaluated", default=None)


@contextlib.contextmanager
def evaluated_weights() -> Iterator[list[Weights]]:
    """A context manager that yields a list; every set of weights that a Task evaluates outside of training is appended to it.

    It finds the network that a method's `predict` evaluates, wherever the server's state holds that network.
    """
    found: list[Weights] = []
    token = _evaluated.set(found)
    try:
        yield found
    finally:
        _evaluated.reset(token)


def join(first: Weights, rest: Weights) -> Weights:
    """A network's weights from the two parts that `Task.split` gives."""
    return Weights({**first.params, **rest.params}, {**first.stats, **rest.stats})


class Task(NamedTuple):
    """A network and its inputs.

    `norm` says which statistics batch norm uses outside of training: `static` (sBN: the server collects them after each of its
    steps), `running` (updated in training, averaged over clients) or `batch` (the evaluated batch's own). Training always
    normalizes by the batch.
    """

    model: ModelFns
    views: Views  # how uint8 images become the network's inputs: plain, weakly and strongly augmented
    num_classes: int  # C
    norm: str
    norm_momentum: float = 0.1  # a new batch's share in `running` statistics (PyTorch's convention)
    labels_at: tuple[str, ...] = ("server",)  # the `server`, the `clients`, or both (the clients' true labels are revealed)

    def init(self, key: Key, image_shape: tuple[int, ...]) -> Weights:
        """Fresh weights."""
        return Weights(*self.model.init(key, image_shape))

    def train_logits(self, weights: Weights, images: Inputs, mask: Mask, key: Key | None = None) -> tuple[Logits, PyTree]:
        """Outputs in training mode, and the batch's statistics; `key` is a `dropout_key`, None: no dropout."""
        logits, stats = self.model.apply(weights.params, weights.stats, images, mask=mask, train=True, key=key)
        return count_outputs(logits), stats

    def train_logits_together(
        self,
        weights: Weights,
        views: Sequence[Float[Array, "_ ..."]],
        masks: Sequence[Bool[Array, " _"]],
        key: Key,
        *,
        fixed: int | None = None,
    ) -> tuple[tuple[Float[Array, "_ C"], ...], PyTree]:
        """Logits of several batches, some of which may be empty, and their common statistics, from one forward pass.

        No gradient flows through the logits of the batch at the index `fixed`. Without batch norm, which has to see all batches
        together, that batch has a forward pass of its own, so that nothing is computed backwards for it.
        """
        if fixed is not None and len(masks[fixed]) > 0 and not jax.tree.leaves(weights.stats):
            alone, _ = self.train_logits(jax.lax.stop_gradient(weights), views[fixed], masks[fixed], substream(key, "fixed"))
            rest, of_rest = ([*batches[:fixed], *batches[fixed + 1 :]] for batches in (views, masks))
            logits, stats = self.train_logits_together(weights, rest, of_rest, key)
            return (*logits[:fixed], alone, *logits[fixed:]), stats
        ends = list(itertools.accumulate(len(mask) for mask in masks))[:-1]
        joined, stats = self.train_logits(weights, jnp.concatenate(views), jnp.concatenate(masks), key)
        parts = enumerate(jnp.split(joined, ends))
        return tuple(jax.lax.stop_gradient(part) if number == fixed else part for number, part in parts), stats

    def train_features(self, weights: Weights, images: Inputs, mask: Mask, key: Key | None = None) -> tuple[Outputs, PyTree]:
        """Inputs of the classifier in training mode, and the batch's statistics; `weights` need not contain the classifier."""
        features, stats = self.model.features(weights.params, weights.stats, images, mask=mask, train=True, key=key)
        return count_outputs(features), stats

    def train_outputs(
        self, weights: Weights, images: Inputs, mask: Mask, key: Key | None = None
    ) -> tuple[tuple[Logits, Outputs], PyTree]:
        """`train_logits` and `train_features` together, by one forward pass where the model has `both`."""
        if self.model.both is None:
            (features, _), (logits, stats) = (
                get(weights, images, mask, key) for get in (self.train_features, self.train_logits)
            )
            return (logits, features), stats
        of_batch = {"mask": mask, "train": True, "key": key}
        (logits, features), stats = self.model.both(weights.params, weights.stats, images, **of_batch)
        return (count_outputs(logits), features), stats

    def split(self, weights: Weights, names: frozenset[str] | None = None) -> tuple[Weights, Weights]:
        """Splits weights in two: those of the layers `names` (None: the backbone's), and the rest; `join` reverses it."""
        first = self.model.backbone() if names is None else names

        def only(of_first: bool) -> Weights:
            return Weights(*({name: x for name, x in tree.items() if (name in first) == of_first} for tree in weights))

        return only(True), only(False)

    def num_features(self, backbone: Weights, image_shape: tuple[int, ...]) -> int:
        """The number of inputs of the classifier, for images of a shape."""
        image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
        return jax.eval_shape(self.model.features, *backbone, image)[0].shape[1]

    def check_backbone(self, method: str) -> None:
        """ValueError where the network of the method of this name has no layers before its classifier."""
        if not self.model.backbone():
            accepted = "one with layers before its classifier, such as cnn, cifar_cnn, mnist_cnn or mlp"
            got = f"got a network that is one classifier, with method.name={method}"
            raise ValueError(f"model.name: {got}, accepted: {accepted}")

    def eval_logits(self, weights: Weights, images: Array, mask: Mask) -> Logits:
        """Outputs, outside of training, for views of images such as `views.plain` gives; ValueError for uint8 images."""
        if (seen := _evaluated.get()) is not None:
            seen.append(weights)
        if jnp.issubdtype(images.dtype, jnp.integer):
            of_views = "views of them, such as task.views.plain(images); task.predict takes the images"
            raise ValueError(f"eval_logits: got {images.dtype} images, accepted: {of_views}")
        logits, _ = self.model.apply(weights.params, weights.stats, images, mask=mask, train=self.norm == "batch")
        return count_outputs(logits)

    def predict(self, weights: Weights, images: Array, mask: Mask) -> Logits:
        """Logits of uint8 images [B, H, W, ch]."""
        return self.eval_logits(weights, self.views.plain(images), mask)

    def update_stats(self, stats: PyTree, batch_stats: PyTree) -> PyTree:
        """Statistics after a training step on a batch with `batch_stats`."""
        return norm.running(stats, batch_stats, self.norm_momentum) if self.norm == "running" else stats

    def update(self, broadcast: Weights, local: Weights) -> Weights:
        """The pseudo-gradient broadcast - local; with statistics only where they are `running`."""
        if self.norm != "running":
            broadcast, local = broadcast._replace(stats=()), local._replace(stats=())
        return jax.tree.map(lambda x, y: x - y, broadcast, local)

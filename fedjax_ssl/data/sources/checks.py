"""Checks of every dataset, with one line on what is wrong and how to correct it."""

from collections.abc import Sequence
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8

from fedjax_ssl.data.sources.values import UNLABELED, is_integer, understood

Images = UInt8[np.ndarray, "N H W ch"] | Float32[np.ndarray, "N V D"]
Classes = Int32[np.ndarray, " N"]


class Origins(NamedTuple):
    """Where each example is from, as texts: its `file`, or its place in the `original` splits, such as `test[17]`."""

    kind: str
    train: Shaped[np.ndarray, " N"]
    test: Shaped[np.ndarray, " N"]


class Dataset(NamedTuple):
    """A classification dataset in memory. Every class in 0..C-1 occurs in the training split.

    Images of three channels are RGB. Texts are vectors of D features in V stored views: the first is of the text itself, the
    last is its strong view (V = 1 without one, and in the test split). A training label of -1 is unknown.
    """

    name: str
    train_images: Images
    train_labels: Classes
    test_images: Images
    test_labels: Classes
    num_classes: int
    clients: Classes | None = None
    """Which client each training example belongs to, 0..K-1 or -1 for none, if the dataset says so."""
    test_clients: Classes | None = None
    """The same for the test examples."""
    classes: tuple[str, ...] = ()
    """The names of the classes 0..C-1; empty where they are numbers alone."""
    origins: Origins | None = None
    """Where the examples are from, unless their positions say it: images in files, or splits that were drawn anew."""
    whole: str = ""
    """Where splits were drawn anew, a digest of all examples before the draw, which does not depend on the seed."""
    validation: "Part | None" = None
    """The data's own validation examples, where `data.validation=own` asks for them."""
    sizes_from: str = ""
    """Who says the dataset's size, where random images stand in for its own (`stand_in`); empty where they are its own."""

    @property
    def holds_features(self) -> bool:
        """Whether the examples are vectors of features, not images."""
        return self.train_images.dtype == np.float32


class Part(NamedTuple):
    """Examples, their labels and, if known, the numbers of the clients that they belong to, aligned."""

    images: Shaped[np.ndarray, "N ..."]
    labels: Shaped[np.ndarray, "*_"]
    clients: Classes | None = None
    origins: Shaped[np.ndarray, " N"] | None = None  # texts, see `Origins`


def dataset(name: str, train: Part, test: Part, num_classes: int | None = None) -> Dataset:
    """A dataset of two splits of images, checked, see `sources.from_arrays`."""
    train, test = checked_part(f"{name} train", train, may_lack_labels=True), checked_part(f"{name} test", test)
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(
            f"{name}: train images have shape {train.images.shape[1:]} and test images {test.images.shape[1:]}: "
            "resize them to one shape"
        )
    return join(name, train, test, num_classes)


def with_validation(data: Dataset, valid: Part | None) -> Dataset:
    """A dataset of images with validation examples, checked; None: as it is."""
    if valid is None:
        return data
    where, shape = f"{data.name} validation", data.train_images.shape[1:]
    valid = checked_part(where, valid)
    if valid.images.shape[1:] != shape:
        raise ValueError(f"{where}: images have shape {valid.images.shape[1:]}, and train images {shape}: resize them to one")
    if (largest := int(valid.labels.max(initial=0))) >= data.num_classes:
        raise ValueError(f"{where}: label {largest} is out of range for {data.num_classes} classes: remove such examples")
    return data._replace(validation=valid)


def join(name: str, train: Part, test: Part, num_classes: int | None = None) -> Dataset:
    """A dataset of two checked splits; their classes are checked here."""
    known = train.labels[train.labels != UNLABELED]
    if not len(known):
        raise ValueError(f"{name}: no training example has a label: give a few of each class labels 0..C-1")
    largest = int(max(known.max(), test.labels.max()))
    num_classes = largest + 1 if num_classes is None else num_classes
    if largest >= num_classes:
        raise ValueError(f"{name}: label {largest} is out of range for {num_classes} classes: give labels 0..{num_classes - 1}")
    # Bounded by N, so that one absurd label costs no memory.
    present = np.bincount(known[known <= len(known)], minlength=min(num_classes, len(known) + 1))
    if not present.all():
        empty = np.flatnonzero(present == 0)
        raise ValueError(
            f"{name}: no training example of class {empty[0]} ({np.unique(known).size} of {num_classes} classes occur): "
            "renumber the labels to 0..C-1 with every class in the training split (renumber_labels=true does it for images)"
        )
    if num_classes == 1:
        raise ValueError(f"{name}: all labels are {largest}: give examples of two classes or more")
    whose = train.clients, test.clients
    return Dataset(name, train.images, train.labels, test.images, test.labels, num_classes, *whose)


def named(data: Dataset, classes: Sequence[str] | np.ndarray) -> Dataset:
    """The dataset with the names of its classes, in their order, or with none; ValueError unless each has a name of its own."""
    names = names_of(data.name, classes)
    if names and not len(names) == len(set(names)) == data.num_classes:
        got = f"classes={first_line(list(names))} for {data.num_classes} classes"
        raise ValueError(f"{data.name}: {got}: give each a name of its own")
    return data._replace(classes=() if names == tuple(map(str, range(len(names)))) else names)


def names_of(where: str, classes: Sequence[str] | np.ndarray) -> tuple[str, ...]:
    """Names of classes, given as text or integers; ValueError where they are something else."""
    given = np.asarray(classes)
    if given.size and (given.ndim != 1 or given.dtype.kind not in "USiu"):
        raise ValueError(f"{where}: classes have dtype {given.dtype} and shape {given.shape}: give a text for each class")
    given = np.char.decode(given, "utf-8", "replace") if given.dtype.kind == "S" else given
    # A folder's name may be no valid text, and be spelled in another of Unicode's forms than elsewhere.
    return tuple(normalize("NFC", str(name).encode("utf-8", "replace").decode()) for name in given)


def checked_part(where: str, split: Part, *, may_lack_labels: bool = False) -> Part:
    """One split's images uint8 [N, H, W, ch] and labels, or a ValueError that says what is wrong with them."""
    images = _checked_images(where, split.images)
    labels = checked_labels(where, split.labels, len(images), may_lack_labels=may_lack_labels)
    if split.clients is not None and len(split.clients) != len(images):
        raise ValueError(f"{where}: {len(images)} examples but {len(split.clients)} clients' ids: give one id per example")
    return Part(images, labels, split.clients, split.origins)


def _checked_images(where: str, images: np.ndarray) -> UInt8[np.ndarray, "N H W ch"]:
    shape = images.shape
    if np.ma.is_masked(images):
        raise ValueError(f"{where}: images are masked at {np.ma.count_masked(images)} values: fill them in, or leave these out")
    if images.dtype == object:
        got = "are missing" if images.ndim == 0 else "have different shapes"
        raise ValueError(f"{where}: images {got}: give one array [N, H, W] or [N, H, W, ch], all of one size")
    if images.dtype != np.uint8:
        raise ValueError(f"{where}: images have dtype {images.dtype}{_as_uint8(images)}")
    if images.ndim not in (3, 4) or 0 in shape:
        side = round(shape[1] ** 0.5) if images.ndim == 2 else 0
        flat = f" (for flat ones images.reshape(-1, {side}, {side}))" if side and side**2 == shape[1] else ""
        raise ValueError(f"{where}: images have shape {shape}: needed is [N, H, W] or [N, H, W, ch], none of them 0{flat}")
    if images.ndim == 4 and shape[1] in (1, 3, 4) and shape[3] > 4:
        raise ValueError(f"{where}: images have shape {shape}, channels first: give np.moveaxis(images, 1, -1)")
    return images[..., None] if images.ndim == 3 else images


def _as_uint8(images: np.ndarray) -> str:
    """How images of another dtype become uint8."""
    scale = ": scale them to 0..255 and store them as uint8"
    if images.dtype == bool:
        return f"{scale}: images.astype(np.uint8) * 255"
    if images.dtype.kind not in "iuf" or not images.size:
        return scale
    low, high = images.min(), images.max()
    if not np.isfinite([low, high]).all():
        return f" with NaN or infinity{scale}"
    span = f" from {low:.6g} to {high:.6g}"
    if low < 0:
        return f"{span}{scale}, without any normalization, which data.mean and data.std do"
    if images.dtype.kind == "f":
        how = "np.rint(255 * images)" if high <= 1 else "np.rint(images)" if high <= 255 else ""
    else:
        how = "images" if high <= 255 else "(images // 257)" if high <= 65535 else ""
    return f"{span}{scale}{f': {how}.astype(np.uint8)' if how else ''}"


def checked_labels(where: str, labels: np.ndarray, num_examples: int, *, may_lack_labels: bool = False) -> Classes:
    """The labels of `num_examples` examples, or a ValueError that says what is wrong with them."""
    labels = understood(f"{where}: labels", labels)
    if labels.ndim != 1:
        one_hot = labels.ndim == 2 and labels.size and np.array_equal(np.eye(labels.shape[1])[labels.argmax(1)], labels)
        how = ", one-hot: give labels.argmax(1)" if one_hot else ": needed is [N] or [N, 1], one class per example"
        raise ValueError(f"{where}: labels have shape {labels.shape}{how}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{where}: labels {_not_integers(labels)}")
    if num_examples != len(labels):
        raise ValueError(f"{where}: {num_examples} examples but {len(labels)} labels: give one label per example")
    low, high = int(labels.min()), int(labels.max())
    if low < (UNLABELED if may_lack_labels else 0) or high > np.iinfo(np.int32).max:
        unlabeled = "-1 for unlabeled" if may_lack_labels else "-1 for unlabeled is for training examples alone"
        raise ValueError(f"{where}: labels range from {low} to {high}: number the classes 0..C-1 ({unlabeled})")
    return labels.astype(np.int32)


def _not_integers(labels: np.ndarray) -> str:
    """What is wrong with labels [N] of another dtype, and what to do."""
    if labels.dtype.kind == "U" or not len(labels):
        text = next((label for label in labels if not is_integer(label)), next(iter(labels), ""))
        return f"are text such as {first_line(text)!r}: number the classes 0..C-1; renumber_labels=true does it"
    texts = ", or as texts, labels.astype(str), with renumber_labels=true" if labels.dtype == object else ""
    return f"have dtype {labels.dtype}: store them as integers 0..C-1{texts}"


def first_line(value: object) -> str:
    """The first line of a value's text, at most 200 characters of it."""
    return (str(value).splitlines() or [""])[0][:200]

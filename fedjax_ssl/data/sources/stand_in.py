"""A stand-in for a dataset that is not fetched: as many random images of the same shape, to count what a run will cost."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.data.catalog import SIZES, known
from fedjax_ssl.data.sources import builtin, tfds
from fedjax_ssl.data.sources.checks import Dataset, named

BLOCK = 1000  # different images


class Known(NamedTuple):
    """The shape [H, W, ch] of a dataset's images, how many each of its splits has, its classes, and who says so."""

    shape: tuple[int, ...]
    numbers: dict[str, int]
    num_classes: int
    says: str


def load(name: str, data_dir: str | None, resplit: Sequence[float] | None) -> Dataset | None:
    """A dataset as large as the one of that name, with classes of one size; None: nobody knows how large it is.

    The size is that in TFDS's metadata in `data_dir`, or else in the catalog; `sizes_from` says which. Nothing is fetched.
    """
    found = _of_tfds(name, data_dir) or _of_catalog(name)
    if found is None:
        return None
    train, test = found.numbers["train"], found.numbers["test"]
    if resplit is not None:
        whole = sum(found.numbers.values())
        train, test = round(resplit[0] * whole), round(resplit[2] * whole)
    block = builtin.synthetic(
        num_train=min(train, max(BLOCK, 10 * found.num_classes)),
        num_test=min(test, BLOCK),
        image_shape=found.shape,  # type: ignore[arg-type]
        num_classes=found.num_classes,
    )
    trained, tested = np.arange(train) % len(block.train_labels), np.arange(test) % len(block.test_labels)
    data = block._replace(
        name=name,
        train_images=block.train_images[trained],
        train_labels=block.train_labels[trained],
        test_images=block.test_images[tested],
        test_labels=block.test_labels[tested],
        sizes_from=found.says,
    )
    return named(data, about.names if (about := known(name)) else ())


def _of_tfds(name: str, data_dir: str | None) -> Known | None:
    builder: Any = tfds.prepared(name, data_dir)
    if builder is None:
        return None
    features: dict[str, Any] = dict(builder.info.features.items())
    image, label = features.get("image"), features.get("label")
    numbers = {split: info.num_examples for split, info in builder.info.splits.items()}
    shape: Any = getattr(image, "shape", None) or (None,)
    num_classes: Any = getattr(label, "num_classes", None)
    if None in (*shape, num_classes) or not {"train", "test"} <= set(numbers):
        return None  # reading it says what is wrong
    wanted = {split: numbers[split] for split in ("train", "validation", "test") if split in numbers}
    return Known(shape, wanted, num_classes, f"TFDS's metadata in {builder.data_dir}")


def _of_catalog(name: str) -> Known | None:
    about, sizes = known(name), SIZES.get(name)
    if about is None or sizes is None:
        return None
    numbers = {"train": sizes.train, "validation": sizes.validation, "test": sizes.test}
    return Known(sizes.shape, numbers, about.classes, "the catalog")

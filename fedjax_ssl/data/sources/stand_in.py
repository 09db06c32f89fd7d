"""A stand-in for a dataset that is not fetched: as many random images of the same shape, to count what a run will cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_ssl.data.catalog import SIZES, Sizes, known
from fedjax_ssl.data.sources import builtin, tfds
from fedjax_ssl.data.sources.checks import Dataset, Part, named

BLOCK = 1000  # different images


def load(name: str, data_dir: str | None, resplit: Sequence[float] | None, *, validation: bool = False) -> Dataset | None:
    """A dataset as large as the one of that name, with classes of one size; None: nobody knows how large it is.

    The size is that in TFDS's metadata in `data_dir`, or else in the catalog; `sizes_from` says which. Nothing is fetched.
    """
    found = _of_tfds(name, data_dir) or _of_catalog(name)
    if found is None:
        return None
    sizes, num_classes, says = found
    train, valid, test = sizes.train, sizes.validation, sizes.test
    if resplit is not None:
        whole = train + valid + test
        train, test = round(resplit[0] * whole), round(resplit[2] * whole)
        valid = whole - train - test
    block = builtin.synthetic(
        num_train=min(train, max(BLOCK, 10 * num_classes)),
        num_test=min(test, BLOCK),
        image_shape=sizes.shape,
        num_classes=num_classes,
    )
    trained, tested = np.arange(train) % len(block.train_labels), np.arange(test) % len(block.test_labels)
    if validation and valid:
        validated = np.arange(valid) % len(block.test_labels)
        block = block._replace(validation=Part(block.test_images[validated], block.test_labels[validated]))
    data = block._replace(
        name=name,
        train_images=block.train_images[trained],
        train_labels=block.train_labels[trained],
        test_images=block.test_images[tested],
        test_labels=block.test_labels[tested],
        sizes_from=says,
    )
    return named(data, about.names if (about := known(name)) else ())


def _of_tfds(name: str, data_dir: str | None) -> tuple[Sizes, int, str] | None:
    """A dataset's sizes, the number of its classes, and who says so; None: TFDS's metadata do not say them all."""
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
    sizes = Sizes(shape, numbers["train"], numbers.get("validation", 0), numbers["test"])
    return sizes, num_classes, f"TFDS's metadata in {builder.data_dir}"


def _of_catalog(name: str) -> tuple[Sizes, int, str] | None:
    about, sizes = known(name), SIZES.get(name)
    return (sizes, about.classes, "the catalog") if about and sizes else None

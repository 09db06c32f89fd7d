"""Sources: every dataset as the same NumPy arrays, whatever it was stored as.

Functions import slow packages (tensorflow_datasets, scikit-learn) themselves, so that other runs do not pay for them.
"""

import os
from collections.abc import Sequence

import numpy as np

from fedjax_ssl.data.catalog import DATASETS, ORIGINALS, known
from fedjax_ssl.data.sources import builtin, folders, huggingface, labels, npz, originals, quality, text, tfds
from fedjax_ssl.data.sources.builtin import synthetic
from fedjax_ssl.data.sources.checks import Dataset, Part, dataset, named, with_validation
from fedjax_ssl.data.sources.huggingface import Columns
from fedjax_ssl.data.sources.resplit import OTHERS, VALID, Splits
from fedjax_ssl.data.sources.text import Raw, from_features
from fedjax_ssl.data.sources.values import array_of
from fedjax_ssl.options import did_you_mean

__all__ = ["DIGITS", "GENERIC", "SYNTHETIC", "Dataset"]
__all__ += ["from_arrays", "from_features", "load", "padded", "synthetic", "unpadded"]

DIGITS, SYNTHETIC = "digits", "synthetic"
"""The names of scikit-learn's digits, and of small random images, which the seed draws."""
GENERIC = ("npz", "image_folder", "parquet", "text_features")
"""Names for a user's own data: each is also a kind of storage."""
_SPLIT_ANEW = ("npz", "image_folder", "parquet", "hf")


def load(
    name: str,
    *,
    data_dir: str | None = None,
    path: str | None = None,
    resplit: Sequence[float] | None = None,
    renumber_labels: bool = False,
    seed: int = 0,
    download: bool = False,
    validation: bool = False,
    columns: Columns = Columns(),
) -> Dataset:
    """Loads a dataset by name: one in `fedjax_ssl.data.catalog.DATASETS` or GENERIC, `synthetic`, hf/OWNER/NAME, or TFDS's.

    `data_dir` is the folder of datasets that TFDS prepared and of original files (None: see `data.download.folder`); a dataset
    that it has in neither form is fetched into it, if `download` is true. `path` is the file or folder of a dataset that is
    stored as one of GENERIC, as `fedjax_ssl/data/README.md` describes it. `resplit` has the shares of new splits, see
    `resplit.Splits`; it has to be None for `digits`, `synthetic` and text features. `renumber_labels` is for files of images:
    their labels, integers or text, become 0..C-1 in sorted order, and the log says which is which. The seed draws `resplit` and
    `synthetic`. `columns` are those of `parquet` and of the Hub's datasets, whose names begin with hf/. With `validation`
    the data have to have a validation part of their own, which is read, too. Raises FileNotFoundError, which says what to get
    where, and ValueError for an unknown name, an argument that the source does not take, or unusable data.
    """
    if name == "chestmnist":
        raise ValueError("name='chestmnist' has several labels per image, and one is needed: take another part of MedMNIST")
    about = known(name)
    of_hub = "hf" if name.startswith(huggingface.PREFIX) else "tfds"
    kind = about.kind if about else name if name in (*GENERIC, SYNTHETIC) else of_hub
    if path is not None and kind not in GENERIC:
        raise ValueError(f"path={path!r} is for {', '.join(GENERIC)} and their kind, got name={name!r}: drop it, or rename")
    if resplit is not None and kind not in (*_SPLIT_ANEW, "tfds"):
        raise ValueError(f"resplit={resplit!r} is for datasets of images that are stored, got name={name!r}: drop it")
    if renumber_labels and kind not in _SPLIT_ANEW:
        raise ValueError(f"renumber_labels=True is for {', '.join(_SPLIT_ANEW[:-1])} and hf/..., got name={name!r}: drop it")
    if validation and kind not in (*_SPLIT_ANEW, "tfds"):
        raise ValueError(f"{name} has no validation part of its own: take {OTHERS}")
    how = Splits(resplit, seed, validation)
    found = tfds.load(name, data_dir, how) if kind == "tfds" else None
    if found is None and path is None and name in ORIGINALS:
        found = originals.load(name, data_dir, how, fetch=download)
    elif kind in ("parquet", "hf"):
        if path is None and kind == "parquet":
            raise ValueError("name='parquet' needs path: give the folder to read")
        path = path and os.path.expanduser(path)
        found = quality.warn(huggingface.load(name, path, data_dir, how, renumber_labels, columns, download))
    elif kind in GENERIC:
        found = _from_path(name, kind, path, how, renumber_labels)
        found = found if about else quality.warn(found)
    elif kind not in ("tfds", "hf"):
        found = builtin.digits() if name == DIGITS else synthetic(seed=seed)
    if found is None:
        names = [*GENERIC, SYNTHETIC, *DATASETS]
        prepared = f"what TFDS has prepared in data_dir={tfds.folders(data_dir)[-1]} (other folders: --config.data.data_dir)"
        accepted = f"{', '.join(names)}, or {prepared}"
        raise ValueError(f"unknown dataset name={name!r}, accepted: {accepted}{did_you_mean(name.lower(), names)}")
    if about and found.num_classes != about.classes:
        raise ValueError(
            f"{name}: got {found.num_classes} classes, and it has {about.classes}: check that these are all its data"
        )
    return named(found, about.names) if about and about.names else found


def from_arrays(
    *,
    train_images: Raw,
    train_labels: Raw,
    test_images: Raw | None = None,
    test_labels: Raw | None = None,
    num_classes: int | None = None,
    validation_images: Raw | None = None,
    validation_labels: Raw | None = None,
    clients: Raw | Sequence[Raw] | None = None,
    test_clients: Raw | None = None,
    classes: Sequence[str] | np.ndarray = (),
    renumber_labels: bool = False,
    name: str = "arrays",
) -> Dataset:
    """A dataset of images in memory, checked; for `fedjax_ssl.build(config, dataset=...)`.

    Images are uint8 [N, H, W] or [N, H, W, ch], RGB if ch = 3. Labels are integers [N] or [N, 1] in 0..C-1, with every class in
    the training set; C is the largest label + 1 by default. A training label of -1 is unknown: nobody gets such an example as a
    labeled one. With `renumber_labels`, labels are any integers or text, which become 0..C-1 in sorted order. `classes` are the
    classes' names, where they have some.

    `clients` says whose the training examples are, for `data.partition=natural`: an id for each example, integers or text,
    numbered in sorted order, or K lists of positions, one per client. `test_clients` has the ids of the test examples, for
    `data.client_test=own`; if `clients` are lists, the ids are 0 to K-1. Validation examples are for `data.validation=own`. A
    `name` of `fedjax_ssl.data.catalog.DATASETS` brings its views. Raises ValueError, with one line on what is wrong.
    """
    splits = {
        "train": Part(_array(name, "train images", train_images), _array(name, "train labels", train_labels)),
        "test": Part(_array(name, "test images", test_images), _array(name, "test labels", test_labels)),
    }
    if validation_images is not None or validation_labels is not None:
        given = (("images", validation_images), ("labels", validation_labels))
        splits[VALID] = Part(*(_array(name, f"validation {what}", array) for what, array in given))
    ids = {split: own for split, own in (("train", clients), ("test", test_clients)) if own is not None}
    sizes = {split: len(part.images) for split, part in splits.items()}
    whose = labels.clients_of_splits(name, ids, sizes, merged=False)
    splits = {split: part._replace(clients=whose.get(split)) for split, part in splits.items()}
    if renumber_labels:
        splits, found = labels.renumbered(name, splits, merged=False)
        classes = classes if np.size(classes) else found
    made = with_validation(dataset(name, splits["train"], splits["test"], num_classes), splits.get(VALID))
    return quality.warn(named(made, classes))


def _array(name: str, what: str, given: Raw | None) -> np.ndarray:
    if given is None:
        raise ValueError(f"{name} {what}: got None, accepted: an array; for a test part leave some training examples out")
    try:
        return array_of(given)
    except ValueError:  # lists of different lengths
        raise ValueError(f"{name} {what}: examples have different shapes: give one array, all examples of one size") from None


def padded(data: Dataset, size: int) -> Dataset:
    """The dataset with images zero-padded on all sides to `size` x `size` pixels; an odd pixel goes to the bottom or right."""
    if data.holds_features:
        raise ValueError(f"data.image_size: got {size} for text features, accepted: 0, as they have no size")
    height, width = data.train_images.shape[1:3]
    minimum = max(height, width)
    if size < minimum:
        raise ValueError(
            f"data.image_size: got {size} for images of {width} x {height} pixels, accepted: 0, or {minimum} and more"
        )
    borders = [(0, 0), *(((size - side) // 2, (size - side + 1) // 2) for side in (height, width)), (0, 0)]
    train, test = np.pad(data.train_images, borders), np.pad(data.test_images, borders)
    valid = data.validation and data.validation._replace(images=np.pad(data.validation.images, borders))
    return data._replace(train_images=train, test_images=test, validation=valid)


def unpadded(images: np.ndarray, stored_shape: Sequence[int]) -> np.ndarray:
    """The images of a padded dataset as they were before; `stored_shape` is the shape that each of them had."""
    rows, columns = (
        slice((have - had) // 2, (have - had) // 2 + had) for have, had in zip(images.shape[1:3], stored_shape, strict=False)
    )
    return images[:, rows, columns]


def _from_path(name: str, kind: str, path: str | None, how: Splits, renumber: bool) -> Dataset:
    """The dataset in a file or folder of the user's."""
    if path is None:
        raise ValueError(f"name={name!r} needs path: give the {'folder' if kind == 'image_folder' else 'file'} to read")
    path = os.path.expanduser(path)
    try:
        if kind == "text_features":
            return text.load(name, path)
        return (npz if kind == "npz" else folders).load(name, path, how, renumber)
    except ValueError as error:
        if path in str(error):
            raise
        raise ValueError(f"path={path}: {error}") from error

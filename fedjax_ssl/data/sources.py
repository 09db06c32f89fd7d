"""Sources: every dataset as the same five NumPy arrays, whatever it was stored as.

Slow imports (tensorflow_datasets, scikit-learn) stay inside the functions that need them, so that importing the package,
and running on data that do not need them, costs nothing.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import cv2
import numpy as np

BUILT_IN = ("digits", "npz", "synthetic")


class Dataset(NamedTuple):
    """A classification dataset in memory. Every class in 0..C-1 occurs in the training split.

    Attributes:
        name: what it was loaded as.
        train_images: uint8 [N, H, W, ch], values 0..255, RGB where ch = 3.
        train_labels: int32 [N].
        test_images: uint8 [N', H, W, ch].
        test_labels: int32 [N'].
        num_classes: C.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    num_classes: int


class _Split(NamedTuple):
    images: np.ndarray
    labels: np.ndarray


def load(
    name: str,
    *,
    data_dir: str | None = None,
    path: str | None = None,
    resplit: Sequence[float] | None = None,
    seed: int = 0,
) -> Dataset:
    """Loads a dataset by name; never downloads.

    Args:
        name: `digits` (scikit-learn's 1,797 images of 8 x 8, bundled; fixed split of 1,437 and 360), `npz` (a file, see
            `path`), `synthetic` (see `synthetic`), or a TFDS name such as `cifar10`, `svhn_cropped`, `emnist/byclass`.
        data_dir: for TFDS names: the folder of prepared datasets; None = TFDS's own default.
        path: for `npz`: a file with uint8 images [N, H, W] or [N, H, W, ch] and integer labels [N] or [N, 1], as
            `x_train, y_train, x_test, y_test` or `train_images, train_labels, test_images, test_labels` (and, not
            required, a validation split `x_val, y_val` or `val_images, val_labels`, which is held out).
        resplit: for `npz`: fractions (train, validation, test); all splits are merged and split anew, stratified by class,
            and the validation part is held out. None = the file's own splits.
        seed: draws `resplit` and `synthetic`; the other datasets do not depend on it.

    Returns:
        Dataset of NumPy arrays.

    Raises:
        FileNotFoundError: `path`, `data_dir` or the prepared dataset in it does not exist.
        ValueError: unknown name, an argument that the source does not take, or unusable data.
    """
    if name != "npz" and (path is not None or resplit is not None):
        given = f"path={path!r}" if path is not None else f"resplit={resplit!r}"
        raise ValueError(f"{given} is for name='npz' alone, got name={name!r}: drop it, or load the file with name='npz'")
    if name == "digits":
        return _digits()
    if name == "npz":
        return _npz(path, resplit, seed)
    if name == "synthetic":
        return synthetic(seed=seed)
    return _tfds(name, data_dir)


def synthetic(
    *,
    num_train: int = 2000,
    num_test: int = 500,
    image_shape: tuple[int, int, int] = (8, 8, 1),
    num_classes: int = 10,
    noise: float = 64.0,
    seed: int = 0,
) -> Dataset:
    """Random images around one random picture per class: learnable, without any file.

    image = clip(picture[label] + noise z, 0, 255), picture ~ U(0, 255) per pixel, z ~ N(0, 1); classes as equal in size as
    the numbers allow.

    Args:
        num_train: N >= C.
        num_test: N' >= 1.
        image_shape: (H, W, ch).
        num_classes: C >= 2.
        noise: standard deviation of a pixel, in units of 0..255.
        seed: draws everything.

    Returns:
        Dataset.

    Raises:
        ValueError: fewer than two classes, or fewer training examples than classes.
    """
    if not 2 <= num_classes <= num_train or num_test < 1:
        raise ValueError(
            f"synthetic: got num_classes={num_classes}, num_train={num_train}, num_test={num_test}: "
            "accepted are 2 <= num_classes <= num_train and num_test >= 1"
        )
    rng = np.random.default_rng(seed)
    pictures = rng.uniform(0.0, 255.0, (num_classes, *image_shape))

    def draw(size: int) -> _Split:
        labels = rng.permutation(np.arange(size) % num_classes)
        images = pictures[labels] + noise * rng.standard_normal((size, *image_shape))
        return _Split(np.clip(np.rint(images), 0, 255).astype(np.uint8), labels)

    return _dataset("synthetic", draw(num_train), draw(num_test), num_classes)


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images[..., None] * (255.0 / 16.0)).astype(np.uint8)  # its pixels count 0..16
    train, test = _stratified(_Split(images, bunch.target), 1437, 360, seed=0)
    return _dataset("digits", train, test, 10)


def _stratified(pool: _Split, num_train: int, num_test: int, seed: int) -> tuple[_Split, _Split]:
    """Two disjoint random subsets in which every class has its share; what is over is held out."""
    from sklearn.model_selection import train_test_split

    rows = np.arange(len(pool.labels))
    train, test = train_test_split(rows, train_size=num_train, test_size=num_test, stratify=pool.labels, random_state=seed)
    return _Split(pool.images[train], pool.labels[train]), _Split(pool.images[test], pool.labels[test])


# --- npz ---------------------------------------------------------------------------------------------------------------

_NPZ_KEYS = (("x_{}", "y_{}"), ("{}_images", "{}_labels"))
# What NumPy raises for pickled objects, damaged or encrypted members and members that end too early.
_UNREADABLE = (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def _npz(path: str | None, resplit: Sequence[float] | None, seed: int) -> Dataset:
    splits = _read_npz(path)
    if resplit is None:
        return _dataset("npz", splits["train"], splits["test"])
    fractions = tuple(resplit)
    if len(fractions) != 3 or min(fractions) < 0 or not fractions[0] * fractions[2] > 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(
            f"resplit={fractions}: give three fractions (train, validation, test) that add up to 1, "
            "train and test above 0, such as (0.8, 0.05, 0.15)"
        )
    # Checked before they are merged, so that an error names the split that is wrong.
    checked = [_checked(f"npz {split}", *arrays) for split, arrays in splits.items()]
    shapes = sorted({split.images.shape[1:] for split in checked})
    if len(shapes) > 1:
        raise ValueError(f"npz: splits hold images of different shapes {shapes}: resize them to one shape")
    pool = _Split(*(np.concatenate(arrays) for arrays in zip(*checked, strict=True)))
    counts = np.unique(pool.labels, return_counts=True)[1]
    num_train = round(fractions[0] * len(pool.labels))
    num_test = min(round(fractions[2] * len(pool.labels)), len(pool.labels) - num_train)
    if min(num_train, num_test) < len(counts) or counts.min() < 2:
        raise ValueError(
            f"resplit={fractions} of {len(pool.labels)} examples of {len(counts)} classes (the rarest has {counts.min()}) "
            "leaves classes without a training or test example: give larger fractions, or more examples of each class"
        )
    return _dataset("npz", *_stratified(pool, num_train, num_test, seed))


def _read_npz(path: str | None) -> dict[str, _Split]:
    """Split name -> arrays as stored; `train` and `test`, and `val` where the file has it."""
    if path is None:
        raise ValueError("name='npz' needs path: give the .npz file to read")
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"path={path}: no such file: give an existing .npz file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"path={path} is not an .npz archive: write one with numpy.savez(path, x_train=..., y_train=..., ...)")
    try:
        with np.load(path) as archive:
            for keys in _NPZ_KEYS:
                named = {split: [key.format(split) for key in keys] for split in ("train", "val", "test")}
                if all(key in archive for key in named["train"] + named["test"]):
                    found = {split: pair for split, pair in named.items() if all(key in archive for key in pair)}
                    return {split: _Split(*(np.asarray(archive[key]) for key in pair)) for split, pair in found.items()}
            keys_found = ", ".join(archive.files) or "nothing"
    except _UNREADABLE as error:
        raise ValueError(f"path={path} cannot be read as plain arrays ({_first_line(error)}): write it anew") from error
    raise ValueError(
        f"path={path} holds {keys_found}: needed are x_train, y_train, x_test, y_test "
        "or train_images, train_labels, test_images, test_labels"
    )


# --- TensorFlow Datasets -----------------------------------------------------------------------------------------------

_CHUNK = 1000  # examples that a thread reads and decodes at a time


def _tfds(name: str, data_dir: str | None) -> Dataset:
    builder = _tfds_builder(name, data_dir)
    features, folder = dict(builder.info.features.items()), builder.data_dir
    num_classes = getattr(features.get("label"), "num_classes", None)
    if num_classes is None or not _is_fixed_image(features.get("image")):
        raise ValueError(
            f"{name} at {folder} has features {', '.join(sorted(features))}: needed are a class `label` and a uint8 `image` "
            "of fixed size with 1 or 3 channels"
        )
    if not {"train", "test"} <= set(builder.info.splits):
        raise ValueError(f"{name} at {folder} has splits {', '.join(builder.info.splits)}: needed are train and test")
    return _dataset(name, _read_tfds(builder, "train"), _read_tfds(builder, "test"), num_classes)


def _is_fixed_image(feature: Any) -> bool:
    """Whether a TFDS feature holds uint8 images [H, W, ch] of one size, ch 1 or 3."""
    import tensorflow_datasets as tfds

    if not isinstance(feature, tfds.features.Image) or feature.np_dtype != np.uint8:
        return False
    return None not in feature.shape and feature.shape[2] in (1, 3)


def _tfds_builder(name: str, data_dir: str | None) -> Any:
    """Builder of a dataset that is prepared on this disk.

    It is made from the files alone: a builder made from TFDS's code may try to download what is not prepared, and without
    network that takes minutes to fail.
    """
    import tensorflow_datasets as tfds  # here, not above: 0.7 s that no other source should pay

    folder = os.path.expanduser(data_dir or tfds.core.constants.DATA_DIR)
    well_formed = re.fullmatch(r"(\w+)(/[\w.-]+)?(:[\d.*]+)?", name)
    try:
        with contextlib.suppress(tfds.core.DatasetNotFoundError):  # what is missing is said below
            if well_formed:
                return tfds.core.read_only_builder.builder_from_files(name, data_dir=folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"{name} in data_dir={folder} is damaged ({_first_line(error)}): prepare it again") from error

    known = tfds.list_builders(with_community_datasets=False)  # community datasets would be asked for over the network
    if not well_formed or well_formed[1] not in known:
        nearest = difflib.get_close_matches(name.lower(), [*BUILT_IN, *known], n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "see tensorflow.org/datasets/catalog for the latter"
        raise ValueError(
            f"unknown dataset name={name!r}: accepted are {', '.join(BUILT_IN)}, a TFDS name such as cifar10, or your own TFDS "
            f"dataset in data_dir={folder}; {hint}"
        )
    where = f"data_dir={folder}" if os.path.isdir(folder) else f"data_dir={folder}, which does not exist"
    raise FileNotFoundError(
        f"TFDS dataset {name!r} is not prepared in {where}: point data_dir to the folder that holds {well_formed[1]}/, "
        'or prepare it once: pip install importlib_resources && python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('{name}', data_dir='{folder}', file_format='array_record').download_and_prepare()\""
    )


def _read_tfds(builder: Any, split: str) -> _Split:
    """Reads and decodes a split; one thread parses records (holding the GIL) while others decode images (without it).

    Records are parsed here, not by the builder's features: those are general, and take four times as long as the decoding.
    """
    import tensorflow_datasets as tfds
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2

    try:
        source = builder.as_data_source(split=split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
    except NotImplementedError as error:
        raise ValueError(
            f"{builder.name} at {builder.data_dir} is stored as {builder.info.file_format.value}, which needs TensorFlow: "
            "prepare it with file_format='array_record'"
        ) from error
    shape = builder.info.features["image"].shape
    images = np.empty((len(source), *shape), np.uint8)
    labels = np.empty(len(source), np.int64)

    def read(start: int) -> None:
        rows = range(start, min(start + _CHUNK, len(source)))
        for row, record in zip(rows, source.__getitems__(rows), strict=True):
            example = tf_example_pb2.Example.FromString(record).features.feature
            images[row] = _decode(example["image"].bytes_list.value[0], shape)
            labels[row] = example["label"].int64_list.value[0]

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(read, range(0, len(source), _CHUNK)))
    # A missing or truncated file, a record that is no example, a missing feature, an undecodable image.
    except (RuntimeError, ValueError, IndexError, DecodeError) as error:
        raise ValueError(f"{builder.name} at {builder.data_dir} is damaged ({_first_line(error)}): prepare it again") from error
    return _Split(images, labels)


def _decode(encoded: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """Image uint8 [H, W, ch] of an encoded PNG or JPEG: RGB, or gray where ch = 1."""
    flag = cv2.IMREAD_GRAYSCALE if shape[2] == 1 else cv2.IMREAD_COLOR_RGB
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), flag)
    if image is None or image.shape[:2] != shape[:2]:
        raise ValueError(f"an image of {len(encoded)} bytes does not decode to shape {shape}")
    return image.reshape(shape)


# --- what every source has to hold -------------------------------------------------------------------------------------


def _dataset(name: str, train: _Split, test: _Split, num_classes: int | None = None) -> Dataset:
    """Dataset of two splits, checked; `num_classes` None = the largest label + 1."""
    train, test = _checked(f"{name} train", *train), _checked(f"{name} test", *test)
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(
            f"{name}: train images have shape {train.images.shape[1:]} and test images {test.images.shape[1:]}: "
            "resize them to one shape"
        )
    largest = int(max(train.labels.max(), test.labels.max()))
    num_classes = largest + 1 if num_classes is None else num_classes
    if largest >= num_classes:
        raise ValueError(f"{name}: label {largest} is out of range for {num_classes} classes: give labels 0..{num_classes - 1}")
    # Bounded by N, so that one absurd label costs no memory: more classes than examples leave some class empty anyway.
    present = np.bincount(train.labels[train.labels <= len(train.labels)], minlength=min(num_classes, len(train.labels) + 1))
    if not present.all():
        empty = np.flatnonzero(present == 0)
        raise ValueError(
            f"{name}: no training example of class {empty[0]} ({np.unique(train.labels).size} of {num_classes} classes occur): "
            "renumber the labels to 0..C-1 with every class in the training split"
        )
    return Dataset(name, *train, *test, num_classes)


def _checked(where: str, images: np.ndarray, labels: np.ndarray) -> _Split:
    """Images uint8 [N, H, W, ch] and labels int32 [N] of one split, or a ValueError that says what is wrong with them."""
    if images.dtype != np.uint8:
        raise ValueError(f"{where}: images have dtype {images.dtype}: scale them to 0..255 and store them as uint8")
    if images.ndim not in (3, 4) or 0 in images.shape:
        raise ValueError(f"{where}: images have shape {images.shape}: needed is [N, H, W] or [N, H, W, ch], none of them 0")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise ValueError(f"{where}: labels have shape {labels.shape}: needed is [N] or [N, 1], one class per example")
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{where}: labels have dtype {labels.dtype}: store them as integers 0..C-1")
    if len(images) != len(labels):
        raise ValueError(f"{where}: {len(images)} images but {len(labels)} labels: give one label per image")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high > np.iinfo(np.int32).max:
        raise ValueError(
            f"{where}: labels range from {low} to {high}: number the classes 0..C-1 (an unlabeled -1 is not accepted)"
        )
    return _Split(images[..., None] if images.ndim == 3 else images, labels.astype(np.int32))


def _first_line(value: object) -> str:
    """The first line of a value's text, cut at 200 characters: messages stay on one line."""
    return (str(value).splitlines() or [""])[0][:200]

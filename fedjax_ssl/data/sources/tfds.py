"""TensorFlow Datasets, read from array_record without TensorFlow."""

import contextlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import UInt8

from fedjax_ssl.data import download
from fedjax_ssl.data.bars import bar
from fedjax_ssl.data.sources import images
from fedjax_ssl.data.sources.checks import Dataset, Part, first_line
from fedjax_ssl.data.sources.resplit import VALID, Splits, with_splits
from fedjax_ssl.files import check_below

_TRANSPOSED = ("emnist",)  # stored with rows and columns exchanged, as NIST's files are
_NAME = r"(\w+)(/[\w.-]+)?(:[\d.*]+)?"
_CHUNK = 1000  # examples that a thread reads and decodes at a time


def load(name: str, data_dir: str | None, how: Splits) -> Dataset | None:
    """The dataset `name` as TFDS has prepared it, see `sources.load`; None if TFDS has not prepared it."""
    import tensorflow_datasets as tfds

    builder = prepared(name, data_dir)
    if builder is None:
        return None
    features, folder = dict(builder.info.features.items()), builder.data_dir
    image: Any = features.get("image")
    num_classes = getattr(features.get("label"), "num_classes", None)
    has_images = isinstance(image, tfds.features.Image) and image.np_dtype == np.uint8 and None not in image.shape
    if num_classes is None or not has_images or image.shape[2] not in (1, 3):
        raise ValueError(
            f"{name} at {folder} has features {', '.join(sorted(features))}: needed are a class `label` and a uint8 `image` "
            "of fixed size with 1 or 3 channels"
        )
    if not {"train", "test"} <= set(builder.info.splits):
        raise ValueError(f"{name} at {folder} has splits {', '.join(builder.info.splits)}: needed are train and test")
    stored = {"validation" if split == VALID else split: split for split in how.names}
    splits = {split: read(builder, own) for own, split in stored.items() if own in builder.info.splits}
    return with_splits(name, splits, how, num_classes, classes=features["label"].names)


def prepared(name: str, data_dir: str | None) -> Any:
    """The builder of a dataset that TFDS has prepared in `data_dir` (None: in a usual folder); None if it is not there.

    The builder is made from the dataset's files alone: a builder made from TFDS's code may try to download the dataset.
    """
    import tensorflow_datasets as tfds
    from google.protobuf import json_format

    if not re.fullmatch(_NAME, name):
        return None
    for folder in folders(data_dir):
        check_below(os.path.join(folder, re.split("[/:]", name)[0]))
        try:
            with contextlib.suppress(tfds.core.DatasetNotFoundError):
                return tfds.core.read_only_builder.builder_from_files(name, data_dir=folder)
        except (ValueError, OSError, KeyError, json_format.Error) as error:
            raise ValueError(f"{name} in data_dir={folder} is damaged ({first_line(error)}): prepare it again") from error
    return None


def folders(data_dir: str | None) -> list[str]:
    """The folders in which prepared datasets are looked for."""
    import tensorflow_datasets as tfds

    return [str(download.folder(data_dir)), *([] if data_dir else [os.path.expanduser(tfds.core.constants.DATA_DIR)])]


def read(builder: Any, split: str) -> Part:
    """Reads and decodes a split in threads, parsing records itself, which is faster than the builder's features."""
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
    transposed = builder.name in _TRANSPOSED
    pixels = np.empty((len(source), *((shape[1], shape[0], shape[2]) if transposed else shape)), np.uint8)
    as_stored = pixels.swapaxes(1, 2) if transposed else pixels
    labels = np.empty(len(source), np.int64)

    def fill(start: int) -> None:
        rows = range(start, min(start + _CHUNK, len(source)))
        for row, record in zip(rows, source.__getitems__(rows), strict=True):
            example = tf_example_pb2.Example.FromString(record).features.feature
            as_stored[row] = decode(example["image"].bytes_list.value[0], shape)
            labels[row] = example["label"].int64_list.value[0]

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            starts = range(0, len(source), _CHUNK)
            list(bar(pool.map(fill, starts), f"reading {split}", total=len(starts), unit="images", each=_CHUNK))
    except (RuntimeError, ValueError, IndexError, DecodeError) as error:
        raise ValueError(f"{builder.name} at {builder.data_dir} is damaged ({first_line(error)}): prepare it again") from error
    return Part(pixels, labels)


def decode(encoded: bytes, shape: tuple[int, ...]) -> UInt8[np.ndarray, "H W ch"]:
    """The image of an encoded PNG or JPEG: RGB, or gray if `shape` has one channel; ValueError if it has not this shape."""
    image = images.decoded(np.frombuffer(encoded, np.uint8), images.GRAY if shape[2] == 1 else images.RGB)
    if image is None or image.shape[:2] != shape[:2]:
        raise ValueError(f"an image of {len(encoded)} bytes does not decode to shape {shape}")
    return image.reshape(shape)

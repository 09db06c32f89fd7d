"""`.npz` files of images: a user's, and MedMNIST's."""

import math
import os
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from fedjax_ssl.data.sources.checks import Dataset, Part, first_line
from fedjax_ssl.data.sources.labels import clients_of_splits
from fedjax_ssl.data.sources.resplit import VALID, Splits, with_splits
from fedjax_ssl.files import regular
from fedjax_ssl.host_memory import free_bytes

_SPLITS = ("train", VALID, "test")
_KEYS = (("x_{}", "y_{}"), ("{}_images", "{}_labels"))
CLIENTS, CLASSES = {"train": "client", VALID: "client_val", "test": "client_test"}, "classes"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}  # 3.0 names fields
UNREADABLE = (ValueError, OSError, EOFError, RuntimeError, MemoryError, KeyError, zipfile.BadZipFile, zlib.error)
"""What NumPy raises for damaged, encrypted or pickled arrays."""


def load(name: str, path: str, how: Splits, renumber: bool) -> Dataset:
    """The dataset in a file, see `sources.load`. With `how.resplit`, a training part is enough."""
    wanted = [key.format(split) for pair in _KEYS for key in pair for split in _SPLITS]
    arrays, names = read(path, [*wanted, *CLIENTS.values(), CLASSES])
    for pair in _KEYS:
        keys = {split: [key.format(split) for key in pair] for split in _SPLITS}
        splits = {split: Part(arrays[x], arrays[y]) for split, (x, y) in keys.items() if {x, y} <= arrays.keys()}
        if splits.keys() >= ({"train", "test"} if how.resplit is None else {"train"}):
            ids = {split: arrays[key] for split, key in CLIENTS.items() if key in arrays and split in splits}
            sizes = {split: len(part.labels) for split, part in splits.items()}
            whose = clients_of_splits(name, ids, sizes, merged=how.resplit is not None)
            splits = {split: part._replace(clients=whose.get(split)) for split, part in splits.items()}
            return with_splits(name, splits, how, renumber=renumber, classes=arrays.get(CLASSES, ()))
    raise ValueError(
        f"path={path} holds {', '.join(names) or 'nothing'}: needed are x_train, y_train, x_test, y_test "
        "or train_images, train_labels, test_images, test_labels; data.resplit, such as (0.8, 0.05, 0.15), makes a test part"
    )


def read(path: str, keys: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays of `keys` that an `.npz` file has, and the names of all its arrays."""
    if os.path.isdir(path) or not os.path.exists(path):
        what = "is a folder: give the .npz file in it" if os.path.isdir(path) else "no such file: give an existing .npz file"
        raise FileNotFoundError(f"path={path}: {what}")
    regular(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"path={path} is not an .npz archive: write one with numpy.savez(path, x_train=..., y_train=..., ...)")
    try:
        with np.load(path) as archive:
            present = [key for key in archive.files if key in keys]
            needed, free = _size(archive.zip, [f"{key}.npy" for key in present]), free_bytes()
            if not 0 < free < needed:
                return {key: np.asarray(archive[key]) for key in present}, archive.files
    except UNREADABLE as error:
        is_object = "Object arrays" in str(error)
        texts = " without arrays of objects (labels that are texts: labels.astype(str))" if is_object else ""
        raise ValueError(f"path={path} cannot be read as plain arrays ({first_line(error)}): write it anew{texts}") from error
    got = f"arrays of {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB of memory are free"
    raise ValueError(f"path={path} has {got}: give fewer or smaller examples, or use a machine with more memory")


def _size(archive: zipfile.ZipFile, members: Sequence[str]) -> int:
    """The bytes that arrays take; ValueError where a header, which NumPy trusts, claims another size than its array has."""
    total = 0
    for name in set(archive.namelist()).intersection(members):
        with archive.open(name) as file:
            shape, _, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
            claimed, size = math.prod(shape) * dtype.itemsize, archive.getinfo(name).file_size - file.tell()
        if claimed != size and not dtype.hasobject:
            raise ValueError(f"{name} claims {claimed} bytes of shape {shape}, and has {size}")
        total += claimed
    return total

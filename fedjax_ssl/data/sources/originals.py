"""Readers of the files that datasets are published in: what they read equals what TFDS prepares of them, in its order.

They read plain arrays of numbers and images; nothing is unpickled, and nothing is unpacked to disk.
"""

import functools
import gzip
import hashlib
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from fedjax_ssl.data import download
from fedjax_ssl.data.bars import bar
from fedjax_ssl.data.catalog import DATASETS
from fedjax_ssl.data.sources import npz
from fedjax_ssl.data.sources.checks import Dataset, Part, first_line
from fedjax_ssl.data.sources.resplit import VALID, Splits, with_splits
from fedjax_ssl.data.sources.tfds import decode

Reader = Callable[[dict[str, Path]], dict[str, Part]]
"""Paths of a dataset's files, by name -> its splits."""


def load(name: str, data_dir: str | None, how: Splits, *, fetch: bool = True) -> Dataset:
    """A dataset of `catalog.ORIGINALS`, whose files are fetched where they are missing and `fetch` is true.

    Raises what `download.obtain` raises, and ValueError for files of another format.
    """
    if data_dir and not download.folder(data_dir).is_dir():  # mistyped, it would become a folder, and be filled
        raise FileNotFoundError(
            f"data_dir={data_dir}, which does not exist: give the folder that holds {name}, or make it (mkdir), or leave "
            f"data_dir empty for {download.folder()}"
        )
    paths = download.obtain(name, data_dir, download=fetch)
    about = DATASETS[name]
    if about.kind == "npz":
        return npz.load(name, str(paths[f"{name}.npz"]), how, False)
    if about.kind == "text_features":
        raise ValueError(f"name={name!r} needs path: {text_hint(paths)}")
    try:
        splits = _READERS[name](paths)
    except Exception as error:  # what readers of archives raise for other content
        where = next(iter(paths.values())).parent
        raise ValueError(f"{name}: the files in {where} are not in their format ({first_line(error)}): remove them") from error
    return with_splits(name, splits, how, about.classes)


def text_hint(paths: dict[str, Path]) -> str:
    """How the features of a dataset's texts, which an experiment needs, are computed."""
    train, test = paths["train.csv"], paths["test.csv"]
    features = train.with_name("features.npz")
    command = f"fedjax-ssl text_features --train={train} --test={test} --out={features}"
    return f"its texts are there, and an encoder's features of them are needed: run {command}, and give {features} as path"


def tfds_order(split: str, size: int) -> Int64[np.ndarray, " N"]:
    """The original positions of TFDS's examples, which TFDS sorts by the MD5 of the split's name and an example's index."""
    salt = hashlib.md5(split.encode(), usedforsecurity=False)

    def key(number: int) -> bytes:
        digest = salt.copy()
        digest.update(str(number).encode())
        return digest.digest()

    return np.array(sorted(range(size), key=key), np.int64)


def cifar(paths: dict[str, Path], files: dict[str, Sequence[str]], label_bytes: int) -> dict[str, Part]:
    """CIFAR's binary version: per example its labels, the last being the finest, and 3 x 32 x 32 bytes of an image."""
    record = label_bytes + 3 * 32 * 32
    (path,) = paths.values()
    found: dict[str, bytes] = {}
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".bin") and (content := archive.extractfile(member)):
                found[member.name.rpartition("/")[2]] = content.read()
    splits = {}
    for split, names in files.items():
        rows = np.frombuffer(b"".join(found[name] for name in names), np.uint8).reshape(-1, record)
        rows = rows[tfds_order(split, len(rows))]
        images = rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        splits[split] = Part(np.ascontiguousarray(images), rows[:, label_bytes - 1].astype(np.int64))
    return splits


def idx(packed: bytes) -> UInt8[np.ndarray, "*_"]:
    """The array of a gzipped IDX file of bytes: two zeros, type 8, the number of axes, their big-endian lengths, the values."""
    content = gzip.decompress(packed)
    zeros, kind, axes = struct.unpack_from(">HBB", content)
    if (zeros, kind) != (0, 8):
        raise ValueError("no IDX file of bytes")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def mnist(paths: dict[str, Path]) -> dict[str, Part]:
    """MNIST's four files of gzipped IDX."""
    splits = {}
    for split, name in (("train", "train"), ("test", "t10k")):
        images, labels = (idx(paths[f"{name}-{kind}-ubyte.gz"].read_bytes()) for kind in ("images-idx3", "labels-idx1"))
        splits[split] = _in_tfds_order(split, images, labels)
    return splits


def emnist(paths: dict[str, Path]) -> dict[str, Part]:
    """EMNIST by class: IDX files in a zip, whose images have rows and columns exchanged and are turned upright."""
    splits = {}
    with zipfile.ZipFile(paths["gzip.zip"]) as archive:
        for split in ("train", "test"):
            name = f"gzip/emnist-byclass-{split}"
            images, labels = (idx(archive.read(f"{name}-{kind}-ubyte.gz")) for kind in ("images-idx3", "labels-idx1"))
            splits[split] = _in_tfds_order(split, images.swapaxes(1, 2), labels)
    return splits


def svhn(paths: dict[str, Path]) -> dict[str, Part]:
    """SVHN's MATLAB files: X [32, 32, 3, N], y [N, 1], where 10 is the digit 0; `extra` is added to the training examples."""
    import scipy.io

    def read(split: str) -> Part:
        arrays = scipy.io.loadmat(paths[f"{split}_32x32.mat"], variable_names=["X", "y"])
        labels = arrays["y"].reshape(-1).astype(np.int64) % 10
        return _in_tfds_order(split, arrays["X"].transpose(3, 0, 1, 2), labels)

    splits = {"train": read("train"), "test": read("test")}
    if "extra_32x32.mat" in paths:
        splits["train"] = Part(*(np.concatenate(pair) for pair in zip(splits["train"][:2], read("extra")[:2], strict=True)))
    return splits


def cinic10(paths: dict[str, Path]) -> dict[str, Part]:
    """CINIC-10's archive of PNGs: as `folders` reads the unpacked folder, in its order."""
    found: dict[str, list[tuple[str, str, np.ndarray]]] = {split: [] for split in ("train", "valid", "test")}
    with tarfile.open(paths["CINIC-10.tar.gz"], "r|gz") as archive:
        for member in bar(archive, "reading CINIC-10", total=270_000, unit="files"):
            path = re.fullmatch(r"(?:.*/)?(train|valid|test)/([^/.][^/]*)/([^/.][^/]*\.png)", member.name)
            if path is not None and member.isfile() and (content := archive.extractfile(member)):
                found[path[1]].append((path[2], path[3], decode(content.read(), (32, 32, 3))))
    classes = sorted({label for label, _, _ in found["train"]})
    splits = {}
    for split, examples in found.items():
        examples.sort(key=lambda example: example[:2])
        labels = np.array([classes.index(label) for label, _, _ in examples], np.int64)
        splits[VALID if split == "valid" else split] = Part(np.stack([image for _, _, image in examples]), labels)
    return splits


def _in_tfds_order(split: str, images: UInt8[np.ndarray, "*_"], labels: np.ndarray) -> Part:
    order = tfds_order(split, len(images))
    return Part(np.ascontiguousarray(images[order]), labels[order].astype(np.int64))


_READERS: dict[str, Reader] = {
    "cifar10": functools.partial(
        cifar, files={"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}, label_bytes=1
    ),
    "cifar100": functools.partial(cifar, files={"train": ["train.bin"], "test": ["test.bin"]}, label_bytes=2),
    "mnist": mnist, "fashion_mnist": mnist, "emnist/byclass": emnist, "svhn_cropped": svhn, "svhn_cropped/extra": svhn,
    "cinic10": cinic10,
}  # fmt: skip

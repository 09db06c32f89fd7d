"""Datasets packed as their authors pack them, in their order, and entries of a catalog for them."""

import gzip
import hashlib
import io
import struct
import tarfile
import zipfile

import numpy as np
import scipy.io

from fedjax_ssl.data.catalog import ORIGINALS

LEVEL = 1  # of compression: quick


def idx(array):
    return gzip.compress(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes(), LEVEL)


def tar_gz(members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=LEVEL) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def cifar(folder, parts, coarse=False):
    """`cifar-10-batches-bin/data_batch_1.bin` and so on: labels, then channels first."""
    members = {f"{folder}/readme.html": b"<html>"}
    for name, (images, labels) in parts.items():
        rows = [labels[:, None] // 5] if coarse else []
        rows += [labels[:, None], images.transpose(0, 3, 1, 2).reshape(len(images), -1)]
        members[f"{folder}/{name}.bin"] = np.concatenate(rows, 1).astype(np.uint8).tobytes()
    return tar_gz(members)


def cifar10(train, test):
    fifths = zip(np.array_split(train[0], 5), np.array_split(train[1], 5), strict=True)
    parts = {f"data_batch_{i}": part for i, part in enumerate(fifths, 1)} | {"test_batch": test}
    return {"cifar-10-binary.tar.gz": cifar("cifar-10-batches-bin", parts)}


def cifar100(train, test):
    return {"cifar-100-binary.tar.gz": cifar("cifar-100-binary", {"train": train, "test": test}, coarse=True)}


def mnist(train, test):
    files = {}
    for name, (images, labels) in {"train": train, "t10k": test}.items():
        files[f"{name}-images-idx3-ubyte.gz"] = idx(images.squeeze(-1))
        files[f"{name}-labels-idx1-ubyte.gz"] = idx(labels.astype(np.uint8))
    return files


def emnist(train, test):
    """As stored: rows and columns exchanged."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, (images, labels) in {"train": train, "test": test}.items():
            archive.writestr(f"gzip/emnist-byclass-{name}-images-idx3-ubyte.gz", idx(images.squeeze(-1)))
            archive.writestr(f"gzip/emnist-byclass-{name}-labels-idx1-ubyte.gz", idx(labels.astype(np.uint8)))
    return {"gzip.zip": packed.getvalue()}


def svhn(train, test, extra=None):
    files = {}
    for name, part in {"train": train, "test": test, "extra": extra}.items():
        if part is not None:
            packed = io.BytesIO()
            labels = np.where(part[1] == 0, 10, part[1]).astype(np.uint8)[:, None]
            scipy.io.savemat(packed, {"X": part[0].transpose(1, 2, 3, 0), "y": labels}, do_compression=True)
            files[f"{name}_32x32.mat"] = packed.getvalue()
    return files


def cinic10(folder):
    """The folder's files, and what else the archive holds."""
    members = {"README": b"", "imagenet-contributors.csv": b"", "train/airplane/._a.png": b"system"}
    paths = sorted(folder.rglob("*.png"), key=lambda path: hashlib.md5(str(path).encode()).digest())
    return {"CINIC-10.tar.gz": tar_gz(members | {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})}


def serve(server, name, files):
    """Puts a dataset's files where a server has them, and their sizes and checksums into the catalog; its entries."""
    place = server.folder / name.partition("/")[0]
    place.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (place / file).write_bytes(content)
    made = []
    for file in ORIGINALS[name]:
        algorithm, content = file.checksum.partition(":")[0], files[file.name]
        checksum = f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"
        made.append(file._replace(size=len(content), checksum=checksum, publisher="a test"))
    server.patch.setitem(ORIGINALS, name, made)
    return made

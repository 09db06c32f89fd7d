"""Folders of images: `train|valid|test/<class>/*.png`."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import Int32, UInt8

from fedjax_ssl.data.sources.checks import Dataset, Part
from fedjax_ssl.data.sources.resplit import with_splits

_ENDINGS = (".png", ".jpg", ".jpeg")
_SPLITS = ("train", "valid", "test")
_CHUNK = 250  # images that a thread reads at a time


def load(name: str, path: str, resplit: Sequence[float] | None, seed: int) -> Dataset:
    """The dataset in a folder, see `sources.load`: classes are the sorted names of the folders of its first split.

    With `resplit`, all three splits are merged, and the folder may also contain the classes themselves.
    """
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"path={path}: no such folder: give the folder that holds train/ and test/")
    found = [split for split in _SPLITS if (root / split).is_dir()]
    if resplit is None:
        missing = [split for split in ("train", "test") if split not in found]
        if missing:
            raise FileNotFoundError(
                f"path={path} has no folder {missing[0]}/: needed are train/<class>/*.png and test/<class>/*.png; a folder of "
                "classes alone is split by data.resplit, such as (0.8, 0.05, 0.15)"
            )
        found = ["train", "test"]
    folders = {split: root / split for split in found} or {"all": root}
    classes = _classes(next(iter(folders.values())))
    files = {split: _files(folder, classes) for split, folder in folders.items()}
    shape = _decode(next(iter(files.values()))[0][0]).shape[:2]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        read = {split: _read(paths, shape, threads) for split, (paths, _) in files.items()}
    channels = 1 if all(gray for _, gray in read.values()) else 3
    splits = {split: Part(read[split][0][..., :channels], labels) for split, (_, labels) in files.items()}
    return with_splits(name, splits, resplit, seed)


def _classes(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ValueError(f"{folder} holds no folders: give one folder per class, with its images")
    return names


def _files(folder: Path, classes: list[str]) -> tuple[list[Path], Int32[np.ndarray, " N"]]:
    """The image files of a split, sorted by class and name, and their labels."""
    other = sorted(set(classes) ^ set(_classes(folder)))
    if other:
        where = "is missing from" if other[0] in classes else "is only in"
        raise ValueError(f"class folder {other[0]} {where} {folder}: give every split the same class folders")
    paths: list[Path] = []
    counts = []
    for name in classes:
        own = sorted(entry for entry in (folder / name).iterdir() if entry.suffix.lower() in _ENDINGS)
        if not own:
            raise ValueError(f"{folder / name} holds no image ({', '.join(_ENDINGS)}): add some, or remove the class")
        paths += own
        counts.append(len(own))
    return paths, np.repeat(np.arange(len(classes), dtype=np.int32), counts)


def _read(paths: list[Path], shape: tuple[int, ...], threads: ThreadPoolExecutor) -> tuple[UInt8[np.ndarray, "N H W 3"], bool]:
    """RGB images, and whether all were gray."""
    images = np.empty((len(paths), *shape, 3), np.uint8)

    def read(start: int) -> bool:
        gray = True
        for row in range(start, min(start + _CHUNK, len(paths))):
            image = _decode(paths[row])
            if image.shape[:2] != shape:
                (height, width), (first_height, first_width) = image.shape[:2], shape
                raise ValueError(
                    f"{paths[row]} has {width} x {height} pixels and others {first_width} x {first_height}: "
                    "resize all images to one size"
                )
            gray &= image.shape[2] == 1
            images[row] = image
        return gray

    return images, all(list(threads.map(read, range(0, len(paths), _CHUNK))))


def _decode(path: Path) -> UInt8[np.ndarray, "H W ch"]:
    """The gray or RGB image of a file; transparency is dropped."""
    image = None
    content = np.fromfile(path, np.uint8)
    if content.size:  # OpenCV raises an error of its own for an empty file
        image = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
    if image is None:
        raise ValueError(f"{path} cannot be decoded: replace it by an intact image, or remove it")
    if image.dtype != np.uint8:
        raise ValueError(f"{path} has {image.dtype} pixels: save it with 8 bits per channel")
    return image[..., None] if image.ndim == 2 else image[..., 2::-1]

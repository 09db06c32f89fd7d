"""Files of images: which there are in a folder, and their pixels, read in threads."""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import UInt8

from fedjax_ssl.data.bars import bar

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
_SYSTEM = ("thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin")
"""What systems leave in folders; names that begin with a dot (`._*`, `.DS_Store`, `.ipynb_checkpoints`) are such as well."""
_EXIF = (b"Exif\0\0", b"eXIf", b"EXIF")  # what marks it in JPEG, PNG and WebP files; OpenCV always turns TIFF upright
_CHUNK = 250  # images that a thread reads at a time


class Listing(NamedTuple):
    """The folders, image files and other files in a folder, each sorted by name, without what systems leave there."""

    folders: list[Path]
    images: list[Path]
    others: list[Path]


def listing(folder: Path) -> Listing:
    """What a folder holds."""
    found = Listing([], [], [])
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith(".") or entry.name.lower() in _SYSTEM:
                continue
            is_image = entry.name.lower().endswith(ENDINGS)
            (found.folders if entry.is_dir() else found.images if is_image else found.others).append(folder / entry.name)
    return found


def below(folder: Path) -> Listing:
    """The image files and other files in a folder and all folders in it."""
    own = listing(folder)
    inner = [below(inside) for inside in own.folders]
    images, others = ([path for one in (own, *inner) for path in one[kind]] for kind in (1, 2))
    return Listing([], images, others)


def none_in(folder: Path, found: Listing) -> str:
    """What an error says of a folder without images."""
    others = [*found.folders, *found.others]
    such = f", but {len(others)} others, such as {others[0].name}" if others else ""
    return f"{folder} holds no image ({', '.join(ENDINGS)}){such}"


def passed_over(paths: Sequence[Path]) -> str:
    """One line about files, and folders, that are not read."""
    kinds = Counter("folder" if path.is_dir() else path.suffix.lower() or "no suffix" for path in paths)
    counts = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common(5))
    more = ", ..." if len(kinds) > 5 else ""
    return (
        f"{len(paths)} files or folders are passed over ({counts}{more}; first: {paths[0]}): "
        f"images are {', '.join(ENDINGS)}; convert the others, or remove them"
    )


class Read(NamedTuple):
    """RGB images, how many of the files were not gray, and how many had transparent pixels."""

    images: UInt8[np.ndarray, "N H W 3"]
    colored: int
    transparent: int


def read(paths: Sequence[Path], shape: tuple[int, ...], threads: ThreadPoolExecutor) -> Read:
    """The images of files, all of height and width `shape`; ValueError names a file that has another size or is damaged."""
    images = np.empty((len(paths), *shape, 3), np.uint8)

    def fill(start: int) -> tuple[int, int]:
        colored = transparent = 0
        for row in range(start, min(start + _CHUNK, len(paths))):
            image, has_transparency = decode(paths[row])
            if image.shape[:2] != shape:
                (height, width), (first_height, first_width) = image.shape[:2], shape
                raise ValueError(
                    f"{paths[row]} has {width} x {height} pixels and others {first_width} x {first_height}: "
                    "resize all images to one size"
                )
            colored += image.shape[2] == 3
            transparent += has_transparency
            images[row] = image
        return colored, transparent

    starts = range(0, len(paths), _CHUNK)
    counts = list(bar(threads.map(fill, starts), "reading images", total=len(starts), unit="images", each=_CHUNK))
    return Read(images, sum(colored for colored, _ in counts), sum(transparent for _, transparent in counts))


def decode(path: Path) -> tuple[UInt8[np.ndarray, "H W ch"], bool]:
    """The gray or RGB image of a file, upright as EXIF has it, and whether it had transparent pixels, which become opaque."""
    image = None
    content = np.fromfile(path, np.uint8)
    if content.size:  # OpenCV raises an error of its own for an empty file
        image = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
    if image is None:
        raise ValueError(f"{path} cannot be decoded: replace it by an intact image, or remove it")
    if image.dtype != np.uint8:
        raise ValueError(f"{path} has {image.dtype} pixels: save it with 8 bits per channel")
    has_transparency = image.ndim == 3 and image.shape[2] == 4 and bool(np.any(image[..., 3] < 255))
    encoded = content.tobytes()
    if any(mark in encoded for mark in _EXIF):
        upright = cv2.imdecode(content, cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH)
        image = image if upright is None else upright
    return image[..., None] if image.ndim == 2 else image[..., 2::-1], has_transparency

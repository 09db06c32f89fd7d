"""Files of images: which there are in a folder, and their pixels, read in threads."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8

from fedjax_ssl.data.bars import bar
from fedjax_ssl.files import regular

os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(2**26))  # of 2**30, which a few bytes can claim; read at the import
import cv2

GRAY, RGB = cv2.IMREAD_GRAYSCALE, cv2.IMREAD_COLOR_RGB
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
            if entry.is_symlink():
                _check_link(folder, folder / entry.name)
            is_image = entry.name.lower().endswith(ENDINGS)
            (found.folders if entry.is_dir() else found.images if is_image else found.others).append(folder / entry.name)
    return found


def _check_link(folder: Path, link: Path) -> None:
    """Raises ValueError for a link in a folder that leads nowhere, or to a folder around it."""
    if not link.exists():
        raise ValueError(f"{link} is a link to nothing: remove it, or put back what it names")
    if folder.resolve().is_relative_to(link.resolve()):
        raise ValueError(f"{link} is a link to a folder that it lies in: remove it")


def elsewhere(root: Path, paths: Sequence[Path]) -> list[Path]:
    """Those of the files in a folder that lie elsewhere, behind links."""
    real, parents = root.resolve(), {path.parent: path.parent.resolve() for path in paths}
    return [path for path in paths if not (path.resolve() if path.is_symlink() else parents[path.parent]).is_relative_to(real)]


def below(folder: Path, around: frozenset[Path] = frozenset()) -> Listing:
    """The image files and other files in a folder and all folders in it; `around` are the folders that it lies in."""
    if (real := folder.resolve()) in around:
        raise ValueError(f"{folder} is a link to a folder that it lies in: remove it")
    own = listing(folder)
    inner = [below(inside, around | {real}) for inside in own.folders]
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


def decoded(content: UInt8[np.ndarray, " N"], flag: int) -> Shaped[np.ndarray, "..."] | None:
    """OpenCV's image of an encoded one; None if it is damaged, empty, or of more than 2**26 pixels.

    ValueError where there are several, as pages of a TIFF or frames of an animation, of which OpenCV takes the first.
    """
    try:
        _, found = cv2.imdecodemulti(content, flag, range=(0, 2))
    except (cv2.error, MemoryError):
        return None
    if len(found) > 1:
        raise ValueError("it has several pages or frames, and an example is one image: save those that are meant one by one")
    return found[0] if found else None


Decoded = tuple[UInt8[np.ndarray, "H W ch"], bool]
Decode = Callable[[Any], Decoded]


class Read(NamedTuple):
    """RGB images, how many of the files were not gray, and how many had transparent pixels."""

    images: UInt8[np.ndarray, "N H W 3"]
    colored: int
    transparent: int


def read(items: Sequence[Any], shape: tuple[int, ...], threads: ThreadPoolExecutor, decode: Decode | None = None) -> Read:
    """The images of files, all of height and width `shape`; ValueError names a file that has another size or is damaged.

    With `decode` the items are what this function takes.
    """
    images = np.empty((len(items), *shape, 3), np.uint8)
    decode = decode or of_file

    def fill(start: int) -> tuple[int, int]:
        colored = transparent = 0
        for row in range(start, min(start + _CHUNK, len(items))):
            image, has_transparency = decode(items[row])
            if image.shape[:2] != shape:
                (height, width), (first_height, first_width) = image.shape[:2], shape
                raise ValueError(
                    f"{_named(items[row])} has {width} x {height} pixels and others {first_width} x {first_height}: "
                    "resize all images to one size"
                )
            colored += image.shape[2] == 3
            transparent += has_transparency
            images[row] = image
        return colored, transparent

    starts = range(0, len(items), _CHUNK)
    counts = list(bar(threads.map(fill, starts), "reading images", total=len(starts), unit="images", each=_CHUNK))
    return Read(images, sum(colored for colored, _ in counts), sum(transparent for _, transparent in counts))


def _named(item: Any) -> str:
    """What an error calls an item: a path, or the split and the row of a table."""
    return f"{item[0]}[{item[-1]}]" if isinstance(item, tuple) else str(item)


def of_file(path: Path) -> Decoded:
    """The image of a file, see `upright`."""
    return upright(np.fromfile(regular(path), np.uint8), str(path))


def upright(content: UInt8[np.ndarray, " N"], path: str) -> Decoded:
    """The gray or RGB image of a file's bytes, upright as EXIF has it, and whether it had transparent pixels.

    These become opaque. Errors call it `path`.
    """
    try:
        image = decoded(content, cv2.IMREAD_UNCHANGED)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if image is None:
        raise ValueError(f"{path} cannot be decoded: replace it by an intact one (of at most 67 million pixels), or remove it")
    if image.dtype != np.uint8:
        raise ValueError(f"{path} has {image.dtype} pixels: save it with 8 bits per channel")
    has_transparency = image.ndim == 3 and image.shape[2] == 4 and bool(np.any(image[..., 3] < 255))
    encoded = content.tobytes()
    if any(mark in encoded for mark in _EXIF):
        upright = decoded(content, cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH)
        image = image if upright is None else upright
    return image[..., None] if image.ndim == 2 else image[..., 2::-1], has_transparency

"""Folders of images: `train|valid|test/<class>/*.png`, or `train/*.png` with the labels in `train.csv`.

In both forms `train.csv` may say which client each image belongs to.
"""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from fedjax_ssl.data.sources import images
from fedjax_ssl.data.sources.checks import Dataset, Part, names_of
from fedjax_ssl.data.sources.labels import clients_of_splits, numbered
from fedjax_ssl.data.sources.resplit import VALID, Splits, with_splits
from fedjax_ssl.data.sources.tables import columns, rows_of
from fedjax_ssl.data.sources.values import UNLABELED, from_text

_log = logging.getLogger(__name__)
_SPLITS = {"train": ("train",), VALID: ("valid", VALID, "validation"), "test": ("test",)}
_UNLABELED = "unlabeled"  # the folder of images whose class nobody knows
_NEEDED = (
    "needed are train/<class>/*.png and test/<class>/*.png, or train/*.png with train.csv, likewise test; a folder of classes, "
    "or of images with labels.csv, alone is split by data.resplit, such as (0.8, 0.05, 0.15)"
)


class Files(NamedTuple):
    """Image files, their labels, the ids of the clients that they belong to (or None), and what else is in their folders."""

    paths: list[Path]
    labels: Shaped[np.ndarray, " N"]
    clients: list[str] | None
    others: list[Path]


def load(name: str, path: str, how: Splits, renumber: bool) -> Dataset:
    """The dataset in a folder, see `sources.load`: classes are the sorted names of the folders of its first split.

    With `how.resplit`, all three splits are merged, and the folder may also contain the classes, or the images, themselves.
    """
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"path={path}: no such folder: give the folder that holds train/ and test/")
    found = _split_folders(root)
    if how.resplit is None:
        missing = [split for split in ("train", "test") if split not in found]
        if missing:
            has = ", ".join(one.name for one in images.listing(root).folders[:9] if one not in found.values())
            raise FileNotFoundError(f"path={path} has no folder {missing[0]}/{has and f', but {has}'}: {_NEEDED}")
        found = {split: found[split] for split in how.names if split in found}
    files, classes = _files(root, found or {"all": _whole(root)})
    first = next(iter(files))
    if (root / _UNLABELED).is_dir():
        files[first] = _joined(files[first], _unlabeled(root / _UNLABELED))
    others = [path for one in files.values() for path in one.others]
    if others:
        _log.warning("%s: %s", path, images.passed_over(others))
    if linked := images.elsewhere(root, [path for one in files.values() for path in one.paths]):
        _log.warning(
            "%s: %d images lie elsewhere, and are read through links (first: %s, at %s): remove links that are not meant",
            *(path, len(linked), linked[0], linked[0].resolve()),
        )
    read = _read(name, path, files, merged=how.resplit is not None)
    parts = {split: part._replace(origins=_named(root, files[split])) for split, part in read.items()}
    renumber = renumber and not classes  # those of folders have their numbers
    return with_splits(name, parts, how, renumber=renumber, classes=classes)


def _named(root: Path, files: Files) -> Shaped[np.ndarray, " N"]:
    """The files' paths below the folder, as texts."""
    return np.array([str(path.relative_to(root)) for path in files.paths])


def test_part(path: str) -> tuple[Part, list[str], list[str]]:
    """The test images of a folder, or all, where it is not split; the names of its folders of classes; and the images' paths.

    Labels are numbered as in `load`; images without folders of classes and without a table have none.
    """
    root = Path(path)
    folder, classes = _split_folders(root).get("test") or _whole(root), list[str]()
    inside = images.listing(folder)
    if inside.images and not inside.folders and not _tables(root, folder):
        files = {"test": Files(inside.images, np.full(len(inside.images), UNLABELED), None, inside.others)}
    else:
        files, classes = _files(root, {"test": folder})
    test = files["test"]._replace(clients=None)  # whose they are does not matter here
    return _read(path, path, {"test": test})["test"], classes, _named(root, test).tolist()


def _split_folders(root: Path) -> dict[str, Path]:
    """The folders of the splits that there are."""
    found = {}
    for split, names in _SPLITS.items():
        folders = [root / name for name in names if (root / name).is_dir()]
        if len(folders) > 1:
            raise ValueError(f"{root} holds {folders[0].name}/ and {folders[1].name}/: keep one of them")
        if folders:
            found[split] = folders[0]
    return found


def _whole(root: Path) -> Path:
    """The folder of all images, which is not yet split: the root, or the one folder beside `labels.csv`."""
    inside = [folder for folder in images.listing(root).folders if folder.name != _UNLABELED]
    return inside[0] if os.path.lexists(root / "labels.csv") and len(inside) == 1 else root


def _files(root: Path, folders: Mapping[str, Path]) -> tuple[dict[str, Files], list[str]]:
    """The files of each split, and the names of the classes, where these are folders."""
    tables = {split: _table(root, folder) for split, folder in folders.items()}
    if not any(tables.values()):
        classes = list(_classes(next(iter(folders.values())), root))
        _log.info("%s: classes are numbered: %s", root, numbered(classes))
        return {split: _of_classes(folder, root, classes) for split, folder in folders.items()}, classes
    files = {}
    for split, folder in folders.items():
        if (table := tables[split]) is None:
            if not (inside := images.listing(folder)).images:
                raise ValueError(f"{images.none_in(folder, inside)}: add some, or remove the folder")
            raise ValueError(f"{folder} has no table of labels, and others have: add {folder}.csv with the columns id,label")
        inside = images.listing(folder)
        rows = rows_of(table, inside.images, folder)
        others = [one for one in (*inside.folders, *inside.others) if one.suffix.lower() != ".csv"] if folder != root else []
        files[split] = Files(inside.images, from_text(f"{table}: labels", rows.labels), rows.clients, others)
    return files, []


def _tables(root: Path, folder: Path) -> list[Path]:
    """The CSV files that may have the labels of a folder of images."""
    places = [root / f"{folder.name}.csv"] if folder != root else []
    return [place for place in (*places, folder / "labels.csv", root / "labels.csv") if os.path.lexists(place)]


def _table(root: Path, folder: Path) -> Path | None:
    """The CSV file of a folder's labels, if it is a folder of images."""
    inside = images.listing(folder)
    if not inside.images:
        return None
    found = _tables(root, folder)
    if found and inside.folders and "label" not in columns(found[0]):
        return None  # it says whose the images of the class folders are
    if not found and not inside.folders:
        where = root / ("labels.csv" if folder == root else f"{folder.name}.csv")
        raise ValueError(
            f"{folder} holds images and no folders: give one folder per class, or {where} with the columns id,label"
        )
    return found[0] if found else None


def _classes(folder: Path, root: Path) -> dict[str, list[Path]]:
    """The folders in a folder, but `unlabeled` beside the splits, by their sorted names.

    Names that differ in Unicode's form alone, as a copy from another system has them, are one.
    """
    found: dict[str, list[Path]] = {}
    inside = [one for one in images.listing(folder).folders if not (one.name == _UNLABELED and folder == root)]
    for name, one in sorted(zip(names_of(str(folder), [one.name for one in inside]), inside, strict=True)):
        found.setdefault(name, []).append(one)
    if not found:
        raise ValueError(f"{folder} holds no folders: give one folder per class, with its images, or a table of labels")
    return found


def _of_classes(folder: Path, root: Path, classes: list[str]) -> Files:
    """The image files of a split, sorted by class and name, and their labels, a number for each class.

    Whose they are says a table beside it, with the split's name; of a folder of classes alone, `clients.csv` in it.
    """
    of_class = _classes(folder, root)
    if other := sorted(set(classes) ^ of_class.keys()):
        where = "is missing from" if other[0] in classes else "is only in"
        raise ValueError(f"class folder {other[0]} {where} {folder}: give every split the same class folders")
    beside = images.listing(folder)
    paths, others, labels = [], [*beside.images, *(beside.others if folder != root else [])], list[int]()
    for label, name in enumerate(classes):
        for one in of_class[name]:
            own = images.listing(one)
            if not own.images:
                raise ValueError(f"{images.none_in(one, own)}: add some, or remove the class")
            paths += own.images
            others += [*own.folders, *own.others]
            labels += [label] * len(own.images)
    table = root / ("clients.csv" if folder == root else f"{folder.name}.csv")
    ids = rows_of(table, paths, folder, needs_labels=False).clients if {"id", "client"} <= columns(table) else None
    return Files(paths, np.array(labels, np.int32), ids, others)


def _unlabeled(folder: Path) -> Files:
    """All images in a folder and those in it, without labels; whose they are says a table `unlabeled.csv` beside it."""
    inside = images.below(folder)
    if not inside.images:
        raise ValueError(f"{images.none_in(folder, inside)}: add some, or remove the folder")
    table = folder.with_suffix(".csv")
    ids = rows_of(table, inside.images, folder, needs_labels=False).clients if os.path.lexists(table) else None
    return Files(inside.images, np.full(len(inside.images), UNLABELED), ids, inside.others)


def _joined(labeled: Files, unlabeled: Files) -> Files:
    """Both as one; images without a client's id, where others have one, are nobody's."""
    ids = None
    if labeled.clients is not None or unlabeled.clients is not None:
        ids = [id for files in (labeled, unlabeled) for id in files.clients or [str(UNLABELED)] * len(files.paths)]
    text = labeled.labels.dtype.kind == "U"  # of a table
    labels = np.concatenate([labeled.labels, unlabeled.labels.astype(str) if text else unlabeled.labels])
    return Files(labeled.paths + unlabeled.paths, labels, ids, labeled.others + unlabeled.others)


def _read(name: str, path: str, files: Mapping[str, Files], *, merged: bool = False) -> dict[str, Part]:
    """The images of all files, gray if all are, with their labels and clients."""
    shape = images.of_file(next(iter(files.values())).paths[0])[0].shape[:2]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        read = {split: images.read(one.paths, shape, threads) for split, one in files.items()}
    if transparent := sum(one.transparent for one in read.values()):
        total = sum(len(one.images) for one in read.values())
        _log.warning(
            "%s: %d of %d images have transparent pixels, which become opaque: lay them on a background, unless that is right",
            *(path, transparent, total),
        )
    channels = 3 if any(one.colored for one in read.values()) else 1
    given = {split: one.clients for split, one in files.items() if one.clients is not None}
    sizes = {split: len(one.labels) for split, one in files.items()}
    ids = from_text(f"{name}: clients", [id for own in given.values() for id in own])  # all are integers, or all are texts
    apart = zip(given, np.split(ids, np.cumsum([len(own) for own in given.values()])[:-1]), strict=True) if given else ()
    whose = clients_of_splits(name, dict(apart), sizes, merged=merged)
    return {split: Part(read[split].images[..., :channels], one.labels, whose.get(split)) for split, one in files.items()}

"""Datasets of the Hugging Face Hub, and folders of parquet files: both as the package `datasets` reads them."""

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from jaxtyping import Shaped, UInt8

from fedjax_ssl.data import download
from fedjax_ssl.data.sources import images, labels
from fedjax_ssl.data.sources.checks import Dataset, Part, first_line
from fedjax_ssl.data.sources.resplit import VALID, Splits, with_splits
from fedjax_ssl.data.sources.values import from_text, understood
from fedjax_ssl.files import replacing

PREFIX = "hf/"
"""How the names of the Hub's datasets begin here: hf/OWNER/NAME, hf/OWNER/NAME/CONFIG or hf/OWNER/NAME@REVISION."""
LABELS = ("label", "labels", "fine_label", "class", "target")
_NAME = re.compile(r"hf/([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?:@([\w./-]+))?")
_SPLITS = {"train": ("train",), VALID: ("validation", "valid", "val", "dev"), "test": ("test",)}
_log = logging.getLogger(__name__)


class Columns(NamedTuple):
    """The names of the columns that are read (empty: the one that fits), and the side of resized images (0: their own)."""

    image: str = ""
    label: str = ""
    client: str = ""
    side: int = 0


def load(
    name: str, path: str | None, data_dir: str | None, how: Splits, renumber: bool, columns: Columns, fetch: bool
) -> Dataset:
    """The dataset `name` of the Hub, or the one in a folder of parquet files, see `sources.load`."""
    place = str(download.folder(data_dir) / "huggingface")
    given = _opened(name, path, place, fetch)
    splits = {split: given[own] for split, names in _SPLITS.items() for own in names if own in given}
    splits = {split: rows for split, rows in splits.items() if split in how.names}
    if not splits.keys() >= ({"train", "test"} if how.resplit is None else {"train"}):
        raise ValueError(
            f"{name} has splits {', '.join(given)}: needed are train and test; data.resplit, such as (0.8, 0.05, 0.15), makes "
            "a test part"
        )
    features = splits["train"].features
    image = _column(name, "image", columns.image, features, _is_image)
    label = _column(name, "label", columns.label, features, _is_label)
    if columns.client and columns.client not in features:
        raise ValueError(f"data.client_column: got {columns.client!r}, accepted: a column of {name}: {', '.join(features)}")
    pixels = _images(name, place, splits, image, columns.side)
    classes = getattr(features[label], "names", None) or ()
    whose: Mapping[str, np.ndarray] = {}
    if columns.client:
        ids = {split: _values(f"{name} {split}: clients", rows, columns.client) for split, rows in splits.items()}
        sizes = {split: len(rows) for split, rows in splits.items()}
        whose = labels.clients_of_splits(name, ids, sizes, merged=how.resplit is not None)
    parts = {
        split: Part(pixels[split], _values(f"{name} {split}: labels", rows, label), whose.get(split))
        for split, rows in splits.items()
    }
    return with_splits(name, parts, how, len(classes) or None, renumber=renumber and not classes, classes=classes)


def _is_image(_: str, kind: Any) -> bool:
    return type(kind).__name__ == "Image"


def _is_label(column: str, kind: Any) -> bool:
    return type(kind).__name__ == "ClassLabel" or column in LABELS


def _opened(name: str, path: str | None, place: str, fetch: bool) -> Mapping[str, Any]:
    """The splits of a dataset, as tables on the disk."""
    try:
        import datasets
        import huggingface_hub
    except ModuleNotFoundError:
        what = 'accepted: python -m pip install "fedjax-ssl[hf]"'
        raise ValueError(f"data.name: got {name} without the package datasets, {what}") from None
    errors = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)
    if path is not None:
        if not (folder := Path(path)).is_dir():
            raise FileNotFoundError(f"path={path}: no such folder: give a folder of parquet files, such as train.parquet")
        files = {split: list(map(str, found)) for split, found in _files(folder).items()}
        try:
            with _quiet(datasets):
                return datasets.load_dataset("parquet", data_files=files, cache_dir=place)
        except errors as error:
            raise ValueError(f"path={path} cannot be read ({first_line(error)}): write its parquet files anew") from error
    if (found := _NAME.fullmatch(name)) is None:
        raise ValueError(f"data.name: got {name}, accepted: hf/OWNER/NAME, hf/OWNER/NAME/CONFIG or hf/OWNER/NAME@REVISION")
    repository, config, revision = found.groups()
    if config or revision:  # a folder of its own, as what was fetched under another name must not be taken for it
        place = str(Path(place, re.sub(r"[^\w.-]", "_", f"{repository}@{config or ''}@{revision or ''}")))

    def opened() -> Mapping[str, Any]:
        with _quiet(datasets):
            return datasets.load_dataset(repository, config, revision=revision, cache_dir=place)

    if Path(place, repository.replace("/", "___")).is_dir():  # as it was fetched, whatever the Hub has now
        try:
            with mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
                return opened()
        except errors as error:
            if not fetch:
                raise FileNotFoundError(f"{name} in {place} cannot be read ({first_line(error)}): remove it there") from error
    if not fetch:
        raise FileNotFoundError(f"{name} is not in {place}: a run fetches it unless data.download=false")
    try:
        return opened()
    except errors as error:
        raise FileNotFoundError(f"{name} cannot be fetched ({first_line(error)}): look at its name and the network") from error


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Within it the package draws no bars and names its errors alone."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        datasets.enable_progress_bars()


def _files(folder: Path) -> dict[str, list[Path]]:
    """The parquet files in a folder, and those below it, by their splits: train-0.parquet, test.parquet or train/0.parquet."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.parquet")):
        words = re.split(r"[-_./]", str(path.relative_to(folder)))
        split = next((split for split, names in _SPLITS.items() if {*names} & {*words}), "train")
        found.setdefault("validation" if split == VALID else split, []).append(path)
    if not found:
        raise FileNotFoundError(f"path={folder} holds no parquet file: give train.parquet and test.parquet, or one of them")
    return found


def _column(name: str, what: str, given: str, features: Mapping[str, Any], fits: Callable[[str, Any], bool]) -> str:
    """The column that is given, or the only one that fits; ValueError where there is none, or there are several."""
    if given:
        if given not in features:
            raise ValueError(f"data.{what}_column: got {given!r}, accepted: a column of {name}: {', '.join(features)}")
        return given
    found = [key for key, kind in features.items() if fits(key, kind)]
    if len(found) != 1:
        got = f"{len(found)} columns that may be it ({', '.join(found)})" if found else "none that may be it"
        raise ValueError(f"data.{what}_column: {name} has {got}, accepted: one of its columns: {', '.join(features)}")
    return found[0]


def _values(what: str, rows: Any, column: str) -> Shaped[np.ndarray, " N"]:
    """A column of integers or texts, as `sources.values` understands them."""
    given = list(rows.select_columns(column)[column])
    if all(isinstance(value, str) for value in given):
        return from_text(what, given)
    return understood(what, np.array(given, object))


def _images(
    name: str, place: str, splits: Mapping[str, Any], column: str, side: int
) -> dict[str, UInt8[np.ndarray, "N H W ch"]]:
    """The images of all splits, gray if all are; kept decoded in `place`, as decoding large ones takes minutes."""
    import datasets

    found, paths = {}, {}
    for split, rows in splits.items():
        about = [name, split, [*splits], column, side, *map(_stamp, rows.cache_files)]
        key = hashlib.sha256(repr(about).encode()).hexdigest()[:32]
        paths[split] = Path(place, "decoded", f"{key}.npy")
        found[split] = _kept(paths[split], len(rows))
    kept = {split: array for split, array in found.items() if array is not None}
    if kept.keys() == found.keys():
        return kept
    encoded = {}
    for split, rows in splits.items():
        alone = rows.select_columns(column)
        is_image = _is_image(column, rows.features[column])
        encoded[split] = (alone.cast_column(column, datasets.Image(decode=False)) if is_image else alone)[column]
    read = _decoded(name, encoded, side)
    for split, array in read.items():
        paths[split].parent.mkdir(parents=True, exist_ok=True)
        with replacing(paths[split]) as file:
            np.save(file, array)
    return read


def _stamp(file: Mapping[str, str]) -> tuple[str, int, int]:
    """What says whether a file is the same as before."""
    about = os.stat(file["filename"])
    return file["filename"], about.st_size, about.st_mtime_ns


def _kept(path: Path, number: int) -> UInt8[np.ndarray, "N H W ch"] | None:
    """The array in a file; None where there is none, or it is damaged."""
    try:
        array = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    return array if array.dtype == np.uint8 and len(array) == number else None


def _decoded(name: str, encoded: Mapping[str, Sequence[Any]], side: int) -> dict[str, UInt8[np.ndarray, "N H W ch"]]:
    """The images of all splits, decoded in threads, and resized where `side` is not 0."""
    import cv2

    def of(item: tuple[str, Sequence[Any], int]) -> tuple[UInt8[np.ndarray, "H W ch"], bool]:
        split, column, row = item
        given = column[row]
        content = given.get("bytes") if isinstance(given, dict) else given
        if not isinstance(content, bytes):
            raise ValueError(f"{name} {split}[{row}] holds no image: give a column of encoded images as data.image_column")
        image, has_transparency = images.upright(np.frombuffer(content, np.uint8), f"{name} {split}[{row}]")
        if side and image.shape[:2] != (side, side):
            image = cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA).reshape(side, side, image.shape[2])
        return image, has_transparency

    first = next(iter(encoded))
    shape = of((first, encoded[first], 0))[0].shape[:2]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        items = {split: [(split, column, row) for row in range(len(column))] for split, column in encoded.items()}
        read = {split: images.read(own, shape, threads, of) for split, own in items.items()}
    if transparent := sum(one.transparent for one in read.values()):
        _log.warning("%s: %d images have transparent pixels, which become opaque", name, transparent)
    channels = 3 if any(one.colored for one in read.values()) else 1
    return {split: one.images[..., :channels] for split, one in read.items()}

"""CSV files beside a folder of images: a header `id,label`, `id,client` or with all three, and one row per image."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from fedjax_ssl import csv_files
from fedjax_ssl.data.sources.checks import first_line
from fedjax_ssl.data.sources.values import UNLABELED


class Rows(NamedTuple):
    """What a table says of each image: labels and clients as text; clients are None without such a column."""

    labels: list[str]
    clients: list[str] | None


def columns(table: Path) -> set[str]:
    """The names in a table's header; none where there is no table."""
    return set(_lines(table, errors="replace")[0][1]) if os.path.lexists(table) else set()


def rows_of(table: Path, images: Sequence[Path], folder: Path, *, needs_labels: bool = True) -> Rows:
    """The row of each image of `folder` in `table`, whose ids are file names or paths below it, with or without suffix.

    ValueError for an image without a row or with several, a row without an image or with several, or an empty cell.
    """
    rows = _read(table, ("id", "label") if needs_labels else ("id", "client"))
    number_of = _numbers(images, folder)
    found: dict[int, dict[str, str]] = {}
    missing = []
    for number, row in rows:
        where = f"{table}, row {number}"
        if (i := number_of.get(row["id"], len(images))) == len(images):
            missing.append(row["id"])
            continue
        if i < 0:
            how = "paths such as FOLDER/NAME.png" if any(one.parent != folder for one in images) else "names with suffix"
            raise ValueError(f"{where}: id {first_line(row['id'])} fits several images: give their {how}")
        if i in found:
            raise ValueError(f"{where}: id {first_line(row['id'])} occurs twice: give each image one row")
        if empty := [key for key, value in row.items() if not value]:
            hint = {"label": f", {UNLABELED} for an unlabeled image", "client": f", {UNLABELED} for nobody's"}.get(empty[0], "")
            raise ValueError(f"{where}: {empty[0]} is empty: fill it in{hint}")
        found[i] = row
    if missing:
        count = f"{len(missing)} of {len(rows)} ids have no image (first: {first_line(missing[0])})"
        raise ValueError(f"{table}: {count}: add the images to {folder}, or remove the rows")
    if len(found) < len(images):
        first = next(path for i, path in enumerate(images) if i not in found)
        count = f"{len(images) - len(found)} of {len(images)} images have no row (first: {first.relative_to(folder)})"
        others = f"with label {UNLABELED} for unlabeled ones" if needs_labels else f"with client {UNLABELED} for nobody's"
        raise ValueError(f"{table}: {count}: add rows, {others}, or move the images away")
    aligned = [found[i] for i in range(len(images))]
    labels = [row.get("label", str(UNLABELED)) for row in aligned]
    return Rows(labels, [row["client"] for row in aligned] if "client" in aligned[0] else None)


def _numbers(images: Sequence[Path], folder: Path) -> dict[str, int]:
    """The number of the image that an id means, -1 where it fits several; an exact name comes before one without its suffix."""
    numbers: dict[str, int] = {}
    for without_suffix in (False, True):
        names: dict[str, int] = {}
        for i, path in enumerate(images):
            path = path.with_suffix("") if without_suffix else path
            for id in {normalize("NFC", name) for name in (path.name, path.relative_to(folder).as_posix())}:
                names[id] = -1 if id in names else i
        numbers = names | numbers
    return numbers


def _lines(table: Path, errors: str = "strict") -> list[tuple[int, list[str]]]:
    """The numbers of a CSV file's lines and their cells in Unicode's NFC, the header first; ValueError where it is none."""
    lines = [(number, [normalize("NFC", cell) for cell in cells]) for number, cells in csv_files.lines(table, errors)]
    return lines or [(1, [])]


def _read(table: Path, needed: tuple[str, ...]) -> list[tuple[int, dict[str, str]]]:
    """The numbers of a CSV file's rows, and these with the columns `id`, `label` and `client` that it has."""
    (_, header), *lines = _lines(table)
    if not set(needed) <= set(header):
        got = first_line(", ".join(header)) or "nothing"
        raise ValueError(f"{table} has the columns {got}: needed is a header {','.join(needed)}, separated by commas")
    places = {key: header.index(key) for key in ("id", "label", "client") if key in header}
    if twice := [key for key in places if header.count(key) > 1]:
        raise ValueError(f"{table} has {header.count(twice[0])} columns {twice[0]}: rename those that are not meant")
    for number, line in lines:
        if len(line) != len(header):
            raise ValueError(
                f"{table}, row {number}: {len(line)} cells, and the header has {len(header)}: write one per column"
            )
    if not lines:
        raise ValueError(f"{table} has no rows: give one per image")
    return [(number, {key: line[place] for key, place in places.items()}) for number, line in lines]

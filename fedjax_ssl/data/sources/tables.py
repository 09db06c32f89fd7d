"""CSV files of labels beside a folder of images: a header `id,label`, perhaps with `client`, and one row per image."""

import csv
from pathlib import Path
from typing import NamedTuple

from fedjax_ssl.data.sources.checks import UNLABELED, first_line


class Rows(NamedTuple):
    """What a table says of each image: labels and clients as text; clients are None without such a column."""

    labels: list[str]
    clients: list[str] | None


def rows_of(table: Path, images: list[Path], *, needs_labels: bool = True) -> Rows:
    """The row of each image in `table`, whose ids are file names with or without suffix.

    Raises ValueError, which names the row or the image, where one has none or several, or a cell is empty.
    """
    rows = _read(table, ("id", "label") if needs_labels else ("id", "client"))
    by_name = {path.name: i for i, path in enumerate(images)}
    by_stem: dict[str, int] = {}
    for i, path in enumerate(images):
        by_stem[path.stem] = -1 if path.stem in by_stem else i
    found: dict[int, dict[str, str]] = {}
    missing = []
    for number, row in enumerate(rows, start=2):
        where = f"{table}, row {number}"
        i = by_name.get(row["id"], by_stem.get(row["id"], len(images)))
        if i == len(images):
            missing.append(row["id"])
            continue
        if i < 0:
            raise ValueError(f"{where}: id {first_line(row['id'])} fits several images: give their names with suffix")
        if i in found:
            raise ValueError(f"{where}: id {first_line(row['id'])} occurs twice: give each image one row")
        if empty := [key for key, value in row.items() if not value]:
            hint = f", {UNLABELED} for an unlabeled image" if empty[0] == "label" else ""
            raise ValueError(f"{where}: {empty[0]} is empty: fill it in{hint}")
        found[i] = row
    if missing:
        count = f"{len(missing)} of {len(rows)} ids have no image (first: {first_line(missing[0])})"
        raise ValueError(f"{table}: {count}: add the images to {images[0].parent}, or remove the rows")
    if len(found) < len(images):
        first = next(path for i, path in enumerate(images) if i not in found)
        count = f"{len(images) - len(found)} of {len(images)} images have no row (first: {first.name})"
        raise ValueError(f"{table}: {count}: add rows, with label {UNLABELED} for unlabeled ones, or move the images away")
    aligned = [found[i] for i in range(len(images))]
    labels = [row.get("label", str(UNLABELED)) for row in aligned]
    return Rows(labels, [row["client"] for row in aligned] if "client" in aligned[0] else None)


def _read(table: Path, needed: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a CSV file, with the columns `id`, `label` and `client` that it has."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file) if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{table} is not a CSV file in UTF-8 ({first_line(error)}): write it anew") from error
    header, *lines = lines or [[]]
    if not set(needed) <= set(header):
        got = first_line(", ".join(header)) or "nothing"
        raise ValueError(f"{table} has the columns {got}: needed is a header {','.join(needed)}, separated by commas")
    for number, line in enumerate(lines, start=2):
        if len(line) != len(header):
            raise ValueError(
                f"{table}, row {number}: {len(line)} cells, and the header has {len(header)}: write one per column"
            )
    if not lines:
        raise ValueError(f"{table} has no rows: give one per image")
    columns = {key: header.index(key) for key in ("id", "label", "client") if key in header}
    return [{key: line[column] for key, column in columns.items()} for line in lines]

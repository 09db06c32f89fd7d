"""CSV files: the one way in which the package reads and writes them."""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from typing import Any

from fedjax_ssl.files import regular

_MARK = "\ufeff"  # the byte order mark that Excel puts in front; where files were joined, one may be inside
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def lines(path: str | os.PathLike[str], errors: str = "strict") -> list[tuple[int, list[str]]]:
    """The cells of each line that is not empty, without spaces around them, with the line's number; the header is a line.

    `errors` is what `open` does with what is not UTF-8. Raises ValueError where it is no regular file, or no CSV file in UTF-8,
    and OSError where it cannot be read.
    """
    try:
        with regular(path).open(newline="", encoding="utf-8-sig", errors=errors) as file:
            reader = csv.reader(line.removeprefix(_MARK) for line in file)
            return [(reader.line_num, [cell.strip() for cell in line]) for line in reader if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8 ({error}): write it anew") from error


def written(rows: Iterable[Sequence[Any]]) -> str:
    """The rows as CSV. A text that a spreadsheet would take for a formula, and run, gets an apostrophe in front."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([_harmless(cell) for cell in row] for row in rows)
    return stream.getvalue()


def _harmless(cell: Any) -> Any:
    if not isinstance(cell, str) or not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell

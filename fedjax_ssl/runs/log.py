"""The log of a run's rounds, `metrics.jsonl`, which is read with suspicion: damage is never taken for good."""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from fedjax_ssl.files import DamagedError, content_of, make_folder, naming, plain, replacing, signed, sync, verified


class MetricsLog:
    """`<workdir>/metrics.jsonl`: one JSON object per finished round, on disk before `append` returns; NaN becomes null.

    Rounds are 1, 2, 3 ... without gaps, and each row ends with a checksum of its own.
    """

    def __init__(self, workdir: str | os.PathLike[str], begins: bytes = b""):
        self.path = pathlib.Path(workdir) / "metrics.jsonl"
        self.begins = begins  # what a digest is of before the first row: of which run it is
        self._hash: Any = None  # of all lines, once it is known

    def append(self, row: Mapping[str, object]) -> None:
        """Adds a row: flat keys to numbers (Python, NumPy or jax scalars); ValueError if `round` is no int."""
        row = plain(row)
        if type(row.get("round")) is not int:
            raise ValueError(f"a row of {self.path.name} needs an integer under 'round'; got the keys {sorted(row)}")
        make_folder(self.path.parent)
        line, is_new = _line({"round": row["round"], **row}), not self.path.exists()
        with naming(self.path), self.path.open("ab") as file:
            file.write(line)
            file.flush()
            sync(file.fileno())
        if is_new:
            sync(self.path.parent)
        if self._hash is not None:
            self._hash.update(line)

    def rows(self) -> list[dict[str, Any]]:
        """All rows, oldest first, without a last one that a killed process cut; DamagedError names a damaged or missing one."""
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(complete_lines(self.path), start=1):
            try:
                row = read_row(line)
                if row["round"] != number:
                    raise ValueError(f"round {row['round']} is in its place")
            except ValueError as error:
                raise DamagedError(f"{self.path}: round {number}", error) from None
            rows.append(row)
        return rows

    def digest(self, round: int | None = None) -> str:
        """A digest of all rows, or of those up to `round`, which tells this log from another run's."""
        if round is None and self._hash is not None:
            return str(self._hash.hexdigest())
        lines = (line + b"\n" for line in complete_lines(self.path)[:round])
        found = hashlib.blake2b(b"".join([self.begins, *lines]), digest_size=16)
        self._hash = found if round is None else self._hash
        return found.hexdigest()

    def truncate(self, round: int) -> None:
        """Removes the rows after `round`, which a run that resumes there writes again, and what a killed process left.

        DamagedError where a row is damaged; nothing is removed then.
        """
        content, self._hash = b"".join(map(_line, self.rows()[:round])), None
        if self.path.exists() and self.path.read_bytes() != content:
            with replacing(self.path) as file:
                file.write(content)


def complete_lines(path: pathlib.Path) -> list[bytes]:
    """The lines of a log, without a last one that has no newline, as a kill or a power cut while it was written leaves it."""
    *lines, torn = (content_of(path) if path.exists() else b"").split(b"\n")
    with contextlib.suppress(ValueError):
        read_row(torn[:-1])
        if not torn.endswith(b"\0"):  # a power cut may leave zeros
            return [*lines, torn]  # a whole row, whose newline became something else
    return lines


def read_row(line: bytes) -> dict[str, Any]:
    """The row in a line of a log; ValueError where it is not, byte for byte, what was written."""
    row = verified(line + b"\n", _line)
    if type(row.get("round")) is not int:
        raise ValueError("it has no round")
    return row


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(signed(row), allow_nan=False).encode() + b"\n"

"""What each client of a recorded round did, in files: `<workdir>/clients/round_<number>.npz`."""

import os
import pathlib
import re
from collections.abc import Mapping

import numpy as np

from fedjax_ssl.data.sources.npz import UNREADABLE
from fedjax_ssl.files import make_folder, regular, replacing

CLIENTS = "clients"
_NAME = "round_{:06d}.npz"


class ClientsLog:
    """The records of a run, one compressed file for each recorded round, whole or not there.

    A round that runs again after a kill replaces its file, so that no round is there twice.
    """

    def __init__(self, workdir: str | os.PathLike[str]):
        self.folder = pathlib.Path(workdir) / CLIENTS

    def append(self, round: int, columns: Mapping[str, np.ndarray]) -> None:
        """Writes a round's record: names -> arrays with leading axis M."""
        make_folder(self.folder)
        with replacing(self.folder / _NAME.format(round)) as file:
            np.savez_compressed(file, **columns)  # type: ignore[arg-type]

    def truncate(self, round: int) -> None:
        """Removes the records after `round`, which a run that resumes there makes again."""
        for number, path in self.files():
            if number > round:
                path.unlink()

    def read(self) -> dict[str, np.ndarray]:
        """All records: `round` int32 [T], and each name's array [T, M, ...]; empty where there is none.

        Raises ValueError for a damaged file, or one that another run's cohort wrote.
        """
        rounds: list[int] = []
        records: list[dict[str, np.ndarray]] = []
        for number, path in self.files():
            try:
                with np.load(regular(path)) as archive:
                    found = {name: archive[name] for name in archive.files}
            except UNREADABLE as error:
                raise ValueError(f"{path} cannot be read ({type(error).__name__}); remove it") from error
            if records and {n: x.shape for n, x in found.items()} != {n: x.shape for n, x in records[0].items()}:
                raise ValueError(f"{path} has other columns than round {rounds[0]}; remove it")
            rounds.append(number)
            records.append(found)
        if not records:
            return {}
        columns = {name: np.stack([record[name] for record in records]) for name in records[0]}
        return {"round": np.array(rounds, np.int32), **columns}

    def files(self) -> list[tuple[int, pathlib.Path]]:
        """The rounds that have a record, with their files, in order."""
        named = ((re.fullmatch(r"round_(\d+)\.npz", path.name), path) for path in self.folder.glob("round_*.npz"))
        return sorted((int(match[1]), path) for match, path in named if match)

"""Folders of runs that did not run."""

import pathlib

from fedjax_ssl.files import write_json
from fedjax_ssl.runs.log import MetricsLog


def write(folder: pathlib.Path, *, rounds: int = 3, summary: bool = True, **keys) -> pathlib.Path:
    """A run's folder by hand: what it logs does not matter here."""
    folder.mkdir(parents=True)
    config = {"method": {"name": "fl2"}, "data": {"name": "digits"}, "seed": 0, "rounds": 3}
    for key, value in keys.items():
        group, _, name = key.rpartition("__")
        (config.setdefault(group, {}) if group else config)[name] = value
    write_json(folder / "config.json", config)
    for number in range(1, rounds + 1):
        MetricsLog(folder).append({"round": number, "eval/accuracy": number / 10, "client/loss": 1.0})
    if summary:
        write_json(folder / "summary.json", {"rounds": rounds, "eval/accuracy": rounds / 10})
    return folder

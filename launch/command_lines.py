"""The command that makes a run, found from its config: a named config with what differs from it, or a config file."""

import pprint
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_ssl.experiment.files import plain
from fedjax_ssl.experiment.report.groups import Group, identity
from fedjax_ssl.experiment.report.runs import Run
from fedjax_ssl.experiment.runs import flattened

from . import command

MOST = 25
"""With more keys than these to set, a config file is easier to read."""
SEVERAL = ("seed", "seeds", "vary", "values")


def of_group(group: Group, folder: str, files: dict[str, bytes]) -> list[str]:
    """One command for each config of a group and all its seeds; `files` gets the config files in `folder` that they need."""
    kinds: dict[str, list[Run]] = {}
    for run in group.runs:
        kinds.setdefault(identity(run), []).append(run)
    lines = []
    for number, runs in enumerate(kinds.values(), start=1):
        base = named(runs[0])
        if base is None:
            name = f"config_{group.slug}{f'_{number}' if len(kinds) > 1 else ''}.py"
            files[name] = config_file(runs[0].tree).encode()
            base = [f"--config={folder}/{name}"]
        lines += [
            f"{command.program('run')} {shlex.join([*base, *seeds])}"
            for seeds in seed_arguments([run.config["seed"] for run in runs])
        ]
    return lines


def seed_arguments(numbers: Sequence[int]) -> Iterator[list[str]]:
    """The arguments of seeds: of those that follow each other in one command."""
    left = sorted(set(numbers))
    while left:
        many = next((i for i, seed in enumerate(left) if seed != left[0] + i), len(left))
        several = [f"--config.seeds={many}"] if many > 1 else []
        first = [f"--config.seed={left[0]}"] if left[0] or not several else []
        yield first + several
        left = left[many:]


def named(run: Run) -> list[str] | None:
    """The named config that is nearest to a run's, with the keys to set; None: none gives the run's config."""
    wanted = {key: value for key, value in plain(run.config).items() if key not in SEVERAL}
    found = []
    for file in _candidates(run.config["method.name"], run.config["data.name"]):
        given = _settings(file, {})
        differing = {key: command.as_text(value) for key, value in wanted.items() if given.get(key) != value}
        if given.keys() == wanted.keys() and len(differing) <= MOST and _settings(file, differing) == wanted:
            found.append([f"--config={file}", *(f"--config.{key}={text}" for key, text in differing.items())])
    return min(found, key=len, default=None)


def _settings(file: str, overrides: Mapping[str, str]) -> dict[str, Any]:
    """The keys, dotted, of a config with overrides, and the defaults of those that it lacks; empty: it is none."""
    from fedjax_ssl.experiment.settings import Settings

    try:
        flat = flattened(plain(Settings.from_dict(command.read(file, overrides).tree).to_dict()))
    except command.WRONG_INPUT:
        return {}
    return {key: value for key, value in flat.items() if key not in SEVERAL}


def _candidates(method: str, dataset: str) -> Iterator[str]:
    """Configs that may be a method's on a dataset."""
    yield f"digits:{method}"
    yield f"digits:{method},labels_at=clients"
    for stem in command.config_names():
        if stem.endswith(f"_{dataset}"):
            yield from (stem, f"{stem}:{method}", f"{stem}:paper,method={method}")


def config_file(tree: Mapping[str, Any]) -> str:
    """A config file with a run's own config, for one seed."""
    alone = {key: value for key, value in plain(tree).items() if key not in SEVERAL}
    shown = pprint.pformat(alone, width=120, sort_dicts=False)
    head = '"""A run\'s config, as its folder holds it."""'
    return f"{head}\n\nCONFIG = {shown}\n\n\ndef get_config(argument=None):\n    return CONFIG\n"

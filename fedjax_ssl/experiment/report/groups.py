"""Groups of runs that differ in their seeds alone, or that a config key puts together."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fedjax_ssl.experiment.report.runs import Run

METHOD, SEED = "method.name", "seed"
SHORT = {"method": METHOD, "dataset": "data.name", "model": "model.name"}
"""Short names of keys. The last part of a key is one, too, if no other key ends in it."""
NOT_COMPARED = (SEED, "seeds", "vary", "values", "checkpoint_every", "data.data_dir")
NOT_COMPARED_GROUPS = ("execution.", "diagnostics.")
"""Keys that do not change what an experiment is, and do not make groups."""


class Group(NamedTuple):
    """Runs with one label. `used` are those that its numbers come from, one for each seed: the finished ones, or, where none
    is finished, the unfinished ones.
    """

    label: str
    values: dict[str, Any]
    runs: tuple[Run, ...]
    used: tuple[Run, ...]

    @property
    def is_finished(self) -> bool:
        """Whether its numbers are those of finished runs."""
        return bool(self.used) and self.used[0].is_finished

    @property
    def slug(self) -> str:
        """The label as a part of a file's name or a link."""
        return slug(self.label)


class Grouped(NamedTuple):
    """Groups in the order of their values, the keys that make them, and lines about what does not fit together."""

    groups: tuple[Group, ...]
    keys: tuple[str, ...]
    notes: tuple[str, ...]


def slug(text: str) -> str:
    """A text as a part of a file's name or a link: letters, digits, points and hyphens."""
    return re.sub(r"[^\w.]+", "-", text).strip("-")


def full_key(name: str, runs: Sequence[Run]) -> str:
    """The config key with a name such as `method`, `num_labels` or `data.num_labels`; ValueError: it is none of the runs'."""
    known = sorted({key for run in runs for key in run.config})
    if name in known or name in SHORT:
        return SHORT.get(name, name)
    owners = [key for key in known if key.rpartition(".")[2] == name]
    if len(owners) == 1:
        return owners[0]
    near = owners or difflib.get_close_matches(name, known, 1) or difflib.get_close_matches(name, SHORT, 1)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise ValueError(f"--by: got {name}, accepted: a key of the runs' configs, such as method or data.num_labels{hint}")


def differing(runs: Iterable[Run]) -> list[str]:
    """The keys in which the configs of runs differ, of those that change the experiment."""
    configs = [run.config for run in runs]
    keys = sorted({key for config in configs for key in config if is_compared(key)})
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def is_compared(key: str) -> bool:
    """Whether a config key changes what an experiment is."""
    return key not in NOT_COMPARED and not key.startswith(NOT_COMPARED_GROUPS)


def identity(run: Run) -> str:
    """What a run's experiment is: the keys that are compared, with their values."""
    return repr([(key, value) for key, value in sorted(run.config.items()) if is_compared(key)])


def group(runs: Sequence[Run], by: Sequence[str] = ()) -> Grouped:
    """Groups runs by keys; without any by the method, and by what else differs between runs of one method."""
    keys = [full_key(name, runs) for name in by] or [METHOD]
    notes = []
    if not by:
        methods: dict[Any, list[Run]] = {}
        for run in runs:
            methods.setdefault(run.config[METHOD], []).append(run)
        keys += sorted({key for own in methods.values() for key in differing(own)})
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(repr([run.config.get(key) for key in keys]), []).append(run)
    shown = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1] or keys[:1]
    groups = []
    for own in members.values():
        values = {key: own[0].config[key] for key in keys if key in own[0].config}
        label = _label({key: values[key] for key in shown if key in values}) or "without " + ", ".join(shown)
        used, said = _used(label, own)
        notes += said
        if by and (mixed := differing(own)):
            notes.append(
                f"{label} puts runs together that differ in {', '.join(mixed)}: its mean and sd are over these as well"
            )
        groups.append(Group(label, values, tuple(own), used))
    groups.sort(key=lambda one: _order(one.label))
    return Grouped(tuple(groups), tuple(shown), (*_across(runs), *notes))


def _label(values: dict[str, Any]) -> str:
    """`fl2`, or `fl2, num_labels=10`."""
    words = [
        text_of(value) if key in SHORT.values() else f"{key.rpartition('.')[2]}={text_of(value)}"
        for key, value in values.items()
    ]
    return ", ".join(words)


def text_of(value: Any) -> str:
    """A config's value in a table or a label."""
    if isinstance(value, list | tuple):
        return ",".join(map(text_of, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def _order(label: str) -> list[tuple[int, float, str]]:
    """Sorts texts by the numbers in them: `labels=4` before `labels=40`."""
    parts = re.split(r"(\d+(?:\.\d+)?)", label)
    return [(1, 0.0, part) if i % 2 == 0 else (0, float(part), "") for i, part in enumerate(parts)]


def _used(label: str, runs: Sequence[Run]) -> tuple[tuple[Run, ...], list[str]]:
    """The runs that a group's numbers come from, and what is to be said of the others."""
    alive = [run for run in runs if not run.reason and run.rounds_done]
    chosen = [run for run in alive if run.is_finished] or alive
    used: dict[tuple[Any, str], Run] = {}
    notes = []
    for run in chosen:
        key = run.config[SEED], identity(run)  # with --by, two runs of a seed may be two experiments
        if key in used:
            notes.append(f"{run.name} is {label} with seed {run.config[SEED]} as {used[key].name} is: used once")
        else:
            used[key] = run
    if chosen and not chosen[0].is_finished:
        notes.append(f"{label}: no run is finished; its numbers are those of the rounds so far")
    return tuple(used.values()), notes


def _across(runs: Sequence[Run]) -> list[str]:
    """What runs differ in so that their numbers should not be compared without a thought."""
    notes = []
    for key, what in (("data.name", "datasets"), ("data.path", "data files"), ("rounds", "numbers of rounds")):
        values = sorted({text_of(run.config.get(key, "")) for run in runs}, key=_order)
        if len(values) > 1:
            notes.append(f"The runs have different {what}: {', '.join(values)}")
    for key, what in (("git_commit", "commits"), ("jax_version", "JAX versions"), ("device", "devices")):
        found = sorted({str(run.summary[key]) for run in runs if run.summary.get(key)})
        if len(found) > 1:
            shown = [value[:10] for value in found] if key == "git_commit" else found
            notes.append(f"The runs were made with different {what}: {', '.join(shown)}")
    return notes

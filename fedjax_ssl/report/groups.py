"""Groups of runs that differ in their seeds alone, or that a config key puts together."""

import difflib
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_ssl.experiment.expansion import CLIENT_FILES, ELSEWHERE
from fedjax_ssl.runs.reading import Run
from fedjax_ssl.runs.sweep import short

METHOD, SEED, DATASET, DATA_FILE = "method.name", "seed", "data.name", "data.path"
NAMES = {
    "fl2": "(FL)²", "semifl": "SemiFL", "fedmatch": "FedMatch", "fedcon": "FedCon", "fedsiam_pi": "FedSiam-Pi",
    "fedsiam_mt": "FedSiam-MT", "fedsiam_d": "FedSiam-D", "fedsem": "FedSem", "fedtrinet": "FedTriNet", "fedlabel": "FedLabel",
    "feddure": "FedDure", "fixmatch": "FixMatch", "uda": "UDA", "fedavg": "FedAvg", "fedavg_pp": "FedAvg++",
    "fedprox": "FedProx", "freematch": "FreeMatch", "sage": "SAGE", "cbafed": "CBAFed", "feddb": "FedDB",
    "rscfed": "RSCFed", "twinsight": "Twin-sight",
    "freematch_central": "FreeMatch (pooled)", "fixmatch_central": "FixMatch (pooled)",
}  # fmt: skip
"""The methods as their papers write them."""
BETWEEN = "(, |: )"  # parts of a label
SHORT = {"method": METHOD, "dataset": DATASET, "model": "model.name"}
"""Short names of keys. The last part of a key is one, too, if no other key ends in it."""
NOT_COMPARED = {SEED, "seeds", "vary", "values", "checkpoint_every", *ELSEWHERE} - {DATA_FILE}
NOT_COMPARED_GROUPS = ("execution.", "diagnostics.")
"""Keys that do not change what an experiment is, and do not make groups."""


class Shown(NamedTuple):
    """A group's name and its place in figures.

    `label` is its name, `figure` says which figures show it (empty: those of all groups), and `curve` is its name in their
    legends.
    """

    label: str
    figure: str
    curve: str


class Group(NamedTuple):
    """Runs of one kind. `used` are those that its numbers come from, one for each seed: the finished ones, or, where none
    is finished, the unfinished ones. `slug` is its part of files' names and links, which no other group has.
    """

    place: Shown
    runs: tuple[Run, ...]
    used: tuple[Run, ...]
    slug: str

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.place.label

    @property
    def is_finished(self) -> bool:
        """Whether its numbers are those of finished runs."""
        return bool(self.used) and self.used[0].is_finished

    def uses(self, run: Run) -> bool:
        """Whether the group's numbers come from a run, too."""
        return run.path in {one.path for one in self.used}


class Grouped(NamedTuple):
    """Groups in the order of a sweep or of their names, what tells them apart, and lines about what does not fit together."""

    groups: tuple[Group, ...]
    heading: str
    notes: tuple[str, ...]


def slug(text: str) -> str:
    """A text as a part of a file's name or a link: letters, digits, points and hyphens."""
    return re.sub(r"[^\w.]+", "-", text.replace("²", "2")).strip("-")


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


def differing(runs: Iterable[Run]) -> set[str]:
    """The keys whose values differ between the runs that read them."""
    configs = list(map(_with_files_anywhere, runs))
    keys = {key for config in configs for key in config}
    return {key for key in keys if len({repr(config[key]) for config in configs if key in config}) > 1}


def differing_within_methods(runs: Iterable[Run]) -> set[str]:
    """The keys in which runs of one method differ."""
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.config[METHOD], []).append(run)
    return {key for own in methods.values() for key in differing(own)}


def is_compared(key: str) -> bool:
    """Whether a config key changes what an experiment is."""
    return key not in NOT_COMPARED and not key.startswith(NOT_COMPARED_GROUPS)


def identity(run: Run) -> str:
    """What a run's experiment is: the keys that are compared, with their values."""
    own = _with_files_anywhere(run) | ({DATA_FILE: run.dataset} if run.dataset else {})
    return repr([(key, value) for key, value in sorted(own.items()) if is_compared(key)])


def _with_files_anywhere(run: Run) -> dict[str, Any]:
    """A run's config with names and digests of its files alone: the same file in another folder makes no other experiment."""
    keys = {DATA_FILE, *CLIENT_FILES, *run.files}
    names = {key: pathlib.PurePath(run.config.get(key) or "").name for key in keys}
    return run.config | {key: f"{name} {run.files.get(key, '')[:8]}".strip() for key, name in names.items()}


def with_data_named(runs: Sequence[Run]) -> list[Run]:
    """The runs with a name of their data as `data.path`: the same for one dataset, and different ones for several.

    It is the file's name, and, where that does not tell datasets of one `data.name` apart, the first digits of their digest.
    Runs without a digest keep their path.
    """
    names: dict[tuple[str, str], str] = {}  # the first one of each dataset
    for run in runs:
        path = pathlib.PurePath(run.config.get(DATA_FILE) or "")
        names.setdefault((run.config[DATASET], run.dataset), path.name)
    counts = Counter((kind, name) for (kind, _), name in names.items())

    def named(run: Run) -> Run:
        kind = run.config[DATASET]
        name = names[kind, run.dataset]
        word = f"{name} {run.dataset[:8]}".strip() if counts[kind, name] > 1 else name
        return run._replace(config=run.config | {DATA_FILE: word}) if run.dataset else run

    return list(map(named, runs))


def group(
    runs: Sequence[Run],
    by: Sequence[str] = (),
    places: Mapping[pathlib.Path, Shown] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Grouped:
    """Groups runs by keys; without any, runs of sweeps by their `places`, others by method and what else its runs differ in.

    `labels` are a reader's own, for a group's label or a method's name.
    """
    labels = labels or {}
    places = {} if by or places is None else places
    runs = with_data_named(runs)
    others = [run for run in runs if run.path not in places]
    keys = [full_key(name, runs) for name in by] or [METHOD, *sorted(filter(is_compared, differing_within_methods(others)))]
    shown = [key for key in keys if key in differing(others)] or keys[:1]
    members: dict[Shown, list[Run]] = {}
    for run in runs:
        members.setdefault(places.get(run.path) or _named(run, shown), []).append(run)
    order = list(places.values())
    ranked = sorted(members, key=lambda one: (order.index(one) if one in order else len(order), _order(one.label)))
    groups, notes, slugs, taken = list[Group](), _across(runs), Counter[str](), {one.label for one in members}
    parts = {part for one in members for part in (one.label, *re.split(BETWEEN, one.label))}
    notes += [f"--labels: no method or group is called {name}" for name in labels if name not in parts]
    words = {}
    for place in members:
        word = slug(place.label)
        slugs[word.lower()] += 1  # FedAvg and FedAvg++ have the same word
        words[place] = f"{word}-{n}" if (n := slugs[word.lower()]) > 1 else word
    for raw in ranked:
        own, place = members[raw], _relabeled(raw, labels, taken)
        taken.add(place.label)
        used, said = _used(place.label, own)
        notes += said
        if (by or len({run.dataset for run in own} - {""}) > 1) and (mixed := sorted(filter(is_compared, differing(own)))):
            notes.append(
                f"{place.label} puts runs together that differ in {', '.join(mixed)}: its mean and sd are over these as well"
            )
        groups.append(Group(place, tuple(own), used, words[raw]))
    heading = ", ".join("method" if key == METHOD else short(key, shown) for key in shown)
    return Grouped(tuple(groups), heading if others else "experiment", tuple(notes))


def _relabeled(place: Shown, labels: Mapping[str, str], taken: Iterable[str]) -> Shown:
    """The place with a reader's own label, or methods' names in it as papers write them; unchanged where one is `taken`."""
    names = {**NAMES, **labels}

    def renamed(label: str) -> str:
        return labels.get(label) or "".join(names.get(part, part) for part in re.split(BETWEEN, label))

    return place if (label := renamed(place.label)) in taken else place._replace(label=label, curve=renamed(place.curve))


def _named(run: Run, keys: Sequence[str]) -> Shown:
    """The place of a run that its values of keys name: `fl2`, or `fl2, num_labels=10`."""
    config = _with_files_anywhere(run)
    words = [
        text_of(config[key]) if key in SHORT.values() else f"{short(key, keys)}={text_of(config[key])}"
        for key in keys
        if key in run.config
    ]
    label = ", ".join(words) or f"without {', '.join(keys)}"
    return Shown(label, "", label)


def text_of(value: Any) -> str:
    """A config's value in a table or a label."""
    if isinstance(value, list | tuple):
        return ",".join(map(text_of, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value) or "none"


def _order(label: str) -> list[tuple[int, float, str]]:
    """Sorts texts by the numbers in them: `labels=4` before `labels=40`."""
    parts = re.split(r"(\d+(?:\.\d+)?)", label)
    return [(1, 0.0, part) if i % 2 == 0 else (0, float(part), "") for i, part in enumerate(parts)]


def _used(label: str, runs: Sequence[Run]) -> tuple[tuple[Run, ...], list[str]]:
    """The runs that a group's numbers come from, and what is to be said of the others."""
    alive = [run for run in runs if not run.reason and run.rounds_done]
    chosen = [run for run in alive if run.is_finished] or alive
    used: dict[tuple[Any, str, str], Run] = {}
    notes = []
    for run in chosen:
        key = run.config[SEED], identity(run), run.data  # with --by, two runs of a seed may be two experiments
        if key in used:
            notes.append(f"{run.name} is {label} with seed {run.config[SEED]} as {used[key].name} is: used once")
        else:
            used[key] = run
    if chosen and not chosen[0].is_finished:
        least = min(run.rounds_done for run in used.values())
        used = {key: run.up_to(least) for key, run in used.items()}
        notes.append(f"{label}: no run is finished; its numbers are those up to round {least}, which all have")
    return tuple(used.values()), notes


def _across(runs: Sequence[Run]) -> list[str]:
    """What runs differ in so that their numbers should not be compared without a thought."""
    notes = []
    for key, what in ((DATASET, "datasets"), (DATA_FILE, "data files"), ("rounds", "numbers of rounds")):
        values = sorted({text_of(run.config.get(key, "")) for run in runs}, key=_order)
        if len(values) > 1:
            notes.append(f"The runs have different {what}: {', '.join(values)}")
    for key, what in (("git_commit", "commits"), ("jax_version", "JAX versions"), ("device", "devices")):
        found = sorted({str(run.summary[key]) for run in runs if run.summary.get(key)})
        if len(found) > 1:
            shown = [value[:10] + value[40:] for value in found] if key == "git_commit" else found
            notes.append(f"The runs were made with different {what}: {', '.join(shown)}")
    return notes

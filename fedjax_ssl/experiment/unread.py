"""Settings that a run does not read.

Each field states the conditions under which it is read (`options.ReadWhere`); this module checks which of them hold for a run.
"""

from collections.abc import Iterator, Mapping, Sequence

from fedjax_ssl.data.partition import PARTITIONS
from fedjax_ssl.data.settings import DataSettings
from fedjax_ssl.data.sources import DIGITS, SYNTHETIC
from fedjax_ssl.experiment.expansion import flattened
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import VIEWS, Method
from fedjax_ssl.options import Is, ReadWhere, fields_of, is_group

Marks = list[dict[str, Is]]  # one of them has to hold, with all of its conditions

OF_PARTITIONS = ("alpha", "min_size", "shards_per_client", "classes_per_client")
"""The keys of `data` that are parameters of partitions."""

SAID: dict[str, str] = {
    "run.has_clients": "a method with clients",
    "run.has_client_data": "a method that reads the clients' data",
    "run.draws_labels_apart": "a method that reads the clients' data, and labels that are drawn before the split",
    "run.has_unlabeled_data": "a method that reads unlabeled data",
    "run.has_batch_norm": "a network with batch norm",
    "run.prepares": "a method whose server trains before round 1",
    "run.has_one_partition": (
        "a method that reads the clients' data, unless data.labeled_partition and data.unlabeled_partition both replace it"
    ),
    "run.reads_files": "data that are read from files",
    "run.has_columns": "data.name=parquet or hf/OWNER/NAME",
    **{f"run.has_{view}_views": f"a method that trains on {view} views" for view in VIEWS},
    **{
        f"run.partition_reads_{key}": f"a partition by {' or '.join(names)}"
        for key in OF_PARTITIONS
        if (names := [name for name, scheme in PARTITIONS.items() if key in scheme.parameters])
    },
}  # fmt: skip
"""The facts about a run, beside the keys of its config, that a condition may ask for, in words."""


def facts(settings: Settings, method: Method, *, has_batch_norm: bool) -> dict[str, bool]:
    """Which of the facts in SAID hold."""
    data, requires = settings.data, method.requires
    has_client_data = requires.clients or requires.next_cohort
    apart = (data.labeled_partition or data.partition, data.unlabeled_partition or data.partition)
    schemes = {*(apart if data.labels_at == "clients" else [data.partition])} if has_client_data else set()
    views = set(requires.views) | ({"labeled"} if data.labels_at == "server" else set())
    if "strong" in views or ("labeled" in views and data.labeled in ("default", data.weak)):  # strong views follow the weak one
        views.add("weak")
    found = {
        "run.has_clients": requires.clients,
        "run.has_client_data": has_client_data,
        "run.draws_labels_apart": has_client_data and not data.is_joint,
        "run.has_unlabeled_data": has_client_data or requires.pool,
        "run.has_batch_norm": has_batch_norm,
        "run.prepares": method.prepare is not Method._field_defaults["prepare"],
        "run.has_one_partition": has_client_data and data.partition in schemes,
        "run.reads_files": data.name not in (DIGITS, SYNTHETIC),
        "run.has_columns": data.name == "parquet" or data.name.startswith("hf/"),
    }
    found |= {f"run.has_{view}_views": view in views for view in VIEWS}
    for key in OF_PARTITIONS:
        found[f"run.partition_reads_{key}"] = any(key in PARTITIONS[scheme].parameters for scheme in schemes)
    return found


def unread_by(settings: Settings, known: Mapping[str, bool]) -> dict[str, str]:
    """The keys that a run with the facts `known` does not read, and for each, in words, what would read it."""
    values = {**flattened(settings.to_dict()), **known}
    found: dict[str, str] = {}
    for key, asked in readers(settings):
        for marks in asked:
            lacking = [[one for one, what in mark.items() if not what.holds(values[one])] for mark in marks]
            if all(lacking):
                alternatives = zip(marks, lacking, strict=True)
                words = (" and ".join(_said(one, mark[one]) for one in keys) for mark, keys in alternatives)
                found[key] = "; or ".join(dict.fromkeys(words))
                break
    return found


def ignored(settings: Settings, unread: Mapping[str, str]) -> dict[str, str]:
    """The unread keys whose value is not the default, which for a view is the default of its dataset."""
    data = settings.data.resolved()
    usual = DataSettings(name=data.name).resolved()
    views = {
        "weak": usual.weak,
        "strong": usual.strong,
        "labeled": DataSettings(name=data.name, weak=data.weak).resolved().labeled,
    }
    names = {"method": {"name": settings.method.name}, "model": {"name": settings.model.name}}
    both = settings.model_copy(update={"data": data}), Settings.from_dict(names | {"data": views})
    values, defaults = (flattened(one.to_dict()) for one in both)
    return {key: needs for key, needs in unread.items() if values[key] != defaults[key] and values[key] is not False}


def readers(settings: Settings) -> Iterator[tuple[str, list[Marks]]]:
    """Every key with its groups' marks and its own; a run reads a key if at least one mark holds at each of these levels."""
    asked: dict[str, list[Marks]] = {"": []}
    for key, field in fields_of(settings):
        group = key.rpartition(".")[0]
        beside = f"{group}." if group else ""
        marks = [mark.conditions for mark in field.metadata if isinstance(mark, ReadWhere)]
        own = [{one if "." in one else beside + one: what for one, what in mark.items()} for mark in marks]
        asked[key] = [*asked[group], *([own] if own else [])]
        if not is_group(field):
            yield key, asked[key]


def needs(asked: Sequence[Marks]) -> str:
    """What a key asks for, in words; empty: every run reads it."""
    return ", and ".join(
        "; or ".join(" and ".join(_said(key, what) for key, what in mark.items()) for mark in marks) for marks in asked
    )


def _said(key: str, asked: Is) -> str:
    return SAID.get(key) or asked.words.format(key)

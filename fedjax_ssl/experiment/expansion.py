"""The runs that one config asks for: seeds (`seeds`), values of a number (`vary` and `values`), or each value for each seed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_ssl.data.catalog import known
from fedjax_ssl.data.presets import names
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.options import KINDS, did_you_mean, plural

GROUPS = ("client", "server", "method", "data")
"""The groups of settings with numbers that can vary between runs of one program."""
SWITCHES = ("momentum", "weight_decay", "clip_norm", "warmup_rounds", "prox_mu")
"""Settings that turn off a part of the program when they are 0.

If such a setting varies between runs of one program, none of its values may be 0.
"""

PLACES = ("data.data_dir", "data.path", "data.download")
"""Keys that say where data are stored; processes of a run may differ in them, because `run.json` holds a digest of the data."""
ELSEWHERE = (*PLACES, "log_to", "eval_metrics", "client.on_nonfinite")
"""Keys that may change when a run goes on.

They say where data lie, which metrics there are and where they go, and whether a client left out of a round ends the run.
"""
CLIENT_FILES = ("system.file", "system.trace")
"""Files of clients' devices and windows. They count as data: the digest covers their content, wherever they lie."""


class Run(NamedTuple):
    """One of several runs: its own settings, its folder's name (`3`, `0-learning_rate=0.1`), and its value of what varies."""

    settings: Settings
    name: str
    number: float | None

    def __str__(self) -> str:
        return f"seed {self.settings.seed}" if self.number is None else f"seed {self.name.replace('-', ', ', 1)}"


def runs_of(settings: Settings) -> tuple[Run, ...]:
    """The runs that the settings ask for; raises ValueError where they cannot be several runs."""
    if not settings.is_several:
        return (Run(settings, "", None),)
    if settings.vary or settings.values:
        _check(settings)
    alone, path = settings.model_copy(update={"seeds": 1, "vary": "", "values": ()}), settings.vary.split(".")
    each: list[tuple[float | None, Settings]] = [(None, alone)]
    if settings.vary:
        each = [(value, Settings.from_dict(replaced(alone.to_dict(), path, value))) for value in settings.values]
    return tuple(
        Run(own.model_copy(update={"seed": seed}), f"{seed}" if value is None else f"{seed}-{path[-1]}={value}", value)
        for seed in range(settings.seed, settings.seed + settings.seeds)
        for value, own in each
    )


def _check(settings: Settings) -> None:
    """Raises ValueError unless `vary` is the key of a float and `values` are at least two different numbers for it."""
    key, values = settings.vary, settings.values
    if not key:
        raise ValueError(f"vary: got '' with {plural(len(values), 'value')}, accepted: the key of the number that has them")
    config = {name: value for name, value in settings.to_dict().items() if name in GROUPS}
    flat = flattened(config)
    numbers = [name for name, value in flat.items() if type(value) is float]
    if key not in numbers:
        what = f"which is {KINDS.get(type(flat[key]), 'no float')}, " if key in flat else ""
        hint = "" if key in flat else did_you_mean(key, numbers)
        raise ValueError(f"vary: got {key!r}, {what}accepted: the key of a float in {', '.join(GROUPS)}{hint}")
    if len(values) < 2 or len(set(values)) < len(values):
        raise ValueError(f"values: got {values} with vary={key}, accepted: two numbers or more, each once")
    if (last := key.rpartition(".")[2]) in SWITCHES and 0 in values:
        why = f"as without {last} the program is another one"
        raise ValueError(f"values: got {values} with vary={key}, accepted: numbers > 0, {why}")


def flattened(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as one, with dotted keys."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def identity(config: dict[str, Any], without: Sequence[str] = ELSEWHERE) -> dict[str, Any]:
    """The part of a config (of dotted keys) that says which experiment it is, without the keys `without`."""
    files = {key: "a file" for key in CLIENT_FILES if config.get(key) not in (None, "", "diurnal")}
    about, keys = known(str(config.get("data.name"))), ("data.weak", "data.strong", "data.labeled")
    if "data.name" in config and "text_features" not in (config["data.name"], about and about.kind):  # whose views are stored
        views = names(str(config["data.name"]), *(str(config.get(key, "default")) for key in keys))
        config = config | dict(zip(keys, views, strict=True))
    return {key: value for key, value in (config | files).items() if key not in without}


def replaced(tree: Any, path: Sequence[str], value: object) -> Any:
    """`tree`, of mappings and settings, with `value` at `path`; the value may be traced, and is not checked."""
    name, *rest = path
    if isinstance(tree, Mapping):
        return {**tree, name: replaced(tree.get(name), rest, value) if rest else value}
    return tree.model_copy(update={name: replaced(getattr(tree, name), rest, value) if rest else value})

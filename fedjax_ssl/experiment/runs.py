"""The runs that one config asks for: several seeds (`seeds`), or several values of a number (`vary` and `values`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_ssl.experiment.settings import Settings

GROUPS = ("client", "server", "method", "data")
"""Where the numbers are that can be varied. A network's own options shape it, so that they cannot."""


SWITCHES = ("momentum", "weight_decay", "clip_norm", "prox_mu")
"""Numbers of which 0 is another program, without what they are for; of several values in one program none can be 0."""


class Run(NamedTuple):
    """One of several runs.

    Attributes:
        settings: its own, as if it ran alone: `seeds` is 1, `vary` and `values` are empty.
        name: of its folder, such as `3`, or `0-learning_rate=0.1`.
        number: its value of the number that is varied, None where seeds are.
    """

    settings: Settings
    name: str
    number: float | None

    def __str__(self) -> str:
        return f"seed {self.settings.seed}" if self.number is None else self.name.partition("-")[2]


def runs_of(settings: Settings) -> tuple[Run, ...]:
    """The runs that the settings ask for, each with the settings that it has alone.

    Raises:
        ValueError: they ask for something that cannot be several runs, or a value is refused by the setting's own check.
    """
    if not settings.is_several:
        return (Run(settings, "", None),)
    _check(settings)
    alone = replaced_fields(settings, seeds=1, vary="", values=())
    if not settings.vary:
        seeds = range(settings.seed, settings.seed + settings.seeds)
        return tuple(Run(replaced_fields(alone, seed=seed), str(seed), None) for seed in seeds)
    last = settings.vary.rpartition(".")[2]
    found = []
    for value in settings.values:
        own = Settings.from_dict(replaced(alone.to_dict(), settings.vary.split("."), value))
        found.append(Run(own, f"{settings.seed}-{last}={value}", value))
    return tuple(found)


def _check(settings: Settings) -> None:
    """Raises ValueError where the settings cannot be several runs."""
    vary, values = settings.vary, settings.values
    if values and not vary:
        raise ValueError(f"vary: got '' with {len(values)} values, accepted: the key of the number that has them")
    if vary:
        _check_key(settings, vary)
        if len(values) < 2 or len(set(values)) < len(values):
            raise ValueError(f"values: got {values} with vary={vary}, accepted: two numbers or more, each once")
        if (last := vary.rpartition(".")[2]) in SWITCHES and 0 in values:
            raise ValueError(
                f"values: got {values} with vary={vary}, accepted: numbers > 0, as without {last} the program is another one"
            )


def _check_key(settings: Settings, key: str) -> None:
    config = {name: value for name, value in settings.to_dict().items() if name in GROUPS}
    config["method"] = {**settings.method_options().model_dump(), **config["method"]}
    flat = dict(_flat(config))
    numbers = [name for name, value in flat.items() if type(value) is float]
    if key not in numbers:
        near = difflib.get_close_matches(key, [name for name in numbers if name != key], 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        what = f"which is a {type(flat[key]).__name__}, " if key in flat else ""
        raise ValueError(f"vary: got {key!r}, {what}accepted: the key of a float in {', '.join(GROUPS)}{hint}")


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def replaced(tree: Any, path: Sequence[str], value: Any) -> Any:
    """`tree`, of mappings and frozen models, with `value` at `path`, unchecked, as a number that is traced has to be."""
    name, *rest = path
    if isinstance(tree, Mapping):
        return {**tree, name: replaced(tree.get(name), rest, value) if rest else value}
    return tree.model_copy(update={name: replaced(getattr(tree, name), rest, value) if rest else value})


def replaced_fields(settings: Any, **fields: Any) -> Any:
    """Settings with other values in some fields, unchecked."""
    return settings.model_copy(update=fields)

"""Checks that the options of several methods share, in one line that names the config key."""

from __future__ import annotations

import dataclasses
from typing import Any


def choice(*accepted: str) -> Any:
    """A dataclass field that accepts these words; the first is the default."""
    return dataclasses.field(default=accepted[0], metadata={"accepted": accepted})


def check_choices(options: Any) -> None:
    """Raises ValueError, naming the config key, where a `choice` field of `options` holds another word."""
    for field in dataclasses.fields(options):
        accepted = field.metadata.get("accepted")
        if accepted and getattr(options, field.name) not in accepted:
            got = getattr(options, field.name)
            raise ValueError(f"method.{field.name}: got {got!r}, accepted: {', '.join(accepted)}")


def check_phases(name: str, first: int, rounds: int) -> None:
    """Raises ValueError where a first phase of `first` rounds, the option `name`, leaves no round to the second."""
    if first >= rounds:
        raise ValueError(f"method.{name}: got {first}, accepted: a number < rounds = {rounds}")

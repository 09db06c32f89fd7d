"""What settings and methods' own options are made of: frozen models whose fields say what they accept and what they mean.

A wrong value is a ValueError with one line, `key: got X, accepted: Y`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import annotated_types
import numpy as np
import pydantic
from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

MANY = 2**31 - 1
"""The largest whole number that a setting may have."""


def _as_tuple(value: Any) -> Any:
    """A list as a tuple, and one number as a tuple of one, which is what a command line gives."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value


Count = Annotated[int, Field(ge=0, le=MANY)]
Positive = Annotated[int, Field(ge=1, le=MANY)]
Fraction = Annotated[float, Field(ge=0, le=1)]
"""A number in [0, 1]."""
Weight = Annotated[float, Field(ge=0)]
"""A number >= 0."""
Rate = Annotated[float, Field(gt=0)]
"""A number > 0."""
Decay = Annotated[float, Field(ge=0, lt=1)]
"""A number in [0, 1)."""
Numbers = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]
Phase = Annotated[float, Field(ge=0, le=MANY)]
"""Rounds of a phase: below 1 a share of all rounds, from 1 on a number of rounds."""
FirstPhase = Annotated[Phase, Field(gt=0)]
"""A phase that there has to be."""


class Model(pydantic.BaseModel):
    """A frozen model that forbids unknown keys, converts no types, and accepts finite numbers alone."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Options(Model):
    """The base of a method's own options."""

    def for_run(self, rounds: int, counts: np.ndarray, batch_size: int) -> Self:
        """The options of a run, with what depends on its length and its data resolved.

        Args:
            rounds: of the run.
            counts: int32 [K, 2], the clients' labeled and unlabeled examples.
            batch_size: of the clients.
        """
        return self


def rounds_of(name: str, phase: float, rounds: int, *, maximum: int | None = None) -> int:
    """The number of rounds of a first phase, which leaves at least one round to the second.

    Args:
        name: the option's.
        phase: see Phase; 0: there is no such phase.
        rounds: of the run.
        maximum: the largest number that is accepted; None: `rounds - 1`.

    Raises:
        ValueError: it is no whole number of rounds, or too many.
    """
    maximum = rounds - 1 if maximum is None else maximum
    if phase >= 1 and phase != int(phase):
        raise ValueError(f"method.{name}: got {phase}, accepted: a share of rounds below 1, or a whole number of rounds")
    if phase > max(maximum, 0) and phase >= 1:
        raise ValueError(f"method.{name}: got {int(phase)}, accepted: a number <= {maximum}, with rounds = {rounds}")
    return int(phase) if phase >= 1 else min(max(round(phase * rounds), int(phase > 0)), maximum)


def parse(model: type[Model], values: Any, prefix: str = "") -> Any:
    """An instance of `model` from nested mappings.

    Args:
        model: what to make.
        values: its fields by name.
        prefix: of its keys in messages, such as `method.`.

    Raises:
        ValueError: one line that names the first wrong key, what was got and what is accepted.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{prefix.rstrip('.') or 'the config'}: got {_shown(values)}, accepted: a group of keys")
    if strange := [key for key in values if not isinstance(key, str)]:
        raise ValueError(f"{prefix}{strange[0]!r}: got a key that is no text, accepted: {', '.join(model.model_fields)}")
    try:
        return model.model_validate(dict(values))
    except pydantic.ValidationError as error:
        raise ValueError(" ".join(_line(model, error, prefix).split())) from None


def _line(model: type[pydantic.BaseModel], error: pydantic.ValidationError, prefix: str) -> str:
    """The first error of a validation, unknown keys before all others, in one line."""
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    owner: type[pydantic.BaseModel] = model
    field = None
    for part in first["loc"]:
        if isinstance(owner, type) and issubclass(owner, pydantic.BaseModel) and part in owner.model_fields:
            field = owner.model_fields[part]
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
                owner = inner
        else:
            break
    if first["type"] == "extra_forbidden":
        return unknown_key(prefix + ".".join(map(str, first["loc"])), (prefix + path for path, _ in fields_of(model)))
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    # Of a tuple its wrong entry is shown, under the tuple's key.
    key = prefix + ".".join(part for part in first["loc"] if isinstance(part, str))
    got = _shown(first["input"])
    if field is None:
        return f"{key}: got {got}, accepted: {first['msg']}"
    hint = ""
    if choices := literals(field.annotation):
        near = difflib.get_close_matches(str(first["input"]), choices, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
    too_large = field.annotation is int and first["type"] == "less_than_equal"
    most = f" and <= {MANY}" if too_large else ""
    return f"{key}: got {got}, accepted: {accepted(field)}{most}{hint}"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What to say of a dotted key that is not known: the same name elsewhere, the nearest one, or its group's keys."""
    known, key = list(known), " ".join(key.split())
    group, _, name = key.rpartition(".")
    spelled = {"lr": "learning_rate"}.get(name, name)
    siblings = [one for one in known if one.rpartition(".")[0] == group]
    if (same := f"{group}.{spelled}".lstrip(".")) in known:
        return f"{key}: unknown key; did you mean {same}?"
    if elsewhere := [one for one in known if one.rpartition(".")[2] == spelled]:
        return f"{key}: unknown key; did you mean {' or '.join(elsewhere)}?"
    if near := difflib.get_close_matches(key, siblings, 1) or difflib.get_close_matches(key, known, 1):
        return f"{key}: unknown key; did you mean {near[0]}?"
    top = siblings or [one for one in known if one.count(".") == min(other.count(".") for other in known)]
    return f"{key}: unknown key; accepted: {', '.join(top) or 'none'}"


def from_text(key: str, text: str, like: Any) -> Any:
    """A value of the type of `like` from a command line's text.

    Raises:
        ValueError: the text is none.
    """
    kind = tuple if isinstance(like, list) else type(like)
    try:
        if kind is tuple:
            words = (word.strip() for word in text.strip("()[] ").split(","))
            return tuple(pydantic.TypeAdapter(int | float).validate_strings(word) for word in words if word)
        return text if kind is str else pydantic.TypeAdapter(kind).validate_strings(text)
    except pydantic.ValidationError:
        raise ValueError(f"{key}: got {_shown(text)}, accepted: {_KINDS.get(kind, 'a value')}") from None


def fields_of(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field with its dotted key, groups before their own fields."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
            yield from fields_of(field.annotation, f"{prefix}{name}.")


def literals(annotation: Any) -> list[str]:
    """The words that an annotation accepts; empty: it is no choice of words."""
    return [str(value) for value in get_args(annotation)] if get_origin(annotation) is Literal else []


def accepted(field: FieldInfo) -> str:
    """What a field accepts, in words."""
    annotation = field.annotation
    if words := literals(annotation):
        return ", ".join(word or repr(word) for word in words)
    kind = get_origin(annotation) or annotation
    if kind not in (int, float):
        return _KINDS.get(kind, "a value" if kind is Union else "a group of keys")
    noun = _KINDS[kind]
    low, high = _bounds(field)
    high = None if high and high[1] == MANY else high
    if low and high and annotation is float:
        return f"{noun} in {'[' if '=' in low[0] else '('}{low[1]:g}, {high[1]:g}{']' if '=' in high[0] else ')'}"
    bounds = [f"{sign} {bound:g}" for sign, bound in filter(None, (low, high))]
    return " ".join([noun, " and ".join(bounds)]).strip()


def _bounds(field: FieldInfo) -> tuple[tuple[str, Any] | None, tuple[str, Any] | None]:
    low: tuple[str, Any] | None = None
    high: tuple[str, Any] | None = None
    for mark in field.metadata:
        if isinstance(mark, annotated_types.Ge):
            low = (">=", mark.ge)
        elif isinstance(mark, annotated_types.Gt):
            low = (">", mark.gt)
        elif isinstance(mark, annotated_types.Le):
            high = ("<=", mark.le)
        elif isinstance(mark, annotated_types.Lt):
            high = ("<", mark.lt)
    return low, high


_KINDS: dict[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "numbers, separated by commas",
}  # fmt: skip


def _shown(value: Any) -> str:
    """A value in a message, on one line and not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."

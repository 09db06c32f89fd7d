"""What settings and methods' own options are made of: frozen models whose fields say what they accept and what they mean.

A wrong value is a ValueError with one line, `key: got X, accepted: Y`.
"""

import difflib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin

import numpy as np
import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from fedjax_ssl import moved

ModelT = TypeVar("ModelT", bound="Model")
MANY, HUGE, TINY = 2**31 - 1, 1e38, 1e-37
"""The largest integer, the largest number and the smallest positive number of a setting: int32 and float32 can hold them."""


Count = Annotated[int, Field(ge=0, le=MANY)]
Positive = Annotated[int, Field(ge=1, le=MANY)]
Epochs = Annotated[int, Field(ge=0, le=10_000)]
Steps = Annotated[int, Field(ge=0, le=10_000_000)]
Size = Annotated[int, Field(ge=0, le=1_000_000)]
BatchSize = Annotated[Size, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=HUGE)]
Rate = Annotated[float, Field(ge=TINY, le=HUGE)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Numbers = tuple[Annotated[float, Field(ge=-HUGE, le=HUGE)], ...]

REPEATS = "a factor of the examples of a training"
Repeats = Annotated[int, Field(ge=1, le=1_000), REPEATS]
_ROUNDS = "a number of rounds after `Options.for_rounds`"
Phase = Annotated[float, Field(ge=0, le=MANY), _ROUNDS]
"""The length of a phase: below 1 it is a share of all rounds, at least one round unless it is 0; else a number of rounds."""
FirstPhase = Annotated[Phase, Field(gt=0)]  # a phase of at least one round


class Known(NamedTuple):
    """The mark of a text field whose value is one of `names`, a table that may grow, or one of `others`."""

    names: Mapping[str, object] | Iterable[str]
    others: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """The words that are accepted now."""
        return [*self.others, *self.names]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """The check of a value that is text."""

        def check(value: str) -> str:
            if value not in self.words():
                raise PydanticCustomError("unknown", "unknown")
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))


class Is(NamedTuple):
    """What a condition asks: `holds` checks the value; `words` describe the condition, with `{}` standing for the key."""

    words: str
    holds: Callable[[Any], bool]


SET, UNSET = Is("{}", bool), Is("{} not set", operator.not_)
ABOVE_1 = Is("{} > 1", lambda value: value > 1)


class ReadWhere:
    """A field's mark, which says where a run reads the setting: where all conditions of one of the field's marks hold.

    A condition is a key and what its value has to be: one of a tuple of words, or what an `Is` asks. A key without a dot is in
    the same group as the field; other keys are dotted keys of the config, or facts about the run (`experiment/unread.py`). The
    mark of a group applies to all of its keys.
    """

    def __init__(self, conditions: Mapping[str, tuple[str, ...] | Is] | None = None, **beside: tuple[str, ...] | Is) -> None:
        given = {**(conditions or {}), **beside}
        self.conditions = {key: asked if isinstance(asked, Is) else _one_of(asked) for key, asked in given.items()}


def _one_of(words: tuple[str, ...]) -> Is:
    return Is("{}=" + " or ".join(words), words.__contains__)


class Model(pydantic.BaseModel):
    """A frozen model of finite numbers, without unknown keys. No value is converted, except a list or one number to a tuple."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _as_tuples(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """For a field that is a tuple, converts a list (from JSON) or a single number (from a command line) to a tuple."""
        if get_origin(cls.model_fields[str(info.field_name)].annotation) is not tuple:
            return value
        if isinstance(value, list):
            return tuple(value)
        return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value


class Options(Model, arbitrary_types_allowed=True):
    """The base of a method's, or a network's, own options."""

    def for_rounds(self, rounds: int) -> Self:
        """The options for a run of `rounds` rounds, in which each `Phase` is a number of rounds."""
        phases = (name for name, field in type(self).model_fields.items() if _ROUNDS in field.metadata)
        return self.model_copy(update={name: rounds_of(name, getattr(self, name), rounds) for name in phases})

    def for_clients(self, counts: np.ndarray, batch_size: int) -> Self:
        """The options for clients with `counts` int32 [K, 2] of labeled and unlabeled examples; by default these options."""
        del counts, batch_size
        return self


Divisor = Literal["used", "batch"]
"""What the sum of a loss over a batch is divided by.

`used`: the number of examples that the loss covers; `batch`: the number of all examples in the batch.
"""
PseudoLabels = Literal["global", "local"]
LABELS_BY: Any = Field(
    default="global",
    description="Which model makes a client's pseudo-labels, and when: the `global` one for all examples once a round, or the "
    "client's `local` one for each batch in each step.",
)

UNLABELED_BATCH: Any = Field(
    default=0, description="Number of unlabeled examples B_u in a local step. 0 takes as many as `client.batch_size`."
)
UNLABELED_WEIGHT: Any = Field(
    default=1.0, description="Weight of the unlabeled loss beside the labeled one, in a client that has labels."
)
CLIENT_LABELS = (
    ReadWhere({"data.labels_at": ("clients", "some_clients"), "client.epochs": SET}),
    ReadWhere({"data.reveal_labels": SET, "client.epochs": SET}),
)


class LabeledRepeats(Options):
    """Settings of a client that goes through its labeled examples several times in an epoch (FedSiam's released code)."""

    labeled_repeats: Annotated[Repeats, *CLIENT_LABELS] = Field(
        default=1, description="How many times a client goes through its labeled examples in each epoch."
    )
    repeats_below: Annotated[Fraction, ReadWhere(labeled_repeats=ABOVE_1)] = Field(
        default=1.0,
        description="Clients whose share of labeled examples is below this number repeat them, and the others go through them "
        "once. 1 lets all clients repeat theirs.",
    )


def rounds_of(name: str, phase: float, rounds: int, *, maximum: int | None = None) -> int:
    """The length, in rounds, of the phase called `name` in a run of `rounds` rounds; 0: there is no such phase.

    `phase` is the value of its option. A share above 0 gives at least one round. ValueError for a number of rounds that is no
    integer, or larger than `maximum`. By default the maximum leaves one round to the second phase, unless the run has only one.
    """
    maximum = max(rounds - 1, 1) if maximum is None else maximum
    if phase >= 1 and phase != int(phase):
        raise ValueError(f"method.{name}: got {phase}, accepted: a share of rounds below 1, or a whole number of rounds")
    if phase > maximum and phase >= 1:
        raise ValueError(f"method.{name}: got {int(phase)}, accepted: a number <= {maximum}, with rounds = {rounds}")
    return int(phase) if phase >= 1 else min(max(round(phase * rounds), int(phase > 0)), maximum)


def parse(model: type[ModelT], values: object, prefix: str = "") -> ModelT:
    """An instance of `model` from nested mappings; messages name the first wrong key, after a `prefix` such as `method.`."""
    group = prefix.rstrip(".") or "the config"
    if not isinstance(values, Mapping):
        raise ValueError(f"{group}: got {_shown(values)}, accepted: a group of keys")
    no_text = f"{group}: got a key that is no text, accepted: {', '.join(model.model_fields) or 'none'}"
    try:
        if all(isinstance(key, str) for key in values):
            return model.model_validate(dict(values))
    except pydantic.ValidationError as error:
        raise ValueError(one_line(_line(model, error, prefix))) from None
    except UnicodeError as error:  # half of a pair of UTF-16
        raise ValueError(no_text) from error
    raise ValueError(no_text)


def one_line(text: object) -> str:
    """A message on one line; the middle of a long message is left out."""
    line = " ".join(str(text).split())
    return line if len(line) <= LONG else f"{line[: LONG // 2]} ... {line[-LONG // 2 :]}"


def _line(model: type[pydantic.BaseModel], error: pydantic.ValidationError, prefix: str) -> str:
    """The first error of a validation, unknown keys before all others, in one line."""
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    owner: Any = model
    field = None
    for part in first["loc"]:
        if part not in (fields := getattr(owner, "model_fields", {})):
            break
        field, owner = fields[part], fields[part].annotation
    if first["type"] == "extra_forbidden":
        return unknown_key(prefix + ".".join(map(str, first["loc"])), (prefix + path for path, _ in fields_of(model)))
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if said := moved.line(prefix + ".".join(map(str, first["loc"])), (prefix + path for path, _ in fields_of(model))):
        return said
    # Of a tuple its wrong entry is shown, under the tuple's key.
    key = prefix + ".".join(part for part in first["loc"] if isinstance(part, str))
    got = _shown(first["input"])
    if field is None:
        return f"{key}: got {got}, accepted: {first['msg']}"
    most, least = (first.get("ctx", {}).get(sign) for sign in ("le", "ge"))
    limit = ""
    if most in (MANY, HUGE):  # which `accepted` leaves out
        limit = f", at most {most}"
    elif least == -HUGE or (least == TINY and first["input"] > 0):
        limit = f", at least {least}"
    hint = did_you_mean(got.strip("'"), choices(field))
    return f"{key}: got {got}, accepted: {accepted(field)}{limit}{hint}"


def nearest(word: str, words: Iterable[str]) -> str:
    """The one of `words` that a mistyped `word` may mean, or "". A dotted key is looked for in its group, if that exists."""
    words = list(words)
    prefix = word[: word.rfind(".") + 1]
    siblings = [one for one in words if one[: one.rfind(".") + 1] == prefix]
    if not siblings:
        prefix, siblings = "", words
    near = difflib.get_close_matches(word[len(prefix) :], [one[len(prefix) :] for one in siblings], 1, LIKE)
    return f"{prefix}{near[0]}" if near else ""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The end of an error message: the one of `words` that a mistyped `word` may mean, or nothing."""
    near = nearest(word, words)
    return f" (did you mean {near!r}?)" if near else ""


def unknown_key(key: str, known: Iterable[str]) -> str:
    """A message about an unknown dotted key: the nearest key of its group, one of that name elsewhere, or its group's keys."""
    known, key = list(known), " ".join(key.split())
    if said := moved.line(key, known):
        return said
    group, _, name = key.rpartition(".")
    spelled = {"lr": "learning_rate"}.get(name, name)
    siblings = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == group]
    elsewhere = [one for one in known if one.rpartition(".")[2] == spelled]
    meant = "" if siblings else nearest(group, sorted({one.rpartition(".")[0] for one in known}))
    near = nearest(f"{group}.{spelled}".lstrip("."), known) if siblings else group
    for other in (f"{meant}.{spelled}", near):
        elsewhere = [other] if other in known else elsewhere
    if elsewhere:
        return f"{key}: unknown key; did you mean {' or '.join(elsewhere)}?"
    if not siblings:
        top = min((one.count(".") for one in known), default=0)
        siblings, group = [one for one in known if one.count(".") == top], ""
    return f"{key}: unknown key; accepted{f' in {group}' if group else ''}: {', '.join(siblings) or 'none'}"


def plural(number: int | np.integer, noun: str) -> str:
    """A number with its noun: `1 round`, `2 rounds`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def from_text(key: str, text: str, like: object) -> Any:
    """The value that a command line's text stands for, of the type of `like`; ValueError if the text stands for none."""
    kind = tuple if isinstance(like, list) else type(like)
    try:
        if kind is tuple:
            words = (word.strip() for word in text.strip("()[] ").split(","))
            return tuple(pydantic.TypeAdapter(int | float).validate_strings(word) for word in words if word)
        return text if kind is str else pydantic.TypeAdapter(kind).validate_strings(text)
    except (pydantic.ValidationError, pydantic.PydanticUserError):  # or a value of a kind that no text has
        raise ValueError(f"{key}: got {_shown(text)}, accepted: {KINDS.get(kind, 'a value')}") from None


def as_text(value: Any) -> str:
    """A key's value as the command line takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def fields_of(model: type[pydantic.BaseModel] | pydantic.BaseModel, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field with its dotted key, each group before its fields; for an instance, those of its groups' own classes."""
    kind: Any = model if isinstance(model, type) else type(model)
    for name, field in kind.model_fields.items():
        yield prefix + name, field
        if is_group(field):
            yield from fields_of(field.annotation if model is kind else getattr(model, name), f"{prefix}{name}.")


def is_group(field: FieldInfo) -> bool:
    """Whether a field is a group of keys."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel)


def choices(field: FieldInfo) -> list[str]:
    """The words that a field accepts; empty: it is no choice of words."""
    if get_origin(field.annotation) is Literal:
        return [str(value) for value in get_args(field.annotation)]
    return [word for mark in field.metadata if isinstance(mark, Known) for word in mark.words()]


def accepted(field: FieldInfo) -> str:
    """What a field accepts, in words."""
    annotation = field.annotation
    if words := choices(field):
        return ", ".join(word or repr(word) for word in words)
    kind = get_origin(annotation) or annotation
    if kind not in (int, float):
        return KINDS.get(kind, "a value" if kind is Union else "a group of keys")
    noun = KINDS[kind]
    low, high = _bound(field, ge=">=", gt=">"), _bound(field, le="<=", lt="<")
    low = (">", 0) if low and low[1] == TINY else low
    high = None if high and high[1] in (MANY, HUGE) else high
    if low and high and annotation is float:
        return f"{noun} in {'[' if '=' in low[0] else '('}{low[1]:g}, {high[1]:g}{']' if '=' in high[0] else ')'}"
    bounds = [f"{sign} {bound}" for sign, bound in filter(None, (low, high))]
    return " ".join([noun, " and ".join(bounds)]).strip()


def _bound(field: FieldInfo, **signs: str) -> tuple[str, float] | None:
    """The last of a field's marks `ge`, `gt`, `le` or `lt` that `signs` names: (its sign, the number)."""
    found = [(signs[kind], getattr(mark, kind)) for mark in field.metadata for kind in signs if hasattr(mark, kind)]
    return found[-1] if found else None


LONG = 800  # characters of a message
LIKE = 0.6  # the similarity of two names, from 0 to 1, from which on one may be the other, mistyped
KINDS: dict[object, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "numbers, separated by commas",
}  # fmt: skip
"""Kinds of values, in words."""


def _shown(value: object) -> str:
    """A value in a message, not too long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = f"{type(value).__name__} of many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."

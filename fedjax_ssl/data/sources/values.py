"""Labels and clients' ids as their owners write them: integers or text, and several ways to say that one is not known."""

import contextlib
import logging
import re
from collections.abc import Sequence
from numbers import Real
from typing import Any
from unicodedata import normalize

import numpy as np
from jaxtyping import Shaped

UNLABELED = -1
"""The label of a training example whose class nobody knows, and the client of one that belongs to nobody."""
MISSING = ("nan", "NaN", "None", "<NA>", "NaT")
"""How pandas, NumPy and Python write a value that is missing."""
_UNKNOWN = re.compile(rf"{UNLABELED}(\.0*)?|{'|'.join(MISSING)}")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)(\.0*)?")  # 3, or 3.0 as pandas writes it
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
_log = logging.getLogger(__name__)
Values = Shaped[np.ndarray, " N"]


def from_text(what: str, values: Sequence[str]) -> Values:
    """Texts as integers if all are integers, else as texts; a missing one is -1 or '-1'. A warning calls the values `what`."""
    try:
        return np.array([UNLABELED if value in MISSING else integer(value) for value in values], np.int64)
    except (ValueError, OverflowError):
        return _text(what, values)


def integer(text: str) -> int:
    """The integer that a text is; ValueError for others, and for 03, +3, 1_2 and ٣, which `int` takes as well."""
    if not is_integer(text):
        raise ValueError(text)
    return int(text.partition(".")[0])


def is_integer(text: str) -> bool:
    """Whether a text is an integer, as `integer` reads it."""
    return bool(_INTEGER.fullmatch(text))


def understood(what: str, given: np.ndarray) -> np.ndarray:
    """Values [N] or [N, 1] as integers or text [N], with -1 or '-1' for one that is masked, NaN, None, or pandas' NA.

    Whole floats are integers; text stays text. Anything else is returned as it is, for the caller to refuse.
    """
    given = given[:, 0] if given.ndim == 2 and given.shape[1] == 1 else given
    masked, values = np.ma.getmaskarray(given), np.ma.getdata(given)
    if values.ndim != 1 or values.dtype.kind not in "iufUO":
        return values
    if values.dtype.kind in "fO":
        masked = masked | [not isinstance(value, str) and str(value) in MISSING for value in values.tolist()]
    known = values[~masked]
    if len(known) and all(isinstance(value, str) for value in known.tolist()):
        return _text(what, np.where(masked, str(UNLABELED), values).tolist())
    if values.dtype.kind in "iu":
        return np.where(masked, UNLABELED, values.astype(np.int64)) if masked.any() else values
    if all(isinstance(value, Real) and not isinstance(value, bool) and value == value // 1 for value in known.tolist()):
        with contextlib.suppress(OverflowError):
            numbers = np.full(len(values), UNLABELED, np.int64)
            numbers[~masked] = [int(value) for value in known.tolist()]
            return numbers
    return values


def array_of(given: Any) -> np.ndarray:
    """A user's array, or lists, as an array; it has a mask only where it masks something."""
    if isinstance(given, list | tuple):  # NumPy would make it NaN, with a warning
        given = [None if value is np.ma.masked else value for value in given]
    found = np.ma.asarray(given)
    return found if np.ma.is_masked(found) else np.ma.getdata(found)


def _text(what: str, values: Sequence[str]) -> Values:
    """Text in Unicode's NFC, '-1' for what is missing; the log names that, as a class may have such a name.

    It also names texts that are one number written in several ways, such as 1 and 01, which stay apart.
    """
    if empty := sum(not value.strip() for value in values):
        raise ValueError(f"{what}: {empty} are empty texts: give -1 for what is not known")
    if missing := [value for value in values if value in MISSING]:
        kinds = " or ".join(sorted(set(missing)))
        _log.warning("%s: %d are %s and count as not known, as -1 does: rename a class of that name", what, len(missing), kinds)
    numbers: dict[int, str] = {}
    for value in dict.fromkeys(values):
        if _NUMBER.fullmatch(value) and (first := numbers.setdefault(int(value), value)) != value:
            _log.warning("%s: %r and %r are not the same: write a number in one way, if they should be", what, first, value)
    return np.array([str(UNLABELED) if _UNKNOWN.fullmatch(value) else normalize("NFC", value) for value in values], str)

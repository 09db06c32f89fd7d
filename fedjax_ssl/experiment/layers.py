"""The setting `layers` of an optimizer: factors of the learning rate for parameters whose paths match a pattern."""

import re

import jax

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.local.optimizers import Factors, first_found, path_of
from fedjax_ssl.options import HUGE, did_you_mean, one_line

ACCEPTED = "PATTERN=FACTOR, separated by commas, with regular expressions and numbers >= 0, such as Dense_0=0.1"


def factors_of(key: str, text: str) -> Factors:
    """The patterns and factors in a text such as `Dense_0=0.1,BatchNorm=0`; ValueError, which names `key`, for a wrong one."""
    return [_factor(key, part.strip()) for part in text.split(",")] if text.strip() else []


def _factor(key: str, part: str) -> tuple[str, float]:
    pattern, _, number = part.rpartition("=")
    try:
        re.compile(pattern)
        factor = float(number) if number.isascii() else -1.0
        is_right = bool(pattern) and 0 <= factor <= HUGE
    except (re.error, ValueError, OverflowError, RecursionError):
        is_right = False
    if not is_right:
        raise ValueError(one_line(f"{key}: got {part!r}, accepted: {ACCEPTED}"))
    return pattern.strip(), factor


def check_found(key: str, factors: Factors, params: PyTree) -> None:
    """Raises ValueError, which names `key`, for a pattern that counts for none of a network's parameters."""
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    patterns = [pattern for pattern, _ in factors]
    used = {first_found(patterns, path) for path in paths}
    for index, pattern in enumerate(patterns):
        if index not in used:
            of_others = any(re.search(pattern, path) for path in paths)
            why = "whose parameters all have the factor of a pattern before it" if of_others else "which no parameter has"
            names = list(dict.fromkeys(path.partition("/")[0] for path in paths))
            accepted = f"a pattern in the path of a parameter, such as {paths[0]}, of the layers {', '.join(names)}"
            raise ValueError(one_line(f"{key}: got {pattern}, {why}, accepted: {accepted}{did_you_mean(pattern, names)}"))

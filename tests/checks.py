"""How annotated shapes and dtypes are checked while tests run."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int counts as a float, too


def check_calls(function: Callable[..., Any]) -> Any:
    """The function with its calls checked; those inside of others are not, as each call would make the check anew, in 1 ms."""
    return function if "<locals>" in getattr(function, "__qualname__", "") else _CHECK(function)

"""The progress bar of work on the host, before anything is trained, that may take long."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import tqdm

AFTER_S = 3.0  # what takes less needs no bar
T = TypeVar("T")


def bar(items: Iterable[T], what: str, *, total: int, unit: str, each: int = 1) -> Iterator[T]:
    """The items, with a bar on standard error where that is a terminal; each of the `total` items stands for `each` units."""
    shown = {"unit_scale": each} if each > 1 else {}
    yield from tqdm.tqdm(
        items, desc=what, total=total, unit=f" {unit}", delay=AFTER_S, leave=False, disable=None, dynamic_ncols=True, **shown
    )

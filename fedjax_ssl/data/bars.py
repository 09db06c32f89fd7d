"""The progress bar of work on the host, before anything is trained, that may take long."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import tqdm

AFTER_S = 3.0  # what takes less needs no bar
T = TypeVar("T")


def bar(items: Iterable[T], what: str, *, total: int, unit: str, each: int = 1) -> Iterator[T]:
    """Yields the items, with a progress bar on a terminal's standard error; the bar counts `each` units for an item."""
    shown = {"unit_scale": each} if each > 1 else {}
    yield from tqdm.tqdm(
        items, desc=what, total=total, unit=f" {unit}", delay=AFTER_S, leave=False, disable=None, dynamic_ncols=True, **shown
    )

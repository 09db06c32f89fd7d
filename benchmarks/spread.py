"""The spread of what was measured several times, and the order in which several are measured in turns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def quartiles(values: Iterable[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return [float(x) for x in np.quantile(list(values), (0.25, 0.5, 0.75))]


def whole(count: int) -> int:
    """The turns in which so many have had all the orders of `balanced`."""
    return 2 * count if count % 2 and count > 1 else count


def balanced(count: int, turn: int) -> list[int]:
    """The order of a turn, in which each of so many comes once.

    Over `whole(count)` turns each has each place, and comes after each other one, as often as any (Williams, Experimental
    designs balanced for the estimation of residual effects, 1949).
    """
    zigzag = [place // 2 if place % 2 == 0 else count - 1 - place // 2 for place in range(count)]
    order = [(number + turn) % count for number in zigzag]
    return order[::-1] if count % 2 and turn // count % 2 else order

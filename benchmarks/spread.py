"""The spread of what was measured several times."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def quartiles(values: Iterable[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return [float(x) for x in np.quantile(list(values), (0.25, 0.5, 0.75))]

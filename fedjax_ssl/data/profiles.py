"""What clients' devices are like: how fast they compute, send and receive, and when they can be reached.

Numbers are drawn from a seed, each client's by its id, or read from CSV files.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int64

from fedjax_ssl import csv_files
from fedjax_ssl.arrays import Stored as Array
from fedjax_ssl.data.sources.checks import first_line
from fedjax_ssl.data.sources.values import integer
from fedjax_ssl.host_memory import free_bytes

EVENING = 20 / 24  # of a day: when the windows of `diurnal` begin, on average
SLOWEST, FASTEST = 1e-9, 1e30  # so that no time is 0/0 in float32
Rates = tuple[Float32[np.ndarray, " K"], Float32[np.ndarray, " K"], Float32[np.ndarray, " K"]]  # speed, up, down
Windows = Float32[np.ndarray, "K I 2"]


class Profiles(NamedTuple):
    """Clients' devices, with leading axis K, or M of a cohort; infinity: it takes no time."""

    speed: Float32[Array, " K"]  # examples that pass a network forward in a second; a backward pass takes twice as long
    up: Float32[Array, " K"]  # bytes sent in a second
    down: Float32[Array, " K"]  # bytes received in a second
    windows: Float32[Array, "K I 2"] | None = None  # when a client can be reached: begin, end in seconds; None: always


def lognormal(seed: int, num_clients: int, medians: Sequence[float], speed_sigma: float, bandwidth_sigma: float) -> Rates:
    """Speed, upload and download of each client: median exp(sigma n), n standard normal; a median of 0 gives infinity.

    The two bandwidths of a client share one n: a slow line is slow both ways.
    """
    normal = _normal(seed, "speed", num_clients, 2)
    exponents = (speed_sigma * normal[:, 0], *[bandwidth_sigma * normal[:, 1]] * 2)
    drawn = (np.clip(m * np.exp(x), SLOWEST, FASTEST) if m else np.inf + x for m, x in zip(medians, exponents, strict=True))
    speed, up, down = (np.asarray(x, np.float32) for x in drawn)
    return speed, up, down


def diurnal(seed: int, num_clients: int, *, window: float, spread: float, period: float) -> Windows:
    """One window a day for each client: it begins at EVENING + spread n, n standard normal, and is `window` seconds long."""
    begin = np.mod(EVENING * period + spread * _normal(seed, "windows", num_clients, 1), period)
    return np.stack([begin, begin + window], axis=2).astype(np.float32)


def _normal(seed: int, stream: str, num_clients: int, columns: int) -> Float64[np.ndarray, "K columns"]:
    return np.random.default_rng([seed, zlib.crc32(stream.encode())]).normal(size=(num_clients, columns))


def read_rates(path: str, num_clients: int) -> Rates:
    """Speed, upload and download from a file `client,examples_per_s,up_bytes_per_s,down_bytes_per_s`, a row per client."""
    columns = ("examples_per_s", "up_bytes_per_s", "down_bytes_per_s")
    accepted = f"numbers in [{SLOWEST:g}, {FASTEST:g}]"
    clients, values = _read(path, num_clients, columns, accepted, lambda *row: all(SLOWEST <= x <= FASTEST for x in row))
    counts = np.bincount(clients, minlength=num_clients)
    if len(strange := np.flatnonzero(counts != 1)):
        raise ValueError(f"{path}: got {counts[strange[0]]} rows of client {strange[0]}, accepted: one of each client")
    speed, up, down = np.asarray(values[np.argsort(clients)].T, np.float32)
    return speed, up, down


def read_windows(path: str, num_clients: int, period: float) -> Windows:
    """When clients can be reached, from a file `client,start,end`, of any number of rows.

    A client with fewer windows than others has (0, 0) for the rest. A window that ends after the period goes on at the
    beginning of the next. ValueError where memory is too small: all clients take as much as the one with the most windows.
    """
    accepted = f"0 <= start < {period:g}, and start < end <= start + {period:g}"
    in_range = lambda start, end: 0 <= start < period and start < end <= start + period  # noqa: E731
    clients, values = _read(path, num_clients, ("start", "end"), accepted, in_range)
    counts = np.bincount(clients, minlength=num_clients)
    shape = (num_clients, int(np.max(counts, initial=1)), 2)
    needed, free = 4 * math.prod(shape), free_bytes()
    if 0 < free < needed:
        got = f"got {shape[1]:,} windows of client {np.argmax(counts)}, {needed / 1e9:.3g} GB with as many for each client"
        raise ValueError(f"{path}: {got}, accepted: what fits into {free / 1e9:.3g} GB of memory")
    order = np.argsort(clients, kind="stable")
    place = np.arange(len(clients)) - np.repeat(np.cumsum(counts) - counts, counts)
    windows = np.zeros(shape, np.float32)
    windows[clients[order], place] = values[order]
    return windows


def _read(
    path: str, num_clients: int, columns: Sequence[str], accepted: str, accepts: Callable[..., bool]
) -> tuple[Int64[np.ndarray, " N"], Float64[np.ndarray, "N C"]]:
    """A CSV file of numbers with a header: the column `client` int64 [N], and the others float64 [N, C]."""
    try:
        (_, header), *lines = csv_files.lines(Path(path).expanduser()) or [(1, [])]
    except OSError as error:
        raise ValueError(f"got {path} ({error.strerror}), accepted: a CSV file in UTF-8") from None
    wanted = ("client", *columns)
    if tuple(header) != wanted:
        got = first_line(",".join(header)) or "nothing"
        raise ValueError(f"{path}: got the header {got}, accepted: {','.join(wanted)}")
    clients, values = np.zeros(len(lines), np.int64), np.zeros((len(lines), len(columns)))
    for i, (number, line) in enumerate(lines):
        try:
            client, row = integer(line[0]), [_number(cell) for cell in line[1:]]
        except ValueError:
            client, row = -1, []
        if not (0 <= client < num_clients and len(row) == len(columns) and accepts(*row)):
            whose = f"a client from 0 to {num_clients - 1}, then {accepted}"
            raise ValueError(f"{path}, row {number}: got {first_line(','.join(line))}, accepted: {whose}")
        clients[i], values[i] = client, row
    return clients, values


def _number(text: str) -> float:
    """The number that a text is; ValueError for others, and for 1_2 and ٣, which `float` takes."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return float(text)

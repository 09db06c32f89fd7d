"""Partitions: who gets which examples, as lists of index arrays, from labels and a seeded generator.

Pure NumPy functions that run once, before anything is compiled; `fedjax_ssl.data.federated.pack` makes an index table of
their rows. Every function sees its indices as a set: their order at the input does not change the result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Rows = list[np.ndarray]


class Summary(NamedTuple):
    """What a partition looks like.

    Attributes:
        sizes: int64 [K], examples of each client.
        histogram: int64 [K, C], examples of each client and class.
    """

    sizes: np.ndarray
    histogram: np.ndarray


def balanced_labels(
    labels: np.ndarray, num_labels: int, num_classes: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Class-balanced labeled set: num_labels / C examples of every class, drawn without replacement.

    Args:
        labels: int [N], values in 0..C-1.
        num_labels: size of the labeled set, a positive multiple of C.
        num_classes: C.
        rng: source of randomness; advanced.

    Returns:
        (labeled, rest): int64 [num_labels] and int64 [N - num_labels], both ascending, disjoint, together 0..N-1.

    Raises:
        ValueError: num_labels is not a positive multiple of C, or a class has too few examples.
    """
    labels = np.asarray(labels)
    if num_labels > len(labels):
        raise ValueError(f"num_labels={num_labels} is more than the {len(labels)} training examples: ask for fewer labels")
    if num_labels < 1 or num_labels % num_classes:
        raise ValueError(
            f"num_labels={num_labels} cannot be balanced over {num_classes} classes: give a positive multiple of {num_classes}"
        )
    per_class = num_labels // num_classes
    counts = np.bincount(labels, minlength=num_classes)
    if per_class > counts.min():
        raise ValueError(
            f"num_labels={num_labels} needs {per_class} examples of every class, but class {counts.argmin()} has "
            f"{counts.min()}: give at most {counts.min() * num_classes}"
        )
    labeled = np.zeros(len(labels), bool)
    for c in range(num_classes):
        labeled[rng.choice(np.flatnonzero(labels == c), per_class, replace=False)] = True
    return np.flatnonzero(labeled), np.flatnonzero(~labeled)


def iid(indices: np.ndarray, num_clients: int, rng: np.random.Generator) -> tuple[Rows, np.ndarray]:
    """Equal shares at random: floor(N / K) examples for every client, without replacement.

    Args:
        indices: int [N], distinct pool positions.
        num_clients: K.
        rng: source of randomness; advanced.

    Returns:
        (rows, unassigned): K arrays int64 [floor(N / K)], and the N mod K positions that nobody got.

    Raises:
        ValueError: K is not in 1..N, or a position occurs twice.
    """
    indices = _as_set(indices)
    if not 1 <= num_clients <= len(indices):
        raise ValueError(f"num_clients={num_clients} cannot share {len(indices)} examples: give 1 to {len(indices)} clients")
    share = len(indices) // num_clients
    shuffled = rng.permutation(indices)
    rows = shuffled[: share * num_clients].reshape(num_clients, share)
    return list(rows), shuffled[share * num_clients :]


def dirichlet(
    labels: np.ndarray,
    indices: np.ndarray,
    num_clients: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    min_size: int = 10,
    max_tries: int = 1000,
) -> Rows:
    """Label-skewed shares of unequal size: every class is spread over the clients by p ~ Dir(alpha 1_K).

    The routine of SemiFL's and (FL)^2's released code. Class by class, in order: draw p; set p_k = 0 for the clients that
    already hold >= N / K examples; renormalize; cut the class's ascending list of n_c positions at floor(cumsum(p) n_c).
    All of it is repeated from scratch until the smallest client holds at least `min_size`; a try whose open clients all
    drew p_k = 0 is discarded too. Every try consumes C' K-dimensional Dirichlet draws, C' the number of classes that occur
    in `indices`.

    Args:
        labels: int [pool], labels of the whole pool.
        indices: int [N], distinct pool positions to share out.
        num_clients: K.
        alpha: concentration > 0; small = skewed, large = even.
        rng: source of randomness; advanced.
        min_size: smallest number of examples that a client may end with.
        max_tries: tries before giving up.

    Returns:
        K arrays int64 of pool positions, class after class; each position is in exactly one of them.

    Raises:
        ValueError: an argument is out of range, K min_size > N, a position occurs twice, or no try succeeded.
    """
    indices = _as_set(indices)
    _check_dirichlet(len(indices), num_clients, alpha, min_size, max_tries)
    of_class = np.asarray(labels)[indices]
    class_counts = np.unique(of_class, return_counts=True)[1]

    # Only sizes are computed per try: positions are moved once, for the try that succeeds. Aborting a try once the examples
    # still to come cannot fill the smallest clients would gain nothing: with min_size well under N / K it is certain only
    # after the last class.
    smallest_seen = 0
    for _ in range(max_tries):
        sizes = _dirichlet_sizes(class_counts, rng.dirichlet(np.full(num_clients, alpha), len(class_counts)))
        if sizes is None:
            continue
        smallest = int(sizes.sum(0).min())
        if smallest >= min_size:
            return _rows(indices[np.argsort(of_class, kind="stable")], sizes)
        smallest_seen = max(smallest_seen, smallest)
    raise ValueError(
        f"no Dirichlet split of {len(indices)} examples with alpha={alpha} and num_clients={num_clients} gave every client "
        f"min_size={min_size} in {max_tries} tries (best smallest client: {smallest_seen}): "
        "raise alpha, use fewer clients or lower min_size"
    )


def _check_dirichlet(num_examples: int, num_clients: int, alpha: float, min_size: int, max_tries: int) -> None:
    """Raises ValueError for arguments of `dirichlet` out of range, or a request that no try could meet."""
    if num_clients < 1 or min_size < 0 or max_tries < 1:
        raise ValueError(
            f"got num_clients={num_clients}, min_size={min_size}, max_tries={max_tries}: accepted are >= 1, >= 0 and >= 1"
        )
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha={alpha} is no Dirichlet concentration: give a finite number > 0, such as 0.1")
    if num_clients * min_size > num_examples:
        raise ValueError(
            f"{num_examples} examples cannot give num_clients={num_clients} clients min_size={min_size} each: "
            f"use at most {num_examples // min_size} clients, or lower min_size to {num_examples // num_clients}"
        )


def summary(rows: Rows, labels: np.ndarray, num_classes: int) -> Summary:
    """Sizes and class histograms of a partition.

    Args:
        rows: K arrays of pool positions.
        labels: int [pool], values in 0..C-1.
        num_classes: C.

    Returns:
        Summary of sizes int64 [K] and histogram int64 [K, C]; the histogram's rows add up to the sizes.
    """
    labels = np.asarray(labels)
    histogram = np.array([np.bincount(labels[row], minlength=num_classes) for row in rows]).reshape(len(rows), num_classes)
    return Summary(histogram.sum(1), histogram)


def _as_set(indices: np.ndarray) -> np.ndarray:
    """Ascending positions int64 [N], none twice."""
    positions = np.unique(np.asarray(indices, np.int64))
    if len(positions) != len(indices):
        raise ValueError(f"indices hold {len(indices) - len(positions)} repeated positions: give each position once")
    return positions


def _dirichlet_sizes(class_counts: np.ndarray, proportions: np.ndarray) -> np.ndarray | None:
    """Examples of each class and client, int64 [C', K], or None where no open client has any mass left.

    Args:
        class_counts: int [C'], examples of each class, all > 0.
        proportions: float64 [C', K], the Dirichlet draws.
    """
    num_examples, num_clients = class_counts.sum(), proportions.shape[1]
    sizes = np.zeros(proportions.shape, np.int64)
    held = np.zeros(num_clients, np.int64)
    for c, count in enumerate(class_counts):
        cumulative = np.cumsum(np.where(held < num_examples / num_clients, proportions[c], 0.0))
        if not cumulative[-1] > 0.0:  # small alphas underflow to exact zeros (or NaN), and the division would spread NaN
            return None
        # Divided by its own last entry it ends at exactly 1: rounding never sends an example past the last open client.
        cuts = np.floor(cumulative / cumulative[-1] * count).astype(np.int64)
        sizes[c] = np.diff(cuts, prepend=0)
        held += sizes[c]
    return sizes


def _rows(by_class: np.ndarray, sizes: np.ndarray) -> Rows:
    """Cuts the positions `by_class` int [N], class after class, into one row per client by `sizes` int [C', K]."""
    num_clients = sizes.shape[1]
    owner = np.repeat(np.tile(np.arange(num_clients), len(sizes)), sizes.ravel())
    by_client = by_class[np.argsort(owner, kind="stable")]
    return np.split(by_client, np.cumsum(sizes.sum(0))[:-1])

"""Partitions by Dirichlet draws. Arguments, result and errors: see `shares`."""

import numpy as np
from jaxtyping import Float, Int, Int64
from numpy.random import Generator

from fedjax_ssl.data.bars import bar
from fedjax_ssl.data.shares import Indices, Labels, Partition, checked, cut, distinct, shuffled_by_class
from fedjax_ssl.options import plural


def dirichlet(
    labels: Labels,
    indices: Indices,
    num_clients: int,
    rng: Generator,
    *,
    alpha: float,
    min_size: int = 10,
    max_tries: int = 200,
) -> Partition:
    """Label-skewed shares of unequal size: every class is spread over the clients by p ~ Dir(alpha 1_K).

    The routine of SemiFL's, (FL)^2's and FedDure's released code. Class by class, in order: draw p; set p_k = 0 for the
    clients that already have >= N / K examples; renormalize; cut the class's shuffled n_c positions at floor(cumsum(p) n_c).
    All of it is repeated until every client has at least `min_size` examples.

    With many clients and a small alpha no number of tries suffices. After `max_tries` only the clients with too few examples
    are drawn anew: p is a row of independent Gamma(alpha), normalized, so one client's variables can be replaced. The
    result follows nearly, not exactly, the distribution conditioned on `min_size`, because the clients' shares depend on each
    other; a note says so. ValueError if this fails, too.
    """
    indices = distinct(indices)
    _check_dirichlet(len(indices), num_clients, alpha, min_size, max_tries)
    class_counts = np.unique(np.asarray(labels)[indices], return_counts=True)[1]
    for _ in bar(range(max_tries), "Dirichlet split", total=max_tries, unit="tries"):
        sizes = _dirichlet_sizes(class_counts, rng.dirichlet(np.full(num_clients, alpha), len(class_counts)))
        if sizes is not None and sizes.sum(0).min() >= min_size:
            return Partition(cut(shuffled_by_class(labels, indices, rng)[0], sizes), indices[:0])

    proportions = np.zeros((len(class_counts), num_clients))
    short, fewest = np.ones(num_clients, bool), num_clients
    for _ in bar(range(1000), "Dirichlet split, of clients with too few examples", total=1000, unit="tries"):
        proportions[:, short] = rng.standard_gamma(alpha, (len(class_counts), short.sum()))
        sizes = _dirichlet_sizes(class_counts, proportions)
        short = np.ones(num_clients, bool) if sizes is None else sizes.sum(0) < min_size
        if sizes is not None and not short.any():
            note = (
                f"Dirichlet split with alpha={alpha}, num_clients={num_clients}: none of {max_tries} draws gave every client "
                f"min_size={min_size}, so the clients that fell short were drawn anew, alone"
            )
            return Partition(cut(shuffled_by_class(labels, indices, rng)[0], sizes), indices[:0], (note,))
        fewest = min(fewest, int(short.sum()))
    raise ValueError(
        f"no Dirichlet split of {len(indices)} examples with alpha={alpha} and num_clients={num_clients} gave every client "
        f"min_size={min_size} (at best {plural(fewest, 'client')} fell short): raise alpha, use fewer clients or lower min_size"
    )


def dirichlet_classes(labels: Labels, indices: Indices, num_clients: int, rng: Generator, *, alpha: float) -> Partition:
    """Every client draws its own class mixture q_k ~ Dir(alpha 1_C); a class is split in proportion to its column.

    The partition of FLUTE's FedLabel experiments: class c of n_c examples, shuffled, is cut at
    floor(n_c cumsum_k(q_kc / sum_j q_jc)). ValueError if no client drew any of a class.
    """
    positions = checked(indices, num_clients)
    _check_alpha(alpha)
    by_class, counts = shuffled_by_class(labels, positions, rng)
    cumulative = np.cumsum(rng.dirichlet(np.full(len(counts), alpha), num_clients), axis=0).T  # [C, K]
    undrawn = np.flatnonzero(~(cumulative[:, -1] > 0) & (counts > 0))
    if len(undrawn):
        raise ValueError(
            f"alpha={alpha} with num_clients={num_clients} left no client any share of class {undrawn[0]}: "
            "raise alpha, use more clients or another seed"
        )
    total = np.where(counts > 0, cumulative[:, -1], 1.0)[:, None]
    cuts = np.floor(cumulative / total * counts[:, None]).astype(np.int64)
    return Partition(cut(by_class, np.diff(cuts, axis=1, prepend=0)), positions[:0])


def dirichlet_pairs(labels: Labels, indices: Indices, num_clients: int, rng: Generator, *, alpha: float) -> Partition:
    """Equal shares whose label skew is within pairs of clients: a pair together has a random sample of all examples.

    The partition of SAGE's released code. The shuffled examples are cut into K / 2 equal parts, one for each pair. A pair
    shares its part as in `dirichlet`, drawn again until both clients have at least half of the mean. Then the lists of all
    clients, one after the other and each in the order of classes, are joined and cut into K equal rows; N mod K examples are
    unassigned. ValueError for an odd number of clients.
    """
    positions = checked(indices, num_clients)
    _check_alpha(alpha)
    if num_clients % 2:
        raise ValueError(f"num_clients={num_clients} cannot be paired: give an even number of clients, or use dirichlet")
    share, rows = len(positions) // num_clients, []
    shuffled = rng.permutation(positions)
    for part in shuffled[: share * num_clients].reshape(num_clients // 2, 2 * share):
        by_class, counts = shuffled_by_class(labels, part, rng)
        counts = counts[counts > 0]
        draws = (_dirichlet_sizes(counts, rng.dirichlet(np.full(2, alpha), len(counts))) for _ in range(10_000))
        sizes = next((sizes for sizes in draws if sizes is not None and 2 * sizes.sum(0).min() >= share), None)
        if sizes is None:
            raise ValueError(f"alpha={alpha} left a client of a pair less than half of the mean: raise alpha, or use dirichlet")
        rows += cut(by_class, sizes)
    return Partition(list(np.concatenate(rows).reshape(num_clients, share)), shuffled[share * num_clients :])


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha={alpha} is no Dirichlet concentration: give a finite number > 0, such as 0.1")


def _check_dirichlet(num_examples: int, num_clients: int, alpha: float, min_size: int, max_tries: int) -> None:
    """ValueError for arguments out of range, or a request that no try could meet."""
    if num_clients < 1 or min_size < 0 or max_tries < 1:
        raise ValueError(f"num_clients={num_clients}, min_size={min_size}, max_tries={max_tries}, accepted: >= 1, >= 0, >= 1")
    _check_alpha(alpha)
    if num_clients * min_size > num_examples or (num_clients > 1 and num_clients * min_size == num_examples):
        raise ValueError(
            f"{num_examples} examples cannot give num_clients={num_clients} clients min_size={min_size} each by chance: "
            f"use at most {max(1, (num_examples - 1) // max(1, min_size))} clients, or lower min_size to "
            f"{(num_examples - 1) // num_clients} or less"
        )


def _dirichlet_sizes(
    class_counts: Int[np.ndarray, " C"], proportions: Float[np.ndarray, "C K"]
) -> Int64[np.ndarray, "C K"] | None:
    """Examples of each class and client, or None if no client below N / K has a proportion; a row's scale does not matter."""
    num_examples, num_clients = class_counts.sum(), proportions.shape[1]
    sizes = np.zeros(proportions.shape, np.int64)
    totals = np.zeros(num_clients, np.int64)
    for c, count in enumerate(class_counts):
        cumulative = np.cumsum(np.where(totals < num_examples / num_clients, proportions[c], 0.0))
        if not cumulative[-1] > 0.0:  # small alphas underflow to zeros or NaN
            return None
        # Divided by its own last entry it ends at exactly 1, so no example is lost by rounding.
        cuts = np.floor(cumulative / cumulative[-1] * count).astype(np.int64)
        sizes[c] = np.diff(cuts, prepend=0)
        totals += sizes[c]
    return sizes

"""Partitions that fix how many examples, or which classes, a client gets: equal shares, shards, classes, fixed mixtures."""

from __future__ import annotations

import numpy as np

from fedjax_ssl.data.shares import Partition, by_owner, checked, cut, shuffled_by_class

# Class probabilities of FedMatch's client type 0; type i is this vector, turned by i: the peak stands at class i.
BATCH_IMBALANCED = (0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15)


def class_balanced(labels: np.ndarray, indices: np.ndarray, num_clients: int, rng: np.random.Generator) -> Partition:
    """The same number of every class for every client: n_c / K of class c, and one more for some where K does not divide n_c.

    FedDure's "IID" (Section 4.1). Those that get one more are the clients that hold least so far, in random order among
    equals, so that sizes differ by at most 1: of 750 labels per class 100 clients get 7 or 8 of each and 75 in all.

    Args:
        labels: int [pool], labels of the whole pool; C - 1 is the largest.
        indices: int [N], distinct pool positions to share out.
        num_clients: K.
        rng: source of randomness; advanced.

    Returns:
        Partition; rows hold class after class, nothing is unassigned.

    Raises:
        ValueError: K is not in 1..N, or a position occurs twice.
    """
    positions = checked(indices, num_clients)
    by_class, counts = shuffled_by_class(labels, positions, rng)
    sizes = np.repeat((counts // num_clients)[:, None], num_clients, axis=1)
    more = np.zeros(num_clients, np.int64)
    for c, rest in enumerate(counts % num_clients):
        lucky = np.lexsort((rng.random(num_clients), more))[:rest]
        sizes[c, lucky] += 1
        more[lucky] += 1
    return Partition(cut(by_class, sizes), positions[:0])


def shards(
    labels: np.ndarray, indices: np.ndarray, num_clients: int, rng: np.random.Generator, *, shards_per_client: int
) -> Partition:
    """Sort and shard: examples sorted by class, cut into K s shards, s of them for every client at random.

    FedCon's Non-IID split (200 shards, 2 per client). A shard may span classes. Shards differ in size by at most 1, instead
    of dropping what K s does not divide.

    Args:
        labels: int [pool], labels of the whole pool.
        indices: int [N], distinct pool positions to share out.
        num_clients: K.
        rng: source of randomness; advanced.
        shards_per_client: s.

    Returns:
        Partition; nothing is unassigned.

    Raises:
        ValueError: K or s is < 1, K s > N, or a position occurs twice.
    """
    positions = checked(indices, num_clients)
    num_shards = num_clients * shards_per_client
    if not num_clients <= num_shards <= len(positions):
        raise ValueError(
            f"shards_per_client={shards_per_client} with num_clients={num_clients} cannot cut {len(positions)} examples: "
            f"give 1 to {len(positions) // num_clients} shards per client"
        )
    by_class, _ = shuffled_by_class(labels, positions, rng)
    owners = rng.permutation(np.repeat(np.arange(num_clients), shards_per_client))
    cuts = np.arange(num_shards + 1) * len(positions) // num_shards
    return Partition(by_owner(by_class, np.repeat(owners, np.diff(cuts)), num_clients), positions[:0])


def class_shards(
    labels: np.ndarray, indices: np.ndarray, num_clients: int, rng: np.random.Generator, *, classes_per_client: int
) -> Partition:
    """SemiFL's balanced Non-IID split `l-K`: every class in l K / C equal shards, l shards per client, at most l classes.

    The list that holds every class l K / C times is shuffled; client k takes entries k l to k l + l - 1. One class may
    come up twice for a client.

    Args:
        labels: int [pool], labels of the whole pool; C - 1 is the largest.
        indices: int [N], distinct pool positions to share out.
        num_clients: K.
        rng: source of randomness; advanced.
        classes_per_client: l.

    Returns:
        Partition; a class's shards differ in size by at most 1, and nothing is unassigned.

    Raises:
        ValueError: K or l is out of range, C does not divide l K, or a position occurs twice.
    """
    positions = checked(indices, num_clients)
    num_classes = _check_classes(labels, classes_per_client)
    if classes_per_client * num_clients % num_classes:
        raise ValueError(
            f"classes_per_client={classes_per_client} for num_clients={num_clients} makes {classes_per_client * num_clients} "
            f"shards, which is no multiple of the {num_classes} classes: change num_clients or classes_per_client"
        )
    slots = rng.permutation(np.arange(num_clients * classes_per_client) % num_classes)
    return _share_classes(labels, positions, slots.reshape(num_clients, classes_per_client), rng)


def random_classes(
    labels: np.ndarray, indices: np.ndarray, num_clients: int, rng: np.random.Generator, *, classes_per_client: int
) -> Partition:
    """Every client draws l distinct classes at random; a class is shared equally by those who drew it.

    FedSiam's Non-IID-I as its paper describes it, and its Non-IID unlabeled data with labels at the server, both with l = 2.
    Sizes differ, as some classes are drawn more often than others.

    Args:
        labels: int [pool], labels of the whole pool; C - 1 is the largest.
        indices: int [N], distinct pool positions to share out.
        num_clients: K.
        rng: source of randomness; advanced.
        classes_per_client: l.

    Returns:
        Partition; the examples of a class that nobody drew are unassigned, and noted.

    Raises:
        ValueError: K or l is out of range, or a position occurs twice.
    """
    positions = checked(indices, num_clients)
    num_classes = _check_classes(labels, classes_per_client)
    orders = rng.permuted(np.tile(np.arange(num_classes), (num_clients, 1)), axis=1)
    return _share_classes(labels, positions, orders[:, :classes_per_client], rng)


def class_grid(labels: np.ndarray, indices: np.ndarray, num_clients: int, rng: np.random.Generator) -> Partition:
    """Client i holds classes i // C and i % C, each class in 2 C equal shares: FedSiam's Non-IID-I as released.

    The C clients with i // C = i % C take two shares of their one class.

    Args:
        labels: int [pool], labels of the whole pool; C - 1 is the largest.
        indices: int [N], distinct pool positions to share out.
        num_clients: K = C^2.
        rng: source of randomness; advanced.

    Returns:
        Partition; a class's shares differ in size by at most 1, and nothing is unassigned.

    Raises:
        ValueError: K is not C^2, or a position occurs twice.
    """
    positions = checked(indices, num_clients)
    num_classes = int(np.max(labels)) + 1
    if num_clients != num_classes**2:
        raise ValueError(
            f"num_clients={num_clients} does not make a grid of {num_classes} x {num_classes} classes: "
            f"give {num_classes**2} clients, or use random_classes"
        )
    client = np.arange(num_clients)
    return _share_classes(labels, positions, np.stack([client // num_classes, client % num_classes], 1), rng)


def batch_imbalanced(labels: np.ndarray, indices: np.ndarray, num_clients: int, rng: np.random.Generator) -> Partition:
    """FedMatch's batch-imbalanced split: client i asks for floor(N / K) examples, drawn from class mixture i mod 10.

    The mixtures are `BATCH_IMBALANCED` turned by the client's type: probability .50 for class i mod 10, .15 for its two
    neighbors, .02 for the class opposite, .03 for the other six. Counts are multinomial; every class's shuffled list is taken
    from its start, client after client, until it runs out: what later clients ask for then is short.

    Args:
        labels: int [pool], labels of the whole pool, of 10 classes.
        indices: int [N], distinct pool positions to share out.
        num_clients: K.
        rng: source of randomness; advanced.

    Returns:
        Partition; what nobody asked for is unassigned, and what is short is noted.

    Raises:
        ValueError: the pool has not 10 classes, K is not in 1..N, or a position occurs twice.
    """
    positions = checked(indices, num_clients)
    num_classes = int(np.max(labels)) + 1
    if num_classes != len(BATCH_IMBALANCED):
        raise ValueError(f"batch_imbalanced is defined for 10 classes, got {num_classes}: use dirichlet or class_shards")
    by_class, counts = shuffled_by_class(labels, positions, rng)
    mixtures = np.stack([np.roll(BATCH_IMBALANCED, kind) for kind in range(num_classes)])
    asked = rng.multinomial(len(positions) // num_clients, mixtures[np.arange(num_clients) % num_classes]).T  # [C, K]
    reached = np.minimum(np.cumsum(asked, axis=1), counts[:, None])
    taken = np.diff(reached, axis=1, prepend=0)
    *rows, unassigned = cut(by_class, np.column_stack([taken, counts - reached[:, -1]]))
    short = asked.sum(0) - taken.sum(0)
    note = f"batch_imbalanced: classes ran out, {np.count_nonzero(short)} clients are short of {short.sum()} examples in all"
    return Partition(rows, np.sort(unassigned), (note,) if short.any() else ())


def _check_classes(labels: np.ndarray, classes_per_client: int) -> int:
    """C, if a client can hold `classes_per_client` of the classes 0..C-1."""
    num_classes = int(np.max(labels)) + 1
    if not 1 <= classes_per_client <= num_classes:
        raise ValueError(f"classes_per_client={classes_per_client}: give 1 to {num_classes}, the number of classes")
    return num_classes


def _share_classes(labels: np.ndarray, positions: np.ndarray, slots: np.ndarray, rng: np.random.Generator) -> Partition:
    """Shares every class equally over its slots: `slots` int [K, l], the classes that each client takes a share of.

    Shares differ by at most 1, and which are the larger is random. A class without a slot is unassigned.
    """
    by_class, counts = shuffled_by_class(labels, positions, rng)
    num_clients = len(slots)
    sizes = np.zeros((len(counts), num_clients + 1), np.int64)  # the last column is nobody
    for c, count in enumerate(counts):
        holders = rng.permutation(np.nonzero(slots == c)[0]) if (slots == c).any() else np.array([num_clients])
        share, rest = divmod(int(count), len(holders))
        np.add.at(sizes[c], holders, share)
        np.add.at(sizes[c], holders[:rest], 1)
    *rows, unassigned = cut(by_class, sizes)
    unheld = np.flatnonzero(sizes[:, -1])
    note = f"no client drew class {', '.join(map(str, unheld))}: {len(unassigned)} examples go to no client"
    return Partition(rows, np.sort(unassigned), (note,) if len(unheld) else ())

"""Partitions that fix how many examples, or which classes, a client gets. Arguments, result and errors: see `shares`."""

import numpy as np
from jaxtyping import Int
from numpy.random import Generator

from fedjax_ssl.data.shares import Indices, Labels, Partition, Positions, by_client, checked, cut, shuffled_by_class
from fedjax_ssl.options import plural

BATCH_IMBALANCED = (0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15)
"""Class probabilities of FedMatch's clients 0, 10, 20, ..."""


def class_balanced(labels: Labels, indices: Indices, num_clients: int, rng: Generator) -> Partition:
    """The same number of every class for every client: FedDure's "IID" (Section 4.1).

    Of n_c examples of a class each client gets floor(n_c / K). Each further one goes to a client that has the fewest examples
    so far, at random among equals, so that sizes differ by at most 1.
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


def shards(labels: Labels, indices: Indices, num_clients: int, rng: Generator, *, shards_per_client: int) -> Partition:
    """FedCon's Non-IID split: examples sorted by class, cut into K s equal shards, of which each client gets s at random.

    s = `shards_per_client`. Sizes of shards differ by at most 1; a shard may span classes.
    """
    positions = checked(indices, num_clients)
    num_shards = num_clients * shards_per_client
    if not num_clients <= num_shards <= len(positions):
        raise ValueError(
            f"shards_per_client={shards_per_client} with num_clients={num_clients} cannot cut {len(positions)} examples: "
            f"give 1 to {len(positions) // num_clients} shards per client"
        )
    by_class, _ = shuffled_by_class(labels, positions, rng)
    clients = rng.permutation(np.repeat(np.arange(num_clients), shards_per_client))
    cuts = np.arange(num_shards + 1) * len(positions) // num_shards
    return Partition(by_client(by_class, np.repeat(clients, np.diff(cuts)), num_clients), positions[:0])


def class_shards(labels: Labels, indices: Indices, num_clients: int, rng: Generator, *, classes_per_client: int) -> Partition:
    """SemiFL's balanced Non-IID split `l-K`: every class is cut into l K / C equal shards, and each client gets l shards.

    l = `classes_per_client`; C has to divide l K. A list of every class, l K / C times, is shuffled, and client k takes entries
    k l to k l + l - 1, which may repeat a class. Sizes of a class's shards differ by at most 1.
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


def random_classes(labels: Labels, indices: Indices, num_clients: int, rng: Generator, *, classes_per_client: int) -> Partition:
    """Every client draws l = `classes_per_client` distinct classes at random, and the clients of a class share it equally.

    FedSiam's Non-IID-I as its paper describes it, and its Non-IID unlabeled data with labels at the server, both with l = 2.
    Examples of a class that no client drew are unassigned, with a note.
    """
    positions = checked(indices, num_clients)
    num_classes = _check_classes(labels, classes_per_client)
    orders = rng.permuted(np.tile(np.arange(num_classes), (num_clients, 1)), axis=1)
    return _share_classes(labels, positions, orders[:, :classes_per_client], rng)


def class_grid(labels: Labels, indices: Indices, num_clients: int, rng: Generator) -> Partition:
    """Client i of K = C^2 has classes i // C and i % C, each class in 2 C equal shares: FedSiam's Non-IID-I as released.

    The C clients with i // C = i % C take two shares of their one class.
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


def batch_imbalanced(labels: Labels, indices: Indices, num_clients: int, rng: Generator) -> Partition:
    """FedMatch's batch-imbalanced split of 10 classes: client i asks for floor(N / K) examples of class mixture i mod 10.

    Mixture i is `BATCH_IMBALANCED`, rotated by i; counts are multinomial. Clients take their examples of a class one after
    another until the class runs out: later clients get fewer than they asked for, with a note. The rest is unassigned.
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
    who, lacking = plural(np.count_nonzero(short), "client"), plural(short.sum(), "example")
    note = f"batch_imbalanced: classes ran out, {who} fell short by {lacking} in all"
    return Partition(rows, np.sort(unassigned), (note,) if short.any() else ())


def _check_classes(labels: Labels, classes_per_client: int) -> int:
    """The number of classes C; ValueError if a client cannot have `classes_per_client` of them."""
    num_classes = int(np.max(labels)) + 1
    if not 1 <= classes_per_client <= num_classes:
        raise ValueError(f"classes_per_client={classes_per_client}: give 1 to {num_classes}, the number of classes")
    return num_classes


def _share_classes(labels: Labels, positions: Positions, slots: Int[np.ndarray, "K l"], rng: Generator) -> Partition:
    """Shares each class among the clients that list it in `slots`; shares differ by at most one example.

    Classes in no row stay unassigned.
    """
    by_class, counts = shuffled_by_class(labels, positions, rng)
    num_clients = len(slots)
    sizes = np.zeros((len(counts), num_clients + 1), np.int64)  # the last column is of no client
    for c, count in enumerate(counts):
        clients = rng.permutation(np.nonzero(slots == c)[0]) if (slots == c).any() else np.array([num_clients])
        share, rest = divmod(int(count), len(clients))
        np.add.at(sizes[c], clients, share)
        np.add.at(sizes[c], clients[:rest], 1)
    *rows, unassigned = cut(by_class, sizes)
    undrawn = np.flatnonzero(sizes[:, -1])
    note = f"no client drew class {', '.join(map(str, undrawn))}: nobody has {plural(len(unassigned), 'example')}"
    return Partition(rows, np.sort(unassigned), (note,) if len(undrawn) else ())

"""From a dataset to federated data: which client, or the server, has which labeled and unlabeled examples."""

import logging
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from fedjax_ssl.data.federated import FederatedData, Pool, pack
from fedjax_ssl.data.partition import PARTITIONS, balanced_labels, random_labels, share_of_classes, stratified_labels
from fedjax_ssl.data.settings import DataSettings
from fedjax_ssl.data.shares import Labels, Partition, Positions, Rows, mixed
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.data.sources.resplit import OTHERS

_log = logging.getLogger(__name__)


class Assignment(NamedTuple):
    """Which training examples the server and each client have, labeled or not; `notes` are as in `Partition`.

    Examples for `validation` are nobody's: training examples or, where the data have a validation part, positions after these.
    Each client is tested on its `client_test`, on which nobody trains either: some of its own examples or, at positions after
    all others, examples of the test part. Without tests of clients it is empty.
    """

    server: Positions
    labeled: Rows
    unlabeled: Rows
    pooled: Positions  # every unlabeled training example, also those that no client has
    unassigned: int  # training examples that neither the server nor a client has
    notes: tuple[str, ...]
    validation: Positions
    client_test: Rows


def draw(dataset: Dataset, how: DataSettings, seed: int) -> Assignment:
    """Draws a split of a training set; ValueError if the request cannot be met. No example of unknown class is labeled."""
    _check_natural(dataset, how)
    drawn = _with_validation(dataset, how, seed)
    if how.client_test != "own":
        return drawn
    if (whose := dataset.test_clients) is None:
        raise ValueError("client_test=own: the data do not say whose the test examples are: take client_test=share")
    first = len(dataset.train_labels) + (len(dataset.validation.labels) if dataset.validation is not None else 0)
    return drawn._replace(client_test=[first + np.flatnonzero(whose == k) for k in range(how.num_clients)])


def _with_validation(dataset: Dataset, how: DataSettings, seed: int) -> Assignment:
    """The split, with the examples for validation."""
    if how.validation == "own":
        if dataset.validation is None:
            raise ValueError(f"{dataset.name} has no validation part of its own: take {OTHERS}")
        first = len(dataset.train_labels)
        return _drawn(dataset, how, seed)._replace(validation=first + np.arange(len(dataset.validation.labels)))
    if how.validation != "pool":
        return _drawn(dataset, how, seed)
    labels, clients = dataset.train_labels, dataset.clients
    validation = _share_for_validation(np.arange(len(labels)), labels, how, seed)
    left = np.setdiff1d(np.arange(len(labels)), validation)
    drawn = _drawn(dataset._replace(train_labels=labels[left], clients=None if clients is None else clients[left]), how, seed)
    labeled, unlabeled, tests = ([left[row] for row in rows] for rows in (drawn.labeled, drawn.unlabeled, drawn.client_test))
    pooled = left[drawn.pooled]
    return Assignment(left[drawn.server], labeled, unlabeled, pooled, drawn.unassigned, drawn.notes, validation, tests)


def _share_for_validation(rows: Positions, labels: Labels, how: DataSettings, seed: int) -> Positions:
    """The same share of each class in `rows`, drawn by the seed; ValueError where that is nothing, or all of a class."""
    shuffled = np.random.default_rng([seed, 4]).permutation(rows)
    chosen = np.sort(share_of_classes(shuffled, labels, how.validation_fraction))
    left, present = np.setdiff1d(rows, chosen), labels[rows]
    if not len(chosen) or len(np.unique(labels[left])) < len(np.unique(present)):
        got = f"{how.validation_fraction:g} of {len(rows)} {'labeled' if how.validation == 'labels' else 'training'} examples"
        what = "is less than one example of any class" if not len(chosen) else "leaves none of a class to train on"
        raise ValueError(f"validation_fraction={got} {what}: give another share, or take more labels")
    return chosen


def _held_out(rows: Rows, labels: Labels, how: DataSettings, seed: int, taken: Positions) -> tuple[Rows, Rows]:
    """Each client's examples for its tests, and the others: a share, rounded half up, of those whose class is known.

    The labeled examples `taken` are none of them. ValueError where no client has any.
    """
    rng, is_free = np.random.default_rng([seed, 5]), labels >= 0
    is_free[taken] = False
    free = [rng.permutation(row[is_free[row]]) for row in rows]
    tests = [np.sort(own[: int(how.client_test_fraction * len(own) + 0.5)]) for own in free]
    if not any(map(len, tests)):
        raise ValueError(f"client_test_fraction={how.client_test_fraction:g} is less than one example of any client")
    return tests, [row[~np.isin(row, own)] for row, own in zip(rows, tests, strict=True)]


def _drawn(dataset: Dataset, how: DataSettings, seed: int) -> Assignment:
    """The split of a training set, of which validation takes at most a share of the server's labels."""
    labels = dataset.train_labels
    label_rng, split_rng, labeled_rng = (np.random.default_rng([seed, stream]) for stream in range(3))
    empty = [np.zeros(0, np.int64)] * how.num_clients
    server, labeled, apart, validation = empty[0], empty, Partition([], empty[0]), empty[0]
    tests: Rows = []
    if how.is_joint:
        shared = _share(how, "all", how.partition, dataset, np.arange(len(labels)), split_rng)
        if how.client_test_fraction:
            tests, rows = _held_out(shared.rows, labels, how, seed, empty[0])
            shared = shared._replace(rows=rows)
        labeled, unlabeled = _label_within(shared.rows, labels, how, label_rng)
    else:
        labeled_set, rest = _labeled_set(dataset, how, label_rng)
        if how.validation == "labels":
            validation = _share_for_validation(labeled_set, labels, how, seed)
            labeled_set = np.setdiff1d(labeled_set, validation)
        source = rest if how.exclude_labeled and how.labels_first else np.arange(len(labels))
        shared = _share(how, "unlabeled", how.unlabeled_partition or how.partition, dataset, source, split_rng)
        if how.exclude_labeled and not how.labels_first:
            free = np.zeros(len(labels), bool)
            free[rest] = True
            *rows, unassigned = (row[free[row]] for row in (*shared.rows, shared.unassigned))
            shared = shared._replace(rows=rows, unassigned=unassigned)
        if len(validation) and not how.exclude_labeled:
            *rows, unassigned = (np.setdiff1d(row, validation) for row in (*shared.rows, shared.unassigned))
            shared = shared._replace(rows=rows, unassigned=unassigned)
        if how.client_test_fraction:
            tests, rows = _held_out(shared.rows, labels, how, seed, labeled_set)
            shared = shared._replace(rows=rows)
        # Batch norm sees them in this order, which must not tell their classes.
        unlabeled = shared.rows if (how.unlabeled_partition or how.partition) == "iid" else mixed(shared.rows, split_rng)
        if how.labels_at == "server":
            server = labeled_set
        else:
            apart = _share(how, "labeled", how.labeled_partition or how.partition, dataset, labeled_set, labeled_rng)
            labeled = apart.rows
    pooled = np.concatenate([*unlabeled, shared.unassigned])
    if how.reveal_labels:
        labeled = [np.union1d(own, row[labels[row] >= 0]) for own, row in zip(labeled, unlabeled, strict=True)]
        unlabeled = [row[labels[row] < 0] for row in unlabeled]
    assigned = np.zeros(len(labels), bool)
    assigned[np.concatenate([server, *labeled, *unlabeled, validation, *tests])] = True
    notes = [*apart.notes, *shared.notes]
    if how.labels_at == "clients" and (without := sum(len(row) == 0 for row in labeled)):
        notes.append(f"{without} of {len(labeled)} clients have no labeled example")
    empty_ones = [k for k, (own, others) in enumerate(zip(labeled, unlabeled, strict=True)) if not (len(own) or len(others))]
    if empty_ones:
        first = ", ".join(map(str, empty_ones[:5])) + (", ..." if len(empty_ones) > 5 else "")
        notes.append(f"{len(empty_ones)} of {len(labeled)} clients have no example: {first}")
    pooled = np.random.default_rng([seed, 3]).permutation(np.sort(pooled))
    return Assignment(server, labeled, unlabeled, pooled, int(np.sum(~assigned)), tuple(notes), validation, tests)


def log_notes(assignment: Assignment, num_examples: int, *, of_clients: bool = True) -> None:
    """Logs how many training examples no client gets or validation takes, and where the split differs from the request.

    What concerns clients is logged only if `of_clients` is true, that is, if the method reads their data.
    """
    if len(assignment.validation):
        _log.info("%d examples are for validation", len(assignment.validation))
    if assignment.client_test:
        _log.info("%d examples are for tests of the clients that have them", sum(map(len, assignment.client_test)))
    if not of_clients:
        return
    if assignment.unassigned:
        _log.info("%d of %d training examples are given to no client", assignment.unassigned, num_examples)
    for note in assignment.notes:
        _log.warning("%s", note)


def tables(dataset: Dataset, assignment: Assignment, *, pooled_by_class: bool = False) -> FederatedData:
    """A dataset with the index tables of a split, in NumPy arrays; the table `pooled` may be sorted by true labels."""
    pooled = assignment.pooled
    if pooled_by_class:
        pooled = pooled[np.argsort(dataset.train_labels[pooled], kind="stable")]
    train = Pool(dataset.train_images, dataset.train_labels.astype(np.int32))
    if dataset.validation is not None:
        train = Pool(*(np.concatenate(pair) for pair in zip(train, dataset.validation[:2], strict=True)))
    test = Pool(dataset.test_images, dataset.test_labels.astype(np.int32))
    if max((int(row.max(initial=0)) for row in assignment.client_test), default=0) >= len(train.labels):
        train = Pool(*(np.concatenate(pair) for pair in zip(train, test, strict=True)))
    return FederatedData(
        train=train,
        test=test,
        server=pack([assignment.server]),
        labeled=pack(assignment.labeled),
        unlabeled=pack(assignment.unlabeled),
        client_data=pack([_union(*rows) for rows in zip(assignment.labeled, assignment.unlabeled, strict=True)]),
        pooled=pack([pooled]),
        validation=pack([assignment.validation]) if len(assignment.validation) else None,
        client_test=pack(assignment.client_test) if assignment.client_test else None,
    )


def _check_natural(dataset: Dataset, how: DataSettings) -> None:
    """Raises ValueError where a natural split is asked for and the clients are unknown, or more or fewer than asked for."""
    if "natural" not in (how.partition, how.labeled_partition, how.unlabeled_partition):
        return
    if dataset.clients is None:
        raise ValueError(
            "partition=natural: the data do not say whose the examples are: give an array `client` beside the labels or a "
            "column `client` in the CSV (`clients` in from_arrays), or take another partition"
        )
    numbers = dataset.clients if dataset.test_clients is None else np.concatenate([dataset.clients, dataset.test_clients])
    found = int(numbers.max()) + 1  # with `resplit` the test part may have all examples of a client
    if found != how.num_clients:
        raise ValueError(f"num_clients={how.num_clients} with partition=natural of {found} clients: give num_clients={found}")


def _union(labeled: Positions, unlabeled: Positions) -> Positions:
    """All of a client's examples, each once, also if a labeled one is among the unlabeled ones."""
    if not len(labeled):  # a shortcut for a million clients with labels at the server
        return unlabeled
    return np.concatenate([labeled, unlabeled[~np.isin(unlabeled, labeled)]])


def _share(how: DataSettings, what: str, name: str, dataset: Dataset, indices: Positions, rng: Generator) -> Partition:
    """The partition `name` of some examples; an error says `what` they are.

    Examples of unknown class are shared equally at random where the partition is by class.
    """
    scheme, labels = PARTITIONS[name], dataset.train_labels
    parameters = {key: dataset.clients if key == "clients" else getattr(how, key) for key in scheme.parameters}
    unknown = indices[labels[indices] < 0] if name not in ("iid", "natural") else indices[:0]
    known = indices[labels[indices] >= 0] if len(unknown) else indices
    if not len(indices) and name != "natural":
        raise ValueError(f"{what} examples by {name}: none are left for the clients: label fewer examples")
    if not len(known) and len(unknown):
        return Partition(np.array_split(rng.permutation(unknown), how.num_clients), known)
    try:
        shared = scheme.function(labels, known, how.num_clients, rng, **parameters)
    except ValueError as error:
        raise ValueError(f"{what} examples by {name}: {error}") from error
    if not len(unknown):
        return shared
    more = np.array_split(rng.permutation(unknown), how.num_clients)
    return shared._replace(rows=[np.concatenate(rows) for rows in zip(shared.rows, more, strict=True)])


def _labeled_set(dataset: Dataset, how: DataSettings, rng: Generator) -> tuple[Positions, Positions]:
    """The labeled set and the rest; a share, of examples of known class, is rounded, down to a multiple of C if balanced."""
    labels, num_classes = dataset.train_labels, dataset.num_classes
    num_labels = how.num_labels
    if how.labeled_fraction:
        num_known = int(np.sum(labels >= 0))
        num_labels = round(how.labeled_fraction[0] * num_known)
        num_labels -= num_labels % num_classes if how.label_selection == "balanced" else 0
        if not num_labels:
            minimum = "one label per class" if how.label_selection == "balanced" else "one label"
            raise ValueError(f"labeled_fraction={how.labeled_fraction[0]} of {num_known} examples is less than {minimum}")
    if how.label_selection == "balanced":
        return balanced_labels(labels, num_labels, num_classes, rng)
    return (stratified_labels if how.label_selection == "stratified" else random_labels)(labels, num_labels, rng)


def _label_within(rows: Rows, labels: Labels, how: DataSettings, rng: Generator) -> tuple[Rows, Rows]:
    """Labeled and unlabeled examples of every client: a random share of those of known class is labeled, rounded half up.

    With `stratified` it is a share of each class, rounded half to even, as in FedSiam's released code.
    """
    fractions = np.broadcast_to(how.fractions, how.num_clients)
    shuffled = [rng.permutation(row) for row in rows]
    shuffled = [row[np.argsort(labels[row] < 0, kind="stable")] for row in shuffled]  # those of unknown class last
    shares = list(zip(shuffled, fractions, strict=True))
    if how.label_selection == "stratified":
        labeled = [share_of_classes(row, labels, fraction) for row, fraction in shares]
    else:
        labeled = [row[: int(fraction * np.sum(labels[row] >= 0) + 0.5)] for row, fraction in shares]
    if not any(map(len, labeled)):
        raise ValueError(f"labeled_fraction={max(how.fractions)} labels no example of any client: give a larger share")
    if how.exclude_labeled or how.labels_at == "some_clients":
        return labeled, [row[~np.isin(row, own)] for row, own in zip(shuffled, labeled, strict=True)]
    return labeled, shuffled

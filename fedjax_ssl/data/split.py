"""From a dataset to federated data: who holds which labels, and which unlabeled images."""

from __future__ import annotations

import logging

import numpy as np

from fedjax_ssl.data import partition
from fedjax_ssl.data.federated import FederatedData, Pool, pack
from fedjax_ssl.data.sources import Dataset

_log = logging.getLogger(__name__)


def labels_at_server(
    dataset: Dataset,
    *,
    num_labels: int,
    num_clients: int,
    scheme: str,
    alpha: float,
    min_size: int,
    exclude_labeled: bool,
    seed: int,
) -> FederatedData:
    """A few labels at the server, the same number of each class; all other training images, unlabeled, at the clients.

    Args:
        dataset: the dataset.
        num_labels: labeled examples at the server.
        num_clients: K.
        scheme: `iid` or `dirichlet`.
        alpha: concentration of the Dirichlet split.
        min_size: smallest client that a Dirichlet split may have.
        exclude_labeled: whether the labeled examples are kept from the clients.
        seed: draws the labeled set and the split; the two do not depend on each other.

    Returns:
        FederatedData of NumPy arrays.

    Raises:
        ValueError: where the request cannot be met.
    """
    label_rng, split_rng = (np.random.default_rng([seed, stream]) for stream in range(2))
    labels = dataset.train_labels
    labeled, rest = partition.balanced_labels(labels, num_labels, dataset.num_classes, label_rng)
    unlabeled = rest if exclude_labeled else np.arange(len(labels))
    if scheme == "iid":
        rows, unassigned = partition.iid(unlabeled, num_clients, split_rng)
        if len(unassigned):
            _log.info("%d of %d unlabeled images go to no client", len(unassigned), len(unlabeled))
    else:
        rows = partition.dirichlet(labels, unlabeled, num_clients, alpha, split_rng, min_size=min_size)
    return FederatedData(
        train=Pool(dataset.train_images, labels.astype(np.int32)),
        test=Pool(dataset.test_images, dataset.test_labels.astype(np.int32)),
        server=pack([labeled]),
        labeled=pack([np.zeros(0, np.int64)] * num_clients),
        unlabeled=pack(rows),
        pooled=pack([unlabeled]),
    )

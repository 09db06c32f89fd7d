"""Splits: who holds labels and unlabeled examples in both scenarios, on made-up labels and on CIFAR-10's real ones."""

import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.splits import SPLITS
from fedjax_ssl.data import preview, sources, split
from fedjax_ssl.data.federated import tables_of
from fedjax_ssl.data.partition import balanced_labels, class_counts, dirichlet
from fedjax_ssl.data.settings import DataSettings
from fedjax_ssl.data.sources.checks import Part
from tests.data.common import labels_alone, same

LABELS = np.random.default_rng(0).permutation(np.arange(3000) % 10)
SEEDS = st.integers(0, 2**32 - 1)
fast = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def draw(seed=0, labels=LABELS, **keys):
    return split.draw(labels_alone(labels, 10), DataSettings(**{"num_clients": 20, "num_labels": 200} | keys), seed)


def every(rows):
    return np.sort(np.concatenate(rows)).tolist()


def histogram(rows, labels=LABELS):
    return class_counts(rows, labels, 10)


@fast
@given(SEEDS, st.sampled_from(["iid", "dirichlet", "class_balanced", "random_classes"]))
def test_labels_at_the_server_leave_the_clients_the_rest(seed, partition):
    drawn = draw(seed, partition=partition, min_size=1)
    assert histogram([drawn.server])[0].tolist() == [20] * 10
    assert every(drawn.labeled) == []
    assert sorted([*drawn.server, *drawn.pooled]) == list(range(3000))
    assert set(every(drawn.unlabeled)) <= set(drawn.pooled.tolist())
    assert drawn.unassigned == 3000 - 200 - len(every(drawn.unlabeled))


def test_a_server_split_is_the_same_as_before_labels_at_clients_existed():
    """Labeled set and partition come from streams 0 and 1 of the seed: the accuracies in the configs stay what they were."""
    labeled, rest = balanced_labels(LABELS, 200, 10, np.random.default_rng([7, 0]))
    rows = dirichlet(LABELS, rest, 20, np.random.default_rng([7, 1]), alpha=0.3).rows
    drawn = draw(7, partition="dirichlet")
    assert np.array_equal(drawn.server, labeled)
    assert same(list(map(np.sort, drawn.unlabeled)), list(map(np.sort, rows)))


@pytest.mark.parametrize(("partition", "sbn"), [("dirichlet", "cohort"), ("class_balanced", "cohort"), ("iid", "all")])
def test_the_order_of_unlabeled_examples_does_not_tell_their_classes(partition, sbn):
    labels = np.sort(LABELS)  # stored class after class
    drawn = draw(labels=labels, partition=partition)
    for row in [drawn.pooled] if sbn == "all" else drawn.unlabeled:
        of_row = labels[row]
        changes, shares = np.mean(of_row[1:] != of_row[:-1]), np.bincount(of_row) / len(row)
        assert changes == pytest.approx(1 - np.sum(shares**2), abs=4 / len(row) ** 0.5)  # 0 where they are sorted


def test_a_random_labeled_set_is_not_balanced_and_a_share_is_rounded():
    drawn = draw(label_selection="random", labeled_fraction=(0.0111,))
    assert len(drawn.server) == 33
    assert len(set(histogram([drawn.server])[0].tolist())) > 1
    assert len(draw(labeled_fraction=(0.0111,)).server) == 30  # balanced: down to a multiple of the classes


@fast
@given(SEEDS, st.floats(0.05, 1.0), st.sampled_from(["class_balanced", "dirichlet_classes", "shards"]))
def test_a_joint_split_labels_a_share_of_each_client(seed, fraction, partition):
    drawn = draw(seed, labels_at="clients", labeled_fraction=(fraction,), partition=partition)
    assert len(drawn.server) == 0
    assert every([*drawn.labeled, *drawn.unlabeled]) == list(range(3000))
    assert every(drawn.unlabeled) == sorted(drawn.pooled)
    for labeled, unlabeled in zip(drawn.labeled, drawn.unlabeled, strict=True):
        assert len(labeled) == int(fraction * (len(labeled) + len(unlabeled)) + 0.5)


def test_a_joint_split_takes_one_share_per_client_and_counts_clients_without_a_label():
    """FedSiam's Non-IID-III: ten clients 55 %, the others 5 %."""
    drawn = draw(labels_at="clients", labeled_fraction=(0.55,) * 10 + (0.05,) * 10)
    assert [len(row) for row in drawn.labeled] == [83] * 10 + [8] * 10  # of 150: 82.5 and 7.5, halves up
    assert [len(row) for row in drawn.unlabeled] == [67] * 10 + [142] * 10
    shares = (0.0,) * 3 + (0.2,) * 17
    assert draw(labels_at="clients", labeled_fraction=shares).notes == ("3 of 20 clients have no labeled example",)
    assert drawn.notes == draw(labels_at="server").notes == ()


def test_a_joint_split_draws_the_labels_of_a_client_at_random_within_its_own():
    """Both parts of a client have its classes: 2 each under random_classes, the labeled ones near a fifth of each."""
    drawn = draw(labels_at="clients", labeled_fraction=(0.2,), partition="random_classes")
    labeled, unlabeled = histogram(drawn.labeled), histogram(drawn.unlabeled)
    assert ((labeled > 0) == (unlabeled > 0)).all()
    share = labeled.sum(0) / (labeled + unlabeled).sum(0)
    assert 0.1 < share.min() < share.max() < 0.3


@pytest.mark.parametrize("name", ["iid", "noniid1", "noniid2", "noniid3"])
def test_fedsiams_released_splits_are_its_codes(name):
    """It deals n_c / K (on the grid n_c / 20) of a class, and rounds the labeled share of each class, half to even."""
    keys, labels = SPLITS[f"fedsiam_{name}_released"], np.random.default_rng(5).permutation(UNEVEN)
    drawn, sizes = draw(labels=labels, **keys | {"num_clients": 100}), np.bincount(labels)
    labeled, unlabeled = histogram(drawn.labeled, labels), histogram(drawn.unlabeled, labels)
    dealt = np.tile(sizes / 100, (100, 1)) if name in ("iid", "noniid3") else sizes / 20 * on_grid()
    share = np.broadcast_to(keys["labeled_fraction"], 100)[:, None]
    if name == "noniid2":  # labels on the grid, in shares as equal as they can be; the others, 5401 of 6000, anew
        assert labeled.sum(0).tolist() == [59, 67, 60, 61, 58, 54, 59, 63, 58, 60]
        assert (labeled >= np.floor(labeled.sum(0) / 20) * on_grid()).all()
        assert (labeled <= np.ceil(labeled.sum(0) / 20) * on_grid()).all()
        assert unlabeled.sum(1).tolist() == [54] * 100
        assert unlabeled.max() < 20  # on the grid 27 would be of one class
        return
    both = labeled + unlabeled
    assert np.abs(both - dealt).max() <= 1 + (name == "noniid1")
    assert labeled.tolist() == [[round(f * n) for n in row] for f, row in zip(share[:, 0], both.tolist(), strict=True)]


UNEVEN = np.repeat(np.arange(10), [592, 674, 596, 613, 584, 542, 592, 627, 585, 595])  # a tenth of MNIST


def on_grid():
    return np.array([[(c == i // 10) + (c == i % 10) for c in range(10)] for i in range(100)])


def test_a_stratified_labeled_set_has_the_same_share_of_each_class():
    for keys in ({"labeled_fraction": (0.1,)}, {"num_labels": 600}):
        drawn = draw(labels=UNEVEN, label_selection="stratified", **keys)
        assert histogram([drawn.server], UNEVEN)[0].tolist() == [59, 67, 60, 61, 58, 54, 59, 63, 58, 60]
        assert sorted([*drawn.server, *drawn.pooled]) == list(range(6000))
    for num_labels, said in ((1, "less than one example of any class"), (6001, "give 1 to 6000 labels")):
        with pytest.raises(ValueError, match=f"^num_labels={num_labels} .*{said}"):
            draw(labels=UNEVEN, label_selection="stratified", num_labels=num_labels)


def test_labeled_examples_are_among_the_unlabeled_ones_if_they_are_not_excluded():
    drawn = draw(labels_at="clients", labeled_fraction=(0.2,), exclude_labeled=False)
    for labeled, unlabeled in zip(drawn.labeled, drawn.unlabeled, strict=True):
        assert (len(labeled), len(unlabeled)) == (30, 150)
        assert set(labeled) <= set(unlabeled)
    drawn = draw(exclude_labeled=False)
    assert every(drawn.unlabeled) == sorted(drawn.pooled) == list(range(3000))
    assert len(drawn.server) == 200


@fast
@given(SEEDS, st.sampled_from(["class_balanced", "dirichlet"]), st.sampled_from(["class_balanced", "dirichlet"]))
def test_an_apart_split_shares_a_balanced_labeled_set_and_the_rest(seed, labeled, unlabeled):
    keys = {"labels_at": "clients", "labeled_partition": labeled, "unlabeled_partition": unlabeled, "min_size": 1}
    drawn = draw(seed, **keys, alpha=0.5)
    assert histogram(drawn.labeled).sum(0).tolist() == [20] * 10
    assert every([*drawn.labeled, *drawn.unlabeled]) == list(range(3000))
    assert every(drawn.unlabeled) == sorted(drawn.pooled)
    assert len(drawn.server) == 0
    for partition, rows, chance in ((labeled, drawn.labeled, 3), (unlabeled, drawn.unlabeled, 30)):  # of 1 and 14 on average
        spread = np.ptp(histogram(rows), axis=0).max()
        assert spread <= 1 if partition == "class_balanced" else spread > chance


def test_the_two_draws_of_an_apart_split_are_independent():
    """(DIR,DIR): labeled classes say nothing about unlabeled ones, and one of the two draws can be replaced alone."""
    keys = {"labels_at": "clients", "partition": "dirichlet", "alpha": 0.2, "min_size": 1, "num_labels": 1000}
    correlations = []
    for seed in range(20):
        drawn = draw(seed, **keys)
        shares = [histogram(rows) / np.maximum(1, histogram(rows).sum(1, keepdims=True)) for rows in drawn[1:3]]
        correlations.append(np.corrcoef(shares[0].ravel(), shares[1].ravel())[0, 1])
    assert abs(np.mean(correlations)) < 0.1
    both, other = draw(**keys), draw(**keys | {"labeled_partition": "iid"})
    assert same(both.unlabeled, other.unlabeled)
    assert not np.array_equal(both.labeled[0], other.labeled[0])


WAYS = {
    "server": {},
    "joint": {"labels_at": "clients", "labeled_fraction": (0.2,)},
    "apart": {"labels_at": "clients", "partition": "dirichlet", "min_size": 1},
    "remainder": {"num_clients": 19},
    "not excluded": {"labels_at": "clients", "exclude_labeled": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_seed_decides_and_revealing_labels_moves_each_clients_unlabeled_examples_alone(way):
    usual, again, other = (draw(seed, **WAYS[way]) for seed in (3, 3, 4))
    assert same(usual.unlabeled, again.unlabeled)
    assert not same(usual.unlabeled, other.unlabeled)
    revealed = draw(3, **WAYS[way], reveal_labels=True)
    assert np.array_equal(usual.server, revealed.server)
    assert every(revealed.unlabeled) == []
    for labeled, unlabeled, both in zip(usual.labeled, usual.unlabeled, revealed.labeled, strict=True):
        assert sorted({*labeled.tolist(), *unlabeled.tolist()}) == both.tolist()
    assert revealed.unassigned == usual.unassigned
    assert np.array_equal(revealed.pooled, usual.pooled)  # whose images, without labels, the server's statistics are of


def test_federated_data_holds_the_split_and_what_falls_short_is_logged(caplog):
    dataset = sources.synthetic(num_train=2005)
    how = DataSettings(num_clients=20, labels_at="clients", labeled_fraction=(0.2,), partition="batch_imbalanced")
    drawn = split.draw(dataset, how, 0)
    with caplog.at_level(logging.INFO):
        split.log_notes(drawn, len(dataset.train_labels))
    data = split.tables(dataset, drawn)
    assert data.server.count.tolist() == [0]
    assert data.server.index.shape == (1, 1)
    both = [np.concatenate(rows) for rows in zip(drawn.labeled, drawn.unlabeled, strict=True)]
    for table, rows in ((data.labeled, drawn.labeled), (data.unlabeled, drawn.unlabeled), (data.client_data, both)):
        assert same([index[:count] for index, count in zip(table.index, table.count, strict=True)], rows)
    assert data.pooled.count.tolist() == [len(drawn.pooled)]
    assert drawn.unassigned > 0
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert caplog.messages[0] == f"{drawn.unassigned} of 2005 training examples are given to no client"
    assert caplog.messages[1].startswith("batch_imbalanced: classes ran out")


def test_what_a_client_holds_counts_once_where_labeled_examples_are_not_excluded():
    how = DataSettings(num_clients=4, labels_at="clients", labeled_fraction=(0.2,), exclude_labeled=False)
    dataset = sources.synthetic(num_train=200)
    data = split.tables(dataset, split.draw(dataset, how, 0))
    assert data.client_data.count.tolist() == data.unlabeled.count.tolist() == [50] * 4
    assert [len(set(row.tolist())) for row in data.client_data.index] == [50] * 4
    assert np.array_equal(data.client_data.index[:, :10], data.labeled.index)


def test_labeled_examples_may_leave_after_the_partition(cifar10_labels):
    """FedCon: sorted shards of all 50,000, two a client and so at most two classes each, then the labeled ones leave."""
    keys = {"num_clients": 100, "labeled_fraction": (0.01,), "label_selection": "random", "partition": "shards"}
    after, before = (draw(labels=cifar10_labels, labels_first=first, **keys) for first in (False, True))
    assert len(after.server) == 500
    assert every([after.server, *after.unlabeled]) == list(range(50_000))
    assert max(len(np.unique(cifar10_labels[row])) for row in after.unlabeled) == 2
    assert max(len(np.unique(cifar10_labels[row])) for row in before.unlabeled) > 2
    np.testing.assert_array_equal(before.server, after.server)


def test_clients_without_any_example_are_named():
    how = DataSettings(num_clients=30, num_labels=4, partition="dirichlet", alpha=0.05, min_size=0)
    drawn = split.draw(labels_alone(np.arange(60) % 2, 2), how, 0)
    empty = [k for k, row in enumerate(drawn.unlabeled) if not len(row)]
    assert len(empty) > 5
    assert drawn.notes == (f"{len(empty)} of 30 clients have no example: {', '.join(map(str, empty[:5]))}, ...",)
    assert f"note: {drawn.notes[0]}" in preview.table(preview.preview(drawn, np.arange(60) % 2, 2)).splitlines()
    assert split.draw(labels_alone(np.arange(60) % 2, 2), how.model_copy(update={"partition": "iid"}), 0).notes == ()


@pytest.mark.parametrize("way", [{}, {"partition": "dirichlet"}, {"labels_at": "clients", "labeled_fraction": (0.2,)}], ids=str)
def test_nobody_has_the_share_of_each_class_that_validation_takes_from_the_pool(way):
    labels = np.where(np.arange(3000) % 7 == 0, -1, LABELS)
    drawn = draw(labels=labels, validation="pool", validation_fraction=0.1, **way)
    known = histogram([np.arange(3000)], labels)[0]
    assert histogram([drawn.validation], labels)[0].tolist() == [round(0.1 * count) for count in known]
    assert np.all(labels[drawn.validation] >= 0)
    others = every([drawn.server, *drawn.labeled, *drawn.unlabeled])
    assert not {*others} & {*drawn.validation.tolist()}
    assert len(others) == 3000 - len(drawn.validation) - drawn.unassigned
    assert not {*drawn.pooled.tolist()} & {*drawn.validation.tolist()}
    assert drawn.validation.tolist() != draw(1, labels, validation="pool", **way).validation.tolist()


@pytest.mark.parametrize("way", [{}, {"exclude_labeled": False}, {"labels_first": False}], ids=str)
def test_validation_takes_a_share_of_the_servers_labels_from_everybody(way):
    whole, drawn = draw(**way), draw(validation="labels", validation_fraction=0.25, **way)
    assert histogram([drawn.validation])[0].tolist() == [5] * 10
    assert sorted([*drawn.server, *drawn.validation]) == whole.server.tolist()
    for rows in (drawn.unlabeled, [drawn.pooled]):
        assert not {*every(rows)} & {*drawn.validation.tolist()}
    assert drawn.unassigned == whole.unassigned


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_labels": 10, "validation": "labels"}, "0.1 of 10 labeled examples is less than one example of any class"),
        ({"validation": "labels", "validation_fraction": 0.99}, "0.99 of 200 labeled examples leaves none of a class"),
        ({"validation": "own"}, "has no validation part of its own"),
        ({"validation": "labels", "labels_at": "clients"}, "data.validation: got labels with data.labels_at=clients"),
    ],
)
def test_a_validation_that_cannot_be_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        draw(**keys)


def test_the_datas_own_validation_part_follows_the_training_examples():
    data, own = sources.synthetic(num_train=300, num_test=100), sources.synthetic(num_train=300, num_test=40, seed=1)
    data = data._replace(validation=Part(own.test_images, own.test_labels))
    how = DataSettings(num_clients=5, num_labels=20, validation="own")
    found = split.tables(data, split.draw(data, how, 0))
    rows = found.validation.index[0, : found.validation.count[0]]
    assert np.array_equal(found.train.images[rows], own.test_images)
    assert np.array_equal(found.train.labels[rows], own.test_labels)
    assert max(int(table.index.max()) for name, table in tables_of(found).items() if name != "validation") < 300

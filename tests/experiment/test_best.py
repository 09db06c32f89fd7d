"""Validation: what is evaluated, which round is the best, and when a run ends early."""

import numpy as np
import pytest

from fedjax_ssl.experiment.best import ENDED_EARLY, best, ending
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.settings import Settings
from tests import tiny
from tests.commands import without_times

QUICK = {"data__validation": "pool", "keep_best": "val_accuracy", "rounds": 12, "eval_every": 1, "cohort_size": 2}
QUICK |= {"data__name": "digits", "data__num_labels": 40}


def config(**keys):
    return tiny.config("average", network="linear", **QUICK | keys)


def settings(name="val_accuracy", **keys):
    return Settings(keep_best=name, data=Settings().data.model_copy(update={"validation": "pool"}), rounds=20, **keys)


@pytest.mark.parametrize(
    ("name", "values", "rounds"),
    [
        ("val_accuracy", [0.2, 0.5, 0.5, 0.4, 0.6], [1, 2, 2, 2, 5]),  # of equal ones the first
        ("val_loss", [0.2, 0.5, 0.1, 0.1, 0.05], [1, 1, 3, 3, 5]),
        ("val_accuracy", [None, float("nan"), 0.1, float("nan"), 0.2], [1, 1, 3, 3, 5]),
        ("val_loss", [float("nan"), 7.0, None, 8.0, 6.0], [1, 2, 2, 2, 5]),
    ],
)
def test_the_best_round_is_the_first_with_the_best_value(name, values, rounds):
    row, found = {}, []
    for number, value in enumerate(values, start=1):
        row |= {"round": number, f"eval/{name}": value, "eval/accuracy": number / 10}
        row = row | best(row, row, settings(name))
        found.append(row["best/round"])
        assert row["best/accuracy"] == row["best/round"] / 10  # the test accuracy of that round, whatever it is
        assert best({"round": number + 1}, row, settings(name))["best/round"] == found[-1]  # no evaluation there
    assert found == rounds
    assert best(row, row, Settings()) == {key: row[key] for key in row if key.startswith("best/")}


def test_a_run_ends_after_so_many_evaluations_without_a_better_one():
    own = settings(patience=3, eval_every=2)
    row = {"best/round": 4, "best/val_accuracy": 0.5}
    assert [number for number in range(4, 21) if ending(row | {"round": number}, own)] == list(range(10, 20))
    assert ending(row | {"round": 10}, own) == "round 10: 3 evaluations in a row no better than val_accuracy 0.5 of round 4"
    assert ending(row | {"round": 10}, settings(eval_every=2)) == ending({"round": 10}, own) == ""


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize(
    "where", [{}, {"execution__data": "host"}, {"execution__strategy": "sharded", "execution__devices": 2}]
)
@pytest.mark.parametrize("kind", ["pool", pytest.param("labels", marks=pytest.mark.slow)])
def test_validation_accuracy_and_loss_are_those_of_its_examples(kind, where):
    experiment = build(config(data__validation=kind, data__validation_fraction=0.25, rounds=2, **where))
    *_, (state, row) = experiment.rounds()
    data = experiment.problem.data
    rows, all_labels = data.validation.index[0, : data.validation.count[0]], data.train.labels
    assert len(rows) == (10 if kind == "labels" else sum(round(0.25 * np.sum(all_labels == c)) for c in range(10)))
    logits = experiment.predict(state, data.train.images[rows]).astype(np.float64)
    labels = data.train.labels[rows]
    assert row["eval/val_accuracy"] == pytest.approx(np.mean(logits.argmax(1) == labels))
    shifted = logits - logits.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(rows)), labels]
    assert row["eval/val_loss"] == pytest.approx(losses.mean(), rel=1e-4)


@pytest.mark.usefixtures("own_methods")
def test_each_of_several_runs_ends_early_for_itself_with_the_bits_of_the_longer_run():
    keys = {"seeds": 3, "keep_best": "val_loss", "client__optimizer__learning_rate": 0.001}  # it falls, and rises again
    long = [rows for _, rows in build(config(**keys)).rounds()]
    ended, last = [[], [], []], None
    for _, last in build(config(**keys, patience=2)).rounds():
        for rows, row in zip(ended, last, strict=True):
            if ENDED_EARLY not in row:
                rows.append(row)
    assert len({len(rows) for rows in ended}) > 1  # the test is about something
    for number, rows in enumerate(ended):
        expected = [without_times(row[number]) for row in long[: len(rows)]]
        assert [without_times(row) for row in rows] == expected
        assert len(rows) == 12 or rows[-1]["round"] == rows[-1]["best/round"] + 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data__validation": "none"}, "keep_best: got val_accuracy with data.validation=none"),
        ({"keep_best": "", "patience": 3}, "patience: got 3 with keep_best=''"),
        ({"execution__data": "disk"}, "keep_best: got val_accuracy with execution.data=disk"),
    ],
)
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        Settings.from_dict(tiny.config("fedavg", **QUICK | keys))

"""Runs as a report reads them: damage is named and not used, groups differ in their seeds alone."""

import itertools
import pathlib

import numpy as np
import pytest

from fedjax_ssl.files import read_json, write_json
from fedjax_ssl.report import cells, extras, groups, results, sections
from fedjax_ssl.report.figures import Picture
from fedjax_ssl.report.tables import plus_minus
from fedjax_ssl.runs import reading
from fedjax_ssl.runs.log import MetricsLog
from fedjax_ssl.runs.sweep import on_axis
from tests.folders import write


def grouped(folder: pathlib.Path, *by: str) -> groups.Grouped:
    return groups.group(reading.find([folder]).runs, by)


def test_groups_are_methods_and_what_differs_within_one(tmp_path):
    for seed in (0, 1):
        for number in (4, 40):
            write(tmp_path / f"fl2_{number}_{seed}", seed=seed, data__num_labels=number)
        strategy = "scan" if seed else "vmap"
        write(tmp_path / f"uda_{seed}", seed=seed, data__num_labels=40, execution__strategy=strategy, method__name="uda")
    made = grouped(tmp_path)
    assert [group.label for group in made.groups] == ["(FL)², num_labels=4", "(FL)², num_labels=40", "UDA, num_labels=40"]
    assert [len(group.used) for group in made.groups] == [2, 2, 2]
    assert made.notes == ()
    mixed = grouped(tmp_path, "method")
    assert [(group.label, len(group.used)) for group in mixed.groups] == [("(FL)²", 4), ("UDA", 2)]
    assert mixed.notes == ("(FL)² puts runs together that differ in data.num_labels: its mean and sd are over these as well",)
    assert [group.label for group in grouped(tmp_path, "num_labels").groups] == ["num_labels=4", "num_labels=40"]
    with pytest.raises(ValueError, match=r"^--by: got num_lables, accepted: a key .* \(did you mean .*num_labels\?\)$"):
        grouped(tmp_path, "num_lables")


def test_methods_have_their_papers_names_or_a_readers_own_and_files_keep_theirs(tmp_path):
    for name in ("fl2", "fedsiam_pi"):
        write(tmp_path / name, method__name=name)
    runs = reading.find([tmp_path]).runs
    assert [(one.label, one.slug) for one in groups.group(runs).groups] == [("FedSiam-Pi", "fedsiam_pi"), ("(FL)²", "fl2")]
    own = groups.group(runs, labels={"fl2": "Ours", "fedsiam_pi": "Ours"}).groups
    assert [one.label for one in own] == ["Ours", "fl2"]  # two groups never have one label
    assert groups.group(runs, labels={"fl3": "Ours"}).notes == ("--labels: no method or group is called fl3",)


def test_groups_whose_labels_have_the_same_letters_have_names_of_their_own(tmp_path):
    for name in ("FedAvg", "FedAvg++", "fedavg"):
        write(tmp_path / name, method__name=name)
    assert [group.slug for group in grouped(tmp_path).groups] == ["FedAvg", "FedAvg-2", "fedavg-3"]


def test_the_last_five_accuracies_are_those_of_the_summary_where_a_run_went_on(tmp_path):
    folder = write(tmp_path / "run", rounds=9, eval_every=2)  # the log has an accuracy in each round
    config = read_json(folder / "config.json") | {"rounds": 9}
    write_json(folder / "config.json", config)
    (run,) = reading.find([tmp_path]).runs
    assert results.accuracy(run, 5) == pytest.approx(10 * np.mean([2, 4, 6, 8, 9]))


def test_where_data_lie_and_metrics_go_makes_no_group_and_another_file_does(tmp_path):
    for seed, place in enumerate(("here", "there")):
        write(tmp_path / f"{seed}", seed=seed, data__path=f"/{place}/own.npz", client__on_nonfinite=place, log_to=place)
    made = grouped(tmp_path)
    assert [(group.label, len(group.used)) for group in made.groups] == [("(FL)²", 2)]
    assert made.notes == ("The runs have different data files: /here/own.npz, /there/own.npz",)
    write(tmp_path / "other", data__path="/here/other.npz")
    assert len(grouped(tmp_path).groups) == 2


def test_runs_are_grouped_by_the_digests_of_their_data_and_labels_tell_them_apart(tmp_path):
    own = {"data__name": "image_folder", "data__path": "/here/data"}
    for seed, (digest, path) in enumerate([("a" * 32, "/here/data"), ("a" * 32, "/copied/renamed"), ("b" * 32, "/there/data")]):
        write(tmp_path / f"{seed}", seed=seed, **own | {"data__path": path})
        write_json(tmp_path / f"{seed}" / "run.json", {"dataset": digest})
    assert [(one.label, len(one.used)) for one in grouped(tmp_path).groups] == [
        ("path=data aaaaaaaa", 2),
        ("path=data bbbbbbbb", 1),
    ]
    assert grouped(tmp_path).notes == ("The runs have different data files: data aaaaaaaa, data bbbbbbbb",)
    (made,) = grouped(tmp_path, "method").groups
    assert len(made.used) == 3
    assert "differ in data.path" in grouped(tmp_path, "method").notes[1]
    config = read_json(tmp_path / "2" / "config.json")
    config["data"]["path"] = "/there/other"
    write_json(tmp_path / "2" / "config.json", config)
    assert [one.label for one in grouped(tmp_path).groups] == ["path=data", "path=other"]
    for seed in range(3):
        write_json(tmp_path / f"{seed}" / "run.json", {"dataset": "c" * 32})
    assert [(one.label, len(one.used)) for one in grouped(tmp_path).groups] == [("(FL)²", 3)]


def test_a_sweeps_cell_has_no_mean_over_two_datasets(tmp_path):
    for seed, digest in enumerate("aab"):
        write_json(write(tmp_path / f"{seed}", seed=seed) / "run.json", {"dataset": digest * 32})
    found = cells.results_of(reading.find([tmp_path]).runs)
    assert [one.get("accuracy") for one in found] == [0.3, 0.3, None]
    assert found[2]["error"] == "its data are others than those of seed 0"
    assert np.isnan(cells.over_seeds(found)["accuracy_mean"])
    case = {"case": {"table": "t", "row": "r", "column": ""}, "config": "digits", "overrides": {}}
    first = cells.added([], {}, [case | {"runs": found[:2]}])
    assert cells.added(first, {}, [case | {"runs": found[:1]}])
    with pytest.raises(ValueError, match="t r: the file has it with other data, give another file"):
        cells.added(first, {}, [case | {"runs": [found[0] | {"dataset": "b" * 32}]}])


@pytest.mark.parametrize(("name", "count"), [("there/phones.csv", 1), ("here/servers.csv", 2)])
def test_the_same_trace_in_another_folder_makes_no_group_and_another_trace_does(tmp_path, name, count):
    for seed, path in enumerate(("here/phones.csv", name)):
        write(tmp_path / f"{seed}", seed=seed, system__trace=f"/{path}")
    assert len(grouped(tmp_path).groups) == count


def test_a_file_of_clients_and_start_weights_are_told_apart_by_their_digests(tmp_path):
    for key in ("system.file", "model.init"):
        top, given = tmp_path / key, {key.replace(".", "__"): "/here/own.file"}
        for seed, digest in enumerate("aab"):
            write_json(write(top / f"{seed}", seed=seed, **given) / "run.json", {"files": {key: digest * 64}})
        last = key.rpartition(".")[2]
        assert [(one.label, len(one.used)) for one in grouped(top).groups] == [
            (f"{last}=own.file aaaaaaaa", 2),
            (f"{last}=own.file bbbbbbbb", 1),
        ]


def test_what_should_not_be_compared_is_said_and_a_copy_counts_once(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    write(tmp_path / "c", data__name="mnist", method__name="uda")
    made = grouped(tmp_path)
    assert [(group.label, len(group.used)) for group in made.groups] == [("(FL)²", 1), ("UDA", 1)]
    top = tmp_path.name
    assert made.notes == (
        "The runs have different datasets: digits, mnist",
        f"{top}/b is (FL)² with seed 0 as {top}/a is: used once",
    )
    write_json(tmp_path / "b" / "run.json", {"data": "of other images"})
    assert len(grouped(tmp_path).groups[0].used) == 2


def test_numbers_of_unfinished_runs_are_those_of_the_rounds_that_all_have(tmp_path):
    for seed, rounds in enumerate((1, 2, 2)):
        write(tmp_path / f"{seed}", seed=seed, rounds=rounds, summary=False)
    made = grouped(tmp_path, "method")
    (group,) = made.groups
    assert [results.accuracy(run) for run in group.used] == [10.0, 10.0, 10.0]
    assert made.notes == ("(FL)²: no run is finished; its numbers are those up to round 1, which all have",)
    assert [run.rounds_done for run in group.runs] == [1, 2, 2]
    assert all(map(group.uses, group.runs))


def test_the_results_of_a_sweeps_cell_are_those_of_its_runs_and_damage_is_named(tmp_path):
    write(tmp_path / "top" / "CAT" / "0", rounds=2, summary=False)
    write(tmp_path / "top" / "CAT" / "1", seed=1)
    write(tmp_path / "top" / "CAT" / "2", seed=2, summary=False)
    write(tmp_path / "other" / "0", seed=2)
    cell = {"row": "CAT", "column": "", "config": "digits:fl2", "overrides": {"rounds": 3}, "paper": "68.2", "folder": "CAT"}
    content = {"name": "parts", "about": "", "command": "the command", "machine": "one", "versions": {"jax": "0.12"}}
    file = tmp_path / "top" / "sweep.json"
    write_json(file, content | {"cells": [cell, cell | {"row": "SACR", "folder": "SACR"}]})  # which has not begun
    found = reading.find([tmp_path]).runs
    (sweep,), problems = cells.find(found)
    assert (sweep.name, sweep.source["command"], problems) == ("parts", "the command", [])
    (one,) = sweep.results
    assert one["case"] == {"table": "parts", "row": "CAT", "column": ""}
    unfinished = {"seed": 0, "error": "unfinished: round 2 of 3", "diverged": False}
    assert one["runs"][0] == unfinished | {"curve": [[1, 0.1], [2, 0.2]], "pseudo_labels": [], "server_loss": []}
    assert one["runs"][1]["accuracy"] == 0.3
    assert one["runs"][2]["error"] == "summary.json is missing"
    assert one["runs"][1]["curve"] == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert one["runs"][1]["pseudo_labels"] == []
    results = tmp_path / "results.json"
    results.write_text(cells.as_json(cells.added([], sweep.source, sweep.results)))
    assert cells.from_json(results)[0]["results"][0]["runs"][1]["pseudo_label_accuracy"] is None
    assert np.isnan(one["accuracy_mean"])  # no mean leaves runs out
    assert np.isnan(cells.over_seeds([{"accuracy": 0.3}, {"accuracy": None}])["accuracy_mean"])
    assert cells.over_seeds([{"accuracy": 0.3}, {"accuracy": 0.5}]) == pytest.approx(
        {"accuracy_mean": 0.4, "accuracy_sd": 0.02**0.5}
    )
    write_json(file, content | {"cells": [{"row": 3}]})
    for damage, why in ((file.read_text(), "row: got 3, accepted"), ("{", "it is not JSON")):
        file.write_text(damage)
        assert cells.find(found)[0] == []
        assert why in cells.find(found)[1][0]


def test_cells_are_added_to_those_of_a_file_and_none_that_is_finished_is_lost():
    def cell(row, *runs, config="digits:fl2"):
        return {"case": {"table": "parts", "row": row, "column": ""}, "config": config, "overrides": {}, "runs": [*runs]}

    done, unfinished = {"seed": 0, "accuracy": 0.5}, {"seed": 0, "error": "unfinished: round 2 of 3"}
    first = cells.added([], {"command": "a"}, [cell("CAT", done), cell("SACR", unfinished), cell("LSAA", unfinished)])
    after = [cell("CAT", unfinished), cell("SACR", done), cell("LSAA", unfinished)]
    assert cells.failed_since(first, after) == after[:1]
    after[0]["case"] = dict(reversed(after[0]["case"].items()))  # the order of its keys does not matter
    both = cells.added(first, {"command": "b"}, after[:2])
    shown = [(run["command"], [(one["case"]["row"], one["runs"][0]) for one in run["results"]]) for run in both]
    assert shown == [("a", [("CAT", done), ("LSAA", unfinished)]), ("b", [("SACR", done)])]
    with pytest.raises(ValueError, match="parts CAT: the file has it with other settings"):
        cells.added(first, {"command": "c"}, [cell("CAT", done, config="digits:uda")])


def test_keys_that_end_alike_are_named_in_full(tmp_path):
    for folder, rates in {"a": (0.1, 0.1), "b": (0.3, 0.1), "c": (0.3, 0.3)}.items():
        write(tmp_path / folder, **{"client.optimizer__rate": rates[0], "server__rate": rates[1]})
    labels = [one.label for one in grouped(tmp_path).groups]
    assert labels == [f"client.optimizer.rate={a}, server.rate={b}" for a, b in ((0.1, 0.1), (0.3, 0.1), (0.3, 0.3))]


def test_a_result_has_pseudo_labels_and_the_servers_loss_at_each_evaluation_and_a_saved_confusion_matrix(tmp_path):
    folder = write(tmp_path / "0", rounds=0)
    of_rounds = [(1, 0.3, {}), (2, 0.4, {"eval/accuracy": 0.5}), (3, 0.6, {"eval/accuracy": 0.7})]
    for number, threshold, evaluated in of_rounds:
        labels = {"client/threshold": threshold, "client/mask_rate": threshold / 2, "diagnostics/pseudo_label_accuracy": 0.8}
        MetricsLog(folder).append({"round": number, "server/loss": 1 / number, **labels, **evaluated})
    write_json(folder / "summary.json", {"rounds": 3, "eval/accuracy": 0.7})
    (run,) = reading.find([tmp_path]).runs
    assert cells.result(run)["pseudo_labels"] == [[2, 0.4, 0.2, 0.8], [3, 0.6, 0.3, 0.8]]
    assert cells.result(run)["server_loss"] == [[2, 1 / 2], [3, 1 / 3]]
    assert "confusion" not in cells.result(run)
    write_json(folder / "evaluation.json", {"round": 3, "confusion": [[3, 1], [0, 4]]})
    assert cells.result(run)["confusion"] == [[3, 1], [0, 4]]


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (["fl2", "+ SACR"], [""], [("(FL)²", "", "(FL)²"), ("+ SACR", "", "+ SACR")]),
        (["fl2"], ["iid", "dir"], [("iid", "", "iid"), ("dir", "", "dir")]),
        (["fl2", "uda"], ["iid", "dir"], [
            ("(FL)², iid", "iid", "(FL)²"), ("(FL)², dir", "dir", "(FL)²"), ("UDA, iid", "iid", "UDA"),
            ("UDA, dir", "dir", "UDA"),
        ]),
        (["iid", "dir"], ["fl2", "uda"], [  # a row's methods are compared in one figure
            ("iid, (FL)²", "iid", "(FL)²"), ("iid, UDA", "iid", "UDA"), ("dir, (FL)²", "dir", "(FL)²"),
            ("dir, UDA", "dir", "UDA"),
        ]),
    ],
)  # fmt: skip
def test_a_sweeps_groups_have_the_names_of_its_rows_in_its_order(tmp_path, rows, columns, expected):
    of_cells = []
    for row, column in itertools.product(rows, columns):
        folder, method = f"{row}-{column}", "uda" if "uda" in (row, column) else "fl2"
        for seed in (0, 1):
            write(tmp_path / folder / str(seed), seed=seed, method__name=method)
        of_cells.append({"row": row, "column": column, "config": "c", "overrides": {}, "paper": "", "folder": folder})
    content = {"name": "s", "about": "", "command": "", "machine": "", "versions": {}, "cells": of_cells}
    write_json(tmp_path / "sweep.json", content)
    found = reading.find([tmp_path]).runs
    (sweep,), _ = cells.find(found)
    made = groups.group(found, (), sweep.places)
    assert [(*group.place, len(group.used)) for group in made.groups] == [(*place, 2) for place in expected]
    assert made.heading == "experiment"
    assert groups.group(found, ["method"], sweep.places).heading == "method"
    write(tmp_path / "other" / "0")  # beside it a sweep's groups have its name
    (sweep,), _ = cells.find(reading.find([tmp_path]).runs)
    raw = {label.replace("(FL)²", "fl2").replace("UDA", "uda") for label, _, _ in expected}
    assert {place.label for place in sweep.places.values()} == {f"s: {label}" for label in raw}


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (["MNIST"], ["0 (MT)", ".25", "1 (Pi)"], [("MNIST", 0), ("MNIST", 0.25), ("MNIST", 1)]),
        (["a"], ["CIFAR-10, 10 %", "SVHN, 5 %"], [("a, CIFAR-10", 10), ("a, SVHN", 5)]),
        (["0", "0.5"], ["none"], [("none", 0), ("none", 0.5)]),
        (["fl2"], ["num_labels=10", "num_labels=40"], [("fl2", 10), ("fl2", 40)]),
        (["fl2"], ["CIFAR-10", "10"], []),
    ],
)
def test_numbers_in_names_are_places_on_an_axis(rows, columns, expected):
    assert on_axis([{"row": row, "column": column} for row, column in itertools.product(rows, columns)]) == expected


def test_a_sweep_has_its_accuracies_rows_by_columns_and_a_figure_against_columns_that_are_numbers(tmp_path):
    of_cells = []
    for row, column in itertools.product("ab", ("100", "1", "10")):
        for seed in (0, 1):
            folder = write(tmp_path / f"{row}{column}" / str(seed), rounds=0, summary=False, seed=seed, method__name=row)
            accuracy = {"eval/accuracy": int(column) / 200 + seed / 10}
            for number in (1, 2, 3):
                MetricsLog(folder).append({"round": number, **accuracy})
            sent = 10**6 * (int(column) if row == "b" else 1)
            write_json(folder / "summary.json", {"rounds": 3, **accuracy, "comm/bytes_up": sent})
        of_cells.append({"row": row, "column": column, "config": "", "overrides": {}, "paper": "", "folder": f"{row}{column}"})
    write_json(tmp_path / "b10" / "1" / "summary.json", {"rounds": 2})  # not finished: this cell has no point
    content = {"name": "s", "about": "A figure", "command": "", "machine": "", "versions": {}, "cells": of_cells}

    def shown(x, interval=False):
        write_json(tmp_path / "sweep.json", content | {"x": x})
        found = reading.find([tmp_path]).runs
        sweeps, problems = cells.find(found)
        made = groups.group(found, (), sweeps[0].places)
        made_from = sections.source(made, sweeps, (), problems, "rounds", None, sections.Choices(interval))
        return sections.build(made_from, ())[0].items

    def pictures(x):
        return [one for one in shown(x) if isinstance(one, Picture)]

    (grid,) = (one for one in shown("") if getattr(one, "name", "") == "sweep_s_accuracy")
    assert (grid.title, grid.header) == ("A figure: accuracy of the last round, %", ("", "100", "1", "10"))
    as_text = [tuple(map(str, row)) for row in grid.rows]
    assert as_text == [("a", "55.0 ± 7.1", "5.5 ± 7.1", "10.0 ± 7.1"), ("b", "55.0 ± 7.1", "5.5 ± 7.1", "failed")]
    assert [cell.mark for cell in grid.rows[1][1:3]] == ["*", "*"]
    (grid,) = (one for one in shown("", interval=True) if getattr(one, "name", "") == "sweep_s_accuracy")
    assert str(grid.rows[0][1]) == "55.0 ± 63.5"  # 12.706 times the error 5
    assert grid.below.startswith(plus_minus(True))
    (picture,) = pictures("labels")
    of_accuracy = "test accuracy, %: a from 5.5 to 55; b from 5.5 to 55"
    assert (picture.name, picture.alt) == ("sweep_s_along", f"A figure. {of_accuracy}. MB up: a from 1 to 1; b from 1 to 100.")
    assert pictures("") == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ece": 2}, "ece: got 2, accepted: "),
        ({"confusion": [[1, 2]]}, "cannot reshape array of size 2"),
        ({"round": 2}, "it is of round 2, and the log has 3"),
    ],
)
def test_an_evaluation_that_is_damaged_is_named_and_not_used(tmp_path, change, why):
    folder = write(tmp_path / "run")
    content = {"round": 3, "class_accuracy": [0.5, None, 1], "clients": {"accuracy": [0.5, None], "mean": 0.5}, "accuracy": 0.6}
    write_json(folder / "evaluation.json", content)
    (run,) = reading.find([tmp_path]).runs
    found, problems = extras.evaluation(run)
    np.testing.assert_array_equal(found.per_class, [0.5, np.nan, 1])
    np.testing.assert_array_equal(found.per_client, [0.5, np.nan])
    assert (problems, len(found.confusion)) == ([], 0)
    write_json(folder / "evaluation.json", content | change)
    found, (problem,) = extras.evaluation(run)
    assert (found, problem.startswith(f"evaluation.json: not used: {why}")) == (None, True)


def test_clients_records_are_read_in_the_order_of_rounds(tmp_path):
    ids, tau, classes = np.array([[3, 1], [1, 0]]), np.array([[0.1, 0.2], [0.3, 0.4]]), np.arange(12.0).reshape(2, 2, 3)
    folder = write(tmp_path / "run") / "clients"
    folder.mkdir()
    for row, number in ((1, 10), (0, 5)):
        values = {"client/id": ids[row], "client/threshold": tau[row], "client/class_thresholds": classes[row]}
        np.savez(folder / f"round_{number:06d}.npz", **values)
    (run,) = reading.find([tmp_path]).runs
    records, problems = extras.records(run)
    assert problems == []
    assert (records.round.tolist(), records.id.tolist()) == ([5, 5, 10, 10], [3, 1, 1, 0])
    np.testing.assert_array_equal(records.values["client/threshold"], tau.ravel())
    np.testing.assert_array_equal(records.values["client/class_thresholds"], classes.reshape(4, 3))
    (folder / "round_000015.npz").write_bytes(b"PK")
    records, (problem,) = extras.records(run)
    assert (records, problem.startswith("clients' records: not used: ")) == (None, True)


def test_settings_that_a_run_does_not_read_are_in_no_report(tmp_path):
    for seed in range(2):
        write(tmp_path / f"share{seed}", data__labeled_fraction=[0.1], data__num_labels=40 + seed, seed=seed)
        write_json(tmp_path / f"share{seed}" / "run.json", {"unread": ["data.num_labels"]})
    (group,) = grouped(tmp_path).groups  # of both
    assert all("data.num_labels" not in run.config and run.config["data.labeled_fraction"] == [0.1] for run in group.runs)


def _cell(row, column, overrides, validation, accuracy=(0.5, 0.5), **of_runs):
    pairs = zip(validation, accuracy, strict=True)
    runs = [{"seed": i, "validation": v, "accuracy_there": a, **of_runs} for i, (v, a) in enumerate(pairs)]
    return {"case": {"row": row, "column": column}, "config": f"digits:{row}", "overrides": overrides, "runs": runs}


def test_hyperparameters_are_chosen_by_validation_and_never_by_test_accuracy():
    rates = [{"client.optimizer.learning_rate": rate, "data.validation": "pool"} for rate in (0.01, 0.1, 9)]
    fl2 = [_cell("fl2", "lr=.01", rates[0], (0.6, 0.8), (0.1, 0.3)), _cell("fl2", "lr=.1", rates[1], (0.5, 0.7), (0.9, 0.9))]
    uda = [_cell("uda", "lr=.01", rates[0], (0.2, 0.2)), _cell("uda", "lr=.1", rates[1], (0.3, 0.4))]
    gone = _cell("uda", "lr=9", rates[2], (0.9, 0.9), error="not finite", diverged=True)
    found = cells.chosen_by_validation("s", [*fl2, *uda, gone])
    assert [row[:2] for row in found.rows] == [("fl2", "lr=.01"), ("uda", "lr=.1")]
    assert [[round(one.mean, 6) for one in row[2:]] for row in found.rows] == [[70.0, 20.0], [35.0, 50.0]]
    assert "test accuracies had no part in the choice" in found.note
    unfinished = fl2[1] | {"runs": [{"seed": 0, "error": "unfinished: round 1 of 2", "diverged": False}]}
    assert cells.chosen_by_validation("s", [fl2[0], unfinished]) is None
    other_data = fl2[1] | {"overrides": rates[1] | {"data.num_labels": 9}}
    assert cells.chosen_by_validation("s", [fl2[0], other_data]) is None
    assert cells.chosen_by_validation("s", fl2[:1]) is None
    losses = [
        _cell("a", f"lr={lr}", rates[i], (-loss, -loss), by_loss=True) for i, (lr, loss) in enumerate(((1, 0.9), (2, 0.4)))
    ]
    by_loss = cells.chosen_by_validation("s", losses)
    assert (by_loss.rows[0][1], by_loss.rows[0][2].mean, by_loss.header[2]) == ("lr=2", 0.4, "validation loss")
    assert "lowest mean validation loss" in by_loss.note


def test_what_a_choice_reads_is_the_best_rounds_where_that_is_kept(tmp_path):
    folder = write(tmp_path / "a")
    run = reading.read(folder, "a")
    assert not {"validation", "accuracy_there"} & cells.result(run).keys()
    last = run._replace(summary=run.summary | {"eval/val_accuracy": 0.7})
    assert cells.result(last)["accuracy_there"] == run.summary["eval/accuracy"]
    best = last._replace(summary=last.summary | {"best/val_accuracy": 0.9, "best/accuracy": 0.25})
    by_loss = last._replace(summary=run.summary | {"best/val_loss": 0.3, "best/accuracy": 0.2})
    assert {key: cells.result(by_loss)[key] for key in ("validation", "accuracy_there")} == {
        "validation": -0.3,
        "accuracy_there": 0.2,
    }
    assert {key: cells.result(best)[key] for key in ("validation", "accuracy_there")} == {
        "validation": 0.9,
        "accuracy_there": 0.25,
    }

"""What a report computes over seeds: other scores than accuracy, confidence intervals, and groups compared in pairs of runs."""

import shutil

import numpy as np
import pytest

from fedjax_ssl.files import write_json
from fedjax_ssl.report import groups, results, sections
from fedjax_ssl.report.tables import DASH, latex
from fedjax_ssl.runs import reading
from fedjax_ssl.runs.log import MetricsLog
from tests.folders import write


def grouped(folder, *by):
    return groups.group(reading.find([folder]).runs, by)


def test_other_scores_are_those_of_the_logs_or_of_evaluations_and_a_column_that_none_has_is_left_out(tmp_path):
    def scores():
        made_from = sections.source(grouped(tmp_path), [], (), [], "rounds", None)
        return results.scores(made_from.grouped, made_from.evaluations), made_from

    for seed in (0, 1):
        folder = write(tmp_path / f"fl2{seed}", rounds=2, summary=False, seed=seed)
        MetricsLog(folder).append({"round": 3, "eval/macro_f1": 0.5 + seed / 10, "eval/ece": 0.25})
        folder = write(tmp_path / f"uda{seed}", seed=seed, method__name="uda")
        write_json(folder / "evaluation.json", {"round": 3})  # of an older version
    found, made_from = scores()
    assert (found.header, [*map(str, found.rows[0])]) == (
        ("method", "macro F1, %", "calibration error, %"),
        ["(FL)²", "55.0 ± 7.1", "25.0 ± 0.0"],
    )
    assert str(found.rows[1][1]) == DASH
    assert [one.name for one in sections.build(made_from, ())[1].items[2:]] == ["eval_macro_f1_rounds", "eval_ece_rounds"]
    write_json(tmp_path / "uda0" / "evaluation.json", {"round": 3, "macro_f1": 0.9, "auc": None})
    found, _ = scores()
    assert found.header == ("method", "macro F1, %", "calibration error, %")
    assert str(found.rows[1][1]) == "90.0 (1 of 2)"
    assert r"UDA & 90.0 (1 of 2) & -- \\" in latex(found)
    for seed in (0, 1):
        (tmp_path / f"fl2{seed}" / "metrics.jsonl").unlink()
        write(tmp_path / f"{seed}", seed=seed)
        (tmp_path / f"uda{seed}" / "evaluation.json").unlink()
    assert scores()[0] is None


def write_pairs(top, splits, **accuracies):
    """Runs of methods: accuracies by seed, and the digests of their splits."""
    for method, values in accuracies.items():
        for seed, (value, split) in enumerate(zip(values, splits[method], strict=True)):
            folder = write(top / f"{method}{seed}", rounds=2, summary=False, seed=seed, method__name=method)
            MetricsLog(folder).append({"round": 3, "eval/accuracy": value})
            write_json(folder / "run.json", {"data": split})


def test_groups_are_compared_over_runs_of_the_same_seed_and_split_alone(tmp_path):
    splits = {"fl2": "aacd", "uda": "aaxd", "fedcon": "yzyz", "semifl": ["", "", "c", ""]}  # an empty one is not known
    accuracies = {"fl2": (0.8, 0.7, 0.6, 0.9), "uda": (0.5, 0.5, 0.99, 0.45), "fedcon": [0.1] * 4, "semifl": [0.2] * 4}
    write_pairs(tmp_path, splits, **accuracies)
    table = results.comparisons(grouped(tmp_path))
    differences = np.array([30.0, 20, 45])
    half = 4.302653 * differences.std(ddof=1) / 3**0.5
    first, second, pairs, difference, interval, p = table.rows[0]
    assert (len(table.rows), str(first), str(second), pairs, difference) == (1, "(FL)²", "UDA", 3, "+31.67")
    assert interval == f"[{31.6667 - half:.2f}, {31.6667 + half:.2f}]"
    t = differences.mean() / (differences.std(ddof=1) / 3**0.5)
    assert (table.header[-1], p) == ("p, paired t test", f"{1 - t / (t**2 + 2) ** 0.5:.2g}")
    write_json(write(tmp_path / "other", method__name="fl2", client__epochs=7) / "run.json", {"data": "a"})
    (row,) = results.comparisons(grouped(tmp_path, "method")).rows
    assert row[2] == 2  # which of two runs of seed 0 would be in the pair is not known
    for seed in (0, 1):
        (tmp_path / f"uda{seed}" / "run.json").unlink()
    assert results.comparisons(grouped(tmp_path)) is None


def test_of_many_groups_each_is_compared_with_the_best_that_shares_runs_and_six_pairs_have_wilcoxons_test(tmp_path):
    names = ["fl2", "uda", "fedcon", "semifl", "fixmatch", "fedavg", "fedmatch", "fedsem", "feddure"]
    accuracies = {name: [0.08 * i + 0.01 * (i * seed % 4 + seed) for seed in range(6)] for i, name in enumerate(names, 1)}
    splits = dict.fromkeys(names, "abcdef")
    write_pairs(
        tmp_path, splits | {"fedprox": "xyz", "fedsiam_mt": "xyz"}, **accuracies, fedprox=[0.9] * 3, fedsiam_mt=[0.95] * 3
    )
    table = results.comparisons(grouped(tmp_path))
    assert [str(row[0]) for row in table.rows] == ["FedSiam-MT", *["FedDure"] * 8]
    assert (table.header[-1], str(table.rows[0][-1]), float(table.rows[1][-1]) < 0.1) == ("p, Wilcoxon", DASH, True)
    assert "not corrected for the number of comparisons, 9." in table.note
    assert "with the best one" in table.note
    for folder in (*tmp_path.glob("fl2*"), *tmp_path.glob("uda*")):
        shutil.rmtree(folder)
    table = results.comparisons(grouped(tmp_path))
    assert (len(table.rows), "with the best one" in table.note) == (7 * 6 / 2 + 1, False)


@pytest.mark.ci
def test_with_intervals_a_page_has_them_in_all_tables_and_curves_and_says_so(tmp_path):
    write_pairs(tmp_path, {"fl2": "ab", "uda": "ax"}, fl2=(0.8, 0.7), uda=(0.5, 0.5))
    for interval, factor, words in ((False, 1, "standard deviation"), (True, 12.706205 / 2**0.5, "95 % confidence interval")):
        made_from = sections.source(grouped(tmp_path), [], (), [], "rounds", None, sections.Choices(interval))
        results, curves, *_ = (section.items for section in sections.build(made_from, ()))
        assert str(results[0].rows[0][1]) == f"75.0 ± {factor * 50**0.5:.1f}"
        assert words in results[0].below
        assert results[1].lines == (sections.NOT_COMPARED,)
        assert words in curves[0].lines[0]
        ((_, drawn),) = sections.drawn(made_from, sections.TEST, "rounds")
        assert drawn["eval/accuracy"][0].band[-1] == pytest.approx(factor * 50**0.5)

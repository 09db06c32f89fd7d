"""The numbers of a report against NumPy, and its tables as text, CSV and LaTeX."""

import itertools
import math
import re

import numpy as np
import pytest

from fedjax_ssl.data import preview
from fedjax_ssl.report import cells, figures, statistics, tables
from fedjax_ssl.report.tables import Link, Spread, Table, spread
from launch import report
from tests.commands import refused
from tests.folders import write

NAN = math.nan


def test_the_standard_deviation_has_one_less_than_the_runs_as_its_divisor():
    values = np.array([[0.5, 0.7], [0.6, 0.7], [1.0, 0.1]])
    mean, sd = statistics.mean_sd(values)
    np.testing.assert_allclose(mean, [0.7, 0.5])
    np.testing.assert_allclose(sd, [math.sqrt((0.04 + 0.01 + 0.09) / 2), math.sqrt((0.04 + 0.04 + 0.16) / 2)])
    mean, sd = statistics.mean_sd(values[:1])
    np.testing.assert_array_equal(mean, values[0])
    assert np.isnan(sd).all()


def test_golden_intervals_and_paired_tests():
    # The t quantile of 2 degrees of freedom is 4.302653; differences of 1, 2, 6 have the mean 3 and the variance 7.
    first, second = np.array([11.0, 22, 36]), np.array([10.0, 20, 30])
    found = statistics.compared(first, second)
    half = 4.302652729911275 * math.sqrt(7 / 3)
    assert found[:3] == (3, 3.0, pytest.approx(half))
    # With 2 degrees of freedom p = 1 - t / sqrt(t^2 + 2).
    t = 3 / math.sqrt(7 / 3)
    assert found.student == pytest.approx(1 - t / math.sqrt(t**2 + 2))
    assert math.isnan(found.wilcoxon)
    np.testing.assert_allclose(statistics.half_interval(np.array([7.0, 0]) ** 0.5, 3), [half, 0])
    assert np.isnan(statistics.half_interval(np.array([1.0]), 1)).all()


def test_golden_signed_ranks_by_every_choice_of_signs():
    differences = np.array([0.5, 1.5, -1.0, 3.0, 2.0, 4.0, -0.25])
    ranks = np.abs(differences).argsort().argsort() + 1
    sums = [ranks @ np.array(signs) for signs in itertools.product((0, 1), repeat=7)]  # alike likely if there is no difference
    lower = min(ranks @ (differences > 0), ranks @ (differences < 0))
    found = statistics.compared(50 + differences, np.full(7, 50.0))
    assert found.wilcoxon == pytest.approx(2 * np.mean(np.array(sums) <= lower))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pairs", [2, 7])
def test_differences_that_are_equal_but_for_rounding_have_no_p(pairs):
    second = np.linspace(0, 71, pairs)
    found = statistics.compared(second + 0.1, second)
    assert (found.difference, found.half) == (pytest.approx(0.1), pytest.approx(0))
    assert np.isnan([found.student, found.wilcoxon]).all()


def test_last_values_pass_over_rounds_without_an_evaluation():
    values = np.array([0.1, NAN, 0.2, 0.3, 0.4, NAN, 0.5, 0.6, NAN])
    assert statistics.last(values) == 0.6
    assert statistics.last(values, 5) == pytest.approx(0.4)
    assert statistics.last(values[:1], 5) == 0.1
    assert math.isnan(statistics.last(values[1:2]))


@pytest.mark.parametrize(
    ("accuracies", "left_out", "expected"),
    [
        ([0.1, 0.8, NAN, 0.4], [NAN] * 4, ""),
        ([0.8, 0.3, NAN, 0.39], [NAN] * 4, "accuracy fell from 80.0% in round 1 to 39.0%"),
        ([0.1, 0.8, 0.8, 0.8], [NAN, 0, 2, 1], "round 3: clients returned NaN or infinity and were left out, in 2 rounds"),
        ([NAN] * 4, [NAN] * 4, ""),
    ],
)
def test_a_run_that_ends_may_have_been_unstable(accuracies, left_out, expected):
    columns = {"eval/accuracy": np.array(accuracies), "client/non_finite": np.array(left_out), "round": np.arange(1.0, 5)}
    assert statistics.instability(columns) == expected
    assert statistics.instability({"round": np.arange(1.0, 5), "eval/accuracy": np.full(4, 0.5)}) == ""


def test_a_cell_has_means_and_sample_deviations_and_the_difference_to_the_paper():
    def row(*runs, paper=None):
        return [*map(str, cells.table("t", "", [{"case": {"row": "fl2", "column": ""}, "runs": runs, "paper": paper}]).rows[0])]

    one = {"seed": 0, "accuracy": 0.9, "pseudo_label_accuracy": 0.5, "bytes_up": 2e6, "bytes_down": 4e6, "seconds": 30.0}
    other = one | {"accuracy": 0.8, "pseudo_label_accuracy": 0.7, "seconds": 50.0}
    deviation = np.std([90, 80], ddof=1)
    expected = ["fl2", tables.DASH, f"85.0 ± {deviation:.1f}", "86.2 ± 3.1", "-1.20", "60.0 ± 14.1", "2.00", "4.00", "40"]
    assert row(one, other, paper="86.2 ± 3.1") == expected
    assert row(one, other | {"note": "accuracy fell"}, paper="86.2 ± 3.1") == expected  # it counts, and is named below
    results = [{"case": {"row": "fl2", "column": "iid"}, "runs": [one, other | {"seed": 1, "note": "accuracy fell"}]}]
    assert cells.notes(results) == ["fl2, iid: accuracy fell (seed 1)"]
    assert row(one | {"pseudo_label_accuracy": None}, paper=86.2)[2:6] == ["90.0", "86.2", "+3.80", tables.DASH]
    assert row(one, {"seed": 1, "error": "what went wrong"})[2:5] == [
        "seed 1: what went wrong",
        tables.DASH,
        tables.DASH,
    ]  # no mean over one
    failed = [{"seed": seed, "error": error} for seed, error in ((1, "diverged"), (2, "no summary"), (3, "diverged"))]
    assert row(one, *failed)[2] == "seeds 1, 3: diverged; seed 2: no summary"  # one line for those alike


def test_the_first_value_that_reaches_a_target():
    x, y = np.array([1.0, 2, 3, 4, 5]), np.array([0.2, NAN, 0.8, 0.7, 0.9])
    assert statistics.first_reaching(x, y, 0.8) == 3
    assert statistics.first_reaching(x, y, 0.81) == 5
    assert math.isnan(statistics.first_reaching(x, y, 0.95))


def test_axes_are_in_the_units_that_they_say():
    columns = {
        "round": np.array([1.0, 2, 4]),
        "comm/bytes_up": np.array([1e6, 2e6, 4e6]), "comm/bytes_down": np.array([5e5, 1e6, 2e6]),
        "cost/forward_passes": np.array([100.0, 200, 400]), "cost/backward_passes": np.array([50.0, 100, 200]),
        "time/round_s": np.array([3.0, 2, 2]),
    }  # fmt: skip
    np.testing.assert_array_equal(statistics.axis(columns, "rounds"), [1, 2, 4])
    np.testing.assert_allclose(statistics.axis(columns, "bytes"), [1.5, 3, 6])
    np.testing.assert_allclose(statistics.axis(columns, "uploads"), [1, 2, 4])
    np.testing.assert_allclose(statistics.axis(columns, "passes"), [0.15, 0.3, 0.6])
    np.testing.assert_array_equal(statistics.axis(columns, "seconds"), [3, 5, NAN])  # round 3 is missing
    np.testing.assert_array_equal(statistics.axis(columns | {"sim/seconds": np.array([7.0, 5, 6])}, "simulated"), [7, 12, NAN])
    for kind in ("bytes", "simulated"):
        assert np.isnan(statistics.axis({"round": np.arange(1.0, 3)}, kind)).all()


def test_a_curve_has_the_rounds_in_which_all_runs_have_a_value():
    rounds = [np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 4])]
    xs = [np.array([10.0, 20, 30, 40]), np.array([20.0, 40, 60])]
    ys = [np.array([0.1, 0.2, 0.3, NAN]), np.array([0.3, 0.5, 0.7])]
    x, y = statistics.common(xs, ys, rounds)
    np.testing.assert_array_equal(x, [15, 35])
    np.testing.assert_array_equal(y, [[0.1, 0.3], [0.3, 0.5]])


def test_cells_say_mean_sd_and_how_many_runs_have_a_value():
    assert str(spread([91.23, 91.87, 92.0], 1)) == "91.7 ± 0.4"
    assert str(spread([91.26], 1)) == "91.3"
    assert str(spread([5.0, NAN, 7.0])) == "6.00 ± 1.41 (2 of 3)"
    assert str(spread([12345.6])) == "12,346"
    assert str(spread([NAN, NAN])) == tables.DASH
    assert str(spread([1.0, 3.0], 1)._replace(is_interval=True)) == "2.0 ± 12.7"  # the t quantile is 12.706, the error 1
    assert str(spread([91.26], 1)._replace(is_interval=True)) == "91.3"


def test_a_table_in_three_forms():
    rows = ((Link("fl2_a & b", "x"), Spread(91.0, 0.25, 1, 3), 1200), (Link("uda", "y"), Spread(NAN, NAN), 7))
    table = Table("results", "Accuracy, 100 %", ("method", "last, %", "size"), rows)
    assert tables.text(table).splitlines() == [
        "Accuracy, 100 %", "", "method        last, %   size",
        "fl2_a & b  91.0 ± 0.2  1,200", f"uda                 {tables.DASH}      7", tables.plus_minus(False),
    ]  # fmt: skip
    assert tables.comma_separated(table).splitlines() == [
        'method,"last, %","last, %: sd","last, %: runs",size', "fl2_a & b,91,0.25,3,1200", "uda,,,1,7",
    ]  # fmt: skip
    lines = tables.latex(table).splitlines()
    assert r"\begin{tabular}{lrr}" in lines
    assert r"fl2\_a \& b & 91.0 $\pm$ 0.2 & 1,200 \\" in lines
    assert r"\caption{Accuracy, 100 \%. Behind $\pm$ is the sample standard deviation over runs.}" in lines
    intervals = table.with_intervals()
    assert tables.text(intervals).splitlines()[3:] == [
        "fl2_a & b  91.0 ± 0.6  1,200", f"uda                 {tables.DASH}      7", tables.plus_minus(True),
    ]  # fmt: skip
    assert tables.comma_separated(intervals) == tables.comma_separated(table)
    assert r"\caption{Accuracy, 100 \%. Behind $\pm$ is half the width of the 95 \% confidence" in tables.latex(intervals)
    assert tables.plus_minus(True).replace("'", "&#x27;") in tables.as_html(intervals)
    one = table._replace(rows=((Link("fl2", "x"), Spread(91.0, NAN), 1),))
    assert (one.below, one.with_intervals().below) == ("", "")


def test_a_legend_is_no_wider_than_its_figure():
    figure = figures.blank(4.8, 3.4)
    axes = figure.subplots()
    axes.plot([1, 2], label=", ".join(f"method.setting_{i}=a value" for i in range(12)))
    figures._add_legend(figure, axes)
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert 0 <= legend.x0 < legend.x1 <= figure.bbox.width
    assert 0 <= legend.y0 < legend.y1 < axes.get_window_extent().y0


@pytest.mark.parametrize("rounds", [[1], [1, 2], [5, 10, 15]])
def test_rounds_have_whole_ticks(rounds):
    figure = figures.blank(4.8, 3.4)
    axes = figure.subplots()
    axes.plot(rounds, rounds)
    figures._whole_ticks(axes, [np.array(rounds, float)])
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert shown
    assert all(tick == round(tick) for tick in shown)


@pytest.mark.filterwarnings("error")
def test_texts_that_the_font_lacks_are_numbers_or_as_python_writes_them_and_warn_of_nothing(tmp_path):
    names = ("\u732b", "\u0642\u0637", "cat \U0001f98a", "Ubung", "\udcff\t")
    heads = [*tables.of_classes(5, names), "cat\u00e9"]
    picture = figures.heat("heat", "\u732b", np.eye(6), ("row", "column", "%"), caption="%", heads=heads)
    for shown in ("0", "1", "2", "3 = Ubung", "4", "cat\u00e9"):
        assert f"<!-- {shown} -->".encode() in picture.svg
    assert picture.caption == "%; the table has the names that are numbers here"
    assert figures.heat("heat", "h", np.eye(1), ("row", "column", "%"), heads=["0 = cat"]).caption == ""
    line = figures.Curve("\u732b", np.arange(2.0), np.arange(2.0), np.zeros(2), 0)
    assert b"<!-- \\u732b -->" in figures.curves("curves", "t", {"accuracy": [line]}, "round").svg
    counts = preview.Preview(*(np.ones((2, 2), int)[0], *[np.ones((2, 2), int)] * 2, np.zeros(2, int), np.zeros(2), 0, ()))
    preview.heat_map(counts, tmp_path / "map.png", "$\u732b$: \u0642")
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_the_best_mean_of_a_column_is_bold_and_those_within_its_spread_have_a_dagger():
    rows = tuple((name, tables.spread(values, 1)) for name, values in {"a": [90, 92], "b": [89, 91], "c": [80, 81]}.items())
    marked = tables.Table("t", "Accuracy", ("method", "%"), rows).marked((1,))
    assert [cell.mark for _, cell in marked.rows] == ["*", "†", ""]  # 91 ± 1.4, 90 ± 1.4 and 80.5 ± 0.7
    signs = (
        "Behind ± is the sample standard deviation over runs. Bold{}: the largest mean of its column; †: a mean within its ±."
    )
    assert marked.below == signs.format(" (* in text)")
    caption = rf"\caption{{Accuracy. {tables.escaped(signs.format(''))}}}"
    assert caption in tables.latex(marked)
    assert r"a & \textbf{91.0 $\mathbf{\pm}$ 1.4} \\" in tables.latex(marked)
    assert r"b & 90.0 $\pm$ 1.4 $^\dagger$ \\" in tables.latex(marked)
    assert "91.0 ± 1.4 *" in tables.text(marked)
    assert "<strong>91.0 ± 1.4</strong>" in tables.as_html(marked)
    fewer = tables.Table("t", "Accuracy", ("method", "%"), (("a", tables.spread([90, NAN, 92], 1)),))
    assert "(2 of 3): the mean of those runs that have a value." in tables.latex(fewer)
    alone = tables.Table("t", "Accuracy", ("method", "%"), rows[:1])
    assert alone.marked((1,)) == alone


def test_figures_have_no_ligatures():
    """A ligature is one glyph, which readers of a PDF cannot search for."""
    svg = figures.curves("a", "A", {"coefficient": [figures.Curve("x", np.ones(1), np.ones(1), np.zeros(1), 0)]}, "f f").svg
    letters = re.search(r"<!-- coefficient -->(.*?)</g>", svg.decode(), re.DOTALL)
    assert letters[1].count("<use ") == len("coefficient")


def test_figures_in_pdf_have_the_font_and_no_date():
    made = [
        figures.curves("a", "A", {"%": [figures.Curve("x", np.arange(3.0), np.arange(3.0), np.zeros(3), 0)]}, "round")
        for _ in "ab"
    ]
    assert made[0].pdf == made[1].pdf
    assert b"/FontFile2" in made[0].pdf
    assert b"CreationDate" not in made[0].pdf


@pytest.mark.ci
def test_mathematics_in_labels_is_typeset_in_figures_and_latex_and_prices_are_not(tmp_path):
    label, price = r"Ours ($\beta = 0.5$, 50 %)", "a_b at $5 and $6"

    def drawn(text):
        one = figures.Curve(text, np.arange(2.0), np.arange(2.0), np.zeros(2), 0)
        return figures.curves("accuracy", "Accuracy", {"accuracy": [one]}, "round").svg.decode()

    italic, dollar = 'href="#DejaVuSans-Oblique-', 'href="#DejaVuSans-7"'
    assert (drawn(label).count(italic), drawn(label).count(dollar)) == (1, 0)  # beta
    assert (drawn(price).count(italic), drawn(price).count(dollar)) == (0, 2)
    long = f"A label that is so long that it has to be broken: {'far ' * 9}$\\alpha = \\beta = \\gamma$"
    assert (drawn(long).count(italic), drawn(long).count(dollar)) == (3, 0)
    assert tables.escaped(label) == r"Ours ($\beta = 0.5$, 50 \%)"
    assert tables.escaped(price) == r"a\_b at \$5 and \$6"
    assert report._labels(r"fl2=Ours ($a=1,b=2$),uda=U") == {"fl2": "Ours ($a=1,b=2$)", "uda": "U"}
    write(tmp_path / "a")
    message = refused(str(tmp_path), r"--labels=fl2=$\bet$", program=report)
    assert message.startswith(r"error: --labels: got '$\\bet$', accepted: mathematics that matplotlib knows (")
    assert r"\bet" in message.partition("(")[2]


def test_ticks_that_would_touch_have_one_label():
    line = figures.Curve("x", np.array([0.64, 6.4, 8.0, 32.0]), np.arange(4.0), np.zeros(4), 0)
    svg = figures.curves("a", "A", {"y": [line]}, "bits", ticks=line.x.tolist()).svg.decode()
    assert [f"<!-- {text} -->" in svg for text in ("0.64", "6.4", "8", "32")] == [True, True, False, True]

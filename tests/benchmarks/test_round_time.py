"""The benchmark of local steps: in which order it measures, what it makes of the times, and that nothing ends its table."""

import contextlib
import itertools
import json
import types

import pytest

from benchmarks import ceilings, round_time, workloads
from benchmarks.ceilings import Ceilings
from benchmarks.spread import balanced
from benchmarks.workloads import TUNED, Case, Workload
from fedjax_ssl.arithmetic import Arithmetic
from fedjax_ssl.simulation import memory

CEILINGS = Ceilings({"float32": 1e6}, 1e3)
CASE = Case("small", "im2col", "scan", "default", "float32", 2, 3)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name in ("small", "long"):
        workload = Workload({"name": "fl2"}, {"name": "linear"}, (8, 8, 1), "server", 16, {}, 1)
        monkeypatch.setitem(workloads.WORKLOADS, name, workload)


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Runs the command: the results that it writes."""

    def main(*words):
        path = tmp_path / "out.json"
        monkeypatch.setattr("sys.argv", ["round_time.py", "--seconds=0", *words, f"--json={path}"])
        round_time.main()
        return json.loads(path.read_text())

    return main


def running(case, seconds, made=(), layout=None):
    """A combination whose rounds take `seconds`, one after another."""
    rows = ((None, {"time/round_s": s, round_time.IMAGES: 100 / s}) for s in itertools.cycle(seconds))
    layout = layout or workloads.experiment(CASE).layout
    return round_time.Running(case, types.SimpleNamespace(layout=layout, simulator=made), 9.0, rows, 1.5)


def test_a_line_has_the_rate_and_the_shares_of_measured_ceilings(results, capsys):
    one_line = ("--loop", "scan", "--conv", "im2col", "--cohort", "2", "--steps", "1", "--fixed")
    written = results("--workloads", "small", *one_line)
    assert all(rate > 1e6 for rate in (written["ceilings"]["flops"]["float32"], written["ceilings"]["bandwidth"]))
    (one,) = written["results"]
    assert 0 < one["useful_share"] < 1
    assert one["memory_share"] > 0 < one["peak_bytes"]
    assert one["quartiles"][0] <= one["images_per_s"] <= one["quartiles"][1]
    assert one["rounds"] == round_time.LEAST_ROUNDS
    words = capsys.readouterr().out.splitlines()[-1].split()
    assert words[:8] == ["small", "im2col", "scan", "default", "float32", "2", "1", f"{one['images_per_s']:,.0f}"]


def test_a_share_is_what_is_computed_over_time_and_ceiling(monkeypatch):
    monkeypatch.setattr(round_time, "arithmetic_of", lambda case: Arithmetic(flops=3000, bytes=10))
    one = running(CASE, [0.5, 0.1, 0.2, 0.3], made=types.SimpleNamespace(memory_bytes=7))
    (rows,) = round_time.in_turns([one], seconds=1.0, least=3)
    assert len(rows) == 4
    got = round_time.summary(one, rows, CEILINGS)
    assert got["round_s"] == 0.25
    assert got["useful_share"] == pytest.approx(3000 / 0.25 / 1e6)
    assert got["memory_share"] == pytest.approx(10 / 0.25 / 1e3)
    assert got["quartiles"] == pytest.approx([300, 625])  # of 200, 333, 500, 1000 a second
    assert (got["images_per_s"], got["peak_bytes"], got["compile_s"]) == (pytest.approx(1250 / 3), 7, 1.5)


def test_a_round_without_a_step_is_an_error():
    idle = round_time.Running(CASE, None, 0.0, iter([(None, {"time/round_s": 1.0})]), 0.0)
    with pytest.raises(ValueError, match="no client took a step"):
        idle.round()


def test_the_best_guesses_come_first_and_axes_that_are_given_are_combined():
    def listed(kind, *words):
        axes = round_time.arguments_of(words, kind)
        return [(c.conv, c.loop, c.compiler, c.dtype) for c in round_time.combinations(axes, "small", kind)], axes

    on_cpu, axes = listed("cpu")
    assert on_cpu == [(*layout, "float32") for layout in round_time.ON_CPU]
    assert (axes.cohort, axes.budget) == ([8], 1700)  # two for each of four devices
    elsewhere, axes = listed("accelerator")
    usual = ("tiled", "vmap", "default")
    assert elsewhere[:5] == [
        (*usual, "tensorfloat32"), (*usual, "bfloat16"), ("grouped", "vmap", "default", "tensorfloat32"),
        (*usual, "float32"), ("tiled", "5", "default", "tensorfloat32"),
    ]  # fmt: skip
    assert len(set(elsewhere)) == len(elsewhere) == 3 * len(round_time.ON_ACCELERATOR)
    assert (axes.cohort, axes.budget) == ([10], 480)
    given, _ = listed("cpu", "--loop", "vmap", "3", "--compiler", "lean", "--conv", "hybrid")
    assert given == [("hybrid", "vmap", "lean", "float32"), ("hybrid", "3", "lean", "float32")]
    assert "grouped" not in {conv for conv, *_ in listed("cpu", "--loop", "scan")[0]}


@pytest.mark.parametrize("word", ["scna", "0"])
def test_an_unknown_loop_is_refused(word, capsys):
    with pytest.raises(SystemExit):
        round_time.arguments_of(["--loop", word], "cpu")
    assert f"got {word}, accepted: scan, vmap, unrolled, separate, or" in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for what the tests add."""
    now = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr(round_time.time, "perf_counter", lambda: now.s)
    monkeypatch.setattr(round_time.memory, "trim", lambda: None)  # takes a while
    return now


def test_workloads_share_the_time_and_what_is_left_is_for_tuning(clock):
    class Bench(round_time.Bench):
        def fixed(self, case):
            clock.s += 10.0 if case.workload == "long" else 1.0
            self.near[case.work] = [(float(case.workload == "long"), None)]
            return case._asdict()

        def tuned(self, case):
            clock.s += 70.0
            return case._asdict()

    axes = round_time.arguments_of(["--workloads", "long", "small"], "cpu")
    results = list(round_time.run(axes, "cpu", Bench(0.0, budget=100.0, most=CEILINGS)))
    measured = [r["workload"] for r in results if "left_out" not in r]
    assert measured[:11] == ["long", *["small"] * 10]  # as much time
    assert measured[11:] == ["long", "small", "long", "small"]  # 42 > 0.4 * 100; small's eleven are done; it is tuned first
    assert [r["workload"] for r in results if r["loop"] == TUNED] == ["small", "long"]
    assert results[-1]["left_out"] == "no time"
    (line,) = round_time.left_out(results)
    assert line.startswith("long: no time for im2col scan default float32 8; ")
    assert line.endswith("; tuned float32 8")
    axes.fixed = True
    clock.s = 0.0
    everything = list(round_time.run(axes, "cpu", Bench(0.0, budget=1000.0, most=CEILINGS)))
    assert len(everything) == 2 * len(round_time.ON_CPU)


@pytest.fixture
def usual(monkeypatch):
    """The usual layout is that of the case `u`."""

    def experiment(case):
        assert (case.loop, case.conv) == ("usual", "")
        return types.SimpleNamespace(layout="u")

    monkeypatch.setattr(round_time, "experiment", experiment)
    monkeypatch.setattr(round_time, "summary", lambda running, rows, most: {**running.case._asdict(), "rounds": len(rows)})


@pytest.mark.parametrize("measured", ["abcdue", "abcd"])
def test_the_tuned_layout_runs_in_turns_with_all_that_may_be_the_best_and_with_the_usual_one(monkeypatch, usual, measured):
    ran = []
    seconds = {"a": [2.8], "b": [1.3], "c": [1.0, 4.0, 1.0, 9.0, *[1.5] * 13], "d": [1.2], "u": [1.25], "e": [1.35], "": [2.5]}

    class Noted(round_time.Running):
        def round(self):
            ran.append(self.case.conv)
            return super().round()

    def start(case, give_up=None):
        name = "u" if case.loop == "usual" else case.conv
        return Noted(*running(case._replace(conv=name), seconds[name], layout=name))

    monkeypatch.setattr(round_time, "start", start)
    bench = round_time.Bench(0.0, 100.0, CEILINGS)
    for conv in measured:
        bench.fixed(CASE._replace(conv=conv))
    near = [c for c in "cdub" if c in measured]  # c's median was 1; a is too slow, e one too many
    assert [kept.case.conv for _, kept in bench.near[CASE.work]] == near
    ran.clear()
    tuned = CASE._replace(conv="", loop=TUNED)
    got = bench.tuned(tuned)
    order = ["u", *(c for c in near if c != "u")]
    all_ = ["", *order]
    turns = [[all_[i] for i in balanced(len(all_), turn)] for turn in range(10)]  # of five programs
    assert ran == [*order, *itertools.chain(*turns)]  # a round each to warm up again
    assert {rival["conv"]: rival["round_s"] for rival in got["beside"]} == {"c": 1.5, "d": 1.2, "b": 1.3, "u": 1.25}
    assert got["beside"][2]["round_quartiles_s"] == [1.2, 1.2]
    assert (got["round_s"], got["round_quartiles_s"], got["search_s"]) == (2.5, [2.5, 2.5], 9.0)
    assert got["of_best"] == pytest.approx(1.2 / 2.5)  # now, and not what was measured before
    assert got["of_usual"] == pytest.approx(1.25 / 2.5)
    assert not got["cut_short"]
    of_other_work = bench.tuned(tuned._replace(cohort=3))
    assert of_other_work["of_best"] == of_other_work["of_usual"]  # no other is there


@pytest.mark.parametrize(("words", "kept"), [([], {"float32"}), (["--fixed"], set())])
def test_what_is_compared_with_nothing_does_not_stay_in_memory(words, kept):
    class Bench(round_time.Bench):
        def fixed(self, case):
            self.near[case.work] = [(1.0, None)]
            return case._asdict()

        def tuned(self, case):
            seen.update(dtype for _, dtype, *_ in self.near)
            return case._asdict()

    axes = round_time.arguments_of(["--workloads", "small", "--dtype", "float32", "bfloat16", *words], "cpu")
    seen, bench = set(), Bench(0.0, 1e6, CEILINGS)
    list(round_time.run(axes, "cpu", bench))
    assert seen == kept
    assert not bench.near


def test_without_a_budget_one_workload_follows_another():
    class Bench(round_time.Bench):
        def fixed(self, case):
            self.near[case.work] = [(1.0, None)]
            assert len(self.near) == 1
            return case._asdict()

        def tuned(self, case):
            return case._asdict()

    axes = round_time.arguments_of(["--workloads", "long", "small"], "cpu")
    results = list(round_time.run(axes, "cpu", Bench(0.0, float("inf"), CEILINGS)))
    number = len(round_time.ON_CPU) + 1
    assert [r["workload"] for r in results] == ["long"] * number + ["small"] * number
    assert [r["loop"] for r in results if r["loop"] == TUNED] == [TUNED] * 2


def test_a_rival_is_as_fast_as_in_its_own_turns():
    """A machine that is slow for two turns says nothing of either."""
    own, rival = ([{"time/round_s": s} for s in seconds] for seconds in ([1.0, 10.0, 10.0], [1.5, 15.0, 1.5]))
    assert round_time.ratios(rival, own) == pytest.approx([0.825, 1.5, 1.5])  # .15 is that of the medians


def test_a_search_that_is_cut_short_is_marked(monkeypatch, clock, usual):
    def start(case, give_up=None):
        clock.s = 200.0
        assert give_up is None or give_up()
        return running(case, [1.0], layout="u")

    monkeypatch.setattr(round_time, "start", start)
    bench = round_time.Bench(0.0, 100.0, CEILINGS)
    got = bench.tuned(CASE._replace(loop=TUNED))
    assert got["cut_short"]
    assert not got["beside"]


@pytest.mark.parametrize(
    ("result", "is_slow"),
    [
        ({"of_best": 0.9, "of_usual": 1.2}, True),
        ({"of_best": 0.92, "of_usual": 1.2}, False),
        ({"of_best": 0.5, "of_usual": 0.5, "cut_short": True}, False),
        ({}, False),
    ],
)
def test_a_tuned_layout_may_be_a_tenth_slower(result, is_slow, results, monkeypatch, capsys):
    assert round_time.slow(result) == is_slow
    assert not round_time.slow({"images_per_s": 1.0})
    row = {
        **CASE._asdict(), "images_per_s": 1.0, "quartiles": [1.0, 1.0], "useful_share": 0.1, "memory_share": 0.1,
        "compile_s": 1.0, "peak_bytes": 1, **result,
    }  # fmt: skip
    monkeypatch.setattr(round_time, "run", lambda *_: iter([row]))
    monkeypatch.setattr(ceilings, "measured", lambda dtypes: CEILINGS)
    if not is_slow:
        results()
        return
    with pytest.raises(SystemExit) as ended:
        results()
    assert ended.value.code == 1
    assert "small: the tuned layout takes 1.11 times the best fixed one's time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore"), "RuntimeError: RESOURCE_EXHAUSTED: out of memory more"),
        (KeyError("flops"), "KeyError: 'flops'"),
        (AssertionError(), "AssertionError:"),
    ],
)
def test_a_case_that_fails_is_a_line_and_the_others_go_on(results, monkeypatch, capsys, error, line):
    def start(case, give_up=None):
        if case.loop in ("scan", TUNED):
            raise error
        return running(case, [1.0], made=types.SimpleNamespace(memory_bytes=7))

    monkeypatch.setattr(ceilings, "measured", lambda dtypes: CEILINGS)
    monkeypatch.setattr(round_time, "start", start)
    with pytest.raises(SystemExit) as ended:
        results("--workloads", "small", "--conv", "im2col", "--loop", "scan", "vmap", "--cohort", "2")
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert lines[0].endswith(line)
    assert lines[1].split()[:3] == ["small", "im2col", "vmap"]
    assert lines[2].endswith(line)
    assert lines[2].split()[1] == TUNED


@pytest.mark.parametrize("is_tuned", [False, True])
def test_a_fixed_layout_without_room_is_no_failure_and_a_tuned_one_is(results, monkeypatch, capsys, is_tuned):
    def start(case, give_up=None):
        if (case.loop == TUNED) == is_tuned and case.loop not in ("vmap", "usual"):
            raise memory.OutOfMemoryError("no memory for\nall")
        return running(case, [1.0], made=types.SimpleNamespace(memory_bytes=7))

    monkeypatch.setattr(ceilings, "measured", lambda dtypes: CEILINGS)
    monkeypatch.setattr(round_time, "start", start)
    with pytest.raises(SystemExit) if is_tuned else contextlib.nullcontext():
        results("--workloads", "small", "--conv", "im2col", "--loop", "scan", "vmap", "--cohort", "2")
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert (round_time.without_room([{"workload": "small", "no_room": ""}]), round_time.without_room([])) == ({"small"}, set())
    assert [line.endswith("OutOfMemoryError: no memory for all") for line in lines] == [not is_tuned, False, is_tuned]


def test_ceilings_are_of_one_device_or_of_all(monkeypatch):
    monkeypatch.setattr(ceilings, "_flops", lambda size, dtype, devices: {1: 2.0, 4: 3.0}[len(devices)])
    monkeypatch.setattr(ceilings, "_bandwidth", lambda length, devices: {1: 5.0, 4: 1.0}[len(devices)])
    assert ceilings.measured(["float32", "bfloat16"]) == ({"float32": 3.0, "bfloat16": 3.0}, 5.0)

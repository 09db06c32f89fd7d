"""Which layout is chosen by measuring: among which, what is kept, and that a run goes on as it began."""

import dataclasses
import json
import logging
import weakref

import jax
import numpy as np
import pytest

from fedjax_ssl.experiment import loop, measurement, tuning
from fedjax_ssl.experiment.layout import Layout
from fedjax_ssl.simulation import memory
from tests import tiny
from tests.tiny import left_open as experiment

USUAL = Layout("sharded", 1, 4, "winograd", "loop", "default", 25)
TRIM = memory.trim


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedjax_ssl" / "layouts"


@pytest.fixture
def clock(monkeypatch):
    """Layouts take as long as `seconds` says, in place of being measured; those that were asked for are in `tried`."""

    class Clock:
        def __init__(self):
            self.tried, self.works, self.now = [], True, 0.0

        def seconds(self, layout):
            faster = {"lean": 0.5, "shifted": 0.8, "unrolled": 1.2}
            return np.prod([faster.get(value, 1.0) for value in layout])

        def perf_counter(self):
            return self.now

    clock = Clock()

    class Timed:
        def __init__(self, piece, *, evaluates):
            clock.tried.append(piece.layout)
            if piece.layout.conv == "im2col":
                raise memory.OutOfMemoryError(f"no memory (GBs): {memory.ADVICE}")
            self.piece, self.evaluates = piece, evaluates
            self.seconds, self.works = clock.seconds(piece.layout), clock.works

        def times(self, other, stop, *, least_turns):
            return self.seconds / other.seconds

    monkeypatch.setattr(tuning, "Timed", Timed)
    monkeypatch.setattr(memory, "trim", lambda: None)  # takes seconds with all that tests leave in memory
    return clock


def test_the_fastest_is_found_and_kept_and_what_fails_is_passed_over(clock, cache, caplog):
    begun = experiment()
    assert begun.layout == USUAL
    with caplog.at_level(logging.INFO):
        found = tuning.tuned(begun)
    assert found.layout == USUAL._replace(compiler="lean", conv="shifted")
    assert found.settings == begun.settings
    assert "im2col, loop, lean: no memory (GBs)\n" in caplog.text  # and no advice to who has not chosen that
    assert [one.compiler for one in clock.tried] == ["default", *["lean"] * 12, "default", "lean"]  # both once more
    (kept,) = cache.glob("*.json")
    content = json.loads(kept.read_text())
    assert Layout(**content["layout"]) == found.layout
    assert content["left_out"] == []
    assert dict(content["tried"])["sharded 1, winograd, loop, lean"] == pytest.approx(0.5)
    assert min(content["tried"], key=lambda pair: pair[1])[0] == "sharded 1, shifted, loop, lean"  # as it was decided
    assert dict(content["tried"])["sharded 1, shifted, loop, lean"] == pytest.approx(0.4)
    tried = len(clock.tried)
    assert tuning.tuned(experiment()).layout == found.layout
    assert tuning.tuned(experiment(), only_long=True).layout == USUAL  # a short run does not look for it
    assert len(clock.tried) == tried  # it was kept
    for broken in ("{", json.dumps(content | {"layout": content["layout"] | {"conv": "of_another_version"}})):
        clock.tried.clear()
        kept.write_text(broken)
        assert tuning.tuned(experiment()).layout == found.layout
        assert len(clock.tried) == tried


def test_what_the_config_says_is_not_changed(clock):
    given = {
        "execution__compiler": "default",
        "execution__conv": "winograd",
        "execution__steps": "loop",
        "execution__batch_size": 25,
    }
    assert tuning.tuned(experiment(**given)).layout == USUAL
    assert {one.strategy for one in clock.tried} == {"sharded", "separate"}
    assert {one.forward_batch_size for one in clock.tried} == {25}
    clock.tried.clear()
    assert tuning.tuned(experiment(execution__data="host")).layout.compiler == "lean"
    assert {one.strategy for one in clock.tried} == {"sharded"}


def test_clients_that_are_sharded_as_the_config_says_may_still_run_together(clock):
    given = experiment(execution__strategy="sharded", execution__conv="hybrid", cohort_size=16, data__num_clients=16)
    assert not any(move.get("chunk_size") == 2 for move in tuning.moves(given))  # those are with other lowerings
    given = experiment(execution__strategy="sharded", cohort_size=16, data__num_clients=16)
    together = {"strategy": "sharded", "chunk_size": 2}
    assert [move for move in tuning.moves(given) if move.get("chunk_size") == 2] == [together | {"conv": "winograd"}]
    given = tiny.experiment("fixmatch", execution__strategy="sharded", cohort_size=16, data__num_clients=16)
    assert {"strategy": "sharded", "chunk_size": 4} in tuning.moves(given)  # a network without convolutions
    assert not any(move.get("strategy") == "separate" for move in tuning.moves(given))


def test_an_accelerator_tries_chunks_of_clients_and_the_lowerings_that_are_fast_there(monkeypatch):
    ten = {"cohort_size": 10, "data__num_clients": 10, "execution__devices": 1}
    given = dataclasses.replace(experiment(**ten, execution__strategy="vmap"), settings=experiment(**ten).settings)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    tried = tuning.moves(given)
    assert [move for move in tried if "chunk_size" in move and "steps" not in move and move["strategy"] == "chunked"] == [
        *({"strategy": "chunked", "chunk_size": size} for size in (5, 4, 1)),
        {"strategy": "chunked", "chunk_size": 1, "conv": "grouped"},
    ]
    assert [move["conv"] for move in tried if list(move) == ["conv"]] == ["tiled", "grouped", "im2col", "shifted"]
    assert not any("compiler" in move for move in tried)


@pytest.mark.parametrize(
    ("clients", "chunks"), [(1, []), (2, [1]), (10, [5, 4, 1]), (50, [25, 16, 4, 1]), (1000, [500, 256, 64, 16, 4, 1])]
)
def test_chunks_on_an_accelerator_are_half_of_all_and_less_by_fours(clients, chunks):
    assert tuning.chunk_sizes(clients) == chunks


@pytest.mark.parametrize("change", [{"execution__rounds_per_dispatch": 2}, {"execution__data": "host"}])
def test_separate_programs_are_not_tried_where_they_cannot_be_and_chunks_are(change):
    tried = tuning.moves(experiment(**change))
    assert not any(move.get("strategy") == "separate" for move in tried)
    assert {"strategy": "sharded", "chunk_size": 2, "conv": "winograd"} in tried


@pytest.mark.parametrize(
    ("alone", "gain", "taken"), [(1.4, 1.04, True), (0.5, 1.02, False), (0.5, 0.9, False), (1.6, 1.5, False), (1.0, 1.04, True)]
)
def test_turns_say_which_layout_is_faster_and_not_what_it_takes_alone(clock, monkeypatch, alone, gain, taken):
    monkeypatch.setattr(clock, "seconds", lambda layout: alone if layout.compiler == "lean" else 1.0)
    monkeypatch.setattr(
        tuning.Timed, "times", lambda self, other, stop, *, least_turns: gain if self.piece.layout == USUAL else 0.9
    )
    monkeypatch.setattr(tuning, "moves", lambda _: [{"compiler": "lean"}])
    assert (tuning.tuned(experiment()).layout.compiler == "lean") == taken


@pytest.mark.parametrize(
    ("once_more", "taken"),
    [({}, ("lean", 50)), ({"lean": 1.02}, ("default", 50)), ({50: 0.9}, ("lean", 25)), (None, ("lean", 50))],
)
def test_what_is_no_faster_once_more_is_not_taken(clock, cache, monkeypatch, caplog, once_more, taken):
    compared, least = [], []

    def times(self, other, stop, *, least_turns):
        tried = other.piece.layout.forward_batch_size if self.evaluates else other.piece.layout.compiler
        again = tried in compared
        compared.append(tried)
        least.append(least_turns)
        if again and once_more is None:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return once_more.get(tried, 1.2) if again else 1.2

    monkeypatch.setattr(tuning.Timed, "times", times)
    monkeypatch.setattr(tuning, "moves", lambda _: [{"compiler": "lean"}, {"forward_batch_size": 50}])
    with caplog.at_level(logging.INFO):
        layout = tuning.tuned(experiment()).layout
    assert (layout.compiler, layout.forward_batch_size) == taken
    assert compared == ["lean", 50, "lean", 50]
    assert least == [1, 1, measurement.LEAST_TURNS, measurement.LEAST_TURNS]  # one slow turn decides nothing the second time
    assert clock.tried[-4:] == [  # all made anew
        USUAL._replace(forward_batch_size=50),
        USUAL._replace(forward_batch_size=50, compiler="lean"),
        layout._replace(forward_batch_size=25),
        layout._replace(forward_batch_size=50),
    ]
    assert caplog.text.count("no faster once more") == (taken[0] == "default") + (taken[1] == 25)
    assert "  50 examples per forward pass, once more, beside 25 examples per forward pass: " in caplog.text
    (kept,) = cache.glob("*.json")
    tried = dict(json.loads(kept.read_text())["tried"])
    assert tried["sharded 1, winograd, loop, lean"] == pytest.approx(1 / (once_more or {}).get("lean", 1.2))  # the last time's
    assert tried["50 examples per forward pass"] == pytest.approx(0.5 / (once_more or {}).get(50, 1.2))


@pytest.mark.parametrize("compiler", ["default", "lean"])
def test_what_was_found_is_kept_where_either_cannot_be_made_once_more(clock, monkeypatch, compiler):
    usual = clock.seconds

    def seconds(layout):
        if layout.compiler == compiler and clock.tried.count(layout) > 1:
            raise RuntimeError("out of memory")
        return usual(layout)

    monkeypatch.setattr(clock, "seconds", seconds)
    monkeypatch.setattr(tuning, "moves", lambda _: [{"compiler": "lean"}])
    assert tuning.tuned(experiment()).layout == USUAL._replace(compiler="lean")
    lean = USUAL._replace(compiler="lean")
    assert clock.tried == {"default": [USUAL, lean, USUAL], "lean": [USUAL, lean, USUAL, lean]}[compiler]


@pytest.mark.parametrize(("chunk_size", "taken"), [(2, "default"), (1, "lean")])
def test_what_has_room_for_other_chunks_beside_the_usual_is_not_compared_with_it(clock, monkeypatch, chunk_size, taken):
    class Timed(tuning.Timed):
        def __init__(self, piece, *, evaluates):
            super().__init__(piece, evaluates=evaluates)
            self.again = clock.tried.count(piece.layout) > 1
            if self.again and piece.layout.compiler == "lean":
                piece.simulator.execution = piece.simulator.execution._replace(chunk_size=chunk_size)

        def times(self, other, stop, *, least_turns):
            return 0.9 if other.again else 1.2

    monkeypatch.setattr(tuning, "Timed", Timed)
    monkeypatch.setattr(tuning, "moves", lambda _: [{"compiler": "lean"}])
    begun = tuning.in_layout(experiment(), USUAL._replace(chunk_size=2))
    assert tuning.tuned(begun).layout == begun.layout._replace(compiler=taken)


def in_turns(monkeypatch, *gains):
    """Comparisons in turns come to these, one after the other; what is left of them."""
    left = iter(gains)
    monkeypatch.setattr(tuning.Timed, "times", lambda self, other, stop, *, least_turns: next(left))
    return left


def test_what_goes_back_has_the_chunks_that_it_began_with(clock, monkeypatch):
    gains = in_turns(monkeypatch, 1.2, 0.9)
    monkeypatch.setattr(tuning, "moves", lambda _: [{"chunk_size": 1}])
    begun = tuning.in_layout(experiment(), USUAL._replace(chunk_size=2))
    assert tuning.tuned(begun).layout == begun.layout
    assert next(gains, None) is None


def failing(monkeypatch):
    """No layout can be compared with one of other options, as where memory is enough for one of them alone."""

    def times(self, other, stop, *, least_turns):
        if other.piece.layout.compiler != self.piece.layout.compiler:
            raise memory.OutOfMemoryError(f"no memory (GBs): {memory.ADVICE}")
        return self.seconds / other.seconds

    monkeypatch.setattr(tuning.Timed, "times", times)


@pytest.mark.parametrize(("alone", "compiler"), [(0.75, "lean"), (0.8, "default")])
def test_where_two_cannot_be_compared_one_has_to_be_clearly_faster_alone(clock, monkeypatch, caplog, alone, compiler):
    usual = clock.seconds
    monkeypatch.setattr(clock, "seconds", lambda layout: usual(layout) * (2 * alone if layout.compiler == "lean" else 1))
    failing(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert tuning.tuned(experiment()).layout == USUAL._replace(compiler=compiler, conv="shifted")
    assert "sharded 1, winograd, loop, lean: no memory (GBs)\n" in caplog.text
    made = clock.tried.count(USUAL._replace(compiler=compiler))
    assert made == 2 + (compiler == "default")  # anew, and what it began with once more


def test_after_a_failed_comparison_neither_stays_in_memory_and_the_run_is_as_long_as_before(clock, uncollected, monkeypatch):
    monkeypatch.setattr(memory, "trim", TRIM)
    failing(monkeypatch)
    alive, timed, asked = [], tuning.Timed, []

    def noted(*args, **options):
        alive.append(weakref.ref(made := timed(*args, **options)))
        there.append(sum(one() is not None for one in alive[:-1]))
        made.itself = made  # as an error and what it was raised in
        return made

    there: list[int] = []
    monkeypatch.setattr(tuning, "Timed", noted)
    monkeypatch.setattr(measurement, "may_be_long", lambda _: True)
    monkeypatch.setattr(measurement, "run_s", lambda *_: 0.0 if asked else asked.append(1) or 1e6)
    assert tuning.tuned(experiment(), only_long=True).layout == USUAL._replace(compiler="lean", conv="shifted")
    assert there[:4] == [0, 1, 0, 1]  # usual, lean beside it, lean made anew, the next beside it


def test_a_best_layout_that_cannot_be_made_anew_is_kept_with_what_is_left_to_try(clock, cache, monkeypatch, caplog):
    failing(monkeypatch)
    usual = clock.seconds

    def seconds(layout):
        if clock.tried.count(layout) > 1:
            raise RuntimeError("out of memory")
        return usual(layout)

    monkeypatch.setattr(clock, "seconds", seconds)
    begun = experiment()
    assert tuning.tuned(begun).layout == USUAL._replace(compiler="lean")
    (kept,) = cache.glob("*.json")
    assert json.loads(kept.read_text())["left_out"] == tuning.moves(begun)[1:]
    assert "no other is tried" not in caplog.text


def test_an_evaluation_that_does_not_run_is_not_tried_each_time(clock, cache, monkeypatch):
    timed = tuning.Timed

    def failing(piece, *, evaluates):
        if evaluates:
            raise RuntimeError("out of memory")
        return timed(piece, evaluates=evaluates)

    monkeypatch.setattr(tuning, "Timed", failing)
    assert tuning.tuned(experiment()).layout == USUAL._replace(compiler="lean", conv="shifted")
    (kept,) = cache.glob("*.json")
    assert json.loads(kept.read_text())["left_out"] == []


def test_the_rest_of_a_search_may_be_of_the_evaluation_alone(clock, cache, monkeypatch):
    monkeypatch.setattr(measurement, "may_be_long", lambda _: True)
    monkeypatch.setattr(measurement, "run_s", lambda *_: 1e6)
    tuning.tuned(experiment(), only_long=True)
    (kept,) = cache.glob("*.json")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"left_out": [{"forward_batch_size": 50}]}))
    monkeypatch.setattr(measurement, "run_s", lambda *_: 0.0)  # unknown without rounds
    monkeypatch.setattr(clock, "seconds", lambda layout: 0.5 if layout.forward_batch_size == 50 else 1.0)
    assert tuning.tuned(experiment(), only_long=True).layout.forward_batch_size == 50


def test_what_had_no_room_is_kept_as_what_it_came_to(clock, monkeypatch):
    """And others are tried in the chunks that were asked for: they may have room."""
    fast = Layout("sharded", 2, 4, "winograd", "loop", "lean", 25)

    class Timed(tuning.Timed):
        def __init__(self, piece, *, evaluates):
            super().__init__(piece, evaluates=evaluates)
            if piece.layout.chunk_size == 2:
                piece.simulator.execution = piece.simulator.execution._replace(chunk_size=1)
                self.seconds /= 10

    monkeypatch.setattr(tuning, "Timed", Timed)
    assert tuning.tuned(experiment()).layout == fast._replace(chunk_size=1, conv="shifted")
    clock.tried.clear()
    begun = tuning.in_layout(experiment(execution__dtype="bfloat16"), fast._replace(compiler="default"))
    assert tuning.tuned(begun).layout == fast._replace(chunk_size=1, conv="shifted")
    assert {one.chunk_size for one in clock.tried if one.strategy == "sharded"} == {2}


def test_forward_passes_have_as_many_examples_as_are_fastest_unless_statistics_depend_on_them(clock, monkeypatch):
    monkeypatch.setattr(clock, "seconds", lambda layout: 1.0 if layout.forward_batch_size != 50 else 0.5)
    found = tuning.tuned(experiment())
    assert found.layout == USUAL._replace(forward_batch_size=50)
    moves = tuning.moves(experiment(model__norm="batch"))
    assert not any("forward_batch_size" in move for move in moves)


def test_pseudo_labels_are_made_of_as_many_examples_as_before():
    begun = experiment()
    measured = tuning.in_layout(begun, begun.layout._replace(forward_batch_size=7))
    asked = experiment(execution__batch_size=7)
    costs = [next(one.rounds())[1]["cost/forward_passes"] for one in (begun, measured, asked)]
    assert costs[0] == costs[1] != costs[2]  # batches are counted whole


def test_work_that_does_not_run_as_it_is_is_no_measure_and_the_log_says_so(clock, cache, caplog):
    given = experiment(execution__conv="im2col", execution__compiler="default")
    assert tuning.tuned(given).layout == given.layout
    assert "does not run in the layout that it has" in caplog.text
    assert not list(cache.glob("*.json"))


def test_work_in_which_clients_do_nothing_is_no_measure(clock, cache):
    clock.works = False
    assert tuning.tuned(experiment()).layout == USUAL
    assert len(clock.tried) == 1
    assert not list(cache.glob("*.json"))


def test_what_was_tried_and_not_taken_does_not_stay_in_memory(clock, uncollected, monkeypatch):
    monkeypatch.setattr(memory, "trim", TRIM)
    alive, there, timed = [], [], tuning.Timed

    def noted(*args, **options):
        there.append(sum(one() is not None for one in alive))
        alive.append(weakref.ref(made := timed(*args, **options)))
        made.itself = made  # as an error and what it was raised in
        return made

    monkeypatch.setattr(tuning, "Timed", noted)
    tuning.tuned(experiment())
    assert len(there) == 15
    assert [number for number, beside in enumerate(there) if beside == 0] == [0, 10, 13]  # rounds, evaluations, and once more
    assert set(there) == {0, 1}  # beside the best, or what it began with
    assert all(one() is None for one in alive)  # before the run is made


def test_a_search_takes_its_share_of_the_shortest_run_that_it_is_for():
    assert tuning.SHARE * measurement.LONG_S == tuning.LEAST_LIMIT_S


def test_a_search_that_is_given_up_keeps_nothing(clock, cache):
    assert tuning.tuned(experiment(), give_up=lambda: len(clock.tried) >= 3).layout == USUAL._replace(compiler="lean")
    clock.tried.clear()
    assert tuning.tuned(experiment(), give_up=lambda: len(clock.tried) >= 2).layout == USUAL  # as it was being compared
    assert not list(cache.glob("*.json"))


@pytest.mark.parametrize("made", [3, 4])  # before and while what was found is compared once more
def test_a_search_that_is_given_up_in_the_end_keeps_what_it_found(clock, monkeypatch, made):
    in_turns(monkeypatch, 1.2, 0.9)
    begun = experiment()
    found = tuning.search(begun, begun.layout, [{"compiler": "lean"}], lambda: len(clock.tried) >= made)
    assert found.layout == USUAL._replace(compiler="lean")
    assert len(clock.tried) == made


def test_of_a_search_that_is_given_up_before_it_nothing_is_made_once_more(clock, monkeypatch):
    asked = iter([False, False, False])  # at the start, before the move and after it
    in_turns(monkeypatch, 1.2)
    begun = experiment()
    found = tuning.search(begun, begun.layout, [{"compiler": "lean"}], lambda: next(asked, True))
    assert found.layout == USUAL._replace(compiler="lean")
    assert len(clock.tried) == 2


def test_before_a_layout_is_made_and_in_the_end_what_was_dropped_before_is_given_back(clock, monkeypatch):
    made = []
    monkeypatch.setattr(memory, "trim", lambda: made.append(len(clock.tried)))
    tuning.tuned(experiment())
    assert made == list(range(len(clock.tried) + 1))


def test_numbers_of_examples_are_compared_once_more_where_nothing_else_was_tried(clock, monkeypatch):
    gains = in_turns(monkeypatch, 1.2, 0.9)
    monkeypatch.setattr(tuning, "moves", lambda _: [{"forward_batch_size": 50}])
    assert tuning.tuned(experiment()).layout == USUAL
    assert next(gains, None) is None


def test_a_search_for_which_time_runs_out_goes_on_the_next_time(clock, cache, monkeypatch):
    def seconds(layout):
        clock.now += 160.0  # a layout takes so long to compile
        return {"shifted": 0.8}.get(layout.conv, 1.0)

    monkeypatch.setattr(clock, "seconds", seconds)
    monkeypatch.setattr(tuning.time, "perf_counter", clock.perf_counter)
    usual = experiment(execution__compiler="default")
    assert tuning.tuned(usual).layout == USUAL
    (kept,) = cache.glob("*.json")
    left_out = json.loads(kept.read_text())["left_out"]
    assert left_out == tuning.moves(usual)[1:]
    assert left_out.index({"conv": "shifted"}) > left_out.index({"steps": "unrolled"})
    for _ in range(len(left_out)):
        found = tuning.tuned(usual)
    assert found.layout == USUAL._replace(conv="shifted")
    assert json.loads(kept.read_text())["left_out"] == []
    tried = len(clock.tried)
    tuning.tuned(usual)
    assert len(clock.tried) == tried


def test_what_was_found_when_time_ran_out_is_compared_once_more(clock, monkeypatch):
    def seconds(layout):
        clock.now += 160.0
        return 0.5 if layout.compiler == "lean" else 1.0

    monkeypatch.setattr(clock, "seconds", seconds)
    monkeypatch.setattr(tuning.time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(measurement, "run_s", lambda *_: 0.0)
    begun = experiment()
    found = tuning.search(begun, begun.layout, tuning.moves(begun), lambda: False)
    lean = USUAL._replace(compiler="lean")
    assert (found.layout, found.left_out) == (lean, tuning.moves(begun)[1:])
    assert clock.tried == [USUAL, lean, USUAL, lean]


@pytest.mark.parametrize(("run_s", "tried"), [(3_000.0, 2), (6_000.0, 2), (10_000.0, 4), (15_000.0, 5), (1e6, 6)])
def test_a_long_run_is_worth_a_longer_search_but_not_any(clock, monkeypatch, run_s, tried):
    """A twentieth of it, and five to fifteen minutes; each layout is compiled for 160 s, and the last one begun is finished."""

    def seconds(layout):
        clock.now += 160.0
        return 1.0

    monkeypatch.setattr(clock, "seconds", seconds)
    monkeypatch.setattr(tuning.time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(measurement, "run_s", lambda *_: run_s)
    begun = experiment()
    found = tuning.search(begun, begun.layout, tuning.moves(begun), lambda: False)
    assert len(found.tried) == tried
    assert len(found.left_out) == len(tuning.moves(begun)) - (tried - 1)


def test_steps_that_would_compile_for_too_long_are_not_written_out(clock, monkeypatch):
    few = {"client__epochs": 0, "client__steps": 4, "server__epochs": 0, "server__steps": 1, "server__pretrain": 0}
    tuning.tuned(experiment(**few))
    assert any(one.steps == "unrolled" for one in clock.tried)
    clock.tried.clear()
    monkeypatch.setattr(type(experiment(**few).simulator), "compile_s", 76.0, raising=False)
    monkeypatch.setattr(measurement, "run_s", lambda *_: 1e6)  # however long it is
    tuning.tuned(experiment(**few, client__batch_size=5))
    assert not any(one.steps == "unrolled" for one in clock.tried)


def test_a_run_that_stops_while_tuning_looks_again_when_it_goes_on(clock, tmp_path, caplog):
    given, stop = experiment(execution__tune="always"), loop.Stop()
    loop.open_workdir(tmp_path, given.settings.to_dict(), overwrite=False)
    stop.signal = 15
    loop.run(tuning.for_run(given, tmp_path, lambda: True), tmp_path, stop)
    assert not (tmp_path / "layout.json").exists()
    clock.tried.clear()
    assert tuning.for_run(given, tmp_path, lambda: False).layout.compiler == "lean"
    assert clock.tried
    assert not caplog.text


def test_without_a_cache_it_measures_each_time(clock, monkeypatch):
    monkeypatch.setattr(tuning, "cache_folder", lambda: None)
    for times in (1, 2):
        assert tuning.tuned(experiment()).layout.compiler == "lean"
        assert len(clock.tried) == 15 * times


def test_a_run_is_tuned_where_a_measured_round_says_that_it_is_long(clock, monkeypatch, caplog):
    short = experiment()
    assert tuning.tuned(short, only_long=True) is short
    assert not clock.tried
    monkeypatch.setattr(measurement, "may_be_long", lambda _: True)
    assert tuning.tuned(short, only_long=True).layout == USUAL
    assert len(clock.tried) == 1  # a second for each of a few rounds
    assert tuning.tuned(experiment(rounds=10**4), only_long=True).layout.compiler == "lean"


def test_a_real_search_runs_rounds_and_finds_a_layout_that_trains_alike():
    few = {"client__epochs": 0, "client__steps": 1, "server__epochs": 0, "server__steps": 1, "server__pretrain": 0}
    begun = experiment(cohort_size=2, data__num_clients=4, **few)
    asked = experiment(cohort_size=2, data__num_clients=4, execution__conv="winograd", execution__compiler="default", **few)
    found = tuning.search(asked, asked.layout, tuning.moves(asked), lambda: False)
    assert found.tried[0][0] == tuning.describe(begun.layout)
    assert found.left_out == []
    assert all(seconds > 0 for _, seconds in found.tried)
    changes = tuning.moves(begun)
    assert {"compiler": "lean"} in changes
    (separate,) = (begun.layout._replace(**move) for move in changes if move.get("conv") == "grouped")
    assert (separate.strategy, separate.steps, separate.conv) == ("separate", "unrolled", "grouped")
    (state, row), (other, same) = (next(tuning.in_layout(begun, one).rounds()) for one in (begun.layout, separate))
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(s.server.weights)]) for s in (state, other))
    assert np.linalg.norm(a - b) < 1e-4 * np.linalg.norm(a)
    assert row["comm/bytes_up"] == same["comm/bytes_up"] > 0


def test_a_run_goes_on_in_the_layout_it_began_in(clock, tmp_path, caplog):
    def run(**overrides):
        return tuning.for_run(experiment(**overrides), tmp_path, lambda: False).layout

    assert run(execution__tune="never") == run() == USUAL  # short
    assert not clock.tried
    (tmp_path / "layout.json").unlink()
    lean = run(execution__tune="always")
    assert lean.compiler == "lean"
    assert run(execution__tune="never") == lean  # as noted
    noted = tmp_path / "layout.json"
    fields = lean._asdict()
    del fields["forward_batch_size"]  # as an earlier version wrote it
    noted.write_text(json.dumps({"layout": fields, "platform": "cpu"}))
    assert run() == lean._replace(forward_batch_size=250)
    noted.write_text(json.dumps({"layout": lean._replace(devices=5)._asdict(), "platform": "cpu"}))
    assert run(execution__tune="never") == USUAL
    assert "layout.json: got 5 devices, there are 4 of cpu here" in caplog.text
    noted.write_text(json.dumps({"layout": lean._asdict(), "platform": "gpu"}))
    assert run(execution__tune="never") == USUAL
    of_another_version = json.dumps({"layout": lean._replace(conv="later")._asdict(), "platform": "cpu"})
    for unreadable in (None, "{", of_another_version):
        noted.unlink(missing_ok=True)
        (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n')  # it has begun
        if unreadable:
            noted.write_text(unreadable)
        caplog.clear()
        assert run(execution__tune="always") == USUAL
        assert "layout.json: cannot be read: going on in a layout that may differ" in caplog.text
        assert json.loads(noted.read_text())["layout"] == USUAL._asdict()

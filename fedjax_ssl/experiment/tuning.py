"""Which layout is the fastest here: a short measurement on a small piece of an experiment's own work, kept on disk.

What `execution.*` leaves open begins as `layout.resolve` has it. Then one thing after another is tried (another lowering of
convolutions, the compiler's other options, another loop over clients, steps written out, other numbers of examples per forward
pass), and kept where it is faster. Layouts are compared on a few clients with a few batches each, whole rounds of them, in
turns, by the median of the turns' ratios; see `measurement`. In the end what was found is compared once more with what the
search began from, both made anew, and given up if it is no faster: of many tries one is lucky, and of two instances of one
program one is faster.

    experiment = fedjax_ssl.tune(fedjax_ssl.build(config))
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax

from fedjax_ssl.experiment import measurement
from fedjax_ssl.experiment.build import assembled
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.layout import Layout, convolves
from fedjax_ssl.experiment.machine import cache_folder, cores, processor, sources
from fedjax_ssl.experiment.measurement import Timed, forward_sizes, has_few_steps
from fedjax_ssl.experiment.writers import write_json
from fedjax_ssl.methods import SERVER_ALONE
from fedjax_ssl.simulation import memory
from fedjax_ssl.simulation.execution import Execution

_log = logging.getLogger(__name__)

LAYOUT = "layout.json"
GAIN = 1.03
"""How many times as fast a candidate must be to be taken: less is noise."""
GAIN_ALONE = 1.3
"""The same by what both take alone, where they cannot be compared in turns: a machine changes its speed by as much."""
FAR = 1.5
"""How many times as long as the best a candidate takes alone that is not compared with it in turns."""
SHARE, LEAST_LIMIT_S, MOST_LIMIT_S = 0.05, 300.0, 900.0
"""Of a run's time, after which no other layout is tried, and the least and most seconds that this comes to: a large network
takes a minute to compile on a CPU. What was found by then is still compared once more, which makes two anew."""

Move = dict[str, Any]


def tuned(experiment: Experiment, *, give_up: Callable[[], bool] = lambda: False, only_long: bool = False) -> Experiment:
    """The experiment in the fastest layout among those that its settings leave open.

    Measures where no result is kept (see `cache_folder`) for the same work on the same devices: in a minute or two for a small
    network; for a large one on a CPU in up to a quarter of an hour, and then what was begun and the last comparison.

    Args:
        experiment: as `build` made it.
        give_up: asked between candidates; once it is true, the best so far is taken, and nothing is kept.
        only_long: leave a run as it is that is over in 100 minutes anyway. Where its arithmetic says so, what is kept is not
            even looked for: the key takes a trace of the whole program.
    """
    if only_long and not measurement.may_be_long(experiment):
        return experiment
    work = key(experiment)
    path = _path(work)
    kept = _found(path) if path is not None else None
    if kept is not None and not kept.left_out:
        return in_layout(experiment, kept.layout)
    _log.info("looking for the fastest layout, kept for the next time")
    begun, todo = (kept.layout, kept.left_out) if kept else (experiment.layout, moves(experiment))
    found = search(experiment, begun, todo, give_up, measurement.LONG_S if only_long else 0.0)
    memory.trim()  # what it leaves, before the run is made
    if path is not None and found.tried and not give_up():
        _keep(path, {"key": work, **found._asdict(), "layout": found.layout._asdict()})
    return in_layout(experiment, found.layout)


def in_layout(experiment: Experiment, layout: Layout) -> Experiment:
    """The experiment in another layout; its settings stay as they are."""
    if layout == experiment.layout:
        return experiment
    settings, problem = experiment.settings, experiment.problem
    changed = assembled(layout.pinned(settings), experiment.views, problem.spec, problem.data, given=settings)
    return dataclasses.replace(changed, settings=settings)


def for_run(experiment: Experiment, workdir: pathlib.Path, give_up: Callable[[], bool]) -> Experiment:
    """The experiment in the layout of the run in a folder: the one that is noted there, or chosen now and noted.

    So a run that goes on does so bit for bit. A run that began without a note goes on as its settings say; one whose devices
    are not there any more has to be in another layout, and differs in rounding from then on. Both are said in the log.

    Args:
        experiment: as `build` made it.
        workdir: a folder that `loop.open_workdir` has accepted.
        give_up: as in `tuned`.
    """
    tune = experiment.settings.execution.tune
    noted = noted_layout(workdir)
    if noted is not None:
        return in_layout(experiment, noted)
    if not _has_begun(workdir) and tune != "never":
        experiment = tuned(experiment, give_up=give_up, only_long=tune == "auto")
        if give_up():  # it stops before round 1, and looks again when it starts again
            return experiment
    note(experiment.layout, workdir)
    return experiment


def note(layout: Layout, workdir: pathlib.Path, **more: Any) -> None:
    """Writes down in which layout a folder's run is, and what else is to be found there again."""
    write_json(workdir / LAYOUT, {"layout": layout._asdict(), "platform": jax.default_backend(), **more})


def noted_layout(workdir: pathlib.Path) -> Layout | None:
    """The layout that a folder's run is in; None where it has not begun, or, with a warning, where it cannot go on in it."""
    path = workdir / LAYOUT
    noted, devices = read(path), len(jax.devices())
    if noted is None:
        if _has_begun(workdir):
            _log.warning("%s: cannot be read: going on in a layout that may differ, and then differs in rounding", path)
        return None
    if json.loads(path.read_text()).get("platform") != jax.default_backend() or noted.devices > devices:
        there = f"{devices} of {jax.default_backend()}"
        _log.warning("%s: got %d devices, there are %s here: going on in another layout", path, noted.devices, there)
        return None
    return noted


def _has_begun(workdir: pathlib.Path) -> bool:
    """Whether a folder's run has finished a round: one that was stopped before has left an empty log."""
    log = workdir / "metrics.jsonl"
    return log.exists() and log.stat().st_size > 0


def key(experiment: Experiment) -> dict[str, Any]:
    """What a choice depends on: the work's shapes and settings, what of the layout is given, the devices and the versions."""
    settings, spec, data = experiment.settings, experiment.problem.spec, experiment.problem.data
    device, few = jax.devices()[0], has_few_steps(experiment)
    given, views = dataclasses.asdict(settings), [settings.data.weak, settings.data.strong, settings.data.labeled]
    return {
        "method": _without_rates(measurement.accepting_all(settings)),
        "model": dict(settings.model),
        "image_shape": list(spec.image_shape),
        "num_classes": spec.num_classes,
        "labels_at": settings.data.labels_at,
        "client": _without_rates(given["client"]),
        "server": _without_rates(given["server"]) | {"pretrain": min(settings.server.pretrain, 2)},
        "steps": [experiment.most_steps, *(int(table.index.shape[1]) for table in (data.client_data, data.server))]
        if few
        else [],
        "skew": measurement.skew(data),
        "views": views if "default" not in views else [settings.data.name, *views],
        "reveal_labels": settings.data.reveal_labels,
        "cohort_size": settings.cohort_size,
        "execution": {k: v for k, v in given["execution"].items() if k != "tune"},
        "test": measurement.evaluated_images(experiment),
        "device": f"{len(jax.devices())} x {device.platform} {device.device_kind}",
        "memory_gb": memory.total_bytes() >> 30,
        "processor": f"{processor()}, {cores()} cores",
        "jax": [jax.__version__, metadata.version("jaxlib")],
        "sources": sources(),
        "flags": [os.environ.get(name, "") for name in ("XLA_FLAGS", "GLIBC_TUNABLES")],
    }


def _without_rates(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, of numbers such as rates and thresholds only whether they are 0: no work depends on how large they are."""
    return {
        name: _without_rates(value) if isinstance(value, Mapping) else bool(value) if isinstance(value, float) else value
        for name, value in settings.items()
    }


def _path(of: Mapping[str, Any]) -> pathlib.Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()[:20]
    return folder / "layouts" / f"{digest}.json"


def _keep(path: pathlib.Path, found: Mapping[str, Any]) -> None:
    """Writes what was found; where it cannot be, as on a full disk, it is measured again the next time."""
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, found)
    except OSError as error:
        _log.warning("%s: not written (%s)", path, error.strerror)


def read(path: pathlib.Path) -> Layout | None:
    """The layout that a file holds; None where there is none, or none that this version knows."""
    try:
        return Layout.checked(json.loads(path.read_text())["layout"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Found(NamedTuple):
    """What a search came to.

    Attributes:
        layout: the best.
        tried: what was measured, in words, and the seconds of its rounds, or of its evaluation, the least of those alone, or,
            where it was compared in turns, in proportion to the seconds of what it was last compared with; empty where nothing
            was.
        left_out: the moves for which there was no time, or nothing to compare them with.
    """

    layout: Layout
    tried: list[tuple[str, float]]
    left_out: list[Move]


def _found(path: pathlib.Path) -> Found | None:
    """What is kept of an earlier search; None where nothing is, or nothing that this version knows."""
    layout = read(path)
    return None if layout is None else Found(layout, [], json.loads(path.read_text()).get("left_out", []))


def moves(experiment: Experiment) -> list[Move]:
    """What is tried, one after another, as changes of the best layout so far; only of what the settings leave open.

    As time may run out, what has often been the fastest comes first. On a CPU that is the options and the loops; of lowerings
    inside loops only those are worth a try that avoid XLA's gradients of convolutions.
    """
    settings, layout = experiment.settings, experiment.layout
    given, platform = settings.execution, jax.default_backend()
    on_cpu, few_steps, convs = platform == "cpu", has_few_steps(experiment), convolves(settings)
    fixed = {name for name, value in dataclasses.asdict(given).items() if value not in ("auto", 0)}
    trains_clients = settings.method["name"] not in SERVER_ALONE
    usual = "sharded" if layout.strategy == "sharded" else "chunked"
    of_device = -(-settings.cohort_size // layout.devices)
    lowerings = ("winograd", "banded", "hybrid", "im2col", "shifted") if on_cpu else ("tiled", "grouped", "im2col", "shifted")
    convolutions: list[Move] = [{"conv": conv} for conv in lowerings] if convs else []
    tried: list[Move] = [{"compiler": "lean"}] if on_cpu else convolutions
    if not on_cpu and trains_clients:
        tried += [{"strategy": usual, "chunk_size": size} for size in chunk_sizes(of_device)]
        if convs:  # one client's convolutions are none with a kernel per client
            tried.append({"strategy": usual, "chunk_size": 1, "conv": "grouped"})
    if trains_clients and given.data == "device" and given.rounds_per_dispatch == 1:
        separate = {"strategy": "separate", "chunk_size": 1}
        no_loop = few_steps and "steps" not in fixed
        tried.append({**separate, "steps": "unrolled"} if no_loop else separate)
        if no_loop and convs and settings.server.pretrain <= 1:  # no loop is left around XLA's convolution
            tried.append({**separate, "steps": "unrolled", "conv": "grouped"})
    if few_steps:
        tried.append({"steps": "unrolled"})
    together = min(of_device, measurement.clients_a_device(settings))
    if trains_clients and on_cpu and together > 1:
        tried.append({"strategy": usual, "chunk_size": together} | ({"conv": "winograd"} if convs else {}))
    if on_cpu:
        tried += convolutions
    if given.batch_size == 0 and settings.model["norm"] != "batch":  # else the batch says what the statistics are
        tried += [
            {"forward_batch_size": size} for size in forward_sizes(settings) if size <= len(experiment.problem.data.test.labels)
        ]
    there = layout._asdict()
    return [move for move in tried if not any(name in fixed and there[name] != value for name, value in move.items())]


def chunk_sizes(of_device: int) -> list[int]:
    """The chunks that are tried of so many clients beside all at once: half of them, and less by fours."""
    half = -(-of_device // 2)
    fours = [4**power for power in range(half.bit_length()) if 4**power < half]
    return [size for size in (half, *reversed(fours)) if size < of_device]


class Contest:
    """The best layout so far, ready to run, and the moves that are tried against it.

    Args:
        experiment: a piece of which is run.
        layout: to begin with.

    Attributes:
        layout: the best.
        tried: as in `Found`, by the words.
    """

    def __init__(self, experiment: Experiment, layout: Layout) -> None:
        self._whole, (self._settings, self._data) = experiment, measurement.piece(experiment)
        self.layout = self._begun = layout
        self.tried: dict[str, float] = {}  # and not what was timed, which holds memory
        self._best: Timed | None = None
        self._ran: Execution | None = None  # the best rounds, in chunks that had room

    def found(self, left_out: list[Move]) -> Found:
        """What it has come to."""
        return Found(self.layout.shrunk(self._ran) if self._ran else self.layout, list(self.tried.items()), left_out)

    def best(self, evaluates: bool) -> Timed | None:
        """The best, made anew where need be; None where that fails."""
        if self._best is None or self._best.evaluates != evaluates:
            self._best = None  # its memory is free
            self._best = self._timed(self.layout, evaluates)
            if self._best is not None and not evaluates:
                self._ran = self._best.piece.simulator.execution
        return self._best

    def attempt(self, move: Move, stop: Callable[[], bool]) -> bool:
        """Takes a move if it is faster; False where that is for the next time, as it was stopped or has nothing to beat."""
        evaluates, layout = _evaluates(move), self.layout._replace(**move)
        best = self.best(evaluates)
        if best is None:
            return describe(self.layout, evaluates) not in self.tried  # what has run before may do so again
        if layout == self.layout or (layout.steps == "unrolled" != self.layout.steps and _takes_long(self._whole, best)):
            return True
        other = self._timed(layout, evaluates)
        if other is None or other.seconds > FAR * best.seconds:
            return True
        gain = _gain(best, other, describe(layout, evaluates), stop, least_turns=1)
        if stop():  # before they were compared enough
            return False
        if gain is None:
            taken, self._best = best.seconds > GAIN_ALONE * other.seconds, None  # whatever failed, its state may be gone
        else:
            self.tried[describe(layout, evaluates)] = self.tried[describe(self.layout, evaluates)] / gain
            taken = gain > GAIN
            self._best = other if taken else best
        if taken:
            self.layout, self._ran = layout, self._ran if evaluates else other.piece.simulator.execution
        return True

    def confirm(self, evaluates: bool, stop: Callable[[], bool]) -> None:
        """Goes back to the rounds, or the evaluation, that it began with, where the best are no faster when compared once more.

        Both are made anew. Where they cannot be compared, as there is no room for both, the best stay: that was measured once.
        What was the best in between does not come back.
        """
        rounds, evaluation = (self.layout, self._begun) if evaluates else (self._begun, self.layout)
        begun = rounds._replace(forward_batch_size=evaluation.forward_batch_size)
        if begun == self.layout or stop():
            return
        self._best = None  # its memory is free
        usual = self._timed(begun, evaluates)
        best = None if usual is None or stop() else self._timed(self.layout, evaluates)
        if usual is None or best is None:
            return
        words = describe(self.layout, evaluates)
        if not evaluates and best.piece.simulator.execution != self._ran:
            _log.info("  %s: other chunks than it was found with, not compared once more", words)
            return
        beside = f"{words}, once more, beside {describe(begun, evaluates)}"
        gain = _gain(usual, best, beside, stop, least_turns=measurement.LEAST_TURNS)
        if stop() or gain is None:
            return
        self.tried[words] = self.tried[describe(begun, evaluates)] / gain
        if gain <= GAIN:
            _log.info("  no faster once more: %s it is", describe(begun, evaluates))
            self.layout, self._ran = begun, self._ran if evaluates else usual.piece.simulator.execution

    def _timed(self, layout: Layout, evaluates: bool) -> Timed | None:
        """A layout, timed; None where that fails. The log says which."""
        words, settings = describe(layout, evaluates), self._settings
        memory.trim()  # what was dropped before
        spec = self._whole.problem.spec._replace(num_clients=settings.data.num_clients)
        try:
            made = assembled(layout.pinned(settings), self._whole.views, spec, self._data, given=settings)
            timed = Timed(made, evaluates=evaluates)
        except (ValueError, RuntimeError) as error:  # out of memory, or an option that this XLA does not know
            _log.info("  %s: %s", words, memory.reason(error))
            return None
        _log.info("  %s: %.4g s", words, timed.seconds)
        self.tried.setdefault(words, timed.seconds)
        return timed


def search(
    experiment: Experiment, layout: Layout, todo: list[Move], give_up: Callable[[], bool], least_run_s: float = 0.0
) -> Found:
    """Tries moves from a layout on.

    Args:
        experiment: whose work is measured.
        layout: to begin with.
        todo: the moves.
        give_up: asked between candidates.
        least_run_s: seconds that a run has to take for any to be tried.
    """
    if not todo or give_up():
        return Found(layout, [], todo)
    began, contest, run_s = time.perf_counter(), Contest(experiment, layout), 0.0
    first = contest.best(_evaluates(todo[0]))
    if first is None:
        _log.warning("a piece of this work does not run in the layout that it has: no other is tried")
        return Found(layout, [], [])
    if not first.evaluates:
        run_s = measurement.run_s(experiment, first.piece, first.seconds)
        if not first.works or run_s < least_run_s:
            return Found(layout, [], [])
    del first  # so that the contest can free its memory
    limit_s = min(max(SHARE * run_s, LEAST_LIMIT_S), MOST_LIMIT_S)
    for number, move in enumerate(todo):
        time_is_up = give_up() or time.perf_counter() - began > limit_s
        if time_is_up or not contest.attempt(move, give_up):
            _log.info("  %d more are not tried", len(todo) - number)
            todo = todo[number:]
            break
    else:
        todo = []
    for evaluates in (False, True):
        contest.confirm(evaluates, give_up)
    return contest.found(todo)


def _takes_long(experiment: Experiment, looped: Timed) -> bool:
    """Whether a program with its steps written out would compile for too long, so that others are not tried."""
    return experiment.most_steps * looped.piece.simulator.compile_s > LEAST_LIMIT_S


def _gain(one: Timed, other: Timed, words: str, stop: Callable[[], bool], *, least_turns: int) -> float | None:
    """How many times as fast as one another is; None where both together have no memory, or fail otherwise."""
    try:
        gain = one.times(other, stop, least_turns=least_turns)
    except (ValueError, RuntimeError) as error:
        _log.info("  %s: %s", words, memory.reason(error))
        return None
    _log.info("  %s: %.3g times as fast, in turns", words, gain)
    return gain


def _evaluates(move: Move) -> bool:
    """Whether a move changes how fast an evaluation is, and not a round."""
    return "forward_batch_size" in move


def describe(layout: Layout, evaluates: bool = False) -> str:
    """A layout in a few words."""
    if evaluates:
        return f"{layout.forward_batch_size} examples per forward pass"
    clients = f"{layout.strategy} {layout.chunk_size}" if layout.strategy in ("chunked", "sharded") else layout.strategy
    return f"{clients}, {layout.conv}, {layout.steps}, {layout.compiler}"

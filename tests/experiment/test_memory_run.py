"""Runs whose cohort does not fit into memory: which layout their folders note, how they go on, and how they fail."""

import json
import logging
import types
from logging.handlers import MemoryHandler

import jax
import pytest

from fedjax_ssl.experiment import layout, loop, many, many_loop, tuning
from fedjax_ssl.experiment.build import build
from fedjax_ssl.simulation import memory
from fedjax_ssl.simulation.many import Spread
from fedjax_ssl.simulation.round import RunState
from fedjax_ssl.simulation.simulator import Program
from launch import command, run
from tests import tiny

COHORT = 12


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """A machine with one device that is no CPU, as far as layouts are chosen."""
    devices = [types.SimpleNamespace(platform="gpu")]
    for module in (layout, many):
        monkeypatch.setattr(module, "available_devices", lambda _: devices)
    monkeypatch.setattr(many, "spread_of", lambda *_: Spread(None, True))


@pytest.fixture
def made(monkeypatch):
    """How many clients at a time the programs of rounds have that were compiled."""
    sizes, compiled = [], Program.compiled

    def noted(self, *args):
        if self._compiled is None and isinstance(args[0], RunState):
            sizes.append(self._execution.chunk_size)
        return compiled(self, *args)

    monkeypatch.setattr(Program, "compiled", noted)
    return sizes


def config(**overrides):
    small = {"data__num_clients": COHORT, "cohort_size": COHORT, "client__epochs": 0, "client__steps": 2, "server__epochs": 1}
    given = {"data__name": "digits", "execution__strategy": "auto", "rounds": 2}
    return tiny.config("fedavg", network="linear", **small | given | overrides)


def limited(monkeypatch, simulator, state, share, *names):
    """The device gets a share of what a round needs by the program's own account."""
    simulator.round(state, *names)
    needed = simulator.memory_bytes
    monkeypatch.setattr(memory, "device_bytes", lambda *_: int(share * needed))


def noted(folder):
    content = json.loads((folder / "layout.json").read_text())["layout"]
    return content["strategy"], content["chunk_size"]


def test_a_run_notes_how_many_clients_fit_and_goes_on_with_as_many(tmp_path, monkeypatch, made):
    first = build(config())
    assert (first.layout.strategy, first.layout.chunk_size) == ("vmap", 0)
    limited(monkeypatch, first.simulator, first.start()[0], 0.8)
    made.clear()

    def go(folder, stop_after=None):
        experiment = build(config())
        loop.open_workdir(folder, experiment.settings.to_dict(), overwrite=False)
        experiment = tuning.for_run(experiment, folder, lambda: False)
        began = experiment.layout
        loop.run(experiment, folder, loop.Stop(), stop_after=stop_after)
        return began

    assert go(tmp_path, stop_after=1).strategy == "vmap"
    strategy, chunk = noted(tmp_path)
    assert strategy == "chunked"
    assert 1 < chunk <= COHORT // 2
    assert made == [0, memory.FEW, *([chunk] if chunk != memory.FEW else [])]
    made.clear()
    assert (go(tmp_path).strategy, made) == ("chunked", [chunk])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["strategy"], summary["chunk_size"]) == ("chunked", chunk)


def test_several_runs_that_do_not_fit_side_by_side_note_it_and_go_on_so(tmp_path, monkeypatch, made):
    def go(folder, stop_after=None):
        experiment = many.build(config(seeds=3))
        for one in experiment.runs:
            loop.open_workdir(folder / one.name, one.settings.to_dict(), overwrite=False)
        many_loop.run(experiment, folder, loop.Stop(), stop_after=stop_after)

    first = many.build(config(seeds=3))
    limited(monkeypatch, first.simulator, first.start()[0], 0.8, "abc")
    made.clear()
    go(tmp_path, stop_after=1)
    assert made == [0, COHORT]
    assert [noted(tmp_path / name) for name in "012"] == [("chunked", COHORT)] * 3
    made.clear()
    go(tmp_path)
    assert made == [COHORT]
    assert json.loads((tmp_path / "1" / "summary.json").read_text())["chunk_size"] == COHORT


@pytest.mark.parametrize(
    "error",
    [memory.OutOfMemoryError("no memory for one client at a time"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: a\nb")],
)
def test_the_command_says_in_one_line_that_memory_is_short(tmp_path, monkeypatch, capsys, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(run, "STOP_AFTER", types.SimpleNamespace(value=None))
    monkeypatch.setattr(run, "_open", lambda: (None, tmp_path))
    monkeypatch.setattr(loop, "run", fail)
    monkeypatch.setattr(loop, "is_done", lambda _: True)
    for name in ("use_all_cores", "keep_programs"):
        monkeypatch.setattr(command, name, lambda: None)
    assert run._run(loop.Stop(), MemoryHandler(1, target=logging.NullHandler())) == 1
    said = "no memory for one client at a time"
    if not isinstance(error, memory.OutOfMemoryError):
        said = f"no memory (RESOURCE_EXHAUSTED: a): {memory.ADVICE}"
    assert capsys.readouterr().err == f"error: {said}\n"
    with monkeypatch.context() as changed:  # while data and programs are made
        changed.setattr(run, "_open", fail)
        assert run._run(loop.Stop(), MemoryHandler(1, target=logging.NullHandler())) == 1
        assert capsys.readouterr().err == f"error: {said}\n"
    monkeypatch.setattr(loop, "run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("else")))
    with pytest.raises(RuntimeError, match="else"):
        run._run(loop.Stop(), MemoryHandler(1, target=logging.NullHandler()))

"""A round that does not fit into memory is run in chunks that do, from the first round on, with the same results."""

import jax
import numpy as np
import pytest

from fedjax_ssl import host_memory
from fedjax_ssl.simulation import memory
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.program import Program
from fedjax_ssl.simulation.simulator import Simulator
from tests import toy

SHORT = "RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nat length"
EXPLAINED = f"no memory (RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.): {memory.ADVICE}"


@pytest.fixture
def tight(monkeypatch):
    """Rounds of more than two clients at a time fail when they run; the chunks of those that were tried."""
    tried, call = [], Program.__call__

    def run(self, *args):
        result = call(self, *args)  # the state that it was given is gone
        if self._execution.auto_chunk and self._jitted.__name__ == "rounds":
            tried.append(self._execution.chunk_size)
            if self._execution.chunk_size not in (1, 2):
                raise jax.errors.JaxRuntimeError(SHORT)
        return result

    monkeypatch.setattr(Program, "__call__", run)
    return tried


@pytest.mark.parametrize("on_host", [False, True])
def test_chunks_are_halved_until_they_fit_and_stay_so(tight, on_host, caplog):
    problem = toy.problem(on_host=on_host)
    _, expected, rows = toy.run(problem, Execution(0), 3)
    simulator, state, got = toy.run(problem, Execution(0, auto_chunk=True), 3)
    assert tight == [0, 3, 2, 2, 2]
    assert simulator.execution.chunk_size == 2
    assert "no memory (RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.): 3 clients at a time from now on" in caplog.text
    np.testing.assert_allclose(state.server["w"], expected.server["w"], rtol=1e-6)
    np.testing.assert_array_equal(state.clients, expected.clients)
    assert got == [pytest.approx(row) for row in rows]


def test_a_round_that_was_compiled_and_does_not_fit_is_not_run(monkeypatch):
    """Chunks are halved all the same, as without `compile`."""
    tried = []

    def check(needed, arguments, devices):
        tried.append(needed)
        if needed == tried[0]:
            raise memory.OutOfMemoryError("of all clients at once")

    monkeypatch.setattr(memory, "check", check)
    simulator = Simulator(toy.problem(), Execution(0, auto_chunk=True))
    with pytest.raises(memory.OutOfMemoryError):
        simulator.compile()
    simulator.round(simulator.initialize())
    assert simulator.execution.chunk_size == 3
    assert len(tried) == 3


def test_vmapped_runs_first_follow_one_another_and_then_chunks_shrink(tight):
    simulator = Simulator(toy.problem(seeds=(0, 1)), Execution(0, vmap_runs=True, auto_chunk=True))
    _, rows = simulator.dispatch(simulator.initialize(), ["a", "b"])
    assert tight == [0, 0, 3, 2]
    assert simulator.execution == Execution(2, auto_chunk=True)
    assert rows[0][1] == pytest.approx(toy.run(toy.problem(seeds=(1,)), Execution(), 1)[2][0])


def test_seconds_of_programs_that_did_not_fit_count_as_compiling(tight):
    simulator, _, _ = toy.run(toy.problem(), Execution(0, auto_chunk=True), 1)
    used = simulator._initialize.compile_s + simulator._round.compile_s
    assert simulator.compile_s > used > 0


@pytest.mark.parametrize(
    ("execution", "error", "said"),
    [
        (Execution(2), SHORT, EXPLAINED),
        (Execution(1, auto_chunk=True), SHORT, EXPLAINED),
        (Execution(0, auto_chunk=True), "INTERNAL: else", "INTERNAL: else"),
    ],
)
def test_chunks_that_were_asked_for_and_one_client_do_not_shrink_and_another_error_stays(monkeypatch, execution, error, said):
    def fail(self, *args):
        raise jax.errors.JaxRuntimeError(error)

    simulator = Simulator(toy.problem(), execution)
    state = simulator.initialize()
    monkeypatch.setattr(Program, "__call__", fail)
    with pytest.raises(memory.OutOfMemoryError if error == SHORT else jax.errors.JaxRuntimeError) as raised:
        simulator.round(state)
    assert str(raised.value) == said


def test_a_round_that_asks_for_more_than_is_free_is_not_begun(monkeypatch):
    simulator = Simulator(toy.problem(), Execution())
    state = simulator.initialize()
    monkeypatch.setattr(memory, "free_bytes", lambda: 1)
    ran = []
    monkeypatch.setattr(Program, "__call__", lambda *_: ran.append(1))
    with pytest.raises(memory.OutOfMemoryError, match=r"no memory \(a round needs .* GB of a device, and may have"):
        simulator.round(state)
    assert not ran


def test_what_a_cpu_may_have_is_a_share_of_the_free_memory_and_the_arguments(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    memory.check(needed=450 + 70, arguments=70, devices=2)
    with pytest.raises(memory.OutOfMemoryError):
        memory.check(needed=451 + 70, arguments=70, devices=2)
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)  # the system does not say
    memory.check(needed=10**15, arguments=0, devices=1)


def test_free_memory_is_the_machines_or_its_containers(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   5 kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    assert host_memory.free_bytes() == 5 * 1024
    (tmp_path / "memory.max").write_text("3000")
    (tmp_path / "memory.current").write_text("1000")
    assert host_memory.free_bytes() == 2000
    (tmp_path / "memory.max").write_text("max")
    assert host_memory.free_bytes() == 5 * 1024
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "none")
    assert host_memory.free_bytes() == 0

"""A cohort that does not fit into memory is run in chunks that do, from the first round on, with the same results."""

import ctypes
import os
import pathlib
import weakref

import jax
import numpy as np
import pytest

from fedjax_ssl.data.federated import TABLES
from fedjax_ssl.simulation import many as many_module
from fedjax_ssl.simulation import memory
from fedjax_ssl.simulation import simulator as simulator_module
from fedjax_ssl.simulation.client_store import HostSimulator
from fedjax_ssl.simulation.execution import Execution, client_mesh
from fedjax_ssl.simulation.many import ManyProblem, ManySimulator, Spread
from fedjax_ssl.simulation.round import RunState
from fedjax_ssl.simulation.separate import SeparateSimulator
from fedjax_ssl.simulation.simulator import Problem, Program, Simulator, copied
from tests import toy

SHORT = "RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nat length"


def three_rounds(kind, execution):
    simulator = kind(toy.problem(), execution, 4)
    state, _ = simulator.initialize(0)
    for _ in range(3):
        state, _ = simulator.round(state)
    return simulator, float(state.server["w"]), np.array(state.clients)


@pytest.fixture
def tight(monkeypatch):
    """Rounds of more than two clients at a time fail when they run; the chunks of those that were tried."""
    tried, call = [], Program.__call__

    def run(self, *args):
        result = call(self, *args)  # the state that it was given is gone
        if self._execution.shrinks and "round_" in str(self._jitted):
            tried.append(self._execution.chunk_size)
            if self._execution.chunk_size not in (1, 2):
                raise jax.errors.JaxRuntimeError(SHORT)
        return result

    monkeypatch.setattr(Program, "__call__", run)
    return tried


@pytest.mark.parametrize("kind", [Simulator, HostSimulator])
def test_chunks_are_halved_until_they_fit_and_stay_so(tight, kind, caplog):
    _, expected, taken = three_rounds(kind, Execution(0))
    simulator, w, clients = three_rounds(kind, Execution(0, shrinks=True))
    assert tight == [0, 3, 2, 2, 2]
    assert simulator.execution.chunk_size == 2
    assert "no memory for all clients at once (RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.): 3 clients" in caplog.text
    np.testing.assert_allclose(w, expected, rtol=1e-6)
    np.testing.assert_array_equal(clients, taken)


def test_each_device_has_chunks_of_its_own(tight):
    simulator, *_ = three_rounds(Simulator, Execution(0, client_mesh(2), shrinks=True))
    assert tight == [0, 2, 2, 2]  # of three clients on each
    assert simulator.execution.num_devices == 2


@pytest.mark.parametrize("cohort_size", [4, 5])
def test_devices_share_the_cohorts_states_on_the_host_too_whatever_the_first_round_found(cohort_size):
    def rounds(kind, shrinks):
        simulator = kind(toy.problem(cohort_size), Execution(0, client_mesh(2), shrinks=shrinks), 4)
        state, _ = simulator.initialize(0)
        for _ in range(3):
            state, _ = simulator.round(state)
        return float(state.server["w"]), np.asarray(state.clients).tolist()

    assert rounds(HostSimulator, True) == rounds(HostSimulator, False) == rounds(Simulator, True)


@pytest.fixture
def of_size(monkeypatch):
    """Rounds need 1,000 bytes and 100 for each client at a time; the chunks for which one was compiled, each in a second."""

    def patch(there, cohort_size):
        def compiled(self, *args):
            if self._compiled is None and isinstance(args[0], RunState):
                made.append(self._execution.chunk_size)
                self.compile_s += 1.0
            return compile_(self, *args)

        def needs(self):
            return 1000 + 100 * (self._execution.chunk_size or cohort_size)

        made, compile_ = [], Program.compiled
        monkeypatch.setattr(Program, "compiled", compiled)
        monkeypatch.setattr(Program, "memory_bytes", property(needs))
        monkeypatch.setattr(memory, "device_bytes", lambda *_: there)
        return made

    return patch


def test_of_a_thousand_clients_as_many_run_at_a_time_as_the_small_and_the_large_program_let_expect(of_size):
    made = of_size(there=4000, cohort_size=1000)
    federated = toy.data([1] * 1000)
    problem = Problem(toy.method(), federated, toy.problem().spec._replace(num_clients=1000), 1000)
    simulator = Simulator(problem, Execution(0, shrinks=True), 4)
    state, _ = simulator.initialize(0)
    before = simulator.compile_s
    for _ in range(2):
        state, _ = simulator.round(state)
    # 3,600 bytes, a tenth being spared, are enough for 26 clients: 39 turns, which 26 a turn fill.
    assert made == [0, 2, 26]
    assert simulator.execution.chunk_size == 26
    assert simulator.compile_s - before > 3.0  # what did not fit, too
    np.testing.assert_array_equal(state.clients, 2)
    pixels = 10 * (np.arange(1000) + 1) % 256
    assert float(state.server["w"]) == pytest.approx(2 * pixels.mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("there", "large", "chunk"),
    [
        (0, 101_000, 500),  # what the device has is not known
        (4000, 0, 500),  # what the program needs is not
        (4000, 1100, 500),  # it needs no more than the small one
        (90_000, 101_000, 500),  # 800 would fit: two turns of 500 take no longer
        (50_000, 101_000, 334),  # 440 would: three turns
        (1300, 101_000, 1),  # the small one fits, but for the tenth that is spared
        (1000, 101_000, 1),
    ],
)
def test_fewer_clients_are_as_many_as_fit_by_extrapolation_and_half_where_nothing_is_known(monkeypatch, there, large, chunk):
    monkeypatch.setattr(memory, "device_bytes", lambda *_: there)
    execution = Execution(0, shrinks=True)
    assert memory.shrunk(execution, lambda one: 1200 if one.chunk_size == 2 else large, 1000).chunk_size == chunk


def test_what_stays_and_what_is_one_already_does_not_shrink():
    assert memory.shrunk(Execution(0), lambda _: 0, 5) is None
    assert memory.shrunk(Execution(1, shrinks=True), lambda _: 0, 5) is None
    assert memory.shrunk(Execution(4, shrinks=True), lambda _: pytest.fail("compiled"), 5).chunk_size == 2


def test_a_program_that_cannot_be_compiled_is_not_compiled_again(monkeypatch):
    tried, compile_ = [], jax.stages.Lowered.compile

    def compiled(self, options):
        tried.append(1)
        if len(tried) < 3:  # the whole, and the small one that is to be its measure
            raise jax.errors.JaxRuntimeError(SHORT)
        return compile_(self, options)

    problem = Problem(toy.method(), toy.data([1] * 8), toy.problem().spec._replace(num_clients=8), 8)
    simulator = Simulator(problem, Execution(0, shrinks=True), 4)
    state, _ = simulator.initialize(0)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    simulator.round(state)
    assert simulator.execution.chunk_size == 2
    assert len(tried) == 3


def test_what_a_program_says_it_needs_is_enough_to_shrink(monkeypatch):
    expected = three_rounds(Simulator, Execution(0))[1]
    monkeypatch.setattr(Program, "memory_bytes", property(lambda self: 100 * (self._execution.chunk_size or 5)))
    monkeypatch.setattr(memory, "device_bytes", lambda *_: 250)
    simulator, w, _ = three_rounds(Simulator, Execution(0, shrinks=True))
    assert simulator.execution.chunk_size == 2
    np.testing.assert_allclose(w, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", [Simulator, HostSimulator])
def test_devices_that_a_run_leaves_idle_do_not_share_a_machines_memory(monkeypatch, kind):
    asked = []
    monkeypatch.setattr(memory, "device_bytes", lambda sharing=0, held=0: asked.append(sharing) or 10**9)
    three_rounds(kind, Execution(0, shrinks=True))
    three_rounds(kind, Execution(0, client_mesh(2), shrinks=True))
    assert asked == [1, 2]


def test_one_client_too_many_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda *_: 10)
    with pytest.raises(memory.OutOfMemoryError, match=r"no memory for one client at a time \(needs .*lower client.batch_size"):
        three_rounds(Simulator, Execution(0, shrinks=True))


@pytest.mark.parametrize(
    ("there", "shrinks", "made", "at_once"),
    [
        (9e9, True, [0], 0),  # side by side
        (1500, False, [0, 5], 5),  # one after another, each with its clients all at once
        (1499, True, [0, 5, 2, 3], 3),
    ],
)
def test_runs_that_do_not_fit_side_by_side_follow_one_another_with_the_same_results(of_size, there, shrinks, made, at_once):
    single, seeds = toy.problem(), (0, 1, 2)
    tables = {name: getattr(single.data, name) for name in TABLES}
    method, data, spec, size = single
    several = ManyProblem(lambda _: method, data.train, data.test, [tables] * 3, seeds, None, spec, size)
    alone = []
    for seed in seeds:
        simulator = Simulator(single, Execution(0), 4)
        state, _ = simulator.round(simulator.initialize(seed)[0])
        alone.append((state, simulator.evaluate(state)))
    tried = of_size(there, cohort_size=15)
    many = ManySimulator(several, Spread(None, True), Execution(0, shrinks=shrinks), 4)
    state, rows = many.round(many.initialize()[0], "abc")
    assert tried == made
    assert many.execution.chunk_size == at_once
    accuracies = many.evaluate(state)
    for number, (own, accuracy) in enumerate(alone):
        np.testing.assert_allclose(state.server["w"][number], own.server["w"], rtol=1e-6)
        np.testing.assert_array_equal(state.clients[number], own.clients)
        assert accuracies[number] == pytest.approx(accuracy)
        assert rows[number]["client/loss"] > 0
    many.round(state, "abc")
    assert tried == made  # and they stay so


def test_runs_that_are_vmapped_are_prepared_one_after_another(monkeypatch):
    method, data, spec, size = toy.problem()
    tables, vmapped, over_runs = {name: getattr(data, name) for name in TABLES}, [], many_module.over_runs

    def noted(function, inputs, shared, spread):
        vmapped.append(spread.vmapped)
        return over_runs(function, inputs, shared, spread)

    monkeypatch.setattr(many_module, "over_runs", noted)
    several = ManyProblem(lambda _: method, data.train, data.test, [tables] * 2, (0, 1), None, spec, size)
    many = ManySimulator(several, Spread(None, True), Execution(0), 4)
    many.round(many.initialize()[0], "ab")
    assert vmapped == [False, True]


def test_runs_that_do_not_fit_one_after_another_in_given_chunks_are_one_clear_line(of_size):
    of_size(there=10, cohort_size=5)
    method, data, spec, size = toy.problem()
    tables = {name: getattr(data, name) for name in TABLES}
    several = ManyProblem(lambda _: method, data.train, data.test, [tables] * 2, (0, 1), None, spec, size)
    many = ManySimulator(several, Spread(None, True), Execution(0), 4)
    with pytest.raises(memory.OutOfMemoryError, match=r"no memory for 5 clients at a time .*lower client.batch_size, "):
        many.round(many.initialize()[0], "ab")


@pytest.mark.parametrize(("kind", "programs"), [(Simulator, 1), (HostSimulator, 1), (SeparateSimulator, 3)])
def test_a_round_that_stays_as_it_is_and_does_not_fit_into_a_machines_memory_is_not_begun(monkeypatch, kind, programs):
    asked = []

    def device_bytes(sharing=0, held=0):
        asked.append(sharing)
        return 10**9 if len(asked) <= programs else 10

    monkeypatch.setattr(memory, "device_bytes", device_bytes)
    three_rounds(kind, Execution(1, client_mesh(2)))
    assert asked == [2] * programs  # the two devices that it has share the memory
    simulator = kind(toy.problem(), Execution(1), 4)
    for _ in range(2):  # it is not begun the second time either, when it is compiled already
        with pytest.raises(
            memory.OutOfMemoryError,
            match=r"no memory \(needs .* of a device, and may have .* of it\): lower client.batch_size, ",
        ):
            simulator.round(simulator.initialize(0)[0])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # which says so itself
    assert three_rounds(kind, Execution(0))[0].execution.chunk_size == 0


def test_what_separate_programs_hand_over_does_not_grow_with_all_clients_data():
    def handed_over(clients):
        spec = toy.problem().spec._replace(num_clients=clients)
        simulator = SeparateSimulator(Problem(toy.method(), toy.data([1] * clients), spec, 5), Execution(1), 4)
        opened = simulator._open.eval_shape(simulator.initialize(0)[0], simulator._data)
        return sum(x.size for x in jax.tree.leaves(opened))

    assert handed_over(700) == handed_over(7) > 0


def test_other_errors_are_left_alone():
    def fail(_):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        memory.in_chunks_that_fit(fail, lambda _: 0, [Execution(0, shrinks=True)], 5)


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A folder that stands for /proc and /sys/fs/cgroup."""
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    return tmp_path


@pytest.mark.parametrize(
    ("groups", "limit", "usage"),
    [
        ("0::/job/step\n", "groups/job/memory.max", "groups/job/memory.current"),
        ("0::/\n", "groups/memory.max", "groups/memory.current"),
        ("2:cpu:/else\n1:memory:/job\n", "groups/memory/job/memory.limit_in_bytes", "groups/memory/job/memory.usage_in_bytes"),
    ],
)
def test_a_container_has_what_it_may_take_and_does_not_hold_yet(system, groups, limit, usage):
    of_machine, (limit, usage) = memory.device_bytes(1), (system / limit, system / usage)
    (system / "cgroup").write_text(groups)
    limit.parent.mkdir(parents=True)
    usage.write_text("3000\n")
    stat = limit.parent / "memory.stat"
    whole, own = ("", "own_") if limit.name == "memory.max" else ("total_", "")
    stat.write_text(f"{own}inactive_file 1\n{own}active_file 1\n{whole}inactive_file 130\n{whole}active_file 70\n")
    limit.write_text("max\n")
    assert memory.device_bytes(1) == of_machine
    limit.write_text("4096\n")
    free = 4096 - 3000 + 200
    assert memory.device_bytes(1) == int(0.9 * free)
    assert memory.device_bytes(2, held=100) == int(0.9 * free) // 2 + 100
    assert memory.total_bytes() == 4096
    assert memory.device_bytes(2, held=9999) == 4096 // 2
    usage.write_text("9000\n")
    assert memory.device_bytes(1) == 1  # and not 0, which is unknown
    stat.unlink()
    assert memory.device_bytes(1) == int(0.9 * 4096)
    limit.write_text(str(2**62))  # what the first version says where there is none
    assert memory.device_bytes(1) == of_machine


def test_a_cpu_devices_share_is_of_what_is_free_of_the_machines_memory(system):
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.device_bytes(1) == int(0.9 * whole)  # it does not say how much is free
    (system / "meminfo").write_text("MemTotal:       99 kB\nMemAvailable:       8 kB\nSwapFree: 1 kB\n")
    free = int(0.9 * 8192)
    assert memory.device_bytes(2) == free // 2
    assert memory.total_bytes() == whole
    assert memory.device_bytes(2, held=100) == free // 2 + 100  # which the arguments have of it already
    assert memory.device_bytes(2, held=2**50) == whole // 2
    assert memory.device_bytes() == free // jax.local_device_count()


def test_what_an_accelerator_has_that_does_not_say_so_is_unknown(system, monkeypatch):
    monkeypatch.setattr(memory, "_is_cpu", lambda: False)
    assert memory.total_bytes() == memory.device_bytes() == 0


@pytest.mark.parametrize("kind", [Simulator, HostSimulator, SeparateSimulator])
def test_a_simulator_that_is_dropped_is_gone_at_once(uncollected, kind):
    simulator, *_ = three_rounds(kind, Execution(1, client_mesh(2)) if kind is SeparateSimulator else Execution(0))
    there = weakref.ref(simulator)
    del simulator
    assert there() is None


def test_a_simulator_of_several_runs_that_is_dropped_is_gone_at_once(uncollected):
    method, data, spec, size = toy.problem()
    tables = {name: getattr(data, name) for name in TABLES}
    several = ManyProblem(lambda _: method, data.train, data.test, [tables] * 2, (0, 1), None, spec, size)
    many = ManySimulator(several, Spread(None, True), Execution(0), 4)
    many.round(many.initialize()[0], "ab")
    there = weakref.ref(many)
    del many
    assert there() is None


def test_an_error_without_words_has_its_name():
    assert memory.reason(RuntimeError()) == "RuntimeError"


def test_what_is_in_a_cycle_is_freed_before_memory_is_given_back(uncollected, monkeypatch):
    class Held:
        pass

    held = Held()
    held.itself, there, seen = held, weakref.ref(held), []
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: seen.append(there()))
    del held
    memory.trim()
    assert seen == [None]


def test_to_find_out_what_fits_no_second_state_is_placed(of_size, monkeypatch):
    of_size(there=4000, cohort_size=1000)
    placed, compiled = [], Program.compiled

    def noted(self, *args):
        if isinstance(args[0], RunState):
            placed.append((self._execution.chunk_size, isinstance(args[0].round, jax.Array)))
        return compiled(self, *args)

    monkeypatch.setattr(Program, "compiled", noted)
    problem = Problem(toy.method(), toy.data([1] * 1000), toy.problem().spec._replace(num_clients=1000), 1000)
    simulator = Simulator(problem, Execution(0, shrinks=True), 4)
    simulator.round(simulator.initialize(0)[0])
    assert dict(placed[:2]) == {0: True, 2: False}


@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("kind", [Simulator, HostSimulator])
def test_a_copied_state_stays_and_can_be_gone_on_from(kind, shrinks):
    simulator = kind(toy.problem(), Execution(0, shrinks=shrinks), 4)
    state, _ = simulator.round(simulator.initialize(0)[0])
    kept = copied(state)
    before = kept.clients.tolist()
    after, _ = simulator.round(state)
    expected = float(after.server["w"]), np.asarray(after.clients).tolist()
    assert kept.clients.tolist() == before
    for later in (simulator, kind(toy.problem(), Execution(0, shrinks=shrinks), 4)):  # the same one, or one that begins
        again, _ = later.round(copied(kept))
        assert (float(again.server["w"]), np.asarray(again.clients).tolist()) == expected


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}), reason="needs glibc")
def test_memory_that_was_freed_among_what_is_in_use_is_given_back():
    def resident():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    libc, size, number = ctypes.CDLL(None), 64 << 10, 4_000
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    pieces = [libc.malloc(size) for _ in range(number)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces[:-1]:
        libc.free(piece)
    kept = resident()
    memory.trim()
    assert kept - resident() > 0.9 * number * size
    libc.free(pieces[-1])


@pytest.mark.parametrize("error", [None, OSError, TypeError])  # no such function, or no such library: musl, macOS, Windows
def test_where_the_c_library_cannot_be_asked_it_keeps_what_it_has(monkeypatch, error):
    asked = []

    def library(name):
        asked.append(name)
        if error is not None:
            raise error
        return object()

    monkeypatch.setattr(memory.ctypes, "CDLL", library)
    memory.trim()
    assert asked == [None]


@pytest.fixture
def given_back(monkeypatch):
    """When memory was given back, on a clock by which compiling takes 3 s and giving back 1 s."""
    now, given = [0.0], []

    def trim():
        given.append(now[0])
        now[0] += 1.0

    def compile_(lowered, options):
        now[0] += 3.0
        return compile_with_known(lowered, options)

    compile_with_known = simulator_module.compile_with_known
    monkeypatch.setattr(simulator_module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(simulator_module, "compile_with_known", compile_)
    monkeypatch.setattr(memory, "trim", trim)
    return given


def test_what_compiling_took_is_given_back_once_and_that_is_no_rounds_time(given_back):
    program = Program(lambda x: x + 1, Execution())
    assert [int(program(jax.numpy.int32(x))) for x in (1, 2)] == [2, 3]
    assert given_back == [3.0]
    assert program.compile_s == 4.0


def test_what_compiling_took_in_vain_is_given_back_too(given_back, monkeypatch):
    def fails(lowered, options):
        compiles(lowered, options)
        raise jax.errors.JaxRuntimeError(SHORT)

    compiles = simulator_module.compile_with_known
    monkeypatch.setattr(simulator_module, "compile_with_known", fails)
    program = Program(lambda x: x + 1, Execution())
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        program(jax.numpy.int32(1))
    assert given_back == [3.0]


def test_a_small_program_leaves_nothing_that_is_worth_giving_back(given_back, monkeypatch):
    monkeypatch.setattr(simulator_module, "LARGE_S", 3.0)
    assert int(Program(lambda x: x + 1, Execution())(jax.numpy.int32(1))) == 2
    assert given_back == []

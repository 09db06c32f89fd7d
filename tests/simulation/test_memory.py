"""A cohort that does not fit into memory is run in halved chunks, from the first round on, with the same results."""

import logging

import jax
import numpy as np
import pytest

from fedjax_ssl.simulation import memory
from fedjax_ssl.simulation.client_store import HostSimulator
from fedjax_ssl.simulation.execution import Execution, client_mesh
from fedjax_ssl.simulation.simulator import Program, Simulator
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
    assert (
        "5 clients at a time do not fit into memory (RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.): 3" in caplog.text
    )
    np.testing.assert_allclose(w, expected, rtol=1e-6)
    np.testing.assert_array_equal(clients, taken)


def test_each_device_has_chunks_of_its_own(tight):
    simulator, *_ = three_rounds(Simulator, Execution(0, client_mesh(2), shrinks=True))
    assert tight == [0, 2, 2, 2]  # of three clients on each
    assert simulator.execution.num_devices == 2


def test_what_a_program_says_it_needs_is_enough_to_shrink(monkeypatch):
    monkeypatch.setattr(Program, "memory_bytes", property(lambda self: 100 * (self._execution.chunk_size or 5)))
    monkeypatch.setattr(memory, "device_bytes", lambda: 250)
    simulator, w, _ = three_rounds(Simulator, Execution(0, shrinks=True))
    assert simulator.execution.chunk_size == 2
    np.testing.assert_allclose(w, three_rounds(Simulator, Execution(0))[1], rtol=1e-6)


def test_one_client_too_many_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda: 10)
    with pytest.raises(
        memory.OutOfMemoryError, match=r"one client at a time does not fit into memory .*lower client.batch_size"
    ):
        three_rounds(Simulator, Execution(0, shrinks=True))


def test_other_errors_and_other_executions_are_left_alone(monkeypatch):
    def fail(_):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        memory.in_chunks_that_fit(fail, Execution(0, shrinks=True), 5)
    monkeypatch.setattr(memory, "device_bytes", lambda: 10)
    assert three_rounds(Simulator, Execution(0))[0].execution.chunk_size == 0


def test_a_cpu_devices_share_is_that_of_the_hosts_memory(caplog):
    with caplog.at_level(logging.WARNING):
        assert 2**28 < memory.device_bytes() < 2**45

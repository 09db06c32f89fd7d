"""What a round must not spend: dispatches, waiting for the host, compiling again, steps that clients do not have."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local.task import Task
from fedjax_ssl.method import DataSpec
from fedjax_ssl.simulation.cohort import sample
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.program import Program
from fedjax_ssl.simulation.simulator import Simulator
from tests import engine, tiny, toy
from tests.jaxprs import equations


@pytest.fixture
def called(monkeypatch):
    """The programs that were called, by name. These alone may compute where `jax.no_execution` forbids it."""
    names, call = [], Program.__call__

    def noted(self, *args):
        names.append(self._jitted.__name__)
        with jax.no_execution(False):
            return call(self, *args)

    monkeypatch.setattr(Program, "__call__", noted)
    return names


@pytest.mark.parametrize(
    ("execution", "programs"),
    [
        pytest.param({"strategy": "scan"}, ["rounds"] * 3, marks=pytest.mark.slow),
        ({"strategy": "sharded", "devices": 2}, ["rounds"] * 3),
        pytest.param({"strategy": "scan", "rounds_per_dispatch": 3}, ["rounds"], marks=pytest.mark.ci),
        pytest.param({"strategy": "scan", "data": "host"}, ["rounds"] * 3, marks=pytest.mark.slow),
    ],
    ids=["scan", "sharded", "three rounds at once", "data on the host"],
)
def test_between_evaluations_a_round_is_one_dispatch_and_nothing_is_compiled_again(called, execution, programs):
    overrides = {f"execution__{key}": value for key, value in execution.items()}
    experiment = tiny.experiment("fedavg", rounds=9, eval_every=3, checkpoint_every=9, **overrides)
    rounds = experiment.rounds()
    for _ in range(3):  # all programs are compiled by then
        next(rounds)
    called.clear()
    with jax.no_execution(True), jax.no_tracing(True), jax.transfer_guard("disallow"):
        assert [row["round"] for _, row in rounds] == [4, 5, 6, 7, 8, 9]
    assert called == [*programs, "evaluation"] * 2


@pytest.mark.parametrize(
    "case", tiny.params(fast=(("fl2", "server"), ("fedmatch", "clients"), ("freematch_central", "server")))
)
def test_a_round_calls_nothing_on_the_host(case):
    method, labels_at = case
    simulator = Simulator(tiny.experiment(method, labels_at=labels_at).problem, Execution(chunk_size=2))
    program = jax.make_jaxpr(simulator._round._jitted)(simulator.template(), simulator._inputs, simulator._pools)
    assert not program.effects  # nothing is printed, logged or waited for
    names = {eqn.primitive.name for eqn in equations(program.jaxpr)}
    assert "dot_general" in names
    assert "pure_callback" not in names


COUNTS = np.array([1, 12, 2, 9, 3, 14, 4, 7], np.int32)
"""Examples of eight clients."""


@pytest.fixture
def steps_run(monkeypatch):
    """How many local steps the device computes in a round of clients that have COUNTS examples, by an execution."""
    ran, train_logits = [], Task.train_logits

    def noted(self, *args):
        jax.debug.callback(lambda: ran.append(1))
        return train_logits(self, *args)

    monkeypatch.setattr(Task, "train_logits", noted)

    def of(execution, **overrides):
        options = {"labels_at": "clients", "client__batch_size": 2, "client__epochs": 1} | overrides
        problem = tiny.experiment("fedavg", **options).problem
        (tables,) = problem.tables
        assert tables["labeled"].index.shape[1] >= COUNTS.max()
        counts = {"labeled": COUNTS, "unlabeled": 0 * COUNTS}
        tables = {**tables, **{name: tables[name]._replace(count=count) for name, count in counts.items()}}
        simulator = Simulator(problem._replace(tables=(tables,)), execution)
        simulator.round(simulator.initialize())
        jax.effects_barrier()
        return len(ran)

    return of


def own_steps():
    """Of the first cohort's clients, in its order."""
    ids = sample(jax.random.key(0), jnp.int32(0), DataSpec((1,), 2, len(COUNTS), 5), 1).ids
    return -(-COUNTS[ids] // 2)


def test_one_after_another_clients_run_the_steps_that_they_have(steps_run):
    assert steps_run(toy.EXECUTIONS["scan"]) == own_steps().sum()


def test_clients_of_a_chunk_have_about_as_much_to_do(steps_run):
    own, longest_first = own_steps(), np.sort(own_steps())[::-1]
    # A chunk takes as long as its longest client; the third has one client and padding.
    as_they_come, by_work = own[0:2].max() + own[2:4].max() + own[4], longest_first[[0, 2, 4]].sum()
    assert by_work < as_they_come
    assert steps_run(toy.EXECUTIONS["chunked"]) == by_work


@pytest.mark.slow
def test_a_second_launch_takes_every_program_from_the_cache(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    config = "--config=configs/digits.py:fixmatch"
    small = ["--config.rounds=2", "--config.cohort_size=2", "--config.client.epochs=1", "--config.server.training.epochs=1"]

    def programs_after(launch):
        engine.run_python("-m", "launch.run", config, *small, f"--workdir={tmp_path / launch}", environment=environment)
        return {path.name for path in (tmp_path / "fedjax_ssl").glob("*-cache")}

    first = programs_after("first")
    assert {"jit_initialize", "jit_rounds", "jit_evaluation"} <= {name.split("-")[0] for name in first}
    assert programs_after("second") == first

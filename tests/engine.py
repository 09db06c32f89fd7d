"""How tests run a method's experiment: under a strategy, with another method in place of its own, for some rounds."""

import pathlib
import subprocess
import sys

import jax
import numpy as np

from fedjax_ssl.simulation.simulator import Simulator
from tests import toy


def simulate(experiment, strategy="chunked", *, changed=None, rounds=1, start=None, evaluated=True, **where):
    """(the simulator, copies of the states after 0, 1, ... rounds, the rows of metrics, by default evaluated).

    strategy: a key of `toy.EXECUTIONS`; changed: (the method) -> the method that runs in its place; start: the first state;
    where: on_host, on_disk.
    """
    problem = experiment.problem._replace(**where)
    if changed is not None:
        method = changed(problem.method(None))
        problem = problem._replace(method=lambda number: method)
    simulator = Simulator(problem, toy.EXECUTIONS[strategy])
    state = simulator.initialize() if start is None else jax.device_put(start, simulator._where.state)
    states, rows = [copied(state)], []
    for _ in range(rounds):
        state, row = simulator.round(state)
        rows.append(row | (simulator.evaluate(state)[0] if evaluated else {}))
        states.append(copied(state))
    return simulator, states, rows


def assert_goes_on(simulator, states, rows, start):
    """From the state after `start` rounds the others, of evaluated rows, come again bit for bit."""
    state = copied(states[start])
    for row in rows[start:]:
        state, got = simulator.round(state)
        assert got | simulator.evaluate(state)[0] == row
    assert same_bits(state, states[-1])


def with_outputs(method, change):
    """The method whose clients return `change` of what they return."""
    return method._replace(client_update=lambda *args: change(method.client_update(*args)))


def copied(state):
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else jax.numpy.copy(x), state)


def on_host(state):
    """A state's arrays on the host, its key as numbers."""
    return jax.device_get(state._replace(key=jax.random.key_data(state.key)))


def same_bits(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, on_host(a), on_host(b)))


def distance(a, b) -> float:
    """Relative Euclidean distance over all numbers of two trees; 0 of two empty ones."""
    flat = [[np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)] for tree in (a, b)]
    if not flat[0]:
        return 0.0
    a, b = map(np.concatenate, flat)
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def run_python(*words, environment=None) -> str:
    """What a Python prints that is run with these words in the repository's root, and has to succeed."""
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run([sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def changes(experiment, factors, rounds):
    """How much the evaluated outputs change over some rounds, for each factor that clients' updates are multiplied by."""
    problem = experiment.problem

    def method_of(factor):
        def scaled(output):
            return output._replace(update=jax.tree.map(lambda x: (x * factor).astype(x.dtype), output.update))

        return with_outputs(problem.method(None), scaled)

    several = problem._replace(
        method=method_of, seeds=problem.seeds * len(factors), tables=problem.tables * len(factors), numbers=factors
    )
    simulator = Simulator(several, toy.EXECUTIONS["scan"])
    state = simulator.initialize()
    before = [copied(one) for one in simulator.split(state)]
    for _ in range(rounds):
        state, _ = simulator.dispatch(state, [None] * len(factors))
    predict = next(iter(experiment.method.predict.values()))
    images = problem.data.test.images[:50]

    def outputs(one):
        return predict(one.server, images, np.ones(len(images), bool))

    return [distance(outputs(a), outputs(b)) for a, b in zip(before, simulator.split(state), strict=True)]

"""What one client makes of its unlabeled examples: its pseudo-labels, which of them it accepts, and the true labels."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32

from fedjax_ssl.method import Cohort
from fedjax_ssl.metrics import PerClient
from fedjax_ssl.simulation import rng
from fedjax_ssl.simulation.program import Program
from fedjax_ssl.simulation.round import ClientInputs, RoundData, RunState, run_client
from fedjax_ssl.simulation.source import Problem, capacity, gather_images


class Inspection(NamedTuple):
    """A client's n unlabeled examples in a round.

    `ids` are their positions in the training pool, `experiment.problem.train`. A pseudo-label is -1 where there is none yet;
    a confidence is NaN where the method does not keep it. If the method makes no pseudo-labels, or makes them anew in each
    step, `accepted` is None, and labels and confidences are those of the global model on plain views.
    """

    ids: Int32[np.ndarray, " n"]
    pseudo_label: Int32[np.ndarray, " n"]
    confidence: Float32[np.ndarray, " n"]
    accepted: Bool[np.ndarray, " n"] | None
    true_label: Int32[np.ndarray, " n"]


def examples_program(problem: Problem, execution: Any) -> Program:
    """What the method says of a client's examples, `example/...`, at the start of the next round; its training is not run.

    Its arguments are those of `of_one`.
    """

    def examples(state: RunState, ids: jax.Array, data: RoundData) -> dict[str, jax.Array]:
        method, cohort = problem.first_method, Cohort(ids, state.round, problem.rounds)
        shared, per_client = method.broadcast(state.server, state.clients, cohort)
        key = rng.client_keys(state.key, state.round, ids)
        of_client = jax.tree.map(lambda x: x[0 if problem.on_host else ids[0]], state.clients)
        per_client, rows, key = jax.tree.map(lambda x: x[0], (per_client, data.clients, key))
        output = run_client(method, (shared, data.images), ClientInputs(per_client, of_client, rows, key))
        named = {name: metric for name, metric in output.metrics.items() if name.startswith("example/")}
        return {name.partition("/")[2]: metric.value for name, metric in named.items() if isinstance(metric, PerClient)}

    return Program(examples, execution)


def of_one(problem: Problem, state: RunState, client: int) -> tuple[RunState, Int32[np.ndarray, " M"], RoundData]:
    """The state, a cohort that begins with a client, and that client's data alone.

    Where client states are on the host the state has only that client's; else it has all, as they are on the device anyway.
    """
    data = problem.data
    number = len(data.unlabeled.count)
    if not isinstance(client, int | np.integer) or not 0 <= client < number:
        raise ValueError(f"client: got {client!r}, accepted: a number from 0 to {number - 1}")
    ids = ((int(client) + np.arange(problem.spec.cohort_size)) % number).astype(np.int32)
    one = Cohort(ids[:1], np.asarray(state.round), problem.rounds)
    of_client = gather_images(data, one, one, capacity(data, 1, reads_next=False), reads_next=False)
    if problem.on_host:
        state = state._replace(clients=jax.tree.map(lambda x: x[ids[:1]], state.clients))
    return state, ids, of_client


def inspection(problem: Problem, client: int, found: dict[str, np.ndarray]) -> Inspection:
    """An Inspection from what the method says of the client's rows."""
    table = problem.data.unlabeled
    count = int(table.count[client])
    index = np.asarray(table.index[client])[:count]
    label = np.asarray(found["pseudo_label"])[:count].astype(np.int32)
    nothing = np.full(count, np.nan, np.float32)
    confidence = np.asarray(found["confidence"], np.float32)[:count] if "confidence" in found else nothing
    accepted = np.asarray(found["accepted"])[:count] if "accepted" in found else None
    return Inspection(index, label, confidence, accepted, np.asarray(problem.train.labels)[index])

"""How good models are for each client: the global one, what the client makes of it, and what the client's state holds."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.federated import Table
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.local.task import evaluated_weights
from fedjax_ssl.method import Cohort, Method, exchanged
from fedjax_ssl.simulation.asynchronous import inner
from fedjax_ssl.simulation.round import ClientInputs, Round, RoundData, RunState, run_client
from fedjax_ssl.simulation.simulator import check_alive
from fedjax_ssl.simulation.source import capacity, gather_images
from fedjax_ssl.wrappers.compression import Compressed

ALONE = {
    "client.steps": 0, "client.unlabeled_epochs": 0, "client.unlabeled_wait": 0, "client.compression": "none",
    "client.optimizer.schedule": "constant", "client.optimizer.warmup_rounds": 0.0, "system.faulty": 0.0, "privacy.clip": 0.0,
}  # fmt: skip
"""What a client that trains for itself alone does not do."""
CHUNK = 32  # clients of one call of the program, which bounds its memory


class Personalized(NamedTuple):
    """Accuracies on the clients' own test examples, NaN for a client without any."""

    before: Float64[np.ndarray, " K"]  # of the global model
    after: Float64[np.ndarray, " K"]  # of each client's own model


def personalized(experiment: Experiment, state: RunState, epochs: int) -> Personalized:
    """Each client trains the global model for some epochs, as its method's clients do, and is then tested on its own examples.

    With labels at the clients it trains on these as well, otherwise by its method's loss on unlabeled examples. Its batch norm
    keeps the global statistics, and its learning rate is the one before any schedule, which may end at 0. No client is faulty,
    and nothing is compressed or clipped, as nothing is sent. The draws depend on the seed, the round and the client alone.
    ValueError without test examples of clients, or for a method whose clients do not send the network that it evaluates.
    """
    settings, table = experiment.settings, experiment.problem.data.client_test
    if table is None:
        raise ValueError(
            "personalize: got a run without data.client_test_fraction, accepted: with one, such as 0.2, or data.client_test=own"
        )
    if not experiment.method.requires.clients:
        raise ValueError(f"personalize: got method.name={settings.method.name}, which has no clients, accepted: with clients")
    method = experiment.changed({"client.epochs": epochs, **ALONE}, experiment.problem.first_number)
    if isinstance(state.clients, Compressed):
        state = state._replace(clients=state.clients.own)
    program = jax.jit(partial(_right, method, one_by_one=experiment.layout.chunk_size == 1))
    found = [jax.device_get(program(*arguments)) for arguments in _chunks(experiment, state, table)]
    return Personalized(*_shares(found, table))


def of_states(experiment: Experiment, state: RunState) -> dict[str, Float64[np.ndarray, " K"]]:
    """Accuracies on the clients' own test examples of each model that the method's clients keep (`Method.predict_client`).

    NaN for a client without test examples, or without such a model yet, whose logits are NaN.
    """
    table, names = experiment.problem.data.client_test, experiment.method.predict_client
    if table is None or not names:
        return {}

    def right(state: RunState, _: PyTree, __: Cohort, ___: RoundData, tests: tuple) -> jax.Array:
        def of_client(both: tuple[PyTree, tuple]) -> jax.Array:
            own, (images, labels, count) = both
            mask = jnp.arange(len(labels)) < count
            logits = [predict(state.server, own, images, mask) for predict in names.values()]
            right = [jnp.sum(mask & (one.argmax(-1) == labels)) for one in logits]
            is_there = [jnp.all(jnp.isfinite(one)) for one in logits]
            return jnp.stack([jnp.where(there, number, jnp.nan) for there, number in zip(is_there, right, strict=True)])

        return jax.lax.map(of_client, (state.clients, tests))

    program = jax.jit(right)
    found = [jax.device_get(program(*arguments)) for arguments in _chunks(experiment, state, table)]
    return dict(zip(names, _shares(found, table), strict=True))


def _shares(found: list[np.ndarray], table: Table) -> Float64[np.ndarray, "_ K"]:
    """The shares of each client's test examples that models have right, from their numbers [c, models] by chunks."""
    right, count = np.concatenate(found)[: len(table.count)].T, np.asarray(table.count, np.float64)
    return np.divide(right, count, out=np.full(right.shape, np.nan), where=count > 0)


def _chunks(experiment: Experiment, state: RunState, table: Table) -> Iterator[tuple]:
    """The program's arguments for the clients of each chunk, all of one shape; the last chunk is filled with client 0."""
    check_alive(state)
    problem, data = experiment.problem, experiment.problem.data
    number = len(table.count)
    size = min(CHUNK, number)
    for start in range(0, number, size):
        ids = np.arange(start, start + size)
        ids = np.where(ids < number, ids, 0).astype(np.int32)
        cohort = Cohort(ids, np.asarray(state.round), problem.rounds)
        rows = gather_images(data, cohort, cohort, capacity(data, size, reads_next=False), reads_next=False)
        clients = jax.tree.map(lambda x, ids=ids: x[ids], state.clients)
        tested = table.index[ids]
        tests = data.train.images[tested], data.train.labels[tested], table.count[ids]
        every = state.clients if experiment.method.requires.all_states else None
        yield state._replace(server=inner(state.server), clients=clients), every, cohort, rows, tests


def _right(
    method: Method, state: RunState, every: PyTree, cohort: Cohort, data: RoundData, tests: tuple, *, one_by_one: bool
) -> jax.Array:
    """How many of their own test examples the global and the personalized models of some clients have right: int32 [c, 2]."""
    ready = Round(method, cohort, data, state, method.broadcast(state.server, every, cohort))

    def of_client(both: tuple[ClientInputs, tuple]) -> jax.Array:
        inputs, (images, labels, count) = both
        output = run_client(method, ready.shared, inputs)
        change = jax.tree.map(lambda x: jnp.where(output.weight > 0, x, 0), method.parameters(output.update))
        own = _moved(method, state.server, change, images)
        mask = jnp.arange(len(labels)) < count
        first = next(iter(method.predict.values()))
        return jnp.stack([jnp.sum(mask & (first(server, images, mask).argmax(-1) == labels)) for server in (state.server, own)])

    both = ready.inputs, tests
    return jax.lax.map(of_client, both) if one_by_one else jax.vmap(of_client)(both)


def _moved(method: Method, server: PyTree, change: PyTree, images: jax.Array) -> PyTree:
    """The server's state with `change` taken from the parameters that it evaluates."""
    with evaluated_weights() as found:
        next(iter(method.predict.values()))(server, images[:1], jnp.ones(1, bool))
    refused = "personalize: got a method whose clients do not send the network that it evaluates"
    params = found[0].params if len(found) == 1 else ()
    if str(jax.tree.structure(params)) != str(jax.tree.structure(change)):
        raise ValueError(refused)
    return exchanged(server, params, jax.tree.map(lambda x, y: x - y.astype(x.dtype), params, change), refused)

"""A federated problem that a person can compute: the model is one number, a client's update moves it towards its mean pixel."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import FederatedData, Pool, pack, tables_of
from fedjax_ssl.method import ClientOutput, DataSpec, Method, Requires
from fedjax_ssl.metrics import Mean, Sum
from fedjax_ssl.options import parse
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Simulator
from fedjax_ssl.simulation.source import Problem

SIZES = (3, 1, 4, 2, 5, 2, 1)


def options(kind, *, rounds: int = 100, counts=((3, 3),), batch_size: int = 1, **values):
    """A method's own options as a run of `rounds` rounds has them."""
    return parse(kind, values, "method.").for_rounds(rounds).for_clients(np.int32(counts), batch_size)


def data(sizes=SIZES) -> FederatedData:
    """Client k holds sizes[k] images of one pixel, each of value 10 (k + 1); the server holds two of value 0."""
    values = np.concatenate([[0, 0], *([10 * (k + 1)] * n for k, n in enumerate(sizes))]).astype(np.uint8)
    labels = (np.arange(len(values)) % 2).astype(np.int32)
    ends = 2 + np.cumsum(sizes)
    rows = [np.arange(end - n, end) for end, n in zip(ends, sizes, strict=True)]
    images = values.reshape(-1, 1, 1, 1)
    return FederatedData(
        train=Pool(images, labels),
        test=Pool(images[:4], labels[:4]),
        server=pack([np.arange(2)]),
        labeled=pack([np.zeros(0, np.int64)] * len(sizes)),
        unlabeled=pack(rows),
        client_data=pack(rows),
        pooled=pack([np.arange(2, len(values))]),
    )


def method(*, aggregator: str = "sum") -> Method:
    """w <- w + mean_k over examples; each client counts how often it took part."""

    def client_update(shared, per_client, state, client_data, key):
        del per_client, key
        values = client_data.unlabeled.take(jnp.arange(client_data.unlabeled.index.shape[0])).reshape(-1).astype(jnp.float32)
        count = client_data.unlabeled.count.astype(jnp.float32)
        local = shared["w"] + jnp.sum(jnp.where(client_data.unlabeled.mask, values, 0)) / jnp.maximum(count, 1)
        metrics = {"client/loss": Mean(local, jnp.ones(())), "comm/bytes_up": Sum(jnp.int32(4))}
        return ClientOutput({"w": shared["w"] - local}, count, state + 1, metrics)

    def server_update(server, aggregate, data, key):
        del data, key
        if aggregator == "stack":
            total = jnp.sum(aggregate.weight)
            update = {"w": jnp.sum(aggregate.weight * aggregate.update["w"]) / total}
        else:
            update = aggregate.update
        return jax.tree.map(lambda w, u: w - u, server, update), {}

    return Method(
        init=lambda key, spec: ({"w": jnp.zeros(())}, jnp.zeros(spec.num_clients, jnp.int32)),
        broadcast=lambda server, clients, cohort: (server, cohort.ids),
        client_update=client_update,
        server_update=server_update,
        predict={
            "w": lambda server, images, _: jnp.stack(
                [images.reshape(-1).astype(jnp.float32), images.reshape(-1) * server["w"]], 1
            )
        },
        requires=Requires(next_cohort=True),
        aggregator=aggregator,
    )


def problem(
    cohort_size: int = 5, *, made=None, sizes=SIZES, seeds=(0,), rounds: int = 9, on_host: bool = False, **options
) -> Problem:
    """The problem of one run or of several; `made` is the method, and `options` are those of `method` where it is not given."""
    federated = data(sizes)
    made = made or method(**options)
    return Problem(
        method=lambda number: made,
        train=federated.train,
        test=federated.test,
        tables=(tables_of(federated),) * len(seeds),
        seeds=seeds,
        numbers=None,
        spec=DataSpec((1, 1, 1), 2, len(sizes), cohort_size),
        rounds=rounds,
        on_host=on_host,
    )


EXECUTIONS: dict[str, Execution] = {
    "vmap": Execution(0),
    "scan": Execution(1),
    "chunked": Execution(2),
    "sharded": Execution(0, devices=4),
    "sharded_chunked": Execution(1, devices=4),
}
"""Every way to map clients: all strategies, chunks that do not divide the cohort, devices that do not either."""


def run(problem: Problem, execution: Execution, rounds: int):
    simulator = Simulator(problem, execution)
    state, rows = simulator.initialize(), []
    for _ in range(rounds):
        state, row = simulator.round(state)
        rows.append(row)
    return simulator, state, rows

"""The server reads the data of the clients that take part in the round to come, not those of the round that ends."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.runs.checkpoint import Checkpoints
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Simulator
from tests import toy

COHORT = 3


def recording():
    """The toy method, whose server keeps, for each client of `next_cohort`, its first image and its number of images."""
    base = toy.method()

    def record(model, data):
        first = data.next_cohort.images[data.next_cohort.index[:, 0]].reshape(-1).astype(jnp.int32)
        return {"model": model, "pixels": first, "counts": data.next_cohort.count}

    def init(key, spec):
        model, clients = base.init(key, spec)
        return {"model": model, "pixels": jnp.zeros(COHORT, jnp.int32), "counts": jnp.zeros(COHORT, jnp.int32)}, clients

    return base._replace(
        init=init,
        prepare=lambda server, data, key: (record(server["model"], data), {}),
        broadcast=lambda server, clients, cohort: base.broadcast(server["model"], clients, cohort),
        server_update=lambda server, aggregate, data, key: (
            record(base.server_update(server["model"], aggregate, data, key)[0], data),
            {},
        ),
        predict={"w": lambda server, images, mask: base.predict["w"](server["model"], images, mask)},
    )


def announced(state) -> list[int]:
    """The clients of the cohort to come, told by their pixels: data on the host are the round's own images, renumbered."""
    ids = np.asarray(state.server["pixels"]) // 10 - 1
    np.testing.assert_array_equal(state.server["counts"], np.array(toy.SIZES)[ids])
    return sorted(ids.tolist())


def simulator(on_host: bool):
    return Simulator(toy.problem(COHORT, made=recording(), on_host=on_host), Execution())


@pytest.mark.parametrize("on_host", [False, True])
def test_the_server_sees_the_clients_that_then_take_part_also_after_a_resume(on_host, tmp_path):
    running, cohorts = simulator(on_host), []
    state = running.initialize()  # whose preparation sees the first cohort
    for number in range(6):
        if number == 4:
            with Checkpoints(tmp_path) as checkpoints:
                checkpoints.restore(running.template())
                checkpoints.save(number, state)
            with Checkpoints(tmp_path) as checkpoints:
                running = simulator(on_host)
                _, state = checkpoints.restore(running.template())
        expected, before = announced(state), np.array(state.clients)
        state, _ = running.round(state)
        cohorts.append((expected, np.flatnonzero(np.asarray(state.clients) - before).tolist()))
    assert [expected for expected, _ in cohorts] == [took_part for _, took_part in cohorts]
    # Else the cohort of one round could pass for that of the next.
    assert all(one != other for (_, one), (_, other) in itertools.pairwise(cohorts))
    assert jax.tree.leaves(state.clients)[0].sum() == 6 * COHORT

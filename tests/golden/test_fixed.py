"""Parameters that clients do not train: they stay, are kept in no optimizer's state, and are not counted in uploads."""

import jax
import numpy as np
import pytest

from tests import engine, tiny

FIXED = {"client__optimizer__layers": "Dense_0=0"}


def sizes(experiment) -> tuple[int, int]:
    """The bytes of all parameters, and those of the fixed layer."""
    params = experiment.simulator.template().server.weights.params
    of = [sum(4 * x.size for x in jax.tree.leaves(tree)) for tree in (params, params["Dense_0"])]
    return of[0], of[1]


@pytest.mark.parametrize("case", [("fedavg", "clients"), ("fl2", "server")])
def test_clients_neither_train_nor_send_nor_store_them_and_the_server_still_trains_them(case):
    method, labels_at = case
    experiment = tiny.experiment(method, labels_at=labels_at, **tiny.confident(method), **FIXED)
    _, states, rows = engine.simulate(experiment, "scan", rounds=2)
    whole, fixed = sizes(experiment)
    before, after = (jax.device_get(state.server.weights.params) for state in states[::2])
    moved = {name: engine.distance(before[name], after[name]) > 0 for name in before}
    assert moved == dict.fromkeys(before, True) | {"Dense_0": labels_at == "server"}
    sent = rows[-1]["comm/bytes_down"] - rows[-1]["comm/bytes_up"]
    assert sent == experiment.settings.cohort_size * fixed
    assert rows[-1]["comm/bytes_up"] == experiment.settings.cohort_size * (whole - fixed)


def test_a_client_keeps_no_momentum_of_them():
    plain, without = (
        tiny.experiment("fedavg", labels_at="clients", client__optimizer__persistent=True, **own) for own in ({}, FIXED)
    )
    of = [sum(x.size for x in jax.tree.leaves(one.simulator.template().clients)) for one in (plain, without)]
    _, fixed = sizes(plain)
    assert of[0] - of[1] == plain.settings.data.num_clients * fixed // 4


def test_the_clip_of_a_step_is_that_of_the_parameters_that_are_trained():
    norms = []
    for own in ({}, FIXED):
        experiment = tiny.experiment(
            "fedavg", labels_at="clients", network="mlp", rounds=1, client__epochs=0, client__steps=1,
            client__optimizer__clip_norm=1e-3, client__optimizer__learning_rate=1.0, client__optimizer__momentum=0.0,
            client__optimizer__weight_decay=0.0, client__optimizer__nesterov=False, diagnostics__clients_every=1, **own,
        )  # fmt: skip
        ((_, row),) = experiment.rounds()
        norms.append(row["clients"]["client/update_norm"])
    np.testing.assert_allclose(norms, 1e-3, rtol=1e-3)

"""FedSiam by its ablations, and what Pi, MT and D have in common."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import Weights
from fedjax_ssl.methods import fedsiam
from tests import engine, tiny
from tests.golden.test_fedsiam_client import TASK
from tests.methods.clients import Client, norm, same

AT_CLIENTS = {"network": "linear", "labels_at": "clients", "client__epochs": 2, "client__batch_size": 4}


@pytest.mark.ci
def test_d_with_labels_at_the_clients_is_pi_at_first_then_mt_and_learns():
    # One network in rounds 1 and 2, and all layers uploaded in round 3.
    curve = {"method__curve": "rectangle", "method__saved": 1 / 3, "method__pi_rounds": 2, "method__end_round": 4, "rounds": 3}
    data = {"data__num_clients": 6, "data__labels_at": "clients", "data__num_labels": 60}
    training = {"cohort_size": 3, "client__epochs": 3, "client__batch_size": 16, "server__optimizer__momentum": 0.0}
    experiment = tiny.experiment("fedsiam_d", network="linear", eval_every=1, **curve, **data, **training)
    rows = []
    for state, row in experiment.rounds():
        rows.append(row)
        online, target = (2 * fedsiam.each(state.server.weights))[:2]  # one network is its own target
        assert same(online, target) == (row["round"] < 3)
        assert (row["eval/accuracy"] == row["eval/accuracy_online"]) == (row["round"] < 3)
    assert [row["client/upload_fraction"] for row in rows] == [0, 0, 1]
    size = 4 * experiment.num_params
    up, down = ([row[key] for row in rows] for key in ("comm/bytes_up", "comm/bytes_down"))
    assert np.diff([0, *up]).tolist() == [3 * size, 3 * size, 3 * (2 * size + 4)]  # and one layer's distance
    assert np.diff([0, *down]).tolist() == [3 * size, 3 * size, 3 * (2 * size + 4)]  # and the boundary
    assert [row["client/upload_bytes_fraction"] for row in rows] == pytest.approx([0, 0, (size + 4) / size])
    assert rows[-1]["client/loss"] < rows[0]["client/loss"]
    assert not any("server/loss" in row for row in rows)


@pytest.mark.slow
def test_a_client_without_data_sends_nothing_of_d():
    experiment = tiny.experiment("fedsiam_d", network="linear", cohort_size=8, method__pi_rounds=0)  # all clients
    (tables,), problem = experiment.problem.tables, experiment.problem
    emptied = tables["unlabeled"]._replace(count=np.r_[0, tables["unlabeled"].count[1:]])
    problem = problem._replace(tables=({**tables, "unlabeled": emptied},))
    _, _, (row,) = engine.simulate(SimpleNamespace(problem=problem), "scan")
    size = 4 * experiment.num_params
    layers, rest = divmod(row["comm/bytes_up"] - 7 * (size + 4), size)  # besides the target, and the distance of one layer
    assert (row["client/participants"], rest) == (7, 0)
    assert 0 <= layers <= 7
    assert row["comm/bytes_down"] == 8 * (2 * size + 4)


def test_without_siamese_networks_unlabeled_images_do_not_train():
    client = Client("fedsiam_pi", 9, 20, method__consistency_weight=0.0, **AT_CLIENTS)
    one = client()
    client.images = client.images.at[client.unlabeled].set(255 - client.images[client.unlabeled])
    assert same(one.update, client().update)
    assert norm(one.update) > 0
    assert "client/consistency_loss" not in one.metrics
    assert one.metrics["cost/forward_passes"] == one.metrics["cost/backward_passes"]  # no pass for a target


def test_the_target_tracks_statistics_of_its_own_but_where_it_is_the_online_network():
    online = Weights({"w": jnp.ones(2)}, {"mean": jnp.full(2, 3.0)})
    target = Weights({"w": jnp.zeros(2)}, {"mean": jnp.ones(2)})
    batch_stats, task = {"mean": jnp.full(2, 11.0)}, TASK._replace(norm="running")
    for alpha, stats, params, mean in ((0.75, batch_stats, 0.25, 2), (0.75, (), 0.25, 1), (0.0, batch_stats, 1, 3)):
        (got,) = fedsiam.following(task, (target,), stats, jnp.float32(alpha))(online)
        np.testing.assert_allclose(got.params["w"], params)
        np.testing.assert_allclose(got.stats["mean"], mean)


@pytest.mark.slow
def test_a_client_that_runs_out_of_time_counts_the_steps_that_it_took():
    late = {"system__speed": 40.0, "system__deadline_s": 1.0, "system__late": "shortened"}
    experiment = tiny.experiment("fedsiam_mt", labels_at="clients", client__epochs=3, **late)
    _, states, rows = engine.simulate(experiment, rounds=1, evaluated=False)
    kept, images = states[1].clients, rows[0]["perf/client_images"]
    size = experiment.settings.client.batch_size
    assert 0 < images <= 5 * 40
    assert np.sum(kept.steps) * size >= images > (np.sum(kept.steps) - 5) * size
    assert np.max(kept.epochs) < 3

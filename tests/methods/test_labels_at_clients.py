"""FixMatch, UDA and FedAvg with labels at the clients, and the server without labels."""

import jax
import numpy as np
import pytest

from tests import tiny
from tests.methods.clients import Client, flat, same, server_data

EPOCHS = 2


def client_of(method, **overrides) -> Client:
    """With a linear network of clear opinions, so that some pseudo-labels are accepted; labels at the clients."""
    options = {"labels_at": "clients", "client__epochs": EPOCHS, "network": "linear"} | overrides
    return Client(method, 9, 20, scale=4.0, **options)


def test_where_nothing_is_accepted_the_labels_train_alone():
    client = client_of("uda", method__confidence=1.0)
    output = client()
    assert output.metrics["client/mask_rate"] == (0, 8 + 8 + 4 + 8)  # four steps, as nine labels take
    np.testing.assert_allclose(flat(output.update), flat(client(unlabeled=0).update), rtol=1e-5, atol=1e-7)


@pytest.mark.ci
def test_pseudo_labels_of_the_global_model_at_the_clients():
    """Made once per round; unlabeled batches from the accepted examples alone, as many as the labeled ones ask for."""
    options = {"method__batches": "accepted", "method__unlabeled_batch_size": 3}
    output = client_of("fixmatch", method__confidence=0.6, **options)()
    accepted, total = output.metrics["client/mask_rate"]
    assert 0 < accepted < total == 20
    steps = EPOCHS * 2
    assert output.metrics["client/loss"].weight == EPOCHS * 9
    drawn = output.metrics["client/unlabeled_loss"].weight
    assert drawn == output.metrics["perf/client_images"].total - EPOCHS * 9 <= steps * 3
    assert drawn >= min(accepted, steps * 3)
    assert np.linalg.norm(flat(output.update)) > 0


def test_a_server_without_labels_does_not_train_before_round_1():
    experiment = tiny.experiment("fedavg", network="linear", server__training__pretrain=3)
    method = experiment.method
    state, _ = method.init(jax.random.key(0), experiment.problem.spec)
    assert state.fine_tune == ()
    prepared, metrics = method.prepare(state, server_data(experiment, [0, 1]), jax.random.key(1))
    assert metrics == {}
    assert same(state, prepared)


@pytest.mark.parametrize("reveal", [False, True])
def test_the_servers_statistics_are_of_labeled_and_unlabeled_data_of_the_next_cohort(reveal):
    experiment = tiny.experiment("fedavg", data__reveal_labels=reveal)
    data = experiment.problem.data
    given = server_data(experiment, [3, 1])
    assert given.labeled.count == 0
    for row, k in enumerate((3, 1)):
        tables = (data.labeled, data.unlabeled)
        expected = [i for table in tables for i in table.index[k][: table.count[k]].tolist()]
        assert sorted(given.next_cohort.index[row, : given.next_cohort.count[row]].tolist()) == sorted(expected)
        assert len(expected) == 250
        assert data.unlabeled.count[k] == (0 if reveal else 175)


def test_revealed_labels_are_trained_on_beside_those_at_the_server():
    """FedAvg with server fine-tuning."""
    client = client_of("fedavg", labels_at="server", data__reveal_labels=True)
    output = client(labeled=9, unlabeled=0)
    assert output.weight == 9
    assert np.any(flat(output.update))
    assert jax.tree.leaves(client.server.fine_tune)  # its optimizer's state: the server trains

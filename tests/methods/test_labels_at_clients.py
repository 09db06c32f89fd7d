"""FixMatch, UDA and FedAvg by their edge cases and ablations, and the server without labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.method import Cohort
from fedjax_ssl.methods.fixmatch import FixMatchOptions
from fedjax_ssl.methods.uda import UDAOptions
from fedjax_ssl.simulation.round import attach, gather
from tests import tiny
from tests.methods.clients import Client, flat, same

PAPER = {"method__pseudo_labels": "local", "method__divisor": "batch", "method__strict": False}
EPOCHS = 2


def client_of(method, **overrides) -> Client:
    """With a linear network of clear opinions, so that some pseudo-labels are accepted; labels at the clients."""
    options = {"labels_at": "clients", "client__epochs": EPOCHS, "network": "linear"} | overrides
    return Client(method, 9, 20, scale=4.0, **options)


@pytest.fixture(scope="module", params=["fixmatch", "uda"])
def client(request):
    return client_of(request.param, **(PAPER if request.param == "fixmatch" else {}))


def test_a_client_without_labels_trains_on_its_unlabeled_examples_for_the_epochs_of_those(client):
    output = client(labeled=0)
    assert np.linalg.norm(flat(output.update)) > 0
    assert np.isfinite(flat(output.update)).all()
    assert output.weight == 20
    assert output.metrics["perf/client_images"].total == EPOCHS * 20
    assert output.metrics["client/loss"] == (0, 0)  # no value
    assert output.metrics["client/unlabeled_loss"].weight > 0


def test_a_client_of_labels_alone_trains_on_them(client):
    output = client(unlabeled=0)
    assert np.linalg.norm(flat(output.update)) > 0
    assert np.isfinite(flat(output.update)).all()
    assert output.weight == 9
    assert output.metrics["perf/client_images"].total == EPOCHS * 9
    assert output.metrics["client/unlabeled_loss"] == (0, 0)
    assert output.metrics["diagnostics/label_ratio"] == (0, 0)


def test_a_client_without_data_takes_no_part(client):
    output = client(labeled=0, unlabeled=0)
    assert output.weight == 0
    assert not np.any(flat(output.update))
    assert output.metrics["perf/client_images"].total == 0


def test_what_lies_beyond_the_counts_changes_nothing(client):
    before, after = client(), client.without_what_lies_beyond()
    np.testing.assert_array_equal(flat(before.update), flat(after.update))
    assert before.weight == after.weight


def test_fedavg_leaves_out_clients_without_labels_and_weighs_the_others_by_all_their_data():
    client = client_of("fedavg")
    output = client()
    assert output.weight == 29
    assert output.metrics["perf/client_images"].total == EPOCHS * 9
    output = client(labeled=0)
    assert output.weight == 0
    assert not np.any(flat(output.update))


def test_where_nothing_is_accepted_the_labels_train_alone():
    client = client_of("uda", method__confidence=1.0)
    output = client()
    assert output.metrics["client/mask_rate"] == (0, 8 + 8 + 4 + 8)  # four steps, as nine labels take
    np.testing.assert_allclose(flat(output.update), flat(client(unlabeled=0).update), rtol=1e-5, atol=1e-7)


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


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        (FixMatchOptions, "pseudo_labels", "locl"),
        (FixMatchOptions, "divisor", "all"),
        (FixMatchOptions, "unlabeled_weight", -1.0),
        (FixMatchOptions, "unlabeled_batch_size", -1),
        (UDAOptions, "unlabeled_batch_size", -1),
        (UDAOptions, "temperature", 0.0),
        (UDAOptions, "confidence", 1.5),
        (UDAOptions, "tsa", "cosine"),
    ],
)
def test_wrong_options_are_refused(options, key, value):
    with pytest.raises(ValueError, match=rf"method\.{key}: got {value!r}"):
        options(**{key: value})


def test_batches_of_accepted_examples_need_labels_that_are_made_before():
    with pytest.raises(ValueError, match=r"method\.batches: got 'accepted'"):
        FixMatchOptions(pseudo_labels="local", batches="accepted")


# --- the server --------------------------------------------------------------------------------------------------------


def server_data(experiment, ids):
    cohort = Cohort(np.array(ids), np.int32(0))
    rows = gather(experiment.problem.data, cohort, cohort)
    return jax.tree.map(jnp.asarray, attach(rows.server, rows.images))


def test_a_server_without_labels_does_not_train_before_round_1():
    experiment = tiny.experiment("fedavg", network="linear", server__pretrain=3)
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


@pytest.mark.parametrize("method", ["fedavg", "fedavg_pp", "fedprox"])
def test_clients_that_train_on_labels_alone_are_refused_where_the_server_keeps_them(method):
    with pytest.raises(ValueError, match=r"^data.labels_at: got server for .*, accepted: clients, or .*reveal_labels=True$"):
        tiny.experiment(method, labels_at="server", data__reveal_labels=False)

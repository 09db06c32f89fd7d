"""FedDure: unlabeled batches of a client's own size, ablations, F-reg's state, clients with one kind of data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import Training
from fedjax_ssl.methods.feddure import FedDureOptions, client_batch_size
from tests.methods.clients import flat, recorded_passes
from tests.methods.test_labels_at_clients import EPOCHS, client_of


@pytest.mark.parametrize(
    ("labeled", "unlabeled", "expected"),
    [
        (50, 450, 90),  # CIFAR-10, IID
        (50, 550, 110),  # Fashion-MNIST
        (50, 850, 170),  # CINIC-10
        (50, 2100, 105),  # 420, divided by 4
        (14, 40, 10),  # one batch of labels, and so four of unlabeled examples
        (25, 40, 10),  # 2.5 rounds to 2
        (35, 40, 10),  # 3.5 rounds to 4
        (34, 40, 13),
        (110, 5, 5),  # fewer than batches
        (0, 12, 3),
        (50, 0, 0),
    ],
)
def test_a_clients_own_batch_size_is_the_released_codes_rule(labeled, unlabeled, expected):
    assert client_batch_size(np.int32(labeled), np.int32(unlabeled), 10) == expected
    assert client_batch_size(jnp.int32(labeled), jnp.int32(unlabeled), 10) == expected


def test_the_shape_of_unlabeled_batches_is_the_largest_clients():
    counts = np.array([[50, 450], [20, 400], [110, 1100], [10, 0]])
    assert FedDureOptions().for_clients(counts, 10).largest_batch_size == 100
    assert FedDureOptions().for_clients(np.array([[5, 0]]), 10).largest_batch_size == 1


@pytest.fixture(scope="module")
def client():
    return client_of("feddure", method__eta_s=0.05, method__eta_w=0.05)


def test_each_client_starts_with_an_f_reg_of_its_own(client):
    assert len({kernel.tobytes() for kernel in np.asarray(client.clients.w["hidden"]["kernel"])}) == 8


@pytest.mark.ci
def test_steps_take_unlabeled_batches_of_the_clients_own_size(client):
    output = client(labeled=9, unlabeled=20)
    steps = EPOCHS * 2  # nine labels in batches of 8
    assert output.metrics["client/loss"].weight == EPOCHS * 9
    assert output.metrics["client/unlabeled_loss"].weight == steps * 5  # a quarter of 20
    assert output.metrics["client/reward"].weight == steps
    assert output.metrics["perf/client_images"].total == EPOCHS * 9 + steps * 5
    assert output.weight == 29
    assert output.client_state.w_optimizer.count == steps
    assert np.isfinite(flat(output)).all()


@pytest.mark.ci
def test_a_limit_of_batch_sizes_below_a_clients_own_leaves_no_gaps_between_batches(monkeypatch):
    scheduled, entries = Training.paired_schedule, []

    def noted(self, *args, **named):
        jax.debug.callback(lambda size: entries.append(int(size)), named["entries"])
        return scheduled(self, *args, **named)

    monkeypatch.setattr(Training, "paired_schedule", noted)
    output = client_of("feddure", method__largest_batch_size=3)(labeled=9, unlabeled=20)
    jax.effects_barrier()
    assert entries == [3]  # by the rule it would be 5, of which a batch of 3 rows leaves out 2
    assert output.metrics["client/unlabeled_loss"].weight == EPOCHS * 2 * 3


def test_f_reg_of_a_client_with_one_kind_of_data_stays(client):
    output = client(labeled=0)
    assert np.linalg.norm(flat(output.update)) > 0
    assert np.isfinite(flat(output.update)).all()
    assert output.weight == 20
    np.testing.assert_array_equal(flat(output.client_state[1:]), flat(client.kept[1:]))
    for name in ("loss", "reward"):
        assert output.metrics[f"client/{name}"] == (0, 0)  # no value
    assert 0 < output.metrics["client/instance_weight_mean"].total / output.metrics["client/instance_weight_mean"].weight < 1
    of_labels = client(unlabeled=0)
    assert of_labels.weight == 9
    assert of_labels.metrics["client/reward"] == of_labels.metrics["client/instance_weight_p10"] == (0, 0)
    np.testing.assert_array_equal(flat(of_labels.client_state[1:]), flat(client.kept[1:]))


@pytest.mark.parametrize(
    ("regulators", "expected"), [("both", [20, 6, 8, 8, 8]), ("no_c", [20, 6, 8]), ("no_f", [20, 6, 8, 8])]
)
def test_theta_sees_one_batch_of_all_views_and_the_passes_are_shared(monkeypatch, regulators, expected):
    """Of 8 labeled and 6 unlabeled examples batch norm sees 20 views at once; look-ahead and C-reg's step share a pass of 6."""
    client = client_of("feddure", network="cnn", method__unlabeled_batch_size=6, method__regulators=regulators)
    passes = recorded_passes(monkeypatch)
    client.trace()
    assert [rows for rows, _, _ in passes] == expected

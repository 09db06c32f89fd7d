"""FedLabel: what r counts, burn-in, clients without labels, and where nobody is sure."""

import numpy as np
import pytest

from tests import tiny
from tests.methods.clients import Client, finite, flat

TAU, STEPS, BATCH = 3, 4, 8


def client_of(**overrides) -> Client:
    """With a linear network of clear opinions, so that some pseudo-labels are accepted."""
    options = {"client__epochs": 0, "client__steps": TAU, "method__unlabeled_steps": STEPS, "network": "linear"}
    return Client("fedlabel", 20, 30, scale=4.0, **options | overrides)


@pytest.fixture(scope="module")
def client():
    return client_of(method__burn_in=5, rounds=8)


@pytest.mark.ci
def test_a_client_of_few_examples_uses_all_of_them_in_every_step(client):
    output = client(labeled=3, unlabeled=2, round=5)
    assert output.metrics["client/loss"].weight == TAU * 3
    assert output.metrics["client/mask_rate"].weight == STEPS * 2


def test_w_u_is_not_trained_before_the_burn_in_is_over(client):
    output = client(round=4)
    assert output.weight == TAU * BATCH
    assert output.metrics["client/mask_rate"] == (0, 0)
    np.testing.assert_array_equal(flat(output.update), flat(client(unlabeled=0).update))
    assert np.any(flat(output.client_state.labeled))
    assert not np.any(flat(output.client_state.unlabeled))


def test_a_client_without_labels_learns_from_what_it_and_the_global_model_agree_on(client):
    output = client(labeled=0, round=5)
    assert output.weight == output.metrics["client/mask_rate"].total > 0
    assert output.metrics["client/loss"] == (0, 0)
    # The local expert is the global one: they agree on all, and it is a tie.
    assert output.metrics["client/local_expert_rate"].total == 0
    agreed, drawn = output.metrics["client/agreement_rate"]
    assert agreed == drawn
    assert np.any(flat(output.update))
    assert finite(output)


def test_where_nobody_is_sure_w_u_stays_and_labels_train_alone_and_in_halves_half_as_far():
    released = {"counts": "passing", "aggregation": "halves", "divisor": "used", "proximity": 10.0}
    client = client_of(method__confidence=1.0, **{f"method__{key}": value for key, value in released.items()})
    output = client()
    assert (output.weight, output.update.used) == (1, 1)
    assert np.any(flat(output.update.labeled))
    assert not np.any(flat(output.update.unlabeled))
    assert not np.any(flat(output.client_state.unlabeled))
    assert finite(output)
    assert client(labeled=0, unlabeled=0).weight == 0


@pytest.mark.parametrize(("key", "value"), [("system.faulty", 0.5), ("client.compression", "int8")])
def test_what_changes_an_update_is_refused_for_halves_of_which_the_server_makes_one(key, value):
    overrides = {"method__aggregation": "halves", key.replace(".", "__"): value}
    with pytest.raises(ValueError, match=f"^{key}: got {value}.* where a server computes the change of parameters from"):
        next(tiny.experiment("fedlabel", network="linear", **overrides).rounds())


def test_a_confidence_that_equals_the_threshold_is_not_enough():
    client = client_of(method__confidence=0.1)
    output = client(labeled=0, weights=client.biased(0.0))  # every output is uniform, over ten classes
    assert output.metrics["client/mask_rate"] == (0, STEPS * BATCH)
    assert finite(output)

"""RSCFed against NumPy (Liang et al. 2022, as its released code has it): both kinds of clients, and the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl.local import Broadcast, Server, ServerState, Weights
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.method import Aggregate, ServerData
from fedjax_ssl.methods.rscfed import RSCFedOptions, Sent, Teacher, group_coefficients, rscfed
from fedjax_ssl.ssl import consensus
from tests.golden import linear_clients as lc

WEIGHT, DECAY, SEEN = 0.3, 0.6, 4  # of the loss, of the teacher, and its steps before this round


def method_of():
    sgd = torch_sgd(momentum=lc.MOMENTUM, nesterov=False, weight_decay=lc.DECAY, clip_norm=0.0)
    client = lc.InOrder(sgd, lambda _: None, batch_size=lc.BATCH, epochs=lc.EPOCHS)
    options = RSCFedOptions(consistency_weight=WEIGHT, teacher_decay=DECAY)
    return rscfed(task=lc.linear_task(), client=client, server=Server(None, None, 0, None), options=options), sgd


def got(client, teacher, steps, labeled, unlabeled):
    method, sgd = method_of()
    params = lc.named(client.params)
    momentum = lc.with_leaves(sgd.init(params), lc.named(client.momentum))
    shared = Broadcast(Weights(params, {}), jnp.float32(lc.RATE), jnp.int32(0), 1)
    state = momentum, Teacher(Weights(lc.named(teacher), {}), jnp.int32(steps))
    output = jax.jit(method.client_update)(shared, (), state, client.client_data(labeled, unlabeled), jax.random.key(0))
    new_momentum, new_teacher = output.client_state
    return output, lc.with_leaves(params, new_momentum)["Dense_0"], new_teacher


def batches(number):
    return [np.arange(number)[i : i + lc.BATCH] for _ in range(lc.EPOCHS) for i in range(0, number, lc.BATCH)]


@pytest.mark.parametrize("steps", [0, SEEN])
def test_an_unlabeled_client_follows_its_teacher_which_follows_it(steps):
    client, stored = lc.Client(), lc.random_layer(np.random.default_rng(5), 0.3)
    w, m = dict(client.params), dict(client.momentum)
    teacher = dict(stored) if steps else dict(client.params)  # in its first round as the model that it receives
    loss, number = 0.0, steps
    for batch in batches(lc.UNLABELED):
        x = client.weak[batch]
        q, p = lc.outputs(teacher, x), lc.outputs(w, x)
        y = q**2 / np.sum(q**2, axis=1, keepdims=True)
        error = 2 * WEIGHT * (p - y)
        w, m = lc.sgd(w, lc.gradient(x, p * (error - np.sum(error * p, axis=1, keepdims=True)) / len(x)), m, decay=lc.DECAY)
        decay = min(1 - 1 / (number + 1), DECAY)
        teacher = lc.combine(lambda t, w, decay=decay: decay * t + (1 - decay) * w, teacher, w)
        loss, number = loss + WEIGHT * np.sum((p - y) ** 2), number + 1
    output, momentum, kept = got(client, stored, steps, 0, lc.UNLABELED)
    lc.assert_same(output.update.update.params["Dense_0"], {name: client.params[name] - w[name] for name in w})
    lc.assert_same(momentum, m)
    lc.assert_same(kept.weights.params["Dense_0"], teacher)
    assert kept.steps == number
    assert output.weight == lc.UNLABELED
    assert not output.update.is_labeled
    np.testing.assert_allclose(output.metrics["client/loss"].total, loss, rtol=1e-5)


def test_a_labeled_client_trains_on_its_labels_and_has_no_teacher():
    client, stored = lc.Client(), lc.random_layer(np.random.default_rng(5), 0.3)
    w, m = dict(client.params), dict(client.momentum)
    for batch in batches(lc.LABELED):
        x, y = client.labeled[batch], lc.LABELS[batch]
        w, m = lc.sgd(w, lc.gradient(x, lc.residual(lc.outputs(w, x), y) / len(y)), m, decay=lc.DECAY)
    output, momentum, kept = got(client, stored, SEEN, lc.LABELED, 0)
    lc.assert_same(output.update.update.params["Dense_0"], {name: client.params[name] - w[name] for name in w})
    lc.assert_same(momentum, m)
    lc.assert_same(kept.weights.params["Dense_0"], stored)
    assert kept.steps == SEEN
    assert output.weight == lc.LABELED
    assert output.update.is_labeled


def coefficients_by_numpy(updates, sizes, labeled, rate, factor):
    """Of the members of a group."""
    share = sizes / sizes.sum()
    apart = [leaf - np.tensordot(share, leaf, 1) for leaf in updates]
    distance = sum(np.sqrt(np.sum(leaf.reshape(len(sizes), -1) ** 2, axis=1)) for leaf in apart)
    r = share * np.exp(-rate * distance / sizes) * np.where(labeled, factor, 1.0)
    return r / r.sum()


@pytest.mark.parametrize("labeled", [[False, True, True, False], [False, False, True, False]])
def test_who_is_far_from_the_mean_of_a_group_counts_less_and_a_labeled_client_more(labeled):
    rng, sizes = np.random.default_rng(1), np.array([30.0, 10.0, 0.0, 25.0])
    kernel, bias, members = rng.standard_normal((4, 2, 3)), rng.standard_normal((4, 3)), sizes > 0
    kernel[2] = np.nan  # of a client that is not in the group, though labeled
    rate, factor = (20.0, 6.0) if labeled[1] else (70.0, 1.0)
    found = consensus.coefficients(
        {"bias": jnp.float32(bias), "kernel": jnp.float32(kernel)}, jnp.float32(sizes), jnp.array(labeled), rates=(20.0, 70.0),
        labeled_factor=6.0,
    )  # fmt: skip
    of_members = (x[members] for x in (bias, kernel))
    expected = coefficients_by_numpy([*of_members], sizes[members], np.array(labeled)[members], rate, factor)
    np.testing.assert_allclose(found[members], expected, rtol=1e-5)
    assert found[2] == 0


def test_a_group_of_nobody_has_no_coefficients_and_tiny_ones_are_no_division_by_zero():
    updates = {"w": jnp.float32([[0.0], [9.0]])}
    nobody = consensus.coefficients(updates, jnp.zeros(2), jnp.zeros(2, bool), rates=(1.0, 1.0), labeled_factor=6.0)
    assert nobody.tolist() == [0, 0]
    far = consensus.coefficients(updates, jnp.ones(2), jnp.zeros(2, bool), rates=(1.0, 1e6), labeled_factor=6.0)
    assert far.tolist() == [0.5, 0.5]  # exp(-4.5e6) is 0 in any floating-point number


def test_groups_are_drawn_without_replacement_from_those_present():
    present = jnp.array([True, False, True, True, True, False])
    drawn = jax.vmap(lambda key: consensus.draw(key, present, 2))(jax.random.split(jax.random.key(0), 4000))
    assert set(np.sum(drawn, axis=1).tolist()) == {2}
    np.testing.assert_allclose(np.mean(drawn, axis=0), np.where(present, 0.5, 0.0), atol=0.03)
    assert consensus.draw(jax.random.key(1), present, 9).tolist() == present.tolist()


def test_the_server_takes_the_plain_mean_of_its_groups():
    sizes, labeled = np.array([20.0, 0.0, 10.0, 30.0]), np.array([True, True, False, False])
    updates = np.array([[1.0, 2.0], [np.nan, np.nan], [-1.0, 0.5], [0.3, -2.0]])
    options = RSCFedOptions(groups=2, group_size=9, distance_weight=8.0)  # every group has all that sent something
    sgd = optax.sgd(1.0)
    client = lc.InOrder(sgd, lambda _: None, batch_size=lc.BATCH, epochs=lc.EPOCHS)
    method = rscfed(task=lc.linear_task(), client=client, server=Server(sgd, None, 0, None), options=options)
    start = Weights({"w": jnp.float32([4.0, 5.0])}, {})
    state = ServerState(start, sgd.init(start.params), ())
    sent = Sent(Weights({"w": jnp.float32(updates)}, ()), jnp.asarray(labeled))
    nothing = lc.Client().client_data(0, 0).unlabeled
    data = ServerData(nothing, nothing, None, nothing, jnp.int32(0))
    state, metrics = method.server_update(state, Aggregate(sent, jnp.float32(sizes)), data, jax.random.key(3))
    there = sizes > 0
    r = coefficients_by_numpy([updates[there]], sizes[there], labeled[there], 8.0, 6.0)
    np.testing.assert_allclose(state.weights.params["w"], [4.0, 5.0] - r @ updates[there], rtol=1e-5)
    np.testing.assert_allclose(metrics["server/labeled_share"].total, r[0], rtol=1e-5)


def test_a_group_has_so_many_clients_and_several_groups_are_averaged():
    rng, sizes = np.random.default_rng(2), np.array([20.0, 15.0, 10.0, 30.0, 25.0])
    updates, labeled = rng.standard_normal((5, 3)), np.arange(5) == 1
    sent = Sent(Weights({"w": jnp.float32(updates)}, ()), jnp.asarray(labeled))
    options = RSCFedOptions(groups=1, group_size=2, distance_weight=8.0, unlabeled_distance_weight=20.0)
    found = group_coefficients(options, sent, jnp.float32(sizes), jax.random.key(7))
    two = np.flatnonzero(found)
    has_label = labeled[two].any()
    r = coefficients_by_numpy([updates[two]], sizes[two], labeled[two], 8.0 if has_label else 20.0, 6.0 if has_label else 1.0)
    np.testing.assert_allclose(found[two], r, rtol=1e-5)
    assert len(two) == 2
    many = group_coefficients(options.model_copy(update={"groups": 40}), sent, jnp.float32(sizes), jax.random.key(7))
    assert np.all(many > 0)
    np.testing.assert_allclose(np.sum(many), 1.0, rtol=1e-5)

"""(FL)^2's client by its edge cases and ablations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedjax_ssl.methods.passes import Passes

from fedjax_ssl.data.federated import Examples
from fedjax_ssl.method import Cohort, Shard
from fedjax_ssl.methods.fl2 import FL2Options, pseudo_label
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny, toy


class Client:
    """One client of a tiny experiment, jitted once per setting."""

    def __init__(self, name="fl2", **overrides):
        self.experiment = tiny.experiment(name, **overrides)
        method, data, spec, _ = self.experiment.problem
        server, clients = jax.jit(lambda key: method.init(key, spec))(jax.random.key(0))
        self.shared = method.broadcast(server, clients, Cohort(jnp.arange(5), jnp.int32(0)))[0]
        self.kept = jax.tree.map(lambda x: x[0], clients)
        self.images, self.labels = jnp.asarray(data.train.images), jnp.asarray(data.train.labels)
        self.index = jnp.asarray(data.unlabeled.index[0])
        self.update = jax.jit(method.client_update)

    def __call__(self, *, count=None, weights=None, truth_shift=0):
        count = jnp.int32(len(self.index) if count is None else count)
        unlabeled = Examples(self.images, self.index, count, None)
        none = Examples(self.images, self.index[:1], jnp.int32(0), self.labels[:1])
        truth = (self.labels[self.index] + truth_shift) % 10
        shared = self.shared if weights is None else self.shared._replace(weights=weights)
        return self.update(shared, (), self.kept, Shard(none, unlabeled, truth), jax.random.key(1))

    def biased(self, bias: float):
        """Weights whose output is the same for every image: class 3 leads by `bias`."""
        weights = jax.tree.map(jnp.zeros_like, self.shared.weights)
        name = max(weights.params, key=lambda n: weights.params[n]["bias"].shape == (10,))
        weights.params[name]["bias"] = jnp.zeros(10).at[3].set(bias)
        return weights


@pytest.fixture(scope="module")
def client():
    return Client()


def norm(tree) -> float:
    return float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))


def test_a_client_that_accepts_nothing_returns_the_global_model_with_its_weight(client):
    # Equal outputs for all images: every confidence is tau_k itself, and nothing lies strictly above.
    output = client(weights=client.biased(2.0))
    tau = np.exp(2) / (np.exp(2) + 9)
    assert norm(output.update) == 0
    np.testing.assert_allclose(output.weight, 1 - tau, rtol=1e-5)
    assert output.metrics["diagnostics/label_ratio"].total == 0
    assert output.metrics["perf/client_images"].total == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, output.client_state, client.kept))


def test_a_client_that_is_sure_of_everything_keeps_a_positive_weight(client):
    output = client(weights=client.biased(1e4))  # tau_k = 1
    assert 0 < output.weight < 1e-10
    assert norm(output.update) == 0


def test_a_client_without_images_takes_no_part(client):
    output = client(count=0)
    assert output.weight == 0
    assert norm(output.update) == 0
    assert output.metrics["client/threshold"].weight == 0


def test_a_client_of_one_image_trains_on_it_and_stays_finite():
    # With > nothing lies above the mean of one confidence. Batch norm then sees one real image in a batch of padding.
    options = {"method__strict": False, "method__batches": "accepted", "execution__conv": "xla"}
    client = Client(network="cnn", client__batch_size=8, **options)
    assert client.shared.weights.stats
    output = client(count=1)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(output.update))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(output.client_state))
    assert norm(output.update) > 0
    assert output.weight > 0
    assert output.metrics["perf/client_images"].total == 1
    assert output.metrics["diagnostics/label_ratio"] == (1, 1)
    assert np.isfinite(output.metrics["client/loss"].total)


def test_images_beyond_the_count_change_nothing(client):
    before = client(count=20)
    images = client.images
    client.images = images.at[client.index[20:]].set(255)
    after = client(count=20)
    client.images = images
    assert jax.tree.all(jax.tree.map(np.array_equal, before.update, after.update))
    np.testing.assert_array_equal(before.weight, after.weight)


def test_all_clients_dropped_leave_the_round_to_the_server():
    experiment = tiny.experiment("fixmatch", server__momentum=0.5)
    method = experiment.problem.method

    def nobody(*args):
        output = method.client_update(*args)
        return output._replace(weight=jnp.zeros(()), update=jax.tree.map(lambda x: x * jnp.nan, output.update))

    problem = experiment.problem._replace(method=method._replace(client_update=nobody))
    simulator = Simulator(problem, toy.executions()["vmap"], 250)
    state, _ = simulator.initialize(0)
    state, metrics = simulator.round(state)
    assert metrics["server/non_finite"] == 0
    assert norm(state.server.optimizer) == 0  # no aggregation: the momentum is untouched
    assert np.isfinite(metrics["server/loss"])


PROBS = np.array([[0.97, 0.02, 0.01], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.96, 0.03, 0.01], [0.2, 0.2, 0.6]], np.float32)


def labeling(monkeypatch, **options):
    """Pseudo-labels of five images whose softmax outputs are PROBS; the last is padding."""
    monkeypatch.setattr("fedjax_ssl.methods.local.class_probabilities", lambda *_: (jnp.asarray(PROBS), Passes()))
    unlabeled = Examples(None, jnp.arange(5), jnp.int32(4), None)
    shard = Shard(unlabeled, unlabeled, jnp.array([0, 0, 2, 1, 2]))
    return pseudo_label(None, FL2Options(**options), None, shard, None)


def test_acceptance_and_confidence_follow_eqs_10_and_11(monkeypatch):
    # tau = mean(.97, .5, .8, .96) = .8075; pbar = (.6325, .2875, .08), so tau(c) = (.8075, .3670, .1021).
    got = labeling(monkeypatch)
    np.testing.assert_allclose(got.tau, 0.8075, rtol=1e-6)
    assert got.label.tolist()[:4] == [0, 0, 1, 0]
    assert got.accepted.tolist() == [True, False, True, True, False]
    assert got.consistent.tolist() == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ("confident", [1, 0, 0, 1, 0]),
        ("confident_accepted", [1, 0, 0, 1, 0]),
        ("accepted", [1, 0, 1, 1, 0]),
        ("correct", [1, 0, 0, 0, 0]),
    ],
)
def test_sacr_acts_on_the_chosen_examples(monkeypatch, on, expected):
    assert labeling(monkeypatch, consistency_on=on).consistent.astype(int).tolist() == expected


def test_a_fixed_threshold_accepts_the_confident_alone(monkeypatch):
    got = labeling(monkeypatch, threshold="fixed", confidence=0.96)
    assert got.accepted.tolist() == [True, False, False, bool(np.float32(0.96) > 0.96), False]
    assert labeling(monkeypatch, threshold="fixed", confidence=0.96, strict=False).accepted.tolist()[3]


def test_each_ablation_changes_the_update():
    updates = {}
    for name, overrides in {
        "paper": {},
        "no consistency": {"method__consistency": "none"},
        "on accepted": {"method__consistency_on": "accepted", "method__rho": 1.0},
        "sam objective": {"method__consistency": "sam", "method__rho": 1.0},
        "sam perturbation": {"method__perturbation": "sam", "method__rho": 1.0},
        "fixed threshold": {"method__threshold": "fixed", "method__confidence": 0.2},
        "accepted batches": {"method__batches": "accepted"},
    }.items():
        output = Client(**{"method__confidence": 0.15, **overrides})()
        updates[name] = np.concatenate([np.ravel(x) for x in jax.tree.leaves(output.update)])
    names = list(updates)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not np.array_equal(updates[one], updates[other]), (one, other)


def test_fixmatch_is_fl2_without_its_three_parts_bit_for_bit(usual_emitters):
    rows, states = [], []
    parts_off = {"method__threshold": "fixed", "method__consistency": "none", "method__aggregation": "uniform"}
    for method, overrides in (("fixmatch", {}), ("fl2", parts_off)):
        experiment = tiny.experiment(method, rounds=2, method__confidence=0.2, **overrides)
        run = list(experiment.rounds())
        kept = [{k: v for k, v in row.items() if not k.startswith(("client/threshold", "time/", "perf/"))} for _, row in run]
        rows += [(method, row) for row in kept]
        states.append(run[-1][0])
    assert [row for name, row in rows if name == "fl2"] == [row for name, row in rows if name == "fixmatch"]
    assert jax.tree.all(jax.tree.map(np.array_equal, states[0].server, states[1].server))


def test_fedprox_pulls_towards_the_broadcast_model():
    free, held = (Client(method__prox_mu=mu, method__confidence=0.15, client__epochs=5)() for mu in (0.0, 20.0))
    assert 0 < norm(held.update) < norm(free.update)

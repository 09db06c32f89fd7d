"""FedMatch against NumPy: whole client updates, uploads, the server's training, who gets which helpers, and what they agree on.

The network is linear, so that each gradient is written out. Batches come in order instead of shuffled, and the views draw
nothing: the strong one is the image's mirror image, the labeled one its negative, so that one in place of another shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl.local import Broadcast, Server, Weights
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.local.server import StaticNorm
from fedjax_ssl.method import Aggregate, ClientData, Cohort, DataSpec, ServerData
from fedjax_ssl.methods.fedmatch import FedMatchClientState, FedMatchOptions, Helpers, fedmatch
from fedjax_ssl.models import decomposed
from fedjax_ssl.models.decomposed import Parts
from fedjax_ssl.ssl import agreement
from tests.golden import linear_clients as lc

SIDE, CLASSES, CLIENTS, RATE, MOMENTUM = lc.SIDE, lc.CLASSES, 6, lc.RATE, lc.MOMENTUM
SGD = torch_sgd(momentum=MOMENTUM)
SIZE = SIDE * SIDE * CLASSES + CLASSES  # parameters
UNLABELED, BATCH = 7, 4
LABELED, LABELED_BATCH = 5, 2
EPOCHS = {False: 2, True: 1}  # labels at the server, at the clients
TRUE_LABELS = np.array([0, 0, 1, 0, 1, 0, 0, 2])  # the eighth row is padding
LABELS = np.array([2, 0, 1, 1, 0, 0])  # so is the sixth here

# Every weight differs from its default and is large enough to show; entries of psi change by more and by less than delta.
OPTIONS = {
    "confidence": 0.8, "unlabeled_batch_size": BATCH, "lambda_s": 1.5, "lambda_i": 0.7, "lambda_a": 0.9, "lambda_l1": 0.06,
    "lambda_l2": 0.11, "l1_thres": 0.03, "delta_thres": 0.04,
}  # fmt: skip


VIEWS = lc.VIEWS._replace(weak=lambda key, images: jnp.nan * images, labeled=lambda key, images: -lc.upright(images))


def outputs(x, *parts):
    return lc.softmax(x @ sum(part["kernel"] for part in parts) + sum(part["bias"] for part in parts))


class Problem:
    """Images, parameters, helpers and momenta in float64, and what FedMatch makes of them here and there."""

    def __init__(self, seed=64):  # the seed is one that the assertions on the example hold for
        rng = np.random.default_rng(seed)
        self.pool = rng.integers(0, 256, (20, SIDE, SIDE, 1)).astype(np.uint8)
        self.rows, self.labeled_rows = rng.permutation(20)[:8], rng.permutation(20)[:6]

        self.sigma, self.psi, self.known, *self.helpers = (lc.random_layer(rng, scale) for scale in (0.8, 0.3, 0.3, 0.9, 0.9))
        self.known = lc.combine(lambda a, b: np.where(rng.random(a.shape) < 0.7, a, b), self.psi, self.known)
        self.momenta = [lc.random_layer(rng, 0.2) for _ in range(2)]
        self.overruled = 0  # labels of confident examples that are not the client's own

    def views(self, rows):
        images = lc.plain(self.pool[rows].astype(float))
        return images.reshape(len(rows), -1), images[:, :, ::-1].reshape(len(rows), -1)

    def psi_gradient(self, options, sigma, psi, at, helpers):
        """(gradient, sums for the metrics) of the unlabeled loss on examples `at`."""
        (x, strong), n = self.views(self.rows[at]), len(at)
        p, q = outputs(x, sigma, psi), outputs(strong, sigma, psi)
        assert np.abs(p.max(1) - options.confidence).min() > 1e-3  # no decision hangs on float32
        f = p.max(1) >= options.confidence
        first = outputs(self.views(self.rows[:1])[0], sigma, psi)
        assert first.max() > options.confidence + 1e-3  # it fills up the last batch: confident, but not to count there
        share = (f / max(f.sum(), 1))[:, None]
        followed = [outputs(x, self.sigma, h) for h in helpers]  # the sigma that the round began with
        votes = sum(np.eye(CLASSES)[o.argmax(1)] for o in [p, *followed])
        label = votes.argmax(1)
        self.overruled += int(((label != p.argmax(1)) & f).sum())
        g = lc.gradient(strong, options.lambda_a * lc.residual(q, label) * share)
        kl = np.zeros(n)
        if helpers:
            kl = sum((o * np.log(o / p)).sum(1) for o in followed) / len(helpers)
            g_i = lc.gradient(x, options.lambda_i * (p - sum(followed) / len(helpers)) * share)
            g = lc.combine(np.add, g, g_i)
        g = lc.combine(lambda g, p: g + options.lambda_l1 * np.sign(p), g, psi)
        g = lc.combine(lambda g, p, s: g + 2 * options.lambda_l2 * (p - s), g, psi, sigma)
        right = label == TRUE_LABELS[at]
        return g, np.array([lc.cross_entropy(q, label)[f].sum(), kl[f].sum(), f.sum(), n, (right & f).sum()])

    def sigma_gradient(self, options, sigma, psi, at):
        x, y = -self.views(self.labeled_rows[at])[0], LABELS[at]
        p = outputs(x, sigma, psi)
        return lc.gradient(x, options.lambda_s * lc.residual(p, y) / len(at)), lc.cross_entropy(p, y).sum()

    def expected(self, options, helpers, at_clients, prox_mu):
        """(sigma, psi, momenta, sums for the metrics) after a client's training; FedProx pulls each part to its own start."""

        def pulled(g, part, start):
            return lc.combine(lambda g, w, a: g + prox_mu * (w - a), g, part, start)

        sigma, psi = self.sigma, self.psi
        m_sigma, m_psi = self.momenta
        batches, labeled = [list(range(4)), list(range(4, 7))], [[0, 1], [2, 3], [4]]
        sums, labeled_loss = 0, 0.0
        for s in range(EPOCHS[at_clients] * len(labeled if at_clients else batches)):
            if at_clients:
                g, loss = self.sigma_gradient(options, sigma, psi, labeled[s % 3])
                (sigma, m_sigma), labeled_loss = lc.sgd(sigma, pulled(g, sigma, self.sigma), m_sigma), labeled_loss + loss
            g, more = self.psi_gradient(options, sigma, psi, batches[s % 2], helpers)
            (psi, m_psi), sums = lc.sgd(psi, pulled(g, psi, self.psi), m_psi), sums + more
        return sigma, psi, [m_sigma, m_psi] if at_clients else [m_psi], sums, labeled_loss

    def got(self, helpers, at_clients, *, prox_mu=0.0, seen=True):
        update = client_of(at_clients, prox_mu)
        labeled = lc.examples(self.pool, self.labeled_rows, LABELED if at_clients else 0, LABELS)
        client_data = ClientData(labeled, lc.examples(self.pool, self.rows, UNLABELED), jnp.asarray(TRUE_LABELS))
        momenta = self.momenta if at_clients else self.momenta[1:]
        momenta = tuple(lc.with_leaves(SGD.init(lc.named(tree)), lc.named(tree)) for tree in momenta)
        state = FedMatchClientState(jnp.array(seen), jnp.zeros(CLASSES), lc.named(self.known), momenta)
        weights = Weights(Parts(lc.named(self.sigma), lc.named(self.psi)), {})
        shared = Broadcast(weights, jnp.float32(RATE), extra=jnp.array(bool(helpers)))
        psi = jax.tree.map(lambda *x: jnp.stack(x), *(lc.named(h) for h in self.helpers))
        per_client = Helpers(psi, jnp.arange(2) < len(helpers))
        return update(shared, per_client, state, client_data, jax.random.key(0))


@functools.cache
def client_of(at_clients, prox_mu):
    """The client update, compiled once for each place of labels and weight of FedProx's term."""
    task = lc.linear_task(labels_at=("clients",) if at_clients else ("server",), views=VIEWS)
    size, epochs = LABELED_BATCH if at_clients else BATCH, EPOCHS[at_clients]
    client = lc.InOrder(SGD, lambda _: None, size, epochs=epochs, prox_mu=prox_mu)
    method = fedmatch(task=task, client=client, server=Server(None, None, 0, None), options=FedMatchOptions(**OPTIONS))
    return lc.with_costs(method.client_update)


def layer(tree):
    (only,) = tree.values()
    return jax.tree.map(lambda x: np.asarray(x, np.float64), only)


def upload(new, known, threshold, delta):
    """(what the server has then, entries sent)."""
    sparse = lc.combine(lambda x: np.where(np.abs(x) > threshold, x, 0), new)
    change = lc.combine(lambda x, y: np.abs(x - y), sparse, known)
    assert np.abs(lc.flat(change) - delta).min() > 1e-4
    sent = lc.combine(lambda c: c > delta, change)
    assert 0 < lc.flat(sent).sum() < SIZE
    return lc.combine(np.where, sent, new, known), int(lc.flat(sent).sum())


def message(entries):
    return min(8 * entries, 4 * SIZE)


@pytest.mark.parametrize(("at_clients", "prox_mu"), [(False, 0.0), (True, 0.0), (True, 0.3)])
@pytest.mark.parametrize("num_helpers", [0, 1, 2])
def test_a_client_update_is_what_the_equations_say(num_helpers, at_clients, prox_mu):
    problem, options = Problem(), FedMatchOptions(**OPTIONS)
    helpers = problem.helpers[:num_helpers]
    sigma, psi, momenta, (ce, kl, confident, images, right), labeled_loss = problem.expected(
        options, helpers, at_clients, prox_mu
    )
    output = problem.got(helpers, at_clients, prox_mu=prox_mu)
    up_psi, entries = upload(psi, problem.psi, options.l1_thres, options.delta_thres)
    up_sigma, sigma_entries = problem.sigma, 0
    assert 0 < confident < images
    assert (problem.overruled > 0) == (num_helpers > 0)
    if at_clients:
        up_sigma, sigma_entries = upload(sigma, problem.sigma, 0.0, options.delta_thres)
        lc.assert_same(layer(output.update.params.sigma), lc.combine(np.subtract, problem.sigma, up_sigma))
        update_psi = output.update.params.psi
    else:
        update_psi = output.update.params  # nothing of sigma
    lc.assert_same(layer(update_psi), lc.combine(np.subtract, problem.psi, up_psi))
    assert output.weight == 1

    state = output.client_state
    assert bool(state.seen)
    lc.assert_same(layer(state.psi), up_psi)
    lc.assert_same(lc.with_leaves(momenta, state.optimizer), momenta)
    noise = lc.plain(np.asarray(agreement.embedding_image((SIDE, SIDE, 1)), float)).reshape(1, -1)
    np.testing.assert_allclose(state.embedding, outputs(noise, up_sigma, up_psi)[0], rtol=1e-4)

    differing = int((lc.flat(problem.known) != lc.flat(problem.psi)).sum())
    assert 0 < differing < SIZE / 2
    parts = 2 if at_clients else 1
    metrics = {
        "client/unlabeled_loss" if at_clients else "client/loss": (ce, confident),
        "client/consistency_loss": (kl, confident if helpers else 0),
        "client/mask_rate": (confident, images),
        "client/upload_fraction": (entries + sigma_entries, parts * SIZE),
        **lc.ratios(right, confident, images),
        "comm/bytes_down": (4 * SIZE + message(differing) + len(helpers) * 4 * SIZE,),
        "comm/bytes_up": (message(entries) + (message(sigma_entries) if at_clients else 0),),
        "perf/client_images": (images + (LABELED if at_clients else 0),),
    }
    if at_clients:
        metrics["client/loss"] = (labeled_loss, LABELED)
    lc.assert_metrics({name: value for name, value in output.metrics.items() if not name.startswith("cost/")}, metrics)


def test_a_new_client_receives_all_of_psi():
    output = Problem().got([], False, seen=False)
    assert output.metrics["comm/bytes_down"].total == 8 * SIZE


class ServerSide:
    """A method with a server, its state in a round of `Problem`, and what that server reads."""

    def __init__(self, labels_at, **options):
        self.problem, self.options = Problem(), FedMatchOptions(**OPTIONS | options)
        task = lc.linear_task(labels_at=(labels_at,), views=VIEWS)
        tune = lc.InOrder(SGD, lambda _: jnp.float32(RATE), LABELED_BATCH, epochs=2)
        server = Server(optax.sgd(1.0), tune, 1, StaticNorm("labeled", "examples", 4, 4))
        client = lc.InOrder(SGD, lambda _: jnp.float32(RATE), BATCH, epochs=1, persistent=False)
        self.method = fedmatch(task=task, client=client, server=server, options=self.options)
        self.state, self.clients = self.method.init(jax.random.key(0), DataSpec((SIDE, SIDE, 1), CLASSES, CLIENTS, 3))
        count = LABELED if labels_at == "server" else 0
        labeled = lc.examples(self.problem.pool, self.problem.labeled_rows, count, LABELS)
        self.data = ServerData(labeled, labeled, None, labeled, jnp.int32(3))

    def parts(self, state):
        return [layer(part) for part in state.weights.params]

    def trained(self, sigma, psi, momentum):
        """(sigma, its momentum) after two epochs."""
        for at in 2 * [[0, 1], [2, 3], [4]]:
            sigma, momentum = lc.sgd(sigma, self.problem.sigma_gradient(self.options, sigma, psi, at)[0], momentum)
        return sigma, momentum


def test_the_server_trains_sigma_before_and_after_every_average_of_psi():
    side = ServerSide("server")
    sigma, psi = side.parts(side.state)
    np.testing.assert_allclose(lc.flat(psi), 0.2 * lc.flat(sigma), rtol=1e-6)  # psi begins as a fifth of sigma
    prepared, _ = jax.jit(side.method.prepare)(side.state, side.data, jax.random.key(1))
    sigma, momentum = side.trained(sigma, psi, {"kernel": 0.0, "bias": 0.0})
    lc.assert_same(side.parts(prepared), [sigma, psi])
    aggregate = Aggregate(Weights(lc.named(side.problem.psi), ()), jnp.float32(2.0))
    after, metrics = jax.jit(side.method.server_update)(prepared, aggregate, side.data, jax.random.key(2))
    psi = lc.combine(np.subtract, psi, side.problem.psi)
    sigma, _ = side.trained(sigma, psi, momentum)
    lc.assert_same(side.parts(after), [sigma, psi])
    assert np.isfinite(metrics["server/loss"].total)


def test_with_labels_at_the_clients_the_server_averages_both_parts_and_trains_none():
    side = ServerSide("clients")
    prepared, _ = jax.jit(side.method.prepare)(side.state, side.data, jax.random.key(1))
    aggregate = Aggregate(Weights(Parts(lc.named(side.problem.sigma), lc.named(side.problem.psi)), ()), jnp.float32(2.0))
    after, metrics = jax.jit(side.method.server_update)(prepared, aggregate, side.data, jax.random.key(2))
    averaged = jax.tree.map(np.subtract, side.parts(side.state), [side.problem.sigma, side.problem.psi])
    lc.assert_same(side.parts(after), averaged)
    assert metrics == {}


def test_the_tested_network_has_a_sparse_psi():
    side = ServerSide("server", l1_thres=0.2)
    sigma, psi = side.problem.sigma, side.problem.psi
    sparse = lc.combine(lambda x: np.where(np.abs(x) > 0.2, x, 0), psi)
    assert 0 < (lc.flat(sparse) == 0).sum() < SIZE
    state = side.state._replace(weights=Weights(Parts(lc.named(sigma), lc.named(psi)), {}))
    logits = side.method.predict["global"](state, jnp.asarray(side.problem.pool), jnp.ones(20, bool))
    x, _ = side.problem.views(np.arange(20))
    np.testing.assert_allclose(jax.nn.softmax(logits), outputs(x, sigma, sparse), rtol=1e-4, atol=1e-6)


def test_the_cohort_gets_its_helpers_psi_in_every_tenth_round_alone():
    side = ServerSide("server")
    assert side.options.helper_period == 10
    rng = np.random.default_rng(4)
    #                     client 0    1     2    3    4    5; client 2 is new
    along_a_line = jnp.float32([0.1, 0.9, 0.15, 0.2, 0.6, 0.4])
    clients = side.clients._replace(
        embedding=jnp.stack([along_a_line, 1 - along_a_line, jnp.zeros(CLIENTS)], axis=1),
        seen=jnp.arange(CLIENTS) != 2,
        psi=jax.tree.map(lambda x: jnp.float32(rng.standard_normal(x.shape)), side.clients.psi),
    )
    broadcast = jax.jit(side.method.broadcast)
    for number in range(31):
        shared, per_client = broadcast(side.state, clients, Cohort(jnp.array([4, 2, 0]), jnp.int32(number)))
        assert bool(shared.extra) == (number in (9, 19, 29))
        if not shared.extra:
            assert not np.any(per_client.available)
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(per_client.psi))
            continue
        assert per_client.available.tolist() == [[True, True], [False, False], [True, True]]
        for got, stored in zip(jax.tree.leaves(per_client.psi), jax.tree.leaves(clients.psi), strict=True):
            np.testing.assert_array_equal(got[0], stored[jnp.array([5, 1])])
            np.testing.assert_array_equal(got[2], stored[jnp.array([3, 5])])


def test_an_upload_carries_the_entries_that_changed():
    #                 same, by delta, up, down, small: by less than delta but 0 once sparse, by more, 0 before, by less
    known = np.array([0.5, 0.5, 0.5, 0.5, 0.1, 0.5, 0.0, 0.2])
    new = np.array([0.5, 0.5625, 0.7, 0.3, 0.04, 0.03, 0.04, 0.25])
    expected = np.array([0.5, 0.5, 0.7, 0.3, 0.04, 0.03, 0.0, 0.2])
    got = decomposed.changed({"w": jnp.float32(new)}, {"w": jnp.float32(known)}, threshold=0.05, delta=0.0625)
    np.testing.assert_allclose(got.value["w"], expected, rtol=1e-6)
    assert int(got.entries) == 4
    dense = decomposed.changed({"w": jnp.float32(new)}, {"w": jnp.float32(known)}, threshold=0.0, delta=0.0)
    np.testing.assert_array_equal(dense.value["w"], jnp.float32(new))
    assert int(dense.entries) == 7

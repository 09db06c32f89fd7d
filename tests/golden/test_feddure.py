"""FedDure against NumPy in float64: a whole `client_update` of a linear softmax network, equation by equation.

F-reg's gradient, the second-order one (Eq. 5), is by central differences; all others are written out. Networks are matrices
[D + 1, C] whose last row is the bias, and F-reg is one flat vector.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import models
from fedjax_ssl.local import Broadcast, Server, Setup, Task, Training, Weights
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.methods.feddure import FedDureClientState, FedDureOptions, Regulators, StepViews, feddure, regulate
from fedjax_ssl.ssl import regulators
from tests.golden import linear_clients as lc
from tests.golden.normalizing import in_front_of, normalized, tracked

ETA_S, ETA_W, THRESHOLD, SHARE = 0.2, 0.05, 0.7, 0.3
# F-reg's parameters in the order in which they are in the flat vector.
SHAPES = {
    ("hidden", "kernel"): (lc.CLASSES, 128),
    ("hidden", "bias"): (128,),
    ("output", "kernel"): (128, 1),
    ("output", "bias"): (1,),
}
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]


class SGD:
    """With Nesterov momentum and weight decay."""

    m = 0.0

    def step(self, w, g, rate):
        w, self.m = lc.sgd(w, g, self.m, rate, decay=lc.DECAY, nesterov=True)
        return w


OPTIMIZERS = {
    "sgd": (SGD, torch_sgd(momentum=lc.MOMENTUM, nesterov=True, weight_decay=lc.DECAY)),
    "adam": (lc.Adam, optax.scale_by_adam()),
}


def ones(x):
    return np.hstack([x, np.ones((len(x), 1))])


def ce(z, y):
    return lc.cross_entropy(lc.softmax(z), y)


def unflat(w):
    """F-reg's parameters by name, from the flat vector."""
    tree = {"hidden": {}, "output": {}}
    for (layer, name), part in zip(SHAPES, np.split(w, np.cumsum(SIZES)[:-1]), strict=True):
        tree[layer][name] = part.reshape(SHAPES[layer, name])
    return tree


def flat(tree):
    return np.concatenate([np.ravel(tree[layer][name]) for layer, name in SHAPES])


def f_reg(w, s):
    """F-reg's weights of outputs s [B, C], and their slopes in s [B, C]."""
    w = unflat(w)
    hidden = s @ w["hidden"]["kernel"] + w["hidden"]["bias"]
    h = 1 / (1 + np.exp(-(np.maximum(hidden, 0) @ w["output"]["kernel"] + w["output"]["bias"])[:, 0]))
    return h, (h * (1 - h))[:, None] * (((hidden > 0) * w["output"]["kernel"][:, 0]) @ w["hidden"]["kernel"].T)


def pseudo_gradient(phi, w, u, y, passed, options):
    """grad_phi G(w, phi), G = mean_i F(f(u_i; phi); w) CE(y_i, f(u_i; phi))."""
    s = lc.softmax(u @ phi)
    if options.regulators == "no_f":
        return u.T @ (passed[:, None] * lc.residual(s, y)) / len(y)
    h, slope = f_reg(w, s)
    residual = h[:, None] * lc.residual(s, y)
    if not options.detach_freg_input:
        residual += ce(u @ phi, y)[:, None] * s * (slope - (slope * s).sum(1, keepdims=True))
    return u.T @ residual / len(y)


def meta_gradient(phi, w, u, y, x, labels, options):
    """grad_w CE(labels, f(x; phi - ETA_S grad_phi G(w, phi))) by central differences."""

    def loss(w):
        return ce(x @ (phi - ETA_S * pseudo_gradient(phi, w, u, y, None, options)), labels).mean()

    steps = 1e-5 * np.eye(len(w))
    return np.array([(loss(w + step) - loss(w - step)) / 2e-5 for step in steps])


class Expected:
    """A client's round, as the equations say; with the network's inputs normalized where there are statistics."""

    def __init__(self, client, options, optimizer, w, adam, stats):
        self.options, self.seen, self.stats = options, [], stats
        self.w, self.f_optimizer = w, adam
        begin = np.vstack([client.params["kernel"], client.params["bias"]])
        theta, self.phi = begin, begin
        optimizer_of_theta, self.c_optimizer = optimizer(), optimizer()
        for labeled, unlabeled in lc.STEPS:
            self.seen.append({"true_labels": lc.TRUE_LABELS[unlabeled]})
            views = client.labeled[labeled], client.weak[unlabeled], client.strong[unlabeled]
            theta = optimizer_of_theta.step(theta, self.gradient(theta, *views, lc.LABELS[labeled]), lc.RATE)
        self.update = {"kernel": (begin - theta)[:-1], "bias": (begin - theta)[-1]}

    def inputs(self, *views):
        """Views as a network sees them in one batch."""
        batch = np.concatenate(views)
        batch = ones(normalized(batch) if self.stats else batch)
        return np.split(batch, np.cumsum([len(view) for view in views])[:-1])

    def gradient(self, theta, x, weak, strong, labels):
        (of_x,), (of_strong,), options = self.inputs(x), self.inputs(strong), self.options  # what phi sees
        if self.stats:  # of theta's batch alone
            self.stats = tracked(self.stats, np.concatenate([x, weak, strong]), SHARE)
        x, weak, strong = self.inputs(x, weak, strong)
        s = lc.softmax(weak @ theta)
        y, passed = s.argmax(1), s.max(1) >= THRESHOLD  # Eq. 1
        assert np.diff(np.sort(s, 1)[:, -2:]).min() > 1e-3  # no decision hangs on float32
        assert np.abs(s.max(1) - THRESHOLD).min() > 1e-3
        phi = theta if options.regulators == "no_c" else self.phi
        reward, m = 0.0, passed.astype(float)
        if options.regulators != "no_f":
            meta = meta_gradient(phi, self.w, of_strong, y, of_x, labels, options)  # Eqs. 4, 5
            self.w = self.f_optimizer.step(self.w, meta, ETA_W)
            m = f_reg(self.w, lc.softmax(strong @ theta))[0]  # Eq. 6
        if options.regulators != "no_c":
            new = self.c_optimizer.step(phi, pseudo_gradient(phi, self.w, of_strong, y, passed, options), ETA_S)  # Eq. 2
            reward = ce(of_x @ phi, labels).mean() - ce(of_x @ new, labels).mean()  # Eq. 3
            self.phi = new
        ce_s, ce_u = ce(x @ theta, labels), ce(strong @ theta, y)
        self.seen[-1] |= {"y": y, "passed": passed, "m": m, "reward": reward, "ce_s": ce_s, "ce_u": ce_u}
        p, q = lc.residual(lc.softmax(x @ theta), labels), lc.residual(lc.softmax(strong @ theta), y)
        return x.T @ p / len(x) + strong.T @ (m[:, None] * q) / len(q) + reward * strong.T @ q / len(q)  # Eqs. 7 to 10

    def metrics(self):
        def all_of(name):
            return np.concatenate([step[name] for step in self.seen])

        no_f, steps = self.options.regulators == "no_f", len(self.seen)
        accepted = [step["passed"] | (not no_f) for step in self.seen]
        of_labels = lc.diagnostics([step["y"] for step in self.seen], [step["true_labels"] for step in self.seen], accepted)
        if not no_f:
            del of_labels["client/mask_rate"]
            of_labels["client/instance_weight_mean"] = (all_of("m").sum(), len(all_of("m")))
            for name, q in (("p10", 0.1), ("p90", 0.9)):
                of_labels[f"client/instance_weight_{name}"] = (sum(np.quantile(step["m"], q) for step in self.seen), steps)
        if self.options.regulators != "no_c":
            of_labels["client/reward"] = (sum(step["reward"] for step in self.seen), steps)
        for name, of in (("client/loss", "ce_s"), ("client/unlabeled_loss", "ce_u")):
            of_labels[name] = (all_of(of).sum(), len(all_of(of)))
        size = sum(4 * leaf.size for leaf in (*self.update.values(), *self.stats.values()))
        forward, backward = self.rows()
        return of_labels | lc.costs(size, size, sum(len(a) + len(b) for a, b in lc.STEPS), forward * steps, backward * steps)

    def rows(self):
        """Rows that a step takes forward and back, theta's and phi's. Weak views go back where batch norm sees them."""
        strong, labeled = lc.UNLABELED_BATCH, lc.BATCH
        forward = labeled + 2 * strong
        back = forward if self.stats else labeled + strong
        if self.options.regulators == "no_f":  # both losses of the reward
            return forward + strong + 2 * labeled, back + strong
        if self.options.regulators == "no_c":
            return forward + 2 * strong + labeled, back + strong + labeled
        return forward + 2 * strong + 3 * labeled, back + 2 * strong + labeled


def got(client, options, optimizer, w, adam, stats):
    """(update, of statistics, weight, client state, metrics) of the method's client, F-reg as the client kept it."""
    task = lc.linear_task("running", norm_momentum=SHARE) if stats else lc.linear_task()
    task = task._replace(model=in_front_of(task.model)) if stats else task
    training = lc.InOrder(optimizer, lambda _: None, lc.BATCH, epochs=lc.EPOCHS, persistent=False)
    method = feddure(task=task, client=training, server=Server(None, None, 0, None), options=options)
    kept = FedDureClientState((), (), ())
    if options.regulators != "no_f":
        moments = (lc.float32(unflat(leaf)) for leaf in (adam.m, adam.v))
        kept = FedDureClientState((), lc.float32(unflat(w)), optax.ScaleByAdamState(jnp.int32(adam.t), *moments))
    shared = Broadcast(Weights(lc.named(client.params), lc.float32(stats)), jnp.float32(lc.RATE))
    update, *output = lc.with_costs(method.client_update)(shared, (), kept, client.client_data(), jax.random.key(0))
    return update.params["Dense_0"], update.stats, *output


@pytest.mark.parametrize(
    ("optimizer", "changes", "norm"),
    [
        ("sgd", {}, False),
        ("adam", {}, False),
        pytest.param("sgd", {"detach_freg_input": True}, False, marks=pytest.mark.ci),
        pytest.param("sgd", {"regulators": "no_c"}, False, marks=pytest.mark.ci),
        ("sgd", {"regulators": "no_f"}, False),
        ("sgd", {}, True),
    ],
    ids=["both", "adam", "detached", "no_c", "no_f", "running statistics"],
)
def test_a_client_update_is_what_the_equations_say(optimizer, changes, norm):
    rng, client, rates = np.random.default_rng(1), lc.Client(), {"eta_s": ETA_S, "eta_w": ETA_W}
    options = FedDureOptions(confidence=THRESHOLD, unlabeled_batch_size=lc.UNLABELED_BATCH, **rates, **changes)
    size = sum(SIZES)
    w, m, v = rng.standard_normal(size) / 4, 1e-3 * rng.standard_normal(size), 1e-5 * rng.uniform(0.5, 1, size)
    stats = {"mean": 0.3 * rng.standard_normal(lc.SIDE**2), "var": rng.uniform(0.3, 0.9, lc.SIDE**2)} if norm else {}
    in_numpy, in_jax = OPTIMIZERS[optimizer]
    expected = Expected(client, options, in_numpy, w, lc.Adam(m, v, 7), stats)
    update, moved, weight, state, metrics = got(client, options, in_jax, w, lc.Adam(m, v, 7), stats)
    lc.assert_same(update, expected.update)
    if norm:
        lc.assert_same(moved, lc.combine(np.subtract, stats, expected.stats))
    assert weight == lc.LABELED + lc.UNLABELED
    wanted = expected.metrics()
    if options.regulators != "no_c":  # a small difference of losses
        np.testing.assert_allclose(metrics["client/reward"], wanted["client/reward"], rtol=2e-3)
        assert abs(wanted["client/reward"][0]) > 1e-3
        wanted["client/reward"] = metrics["client/reward"]
    lc.assert_metrics(metrics, wanted)
    assert state.optimizer == ()
    if options.regulators == "no_f":
        assert state == ((), (), ())
        assert 0 < metrics["client/mask_rate"].total < metrics["client/mask_rate"].weight
        return
    adam, kept = expected.f_optimizer, state.w_optimizer
    assert kept.count == adam.t == 7 + len(lc.STEPS)
    for tree, before, wanted in ((state.w, w, expected.w), (kept.mu, 0, adam.m), (kept.nu, 0, adam.v)):
        moved = wanted - before
        np.testing.assert_allclose(flat(tree) - before, moved, rtol=2e-3, atol=1e-4 * np.abs(moved).max())
    weights = [step["m"] for step in expected.seen]
    assert max(map(np.ptp, weights)) > 0.05  # examples differ in weight


def test_f_reg_has_the_papers_size_and_a_start_of_its_own_for_each_key():
    first, second = (regulators.init(jax.random.key(seed), 10) for seed in (0, 1))
    assert sum(leaf.size for leaf in jax.tree.leaves(first)) == 1537
    for layer, fan_in in (("hidden", 10), ("output", 128)):
        for leaf, other in zip(first[layer].values(), second[layer].values(), strict=True):
            assert np.abs(leaf).max() <= fan_in**-0.5
            assert not np.any(leaf == other)


def test_the_meta_gradient_is_that_of_nested_differentiation():
    """Eqs. 4 and 5 as written. A network of several layers, masked examples hold NaN; Adam's first moment is a tenth of it."""
    rng, shape = np.random.default_rng(0), (4, 4, 1)
    task = Task(models.build("cnn", num_classes=lc.CLASSES, conv="cpu", width=2), None, lc.CLASSES, "static")
    theta, phi = (task.init(jax.random.key(seed), shape) for seed in (0, 1))
    views = rng.standard_normal((11, *shape)).astype(np.float32)
    views[[4, 9, 10]] = np.nan
    masks = np.isfinite(views[:, 0, 0, 0])
    seen = StepViews(views[:5], np.array([0, 2, 1, 1, 0]), masks[:5], None, views[5:], masks[5:])
    w = regulators.init(jax.random.key(2), lc.CLASSES)
    label, passed = np.array([1, 0, 2, 2, 1, 0]), np.ones(6, bool)

    def per_example(params, views, labels):
        logits = task.train_logits(Weights(params, theta.stats), views, np.ones(len(views), bool), None)[0]
        return logits, jax.nn.logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]

    def of_labels(w):
        def weighted(params):
            logits, losses = per_example(params, seen.strong[seen.mask], label[seen.mask])
            hidden = jax.nn.relu(jax.nn.softmax(logits) @ w["hidden"]["kernel"] + w["hidden"]["bias"])
            return jnp.mean(jax.nn.sigmoid(hidden @ w["output"]["kernel"] + w["output"]["bias"])[:, 0] * losses)

        ahead = jax.tree.map(lambda p, g: p - 0.3 * g, phi.params, jax.grad(weighted)(phi.params))
        return jnp.mean(per_example(ahead, seen.labeled[seen.labeled_mask], seen.labels[seen.labeled_mask])[1])

    setup = Setup(task, Training(optax.identity(), lambda _: None, 5, epochs=1), None, FedDureOptions(eta_s=0.3))
    before = Regulators(phi.params, optax.EmptyState(), w, optax.scale_by_adam().init(w))
    step = jax.jit(lambda before: regulate(setup, seen, label, passed, theta, before, jax.random.key(0)))
    direct, nested = 10 * flat(step(before)[0].w_optimizer.mu), flat(jax.jit(jax.grad(of_labels))(w))
    assert np.isfinite(direct).all()
    assert np.linalg.norm(nested) > 1e-5
    np.testing.assert_allclose(direct, nested, rtol=1e-3, atol=1e-4 * np.abs(nested).max())

"""FedDure: two regulators at every client weigh what its unlabeled examples teach; labels at the clients.

The local network theta learns from labels, and from hard pseudo-labels of its own. The coarse-grained regulator (C-reg), a
network phi that starts from the broadcast model each round, also steps along the pseudo-labels, and by how much this lowers its
loss on labeled examples is their reward d, one for a batch. The fine-grained regulator (F-reg), a small network w that each
client keeps, weighs single examples, and learns so that phi's step would lower that loss. Neither is ever sent.

The paper's equations are the default. Its released code is another algorithm, without F-reg, whose reward has the other sign:
from it come data, networks, the size of unlabeled batches and what the paper leaves open, here:

- F-reg sees softmax outputs (the code's base class, which has the weak view's; here the strong one's, as in the equations).
- theta sees labeled, weak and strong views as one batch in training mode. phi sees strong views, and labeled ones, in training
  mode too; the statistics of its batches are dropped.
- The look-ahead is gradient descent, as it is written. theta and phi step by the client's optimizer (the paper: Adam), F-reg by
  Adam, whose state stays with it; phi's starts afresh each round, and theta's unless `client.optimizer.persistent`.
- A local epoch goes once through the labeled examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.local import (
    Broadcast,
    Fit,
    Gradients,
    Server,
    ServerState,
    Task,
    Training,
    Weights,
    apply_gradients,
    dropout_key,
    semi_supervised,
    substream,
)
from fedjax_ssl.method import ClientOutput, DataSpec, Method, Shard
from fedjax_ssl.metrics import Metrics, mean
from fedjax_ssl.options import Count, Fraction, Options, Rate
from fedjax_ssl.ssl import losses, pseudo_labels, thresholds
from fedjax_ssl.ssl import regulators as f_reg

PyTree = Any


class FedDureOptions(Options):
    """FedDure's own settings."""

    regulators: Literal["both", "no_c", "no_f"] = Field(
        default="both",
        description=(
            "`both`; `no_c`: F-reg alone, which then learns through theta's look-ahead, and no reward; `no_f`: C-reg "
            "alone, with a fixed threshold in place of F-reg's weights (the ablation of Section 4.3)."
        ),
    )
    meta_gradient: Literal["direct", "nested"] = Field(
        default="direct",
        description=(
            "The gradient for F-reg in its `direct` form (`fedjax_ssl.ssl.regulators`), or `nested`, as it is written. "
            "They cost about the same: of nested differentiation, too, XLA keeps only what the gradient for F-reg "
            "needs."
        ),
    )
    detach_freg_input: bool = Field(
        default=False,
        description=(
            "Whether F-reg's input is a constant where phi is differentiated, as Theorem 2 does not assume; otherwise "
            "phi can lower its loss by lowering the weights."
        ),
    )
    confidence: Fraction = Field(
        default=0.6,
        description="The threshold that stands in for F-reg (.6 in the released code's settings).",
    )
    eta_s: Rate = Field(default=5e-4, description="Learning rate of phi, and of the look-ahead.")
    eta_w: Rate = Field(default=5e-4, description="Learning rate of F-reg.")
    unlabeled_batch_size: Count = Field(
        default=0,
        description=(
            "B_u; 0: each client's own, by the released code's rule (`own_batch_size`). 'Batch size 10' of the paper's "
            "Section 4.1 may mean 10. All batches have the shape of the largest client's, and `cost/*` counts them so: "
            "split (DIR, DIR) on CIFAR-10, B_u is 15 to 270 with a mean of 97 (over 20 draws), so that 2.8 times as "
            "many unlabeled examples pass as are used."
        ),
    )
    largest_batch_size: Count = Field(default=0, description="")

    def for_run(self, rounds: int, counts: np.ndarray, batch_size: int) -> Self:
        """With the largest client's B_u."""
        largest = self.largest_batch_size or largest_batch(counts, batch_size)
        return self.model_copy(update={"largest_batch_size": largest})


class ClientState(NamedTuple):
    """What a client keeps.

    Attributes:
        optimizer: of theta, where it is persistent.
        w: F-reg's parameters; `()` without F-reg.
        w_optimizer: the state of its Adam, likewise.
    """

    optimizer: PyTree
    w: PyTree
    w_optimizer: PyTree


class Regulators(NamedTuple):
    """What trains beside theta, step by step.

    Attributes:
        phi: C-reg's parameters, and the state of its optimizer; `()` without C-reg.
        phi_optimizer: likewise.
        w: F-reg's, `()` without F-reg.
        w_optimizer: likewise.
    """

    phi: PyTree
    phi_optimizer: PyTree
    w: PyTree
    w_optimizer: PyTree


class Setup(NamedTuple):
    """What the method is made of, as the factory receives it."""

    task: Task
    client: Training
    options: FedDureOptions


class Seen(NamedTuple):
    """A step's two batches, as the networks see them.

    Attributes:
        labeled: views [B, H, W, ch], of which `labels` int32 [B] and `labeled_mask` bool [B] say more.
        labels: see `labeled`.
        labeled_mask: see `labeled`.
        weak: views [B_u, H, W, ch] of the unlabeled examples, of which bool [B_u] `mask` are real.
        strong: likewise.
        mask: see `weak`.
    """

    labeled: jax.Array
    labels: jax.Array
    labeled_mask: jax.Array
    weak: jax.Array
    strong: jax.Array
    mask: jax.Array

    @property
    def both(self) -> jax.Array:
        """Bool scalar: whether there are labeled and unlabeled examples, without which no regulator has anything to learn."""
        return jnp.any(self.labeled_mask) & jnp.any(self.mask)


def feddure(*, task: Task, client: Training, server: Server, options: FedDureOptions = FedDureOptions()) -> Method:
    """FedDure, Algorithm 1.

    Args:
        task: network and views.
        client: local training of theta, whose optimizer is C-reg's too.
        server: aggregation and statistics; clients count with |D_s| + |D_u|.
        options: regulators and their learning rates.

    Returns:
        The method. Its client state is F-reg with its Adam, and the local optimizer's state where `client` is persistent.
    """
    setup = Setup(task, client, options)

    def client_update(shared: Broadcast, _: PyTree, state: ClientState, shard: Shard, key: jax.Array) -> ClientOutput:
        order_key, train_key = jax.random.split(key)
        masks = (shard.labeled.mask, shard.unlabeled.mask)
        if options.unlabeled_batch_size:
            schedule = client.paired_schedule(order_key, *masks, options.unlabeled_batch_size)
        else:
            own = own_batch_size(shard.labeled.count, shard.unlabeled.count, client.batch_size)
            schedule = client.paired_schedule(order_key, *masks, options.largest_batch_size, entries=jnp.maximum(own, 1))

        def step(carry: tuple[Fit, Regulators], pair: Pair, key: jax.Array) -> tuple[tuple[Fit, Regulators], Metrics]:
            gradients, regulators = gradient(setup, shard, carry[0].weights, pair, key, carry[1])
            anchor = shared.weights.params
            fit = apply_gradients(task, client, carry[0], gradients, shared.learning_rate, anchor=anchor)
            return (fit, regulators), gradients.metrics

        start = client.start(shared.weights, state.optimizer), begin(setup, shared.weights, state)
        trained = local.train(start, step, schedule, train_key)
        fit, regulators = trained.carry
        update = task.update(shared.weights, fit.weights)
        state = ClientState(client.keep(fit.optimizer), regulators.w, regulators.w_optimizer)
        metrics = local.client_metrics(trained, down=shared.weights, up=update)
        return ClientOutput(update, local.data_weight(task, shard), state, metrics)

    method = local.averaging_method(task, client, server, client_update, labels_at=("clients",))

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, ClientState]:
        state, optimizer = method.init(key, spec)
        if options.regulators == "no_f":
            return state, ClientState(optimizer, (), ())
        keys = jax.random.split(substream(key, "f_reg"), spec.num_clients)
        w = jax.vmap(lambda key: f_reg.init(key, spec.num_classes))(keys)
        return state, ClientState(optimizer, w, jax.vmap(optax.scale_by_adam().init)(w))

    return method._replace(init=init)


def own_batch_size(labeled: Any, unlabeled: Any, batch_size: int) -> jax.Array:
    """A client's B_u by the released code's rule: about as many unlabeled batches as there are labeled ones.

    |D_u| div n for n = round(|D_s| / B), but n = 4 where that is 2 or less; a quarter of it from 400 on; |D_u| where it is 0.

    Args:
        labeled: |D_s|, integer array of any shape.
        unlabeled: |D_u|, likewise.
        batch_size: B.

    Returns:
        Integers of the same shape; 0 without unlabeled examples.
    """
    n, rest = labeled // batch_size, labeled % batch_size
    n = n + ((2 * rest > batch_size) | ((2 * rest == batch_size) & (n % 2 == 1)))  # rounds half to even, as Python does
    size = unlabeled // jnp.where(n <= 2, 4, n)
    size = jnp.where(size >= 400, size // 4, size)
    return jnp.where(size == 0, unlabeled, size)


def largest_batch(counts: np.ndarray, batch_size: int) -> int:
    """The largest of the clients' own B_u, at least 1: the shape of all unlabeled batches.

    Args:
        counts: int32 [K, 2], the clients' labeled and unlabeled examples.
        batch_size: B.
    """
    return max(int(jnp.max(own_batch_size(counts[:, 0], counts[:, 1], batch_size))), 1)


def begin(setup: Setup, weights: Weights, state: ClientState) -> Regulators:
    """The regulators at the start of a round: C-reg from the broadcast model, F-reg as the client has it."""
    if setup.options.regulators == "no_c":
        return Regulators((), (), state.w, state.w_optimizer)
    return Regulators(weights.params, setup.client.optimizer.init(weights.params), state.w, state.w_optimizer)


def see(task: Task, shard: Shard, pair: Pair, key: jax.Array) -> Seen:
    """The views of a step's batches."""
    at = pair.labeled.positions
    images = shard.unlabeled.take(pair.unlabeled.positions)
    return Seen(
        labeled=task.views.labeled(substream(key, "labeled"), shard.labeled.take(at)),
        labels=shard.labeled.labels[at],
        labeled_mask=pair.labeled.mask,
        weak=task.views.weak(substream(key, "weak"), images),
        strong=task.views.strong(key, images),
        mask=pair.unlabeled.mask,
    )


def gradient(
    setup: Setup, shard: Shard, weights: Weights, pair: Pair, key: jax.Array, regulators: Regulators
) -> tuple[Gradients, Regulators]:
    """One step: theta's gradient, and the regulators after it.

        y_i = argmax f(weak(u_i); theta)                                                              (Eq. 1)
        grad_theta [ CE(y, f(x; theta)) + mean_i (m_i + d) CE(y_i, f(strong(u_i); theta)) ]           (Eqs. 7-10)

    The instance weights m_i and the reward d are constants there, and the pseudo-labels y_i have no threshold. theta takes one
    forward and one backward pass.
    """
    task, options = setup.task, setup.options

    seen = see(task, shard, pair, key)
    views, masks = (seen.labeled, seen.weak, seen.strong), (seen.labeled_mask, seen.mask, seen.mask)

    def forward(params: PyTree) -> tuple[tuple[jax.Array, ...], PyTree]:
        return task.train_logits_together(weights._replace(params=params), views, masks, dropout_key(key))

    logits, pullback, batch_stats = jax.vjp(forward, weights.params, has_aux=True)
    _, weak, strong = logits
    label, confidence = pseudo_labels.harden(jax.nn.softmax(weak))
    passed = seen.mask & thresholds.passes(confidence, options.confidence, strict=False)
    regulators, reward = regulate(setup, seen, label, passed, weights, regulators, key)
    m = instance_weights(options, regulators.w, strong, passed)  # Eq. 6

    def loss(logits: tuple[jax.Array, ...]) -> tuple[jax.Array, Metrics]:
        labeled, _, strong = logits
        supervised, metric = local.labeled_loss(labeled, seen.labels, seen.labeled_mask)
        ce = losses.cross_entropy(strong, label)
        value = supervised + losses.masked_mean((m + reward) * ce, seen.mask)
        return value, {"loss": metric, "unlabeled_loss": mean(ce, seen.mask)}

    cotangent, metrics = jax.grad(loss, has_aux=True)(logits)
    grad = pullback(cotangent)[0]
    metrics |= regulator_metrics(options, seen, m, reward)
    if options.regulators == "no_f":
        metrics |= semi_supervised.step_metrics(label, passed, shard, pair.unlabeled)
    else:
        true_labels = shard.true_labels[pair.unlabeled.positions]
        metrics |= pseudo_labels.diagnostics(label, true_labels, seen.mask, seen.mask)
    return Gradients(grad, batch_stats, metrics), regulators


def instance_weights(options: FedDureOptions, w: PyTree, logits: jax.Array, passed: jax.Array) -> jax.Array:
    """Weights of unlabeled examples, float32 [B_u]: F-reg's of softmax outputs, or whether the threshold is passed."""
    if options.regulators == "no_f":
        return passed.astype(jnp.float32)
    return f_reg.instance_weights(w, jax.nn.softmax(logits))


def regulate(
    setup: Setup, seen: Seen, label: jax.Array, passed: jax.Array, weights: Weights, regulators: Regulators, key: jax.Array
) -> tuple[Regulators, jax.Array]:
    """The regulators' step, and the reward of the batch's pseudo-labels.

        G(w, phi) = mean_i F(f(strong(u_i); phi); w) CE(y_i, f(strong(u_i); phi))
        w'   = w   - eta_w grad_w CE(y, f(x; phi - eta_s grad_phi G(w, phi)))                         (Eqs. 4, 5)
        phi' = phi - eta_s grad_phi G(w', phi)                                                        (Eq. 2)
        d    = CE(y, f(x; phi)) - CE(y, f(x; phi')), positive where the pseudo-labels helped          (Eq. 3)

    In the direct form phi takes a forward pass, two backward ones and one along a direction on strong views, and three forward
    passes and a backward one on labeled views.

    Args:
        setup: the method's parts.
        seen: the step's batches.
        label: int32 [B_u], pseudo-labels.
        passed: bool [B_u], those that pass the fixed threshold; the weights without F-reg.
        weights: theta, which stands in for phi without C-reg.
        regulators: before the step.
        key: of the dropout masks.

    Returns:
        (the regulators after it, d float32 scalar; 0 without C-reg).
    """
    (task, client, options), (phi, phi_optimizer, w, w_optimizer) = setup, regulators
    if options.regulators == "no_c":
        phi = weights.params

    def outputs(phi: PyTree, views: jax.Array, mask: jax.Array) -> jax.Array:
        return task.train_logits(Weights(phi, weights.stats), views, mask, dropout_key(key))[0]

    def strong(phi: PyTree) -> jax.Array:
        return outputs(phi, seen.strong, seen.mask)

    def labeled_loss(phi: PyTree) -> jax.Array:
        logits = outputs(phi, seen.labeled, seen.labeled_mask)
        return losses.masked_mean(losses.cross_entropy(logits, seen.labels), seen.labeled_mask)

    def loss(w: PyTree, logits: jax.Array) -> jax.Array:
        inputs = jax.lax.stop_gradient(logits) if options.detach_freg_input else logits
        m = instance_weights(options, w, inputs, passed)
        return losses.masked_mean(m * losses.cross_entropy(logits, label), seen.mask)

    teaching = Teaching(phi, strong, *jax.vjp(strong, phi), loss, labeled_loss)
    if options.regulators != "no_f":
        moved = step_f_reg(options, teaching, w, w_optimizer)
        w, w_optimizer = jax.tree.map(lambda new, old: jnp.where(seen.both, new, old), moved, (w, w_optimizer))
    if options.regulators == "no_c":
        return Regulators((), (), w, w_optimizer), jnp.zeros(())
    new, phi_optimizer = _step(client.optimizer, options.eta_s, phi, phi_optimizer, teaching.gradient(w))
    reward = labeled_loss(phi) - labeled_loss(new)
    return Regulators(new, phi_optimizer, w, w_optimizer), reward


class Teaching(NamedTuple):
    """How phi, as it is before a step, learns from the batch's pseudo-labels, and what that does to its labeled loss.

    Attributes:
        phi: the parameters.
        strong: phi -> its outputs float32 [B_u, C] on strong views.
        logits: those of `phi`.
        pullback: a cotangent of theirs [B_u, C] -> (the gradient for phi,).
        loss: (w, outputs [B_u, C]) -> G.
        labeled_loss: phi -> CE(y, f(x; phi)).
    """

    phi: PyTree
    strong: Callable[[PyTree], jax.Array]
    logits: jax.Array
    pullback: Callable[[jax.Array], tuple[PyTree]]
    loss: Callable[[PyTree, jax.Array], jax.Array]
    labeled_loss: Callable[[PyTree], jax.Array]

    def gradient(self, w: PyTree) -> PyTree:
        """grad_phi G(w, phi)."""
        return self.pullback(jax.grad(self.loss, 1)(w, self.logits))[0]


def step_f_reg(options: FedDureOptions, teaching: Teaching, w: PyTree, w_optimizer: PyTree) -> tuple[PyTree, PyTree]:
    """F-reg's parameters and its Adam's state after a step (Eqs. 4, 5; see `regulate`)."""
    phi, strong, logits, pullback, loss, labeled_loss = teaching
    if options.meta_gradient == "direct":
        # The pullback is linear, and its transpose is the derivative of phi's outputs in a direction. So the passes are shared,
        # and the network needs no rule but that of reverse mode, the only one that some convolutions have.
        (grad,), derivative = jax.vjp(pullback, jax.grad(loss, 1)(w, logits))
        ahead = f_reg.look_ahead(phi, grad, options.eta_s)
        (change,) = derivative((jax.grad(labeled_loss)(ahead),))
        meta = f_reg.direct_gradient(loss, w, logits, change, options.eta_s)
    else:
        meta = f_reg.nested_gradient(lambda w, phi: loss(w, strong(phi)), labeled_loss, w, phi, options.eta_s)
    return _step(optax.scale_by_adam(), options.eta_w, w, w_optimizer, meta)


def _step(
    optimizer: optax.GradientTransformation, rate: float, params: PyTree, state: PyTree, grad: PyTree
) -> tuple[PyTree, PyTree]:
    """One step, params - rate direction(grad), and the optimizer's state."""
    direction, state = optimizer.update(grad, state, params)
    return jax.tree.map(lambda p, d: p - rate * d, params, direction), state


def regulator_metrics(options: FedDureOptions, seen: Seen, m: jax.Array, reward: jax.Array) -> Metrics:
    """The reward; of instance weights float32 [B_u] the mean over examples, and their 10 % and 90 % quantiles, over steps."""
    metrics: dict[str, Any] = {}
    if options.regulators != "no_f":
        metrics["instance_weight_mean"] = mean(m, seen.mask)
        for name, q in (("p10", 0.1), ("p90", 0.9)):
            metrics[f"instance_weight_{name}"] = mean(losses.masked_quantile(m, seen.mask, q), jnp.any(seen.mask))
    if options.regulators != "no_c":
        metrics["reward"] = mean(reward, seen.both)
    return metrics

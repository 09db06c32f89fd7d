"""FedDure (Bai et al. 2024): two regulators at every client weigh its pseudo-labels; labels at the clients.

The local network theta learns from labels and from hard pseudo-labels of its own. The coarse-grained regulator (C-reg) is a
network phi that starts from the broadcast model each round and takes steps on the same pseudo-labels. The reward d of a batch
is how much phi's step on it lowers phi's loss on labeled examples. The fine-grained regulator (F-reg) is a small network w in
the client state, which weighs single examples and learns so that phi's step would lower that loss. No regulator is ever sent.

The released code is another algorithm, without F-reg and with a reward of opposite sign. It settles what the paper leaves open:

- F-reg sees softmax outputs (of the weak view in the code, here of the strong view, as in the equations).
- Batch norm sees theta's labeled, weak and strong views as one batch. phi sees strong views and labeled ones apart, also
  in training mode; their statistics are dropped.
- theta and phi step by the client's optimizer, phi's from a fresh state each round; F-reg by Adam, whose state is persistent.
- A local epoch goes once through the labeled examples.
"""

from functools import partial
from typing import Annotated, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree, Stored
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.local import Broadcast, Gradients, Server, ServerState, Setup, Task, Training, TrainState, Weights
from fedjax_ssl.method import ClientData, ClientOutput, DataSpec, Method
from fedjax_ssl.metrics import Metrics, mean
from fedjax_ssl.options import UNSET, Fraction, Options, Rate, ReadWhere, Size
from fedjax_ssl.ssl import losses, pseudo_labels
from fedjax_ssl.ssl import regulators as f_reg


class FedDureOptions(Options):
    """FedDure's own settings."""

    regulators: Literal["both", "no_c", "no_f"] = Field(
        default="both",
        description="Regulators in use: `both`, the fine-grained one alone, without rewards (`no_c`), or the coarse-grained "
        "one with a threshold in place of the fine-grained one (`no_f`).",
    )
    detach_freg_input: Annotated[bool, ReadWhere(regulators=("both", "no_c"))] = Field(
        default=False,
        description="If true, the input of the fine-grained regulator (F-reg) is detached, so that no gradient flows through "
        "it to the coarse-grained regulator (phi).",
    )
    confidence: Annotated[Fraction, ReadWhere(regulators=("no_f",))] = Field(
        default=0.6, description="Confidence threshold that replaces F-reg where regulators=no_f."
    )
    eta_s: Rate = Field(default=5e-4, description="Learning rate of the coarse-grained regulator, also in F-reg's look-ahead.")
    eta_w: Annotated[Rate, ReadWhere(regulators=("both", "no_c"))] = Field(default=5e-4, description="Learning rate of F-reg.")
    unlabeled_batch_size: Size = Field(
        default=0,
        description="Number of unlabeled examples in a step. 0 takes for each client a number with which it has about as many "
        "unlabeled as labeled batches, by the released code's rule (`client_batch_size`).",
    )
    largest_batch_size: Annotated[Size, ReadWhere(unlabeled_batch_size=UNSET)] = Field(
        default=0,
        description="Largest unlabeled batch size that a client may have where `unlabeled_batch_size` is 0. 0 sets no limit.",
    )

    def for_clients(self, counts: np.ndarray, batch_size: int) -> Self:
        """The options with `largest_batch_size`, if 0, set to the largest B_u of clients with `counts` int32 [K, 2], or 1."""
        sizes = client_batch_size(counts[:, 0], counts[:, 1], batch_size)
        return self.model_copy(update={"largest_batch_size": self.largest_batch_size or max(int(np.max(sizes)), 1)})


class FedDureClientState(NamedTuple):
    """The optimizer state of theta, and the parameters of F-reg with their Adam's state; `()` if not persistent or absent."""

    optimizer: PyTree
    w: PyTree
    w_optimizer: PyTree


class Regulators(NamedTuple):
    """The parameters and optimizer states of C-reg (phi) and of F-reg (w); those of an absent regulator are `()`."""

    phi: PyTree
    phi_optimizer: PyTree
    w: PyTree
    w_optimizer: PyTree


class StepViews(NamedTuple):
    """The views [B, H, W, ch] of a step's two batches: labeled ones, and weak and strong ones of unlabeled examples."""

    labeled: jax.Array
    labels: jax.Array
    labeled_mask: jax.Array
    weak: jax.Array
    strong: jax.Array
    mask: jax.Array

    @property
    def both(self) -> jax.Array:
        """Whether there are labeled and unlabeled examples; else F-reg does not learn."""
        return jnp.any(self.labeled_mask) & jnp.any(self.mask)


def feddure(*, task: Task, client: Training, server: Server, options: FedDureOptions = FedDureOptions()) -> Method:
    """FedDure, Algorithm 1: two regulators weigh pseudo-labels; clients are averaged by data size, |D_s| + |D_u|."""
    update = partial(client_update, Setup(task, client, server, options))
    method = local.averaging_method(task, client, server, update, labels_at=("clients",))

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, FedDureClientState]:
        state, optimizer = method.init(key, spec)
        if options.regulators == "no_f":
            return state, FedDureClientState(optimizer, (), ())
        keys = jax.random.split(local.substream(key, "f_reg"), spec.num_clients)
        w = jax.vmap(lambda key: f_reg.init(key, spec.num_classes))(keys)
        return state, FedDureClientState(optimizer, w, jax.vmap(optax.scale_by_adam().init)(w))

    return method._replace(init=init)


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, state: FedDureClientState, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: theta trains on labeled and pseudo-labeled batches, and its regulators learn beside it."""
    task, client, _, options = setup
    order_key, train_key = jax.random.split(key)
    masks = (data.labeled.mask, data.unlabeled.mask)
    if options.unlabeled_batch_size:
        schedule = client.paired_schedule(order_key, *masks, options.unlabeled_batch_size)
    else:
        entries = client_batch_size(data.labeled.count, data.unlabeled.count, client.batch_size)
        rows = options.largest_batch_size
        schedule = client.paired_schedule(order_key, *masks, rows, entries=jnp.clip(entries, 1, rows))

    phi = shared.weights.params
    phi, phi_optimizer = ((), ()) if options.regulators == "no_c" else (phi, client.optimizer.init(phi))
    regulators = Regulators(phi, phi_optimizer, state.w, state.w_optimizer)
    start, rate = TrainState(shared.weights, state.optimizer, (regulators,)), shared.learning_rate
    step_gradient = partial(gradient, setup, data)
    trained = local.minimize(task, client, step_gradient, start, schedule, learning_rate=rate, key=train_key)
    weights, optimizer, (regulators,) = trained.carry
    state = FedDureClientState(optimizer, regulators.w, regulators.w_optimizer)
    return local.output_of(task, shared.weights, weights, trained, local.data_weight(task, data), state)


def client_batch_size(labeled: Stored, unlabeled: Stored, batch_size: int) -> Stored:
    """The unlabeled batch size B_u of clients by the rule of the released code, about one batch for each labeled one.

    It is |D_u| div n, where n is round(|D_s| / B), or 4 where that is 2 or less. A result of 400 or more is divided by 4, and a
    result of 0 is replaced by |D_u|. The arguments |D_s| and |D_u| are integers or arrays of one shape.
    """
    xp = jnp if isinstance(unlabeled, jax.Array) else np  # a config has numbers, and is read before JAX starts
    n, rest = labeled // batch_size, labeled % batch_size
    n = n + ((2 * rest > batch_size) | ((2 * rest == batch_size) & (n % 2 == 1)))  # round half to even
    size = unlabeled // xp.where(n <= 2, 4, n)
    size = xp.where(size >= 400, size // 4, size)
    return xp.where(size == 0, unlabeled, size)


def gradient(setup: Setup, data: ClientData, weights: Weights, pair: Pair, key: jax.Array, regulators: Regulators) -> Gradients:
    """The gradient of theta in one step; its `follow` gives the regulators after the step.

        y_i = argmax f(weak(u_i); theta)                                                              (Eq. 1)
        grad_theta [ CE(y, f(x; theta)) + mean_i (m_i + d) CE(y_i, f(strong(u_i); theta)) ]           (Eqs. 7-10)

    The instance weights m_i and the reward d are constants, and all pseudo-labels y_i are used, without a threshold.
    """
    task, _, _, options = setup
    at, images = pair.labeled.positions, data.unlabeled.take(pair.unlabeled.positions)
    step = StepViews(
        labeled=task.views.labeled(local.substream(key, "labeled"), data.labeled.take(at)),
        labels=data.labeled.labels[at],
        labeled_mask=pair.labeled.mask,
        weak=task.views.weak(local.substream(key, "weak"), images),
        strong=task.views.strong(key, images),
        mask=pair.unlabeled.mask,
    )
    views, masks = (step.labeled, step.weak, step.strong), (step.labeled_mask, step.mask, step.mask)

    def forward(params: PyTree) -> tuple[tuple[jax.Array, ...], PyTree]:
        return task.train_logits_together(weights._replace(params=params), views, masks, local.dropout_key(key), fixed=1)

    logits, pullback, batch_stats = jax.vjp(forward, weights.params, has_aux=True)
    _, weak, strong = logits
    label, confidence = pseudo_labels.harden(jax.nn.softmax(weak))
    passed = step.mask & (confidence >= options.confidence)
    regulators, reward = regulate(setup, step, label, passed, weights, regulators, key)
    m = instance_weights(options, regulators.w, strong, passed)  # Eq. 6

    def loss(logits: tuple[jax.Array, ...]) -> tuple[jax.Array, Metrics]:
        labeled, _, strong = logits
        supervised, metric = local.labeled_loss(labeled, step.labels, step.labeled_mask)
        ce = losses.cross_entropy(strong, label)
        value = supervised + losses.masked_mean((m + reward) * ce, step.mask)
        return value, {"loss": metric, "unlabeled_loss": mean(ce, step.mask)}

    cotangent, metrics = jax.grad(loss, has_aux=True)(logits)
    if options.regulators != "no_c":
        metrics["reward"] = mean(reward, step.both)
    if options.regulators == "no_f":
        metrics |= local.semi_supervised.step_metrics(label, passed, data, pair.unlabeled)
    else:
        true_labels = data.true_labels[pair.unlabeled.positions]
        metrics |= pseudo_labels.diagnostics(label, true_labels, step.mask, step.mask)
        metrics["instance_weight_mean"] = mean(m, step.mask)
        for name, q in (("p10", 0.1), ("p90", 0.9)):
            metrics[f"instance_weight_{name}"] = mean(losses.masked_quantile(m, step.mask, q), jnp.any(step.mask))
    return Gradients(pullback(cotangent)[0], batch_stats, metrics, follow=lambda _: (regulators,))


def instance_weights(options: FedDureOptions, w: PyTree, logits: jax.Array, passed: jax.Array) -> jax.Array:
    """Weights of unlabeled examples, float32 [B_u], by F-reg or by the fixed threshold."""
    by_threshold = options.regulators == "no_f"
    return passed.astype(jnp.float32) if by_threshold else f_reg.instance_weights(w, jax.nn.softmax(logits))


def regulate(
    setup: Setup, step: StepViews, label: jax.Array, passed: jax.Array, weights: Weights, regulators: Regulators, key: jax.Array
) -> tuple[Regulators, jax.Array]:
    """The regulators after a step, and the reward d of the pseudo-labels y. Without C-reg, d is 0 and theta replaces phi.

        G(w, phi) = mean_i F(f(strong(u_i); phi); w) CE(y_i, f(strong(u_i); phi))
        w'   = w   - eta_w grad_w CE(y, f(x; phi - eta_s grad_phi G(w, phi)))                         (Eqs. 4, 5)
        phi' = phi - eta_s grad_phi G(w', phi)                                                        (Eq. 2)
        d    = CE(y, f(x; phi)) - CE(y, f(x; phi')), positive where the pseudo-labels helped          (Eq. 3)

    `passed` are the pseudo-labels that pass the fixed threshold, `weights` is theta, and `key` is of the dropout masks.
    """
    (task, client, _, options), (phi, phi_optimizer, w, w_optimizer) = setup, regulators
    phi = weights.params if options.regulators == "no_c" else phi

    def outputs(phi: PyTree, views: jax.Array, mask: jax.Array) -> jax.Array:
        return task.train_logits(Weights(phi, weights.stats), views, mask, local.dropout_key(key))[0]

    def strong(phi: PyTree) -> jax.Array:
        return outputs(phi, step.strong, step.mask)

    def labeled_loss(phi: PyTree) -> jax.Array:
        logits = outputs(phi, step.labeled, step.labeled_mask)
        return losses.masked_mean(losses.cross_entropy(logits, step.labels), step.labeled_mask)

    def loss(w: PyTree, logits: jax.Array) -> jax.Array:  # G, as a function of the outputs on strong views
        inputs = jax.lax.stop_gradient(logits) if options.detach_freg_input else logits
        m = instance_weights(options, w, inputs, passed)
        return losses.masked_mean(m * losses.cross_entropy(logits, label), step.mask)

    logits, pullback = jax.vjp(strong, phi)
    if options.regulators != "no_f":
        # The transpose of the linear pullback is a directional derivative, without forward-mode rules of convolutions.
        (grad,), derivative = jax.vjp(pullback, jax.grad(loss, 1)(w, logits))
        ahead = f_reg.gradient_step(phi, grad, options.eta_s)
        (change,) = derivative((jax.grad(labeled_loss)(ahead),))
        meta = f_reg.meta_gradient(loss, w, logits, change, options.eta_s)
        direction, state = optax.scale_by_adam().update(meta, w_optimizer, w)
        new = f_reg.gradient_step(w, direction, options.eta_w), state
        w, w_optimizer = optax.tree.where(step.both, new, (w, w_optimizer))
    if options.regulators == "no_c":
        return Regulators((), (), w, w_optimizer), jnp.zeros(())
    (grad,) = pullback(jax.grad(loss, 1)(w, logits))
    direction, phi_optimizer = client.optimizer.update(grad, phi_optimizer, phi)
    new_phi = f_reg.gradient_step(phi, direction, options.eta_s)
    return Regulators(new_phi, phi_optimizer, w, w_optimizer), labeled_loss(phi) - labeled_loss(new_phi)

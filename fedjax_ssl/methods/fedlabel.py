"""FedLabel: labels at the clients, and pseudo-labels from the surer of two experts, the global and the local model.

A client in a round (Algorithm 1), w the model that it received:

    w_L <- w, tau steps on labeled batches of b
    w_U <- w, tau' steps on unlabeled batches of b, whose labels are made by w and by the final w_L, both frozen
    upload (w_L - w) + (w_U - w) and r, the number of examples used; the server averages with weights r

Of an unlabeled x, s* is the output of the expert that is surer of it (the larger h: variance or inverse entropy of its
probabilities), s- the other's, y = argmax s*. x is kept if max s* > beta, and

    L = 1/b sum over kept of CE(f(strong(x)), y) + [argmax s- = y] lambda_0 h(s-)/h(s*) KL(s- || f(x))

An example that is not kept counts in b (Eq. 8).

Where the paper is silent, the choices are those of its released code, FLUTE's FedLabels: h and beta are of probabilities; the
global expert wins a tie; only kept examples pass w_U, in training mode, strong and plain views apart, so that batch norm
normalizes each by its own statistics and tracks both, one after the other; a batch without a kept example is no step. A sum of
two changes of batch-norm statistics could leave variances negative: w_L and w_U each count one half there. A client that takes
no step on unlabeled data has w_U = w, and so half of w_L's. r counts draws, repeats included.

FLUTE's other choices contradict the paper and are options (see FedLabelOptions). It never resets w_U's gradients within a
round, so that they add up over its steps; that is a mistake, and not reproduced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import (
    Broadcast,
    Fit,
    Gradients,
    Server,
    ServerState,
    Task,
    Trained,
    Training,
    Weights,
    apply_gradients,
    dropout_key,
    semi_supervised,
    substream,
)
from fedjax_ssl.method import Aggregate, ClientOutput, DataSpec, Method, Shard
from fedjax_ssl.metrics import Metrics, Sum, mean
from fedjax_ssl.options import Fraction, Options, Phase, Positive, Rate, Weight, rounds_of
from fedjax_ssl.ssl import experts, losses, pseudo_labels, thresholds

PyTree = Any
USES = "uses"  # of a step: how often it used each of the client's examples, int32 [n]


class FedLabelOptions(Options):
    """FedLabel's own settings; tau is `client.steps`. `released` says what FLUTE has instead."""

    confidence: Fraction = Field(default=0.3, description="Beta in [0, 1], which max s* has to exceed.")
    measure: Literal["variance", "entropy"] = Field(default="variance", description="H, `variance` or (inverse) `entropy`.")
    experts: Literal["both", "local", "global"] = Field(
        default="both",
        description=(
            "`both`, or as ablations one alone, `local` or `global`: s* is its output then, and there is no consistency."
        ),
    )
    expert_view: Literal["plain", "weak"] = Field(
        default="plain",
        description="What the experts and KL see: the `plain` image, or one random `weak` view per step (`released`).",
    )
    augment: Literal["strong", "none"] = Field(
        default="strong",
        description="CE's view: `strong`, or `none`: what the experts see (the paper's Figure 7).",
    )
    consistency_weight: Weight = Field(
        default=0.05,
        description="Lambda_0; 0: no consistency, and no passes of plain views through w_U.",
    )
    consistency_target: Literal["other", "local"] = Field(
        default="other",
        description="Of KL: the `other` expert's output s-, or always the `local` one's (`released`).",
    )
    kl_order: Literal["target_first", "net_first"] = Field(
        default="target_first",
        description=(
            "KL(s- || f) (`target_first`, the usual order of a distillation), or KL(f || s-) (`net_first`, as printed)."
        ),
    )
    normalize: Literal["batch", "passing"] = Field(
        default="batch",
        description=(
            "CE and consistency are divided by the `batch`, or each by the number of its own `passing` examples: those "
            "kept, those kept that agree (`released`)."
        ),
    )
    unlabeled_steps: Positive = Field(default=10, description="Tau'.")
    unlabeled_rate: Rate = Field(default=1.0, description="W_U's learning rate, as a multiple of w_L's.")
    proximity: Weight = Field(default=0.0, description="Weight of sum over tensors of mean((w_U - w)^2) in L (`released`: 10).")
    burn_in: Phase = Field(default=0.0, description="W_U is not trained in this many first rounds (`released`: 50).")
    counts: Literal["draws", "distinct", "passing"] = Field(
        default="draws",
        description=(
            "R: `draws` of labeled examples and of kept ones; `distinct` such examples; or `passing`, draws of kept "
            "ones alone, 1 if none (`released`)."
        ),
    )
    aggregation: Literal["sum", "halves"] = Field(
        default="sum",
        description=(
            "`sum` of both changes; or `halves`, 1/2 the uniform mean of w_L + 1/2 the mean of w_U with weights r "
            "(`released`), for which both models travel."
        ),
    )

    @property
    def consistent(self) -> bool:
        """Whether there is a consistency term."""
        return self.experts == "both" and self.consistency_weight > 0

    def for_run(self, rounds: int, counts: np.ndarray, batch_size: int) -> Self:
        """With `burn_in` as a number of rounds."""
        return self.model_copy(update={"burn_in": rounds_of("burn_in", self.burn_in, rounds)})


class Setup(NamedTuple):
    """What the method is made of, as the factory receives it."""

    task: Task
    client: Training
    server: Server
    options: FedLabelOptions


class ClientState(NamedTuple):
    """The optimizer states of w_L and w_U; each `()` if not persistent."""

    labeled: PyTree
    unlabeled: PyTree


class Halves(NamedTuple):
    """A client's upload for the aggregation by halves, its weight being 1; averaged over clients, the means of all three.

    Attributes:
        labeled: Weights, w - w_L.
        unlabeled: Weights, r (w - w_U).
        used: float32 scalar, r.
    """

    labeled: Weights
    unlabeled: Weights
    used: jax.Array


def fedlabel(*, task: Task, client: Training, server: Server, options: FedLabelOptions = FedLabelOptions()) -> Method:
    """FedLabel, for labels at the clients.

    Args:
        task: network and views.
        client: training of w_L, tau = `steps` of batches drawn anew each, or `epochs`; w_U's is the same but for its steps.
        server: aggregation and statistics.
        options: FedLabel's own.

    Returns:
        The method. Its client state is the local optimizers', where `client` is persistent.
    """
    setup = Setup(task, client, server, options)
    work = local.server_work(task, server)
    if options.aggregation == "halves":
        step = work.step
        work = work._replace(step=lambda state, aggregate: step(state, merge(aggregate)))
    update = partial(client_update, setup)
    method = local.averaging_method(task, client, server, update, labels_at=("clients",), work=work)

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, ClientState]:
        state, optimizers = method.init(key, spec)
        return state, ClientState(optimizers, optimizers)

    return method._replace(init=init)


def merge(aggregate: Aggregate) -> Aggregate:
    """The update of averaged Halves: 1/2 (mean_k (w - w_L,k) + sum_k r_k (w - w_U,k) / sum_k r_k), the latter 0 if no r > 0."""
    labeled, unlabeled, used = aggregate.update
    safe = jnp.where(used > 0, used, 1.0)
    return aggregate._replace(update=jax.tree.map(lambda of_l, of_u: (of_l + of_u / safe) / 2, labeled, unlabeled))


# --- a client ----------------------------------------------------------------------------------------------------------


def client_update(setup: Setup, shared: Broadcast, _: PyTree, state: ClientState, shard: Shard, key: jax.Array) -> ClientOutput:
    """One client's round."""
    task, options = setup.task, setup.options
    labeled_key, unlabeled_key = jax.random.split(key)
    labeled = train_labeled(setup, shared, state.labeled, shard, labeled_key)
    unlabeled = train_unlabeled(setup, shared, labeled.carry.weights, state.unlabeled, shard, unlabeled_key)
    metrics = {**labeled.metrics, **unlabeled.metrics}
    del metrics[USES]
    used = samples_used(options, labeled, unlabeled)
    has_data = shard.labeled.count + shard.unlabeled.count > 0
    changes = [task.update(shared.weights, trained.carry.weights) for trained in (labeled, unlabeled)]
    if options.aggregation == "halves":
        sent: PyTree = (*changes, used)
        update: PyTree = Halves(changes[0], jax.tree.map(lambda x: used * x, changes[1]), used)
        weight = jnp.where(has_data, 1.0, 0.0)
    else:
        update = together(*changes)
        sent, weight = (update, used), jnp.where(has_data, used, 0.0)
    both = Trained((), metrics, labeled.images + unlabeled.images)
    optimizers = ClientState(labeled.carry.optimizer, unlabeled.carry.optimizer)
    return ClientOutput(update, weight, optimizers, local.client_metrics(both, down=shared.weights, up=sent))


def together(labeled: Weights, unlabeled: Weights) -> Weights:
    """The sum of both changes of parameters, and the mean of those of batch-norm statistics."""
    params = jax.tree.map(jnp.add, labeled.params, unlabeled.params)
    return Weights(params, jax.tree.map(lambda x, y: (x + y) / 2, labeled.stats, unlabeled.stats))


def samples_used(options: FedLabelOptions, labeled: Trained, unlabeled: Trained) -> jax.Array:
    """r, float32 scalar, from the USES of both trainings."""
    uses = [trained.metrics[USES].total for trained in (labeled, unlabeled)]
    if options.counts == "passing":
        return jnp.maximum(jnp.sum(uses[1]), 1).astype(jnp.float32)
    if options.counts == "distinct":
        uses = [jnp.minimum(of_examples, 1) for of_examples in uses]
    return jnp.sum(jnp.concatenate(uses)).astype(jnp.float32)


def train_labeled(setup: Setup, shared: Broadcast, optimizer: PyTree, shard: Shard, key: jax.Array) -> Trained:
    """w_L, by cross-entropy of labeled examples."""
    task, client, _, _ = setup
    order_key, train_key = jax.random.split(key)
    supervised = local.supervised_gradient(task, shard.labeled)
    mask = shard.labeled.mask

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        return _counted(supervised(weights, batch, key), batch, batch.mask, len(mask))

    schedule = (
        batching.draws(order_key, mask, client.batch_size, client.steps) if client.steps else client.schedule(order_key, mask)
    )
    start = Fit(shared.weights, optimizer)
    return local.minimize(task, client, gradient, start, schedule, learning_rate=shared.learning_rate, key=train_key)


def train_unlabeled(
    setup: Setup, shared: Broadcast, expert: Weights, optimizer: PyTree, shard: Shard, key: jax.Array
) -> Trained:
    """w_U, by the labels of the global model and of the local `expert`, w_L."""
    task, client, _, options = setup
    order_key, train_key = jax.random.split(key)
    schedule = batching.draws(order_key, shard.unlabeled.mask, client.batch_size, options.unlabeled_steps)
    schedule = schedule._replace(steps=jnp.where(shared.round >= options.burn_in, schedule.steps, 0))
    gradient = unlabeled_gradient(task, options, shard, shared.weights, expert)
    rate, anchor = options.unlabeled_rate * shared.learning_rate, shared.weights.params

    def step(fit: Fit, batch: Batch, key: jax.Array) -> tuple[Fit, Metrics]:
        gradients, taken = gradient(fit.weights, batch, key)
        return apply_gradients(task, client, fit, gradients, rate, anchor=anchor, where=taken), gradients.metrics

    trained = local.train(client.start(shared.weights, optimizer), step, schedule, train_key)
    return trained._replace(carry=trained.carry._replace(optimizer=client.keep(trained.carry.optimizer)))


def unlabeled_gradient(
    task: Task, options: FedLabelOptions, shard: Shard, anchor: Weights, expert: Weights
) -> Callable[[Weights, Batch, jax.Array], tuple[Gradients, jax.Array]]:
    """The gradient of L on a batch, with respect to w_U, and whether there is an example to take a step on.

    Args:
        task: network and views.
        options: thresholds, weights, and what is divided by what.
        shard: the client's data; the true labels are for diagnostics alone.
        anchor: w, the global expert.
        expert: w_L, the local one.
    """
    distance = {"target_first": losses.kl_divergence, "net_first": losses.reverse_kl}[options.kl_order]

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> tuple[Gradients, jax.Array]:
        images = shard.unlabeled.take(batch.positions)
        plain = options.expert_view == "plain"
        view = task.views.plain(images) if plain else task.views.weak(substream(key, "weak"), images)
        augmented = task.views.strong(key, images) if options.augment == "strong" else view
        decision, target = decide(task, options, anchor, expert, view, batch.mask)
        kept = batch.mask & thresholds.passes(decision.confidence, options.confidence, strict=True)
        agreeing = kept & decision.agreed
        divisor = batch.real if options.normalize == "batch" else None

        def loss(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, jax.Array, PyTree]]:
            net = weights._replace(params=params)
            outputs, stats = task.train_logits(net, augmented, kept, dropout_key(key))
            ce = losses.cross_entropy(outputs, decision.label)
            value, kl = losses.masked_mean(ce, kept, divisor), jnp.zeros_like(ce)
            if options.consistent:
                if options.augment == "strong":
                    outputs, second = task.train_logits(net, view, kept, dropout_key(substream(key, "plain")))
                    stats = task.in_turn(weights.stats, stats, second)
                kl = distance(target, outputs)
                consistency = losses.masked_mean(decision.ratio * kl, agreeing, divisor)
                value += options.consistency_weight * consistency
            if options.proximity:
                apart = jax.tree.map(lambda p, a: jnp.mean(jnp.square(p - a)), params, anchor.params)
                value += options.proximity * sum(jax.tree.leaves(apart))
            return value, (ce, kl, stats)

        grad, (ce, kl, stats) = jax.grad(loss, has_aux=True)(weights.params)
        metrics = {"unlabeled_loss": mean(ce, kept), **semi_supervised.step_metrics(decision.label, kept, shard, batch)}
        if options.experts == "both":
            metrics["local_expert_rate"] = mean(decision.local, kept)
            metrics["agreement_rate"] = mean(decision.agreed, batch.mask)
        if options.consistent:
            metrics["consistency_loss"] = mean(kl, agreeing)
        gradients = _counted(Gradients(grad, stats, metrics), batch, kept, len(shard.unlabeled.mask))
        return gradients, jnp.any(kept)

    return gradient


def decide(
    task: Task, options: FedLabelOptions, anchor: Weights, expert: Weights, view: jax.Array, mask: jax.Array
) -> tuple[experts.Decision, jax.Array]:
    """What the experts decide on a view [B, H, W, ch], and KL's target [B, C]; one expert alone agrees with itself."""
    which = {"both": (anchor, expert), "local": (expert,), "global": (anchor,)}[options.experts]
    logits = [task.eval_logits(weights, view, mask) for weights in which]
    if options.experts == "both":
        decision = experts.decide(logits[0], logits[1], options.measure)
        return decision, decision.other if options.consistency_target == "other" else logits[1]
    label, confidence = pseudo_labels.harden(jax.nn.softmax(logits[0]))
    local_alone = jnp.full_like(mask, options.experts == "local")
    alone = experts.Decision(label, confidence, local_alone, jnp.ones_like(mask), jnp.ones_like(confidence), logits[0])
    return alone, logits[0]


def _counted(gradients: Gradients, batch: Batch, used: jax.Array, n: int) -> Gradients:
    """`gradients` with a metric that counts which of the n examples were `used` bool [B]."""
    uses = jnp.zeros(n, jnp.int32).at[batch.positions].add(used.astype(jnp.int32))
    return gradients._replace(metrics={**gradients.metrics, USES: Sum(uses)})

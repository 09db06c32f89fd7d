"""FedLabel (Cho et al. 2023): pseudo-labels from the more certain of two experts, the global and the local model.

A client in a round (Algorithm 1), w being the model that it received:

    w_L <- w, tau steps on labeled batches of b
    w_U <- w, tau' steps on unlabeled batches of b, whose labels are made by w and by the final w_L, both frozen
    upload (w_L - w) + (w_U - w) and r, the number of examples used; the server averages with weights r

For an unlabeled x, s* is the output of the more certain expert, that of larger h (the variance or the inverse entropy of its
probabilities), s- is the output of the other expert, and y is argmax s*. x is accepted if max s* > beta, and

    L = 1/b sum over accepted of CE(f(strong(x)), y) + [argmax s- = y] lambda_0 h(s-)/h(s*) KL(s- || f(x))    (Eqs. 3-8)

Where the paper is silent, the choices are those of its released code, FLUTE's FedLabels: h and beta refer to probabilities; w_U
sees only accepted examples, with a forward pass of their strong views and one of their plain views, each with its own
statistics; a batch without accepted examples is no step. Batch-norm statistics change by the mean of both changes, since a sum
could leave variances negative.

FLUTE's choices that contradict the paper are options, which say so. FLUTE never resets the gradients of w_U; this mistake
is not copied.
"""

from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import Broadcast, Gradients, Server, ServerState, Setup, Task, Trained, Training, TrainState, Weights
from fedjax_ssl.local.training import GradientFn
from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, DataSpec, Method
from fedjax_ssl.metrics import Metrics, Sum, mean
from fedjax_ssl.options import SET, Divisor, Fraction, Options, Phase, Rate, ReadWhere, Steps, Weight
from fedjax_ssl.ssl import experts, losses

USES = "uses"  # a step's metric: how often it uses each of the client's examples, int32 [n]


class FedLabelOptions(Options):
    """FedLabel's own settings; tau is `client.steps`."""

    confidence: Fraction = Field(default=0.3, description="Confidence that a pseudo-label has to exceed (beta).")
    measure: Annotated[Literal["variance", "entropy"], ReadWhere(experts=("both",))] = Field(
        default="variance",
        description="Certainty of an expert (global or local model): variance or inverse entropy of its probabilities.",
    )
    experts: Literal["both", "local", "global"] = Field(
        default="both",
        description="Which experts make pseudo-labels: `both`, or one alone, which is an ablation without consistency loss.",
    )
    expert_view: Literal["plain", "weak"] = Field(
        default="plain", description="View for the experts' labels and for the consistency loss (released code: `weak`)."
    )
    augment: Literal["strong", "none"] = Field(
        default="strong",
        description="View of the cross-entropy: the `strong` one, or with `none` the view that the experts see (Figure 7).",
    )
    consistency_weight: Annotated[Weight, ReadWhere(experts=("both",))] = Field(
        default=0.05, description="Weight of the consistency loss (lambda_0)."
    )
    consistency_target: Annotated[Literal["other", "local"], ReadWhere(experts=("both",), consistency_weight=SET)] = Field(
        default="other",
        description="The expert to whose outputs the consistency loss pulls w_U, the network of unlabeled batches: the less "
        "certain one (`other`), or the `local` one (released code).",
    )
    divisor: Divisor = Field(
        default="batch",
        description="What the sum of each loss over a batch is divided by: the number of all examples of the `batch`, or of "
        "those that the loss is over (`used`, as in the released code).",
    )
    unlabeled_steps: Annotated[Steps, Field(ge=1)] = Field(
        default=10, description="Number of steps of the network w_U on unlabeled batches (tau')."
    )
    unlabeled_rate: Rate = Field(
        default=1.0,
        description="Learning rate of the network w_U, which trains on unlabeled batches, as a multiple of that of w_L, which "
        "trains on labeled ones.",
    )
    proximity: Weight = Field(
        default=0.0,
        description="Weight of the loss term that holds w_U near the global model: the mean squared difference of a tensor, "
        "summed over tensors (released code: 10).",
    )
    burn_in: Phase = Field(
        default=0.0,
        description="Number of first rounds without training of w_U (released code: 50). Below 1 it is a share of all rounds.",
    )
    counts: Literal["draws", "distinct", "passing"] = Field(
        default="draws",
        description="What is counted for r, a client's aggregation weight: each draw of a used example (`draws`), each used "
        "example once (`distinct`), or only draws of accepted unlabeled examples (`passing`, the released code).",
    )
    aggregation: Literal["sum", "halves"] = Field(
        default="sum",
        description="How the changes of w_L and w_U are combined: as their `sum`, or, with `halves`, as half the mean change "
        "of w_L plus half the mean change of w_U weighted by r (released code). For r see `counts`.",
    )

    @property
    def consistent(self) -> bool:
        """Whether there is a consistency loss."""
        return self.experts == "both" and self.consistency_weight > 0


class FedLabelClientState(NamedTuple):
    """A client's state: the optimizer states of w_L and w_U, each `()` if not persistent."""

    labeled: PyTree
    unlabeled: PyTree


class Halves(NamedTuple):
    """A client's update w - w_L, its update r (w - w_U), and r, float32 scalar: the upload for `aggregation=halves`."""

    labeled: Weights
    unlabeled: Weights
    used: jax.Array


def fedlabel(*, task: Task, client: Training, server: Server, options: FedLabelOptions = FedLabelOptions()) -> Method:
    """FedLabel, for labels at the clients: pseudo-labels by the more certain of the global and the local model.

    `client` says how w_L trains: for `steps` on independently drawn batches, or for `epochs`. w_U has steps of its own.
    """
    work = usual = local.server_work(task, server)
    in_halves = options.aggregation == "halves"
    if in_halves:
        work = usual._replace(step=lambda state, aggregate: usual.step(state, merge(aggregate)))
    update = partial(client_update, Setup(task, client, server, options))
    views = (
        "labeled",
        *(["weak"] if options.expert_view == "weak" else []),
        *(["strong"] if options.augment == "strong" else []),
    )
    method = local.averaging_method(task, client, server, update, labels_at=("clients",), views=views, work=work)

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, FedLabelClientState]:
        state, optimizers = method.init(key, spec)
        return state, FedLabelClientState(optimizers, optimizers)

    return method._replace(init=init, parameters=merged if in_halves else method.parameters)


def merge(aggregate: Aggregate) -> Aggregate:
    """The update of averaged Halves, 1/2 (mean_k (w - w_L,k) + sum_k r_k (w - w_U,k) / sum_k r_k), where 0/0 = 0."""
    labeled, unlabeled, used = aggregate.update
    safe = jnp.where(used > 0, used, 1.0)
    return aggregate._replace(update=jax.tree.map(lambda of_l, of_u: (of_l + of_u / safe) / 2, labeled, unlabeled))


def merged(halves: Halves) -> PyTree:
    """By how much one client's Halves would change the parameters: half the sum of its changes, (w - w_L) and (w - w_U)."""
    return merge(Aggregate(halves, halves.used)).update.params


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, state: FedLabelClientState, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: it trains w_L, then w_U, and uploads both changes."""
    task, _, _, options = setup
    labeled_key, unlabeled_key = jax.random.split(key)
    labeled = train_labeled(setup, shared, state.labeled, data, labeled_key)
    unlabeled = train_unlabeled(setup, shared, labeled.carry.weights, state.unlabeled, data, unlabeled_key)
    metrics = {name: value for name, value in {**labeled.metrics, **unlabeled.metrics}.items() if name != USES}
    used = samples_used(options, labeled, unlabeled)
    has_data = data.labeled.count + data.unlabeled.count > 0
    changes = [task.update(shared.weights, trained.carry.weights) for trained in (labeled, unlabeled)]
    if options.aggregation == "halves":
        sent: PyTree = (*changes, used)
        update: PyTree = Halves(changes[0], jax.tree.map(lambda x: used * x, changes[1]), used)
        weight = jnp.where(has_data, 1.0, 0.0)
    else:
        of_labels, of_unlabeled = changes
        params = jax.tree.map(jnp.add, of_labels.params, of_unlabeled.params)
        update = Weights(params, jax.tree.map(lambda x, y: (x + y) / 2, of_labels.stats, of_unlabeled.stats))
        sent, weight = (update, used), jnp.where(has_data, used, 0.0)
    both = Trained((), metrics, labeled.images.plus(unlabeled.images), labeled.steps + unlabeled.steps)
    optimizers = FedLabelClientState(labeled.carry.optimizer, unlabeled.carry.optimizer)
    return ClientOutput(update, weight, optimizers, local.client_metrics(both, down=shared.weights, up=sent))


def samples_used(options: FedLabelOptions, labeled: Trained, unlabeled: Trained) -> jax.Array:
    """The number r of examples that both trainings used, float32 scalar."""
    uses = [trained.metrics[USES].total for trained in (labeled, unlabeled)]
    if options.counts == "passing":
        return jnp.maximum(jnp.sum(uses[1], dtype=jnp.float32), 1.0)
    if options.counts == "distinct":
        uses = [jnp.minimum(of_examples, 1) for of_examples in uses]
    return jnp.sum(jnp.concatenate(uses), dtype=jnp.float32)  # which may be more than an int32 holds


def train_labeled(setup: Setup, shared: Broadcast, optimizer: PyTree, data: ClientData, key: jax.Array) -> Trained:
    """The training of w_L, by cross-entropy of labeled examples."""
    task, client, _, _ = setup
    order_key, train_key = jax.random.split(key)
    supervised, mask = local.supervised_gradient(task, data.labeled), data.labeled.mask

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        return _counted(supervised(weights, batch, key), batch, batch.mask, len(mask))

    drawn = client.steps > 0
    schedule = batching.draws(order_key, mask, client.batch_size, client.steps) if drawn else client.schedule(order_key, mask)
    start = TrainState(shared.weights, optimizer)
    return local.minimize(task, client, gradient, start, schedule, learning_rate=shared.learning_rate, key=train_key)


def train_unlabeled(
    setup: Setup, shared: Broadcast, expert: Weights, optimizer: PyTree, data: ClientData, key: jax.Array
) -> Trained:
    """The training of w_U, with labels of the global model and of the local `expert`, w_L."""
    task, client, _, options = setup
    order_key, train_key = jax.random.split(key)
    schedule = batching.draws(order_key, data.unlabeled.mask, client.batch_size, options.unlabeled_steps)
    schedule = schedule._replace(steps=jnp.where(shared.round >= options.burn_in, schedule.steps, 0))
    gradient = unlabeled_gradient(task, options, data, shared.weights, expert)
    start, rate = TrainState(shared.weights, optimizer), options.unlabeled_rate * shared.learning_rate
    return local.minimize(task, client, gradient, start, schedule, learning_rate=rate, key=train_key)


def unlabeled_gradient(task: Task, options: FedLabelOptions, data: ClientData, anchor: Weights, expert: Weights) -> GradientFn:
    """The gradient of L for w_U on a batch; the global expert is `anchor`, w, and the local expert is `expert`, w_L."""

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        images = data.unlabeled.take(batch.positions)
        plain = options.expert_view == "plain"
        view = task.views.plain(images) if plain else task.views.weak(local.substream(key, "weak"), images)
        augmented = task.views.strong(key, images) if options.augment == "strong" else view
        decision, target = decide(task, options, anchor, expert, view, batch.mask)
        accepted = batch.mask & (decision.confidence > options.confidence)
        agreeing = accepted & decision.agreed
        divisor = batch.real if options.divisor == "batch" else None

        def loss(net: Weights) -> tuple[jax.Array, PyTree, Metrics]:
            outputs, stats = task.train_logits(net, augmented, accepted, local.dropout_key(key))
            ce = losses.cross_entropy(outputs, decision.label)
            value, kl = losses.masked_mean(ce, accepted, divisor), jnp.zeros_like(ce)
            if options.consistent:
                if options.augment == "strong":
                    plain_key = local.dropout_key(local.substream(key, "plain"))
                    outputs, second = task.train_logits(net, view, accepted, plain_key)
                    # One update of running statistics by them equals two: by those of the first pass, then of the second.
                    kept = 1.0 - task.norm_momentum
                    stats = jax.tree.map(lambda s, a, b: b + kept * (a - s), weights.stats, stats, second)
                kl = losses.kl_divergence(target, outputs)
                value += options.consistency_weight * losses.masked_mean(decision.ratio * kl, agreeing, divisor)
            if options.proximity:
                apart = jax.tree.map(lambda p, a: jnp.mean(jnp.square(p - a)), net.params, anchor.params)
                value += options.proximity * sum(jax.tree.leaves(apart))
            of_kl = {"consistency_loss": mean(kl, agreeing)} if options.consistent else {}
            return value, stats, {"unlabeled_loss": mean(ce, accepted), **of_kl}

        gradients = local.gradients(loss, weights)
        pseudo = local.semi_supervised.step_metrics(decision.label, accepted, data, batch)
        metrics = {**gradients.metrics, **pseudo}
        if options.experts == "both":
            metrics["local_expert_rate"] = mean(decision.local, accepted)
            metrics["agreement_rate"] = mean(decision.agreed, batch.mask)
        gradients = gradients._replace(metrics=metrics, taken=jnp.any(accepted))
        return _counted(gradients, batch, accepted, len(data.unlabeled.mask))

    return gradient


def decide(
    task: Task, options: FedLabelOptions, anchor: Weights, expert: Weights, view: jax.Array, mask: jax.Array
) -> tuple[experts.Decision, jax.Array]:
    """The decision of the experts on a view [B, H, W, ch], and the target [B, C] of KL; one expert alone agrees with itself."""
    which = {"both": (anchor, expert), "local": (expert,), "global": (anchor,)}[options.experts]
    logits = [task.eval_logits(weights, view, mask) for weights in which]
    measure = options.measure if options.experts == "both" else "variance"  # of one expert either is the same
    decision = experts.decide(logits[0], logits[-1], measure)
    return decision, decision.other if options.consistency_target == "other" else logits[-1]


def _counted(gradients: Gradients, batch: Batch, used: jax.Array, n: int) -> Gradients:
    """`gradients` with the metric USES of n examples, of which those of a batch where `used` bool [B] count."""
    uses = jnp.zeros(n, jnp.int32).at[batch.positions].add(used.astype(jnp.int32))
    return gradients._replace(metrics={**gradients.metrics, USES: Sum(uses)})

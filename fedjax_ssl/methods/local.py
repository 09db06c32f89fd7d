"""Local training: a loop of mini-batch steps over one holder's examples, on a client or at the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl.data import batching
from fedjax_ssl.data.federated import Examples, Mixture
from fedjax_ssl.method import Shard
from fedjax_ssl.methods import passes, steps
from fedjax_ssl.methods.optimizers import is_on
from fedjax_ssl.methods.passes import Passes
from fedjax_ssl.methods.task import Task, Weights, dropout_key
from fedjax_ssl.metrics import Mean, Metrics, Sum, mean, num_bytes
from fedjax_ssl.ssl import losses

PyTree = Any


class Training(NamedTuple):
    """How a holder trains.

    Attributes:
        optimizer: direction of descent before the learning rate, as an optax transformation.
        learning_rate: time in rounds (int32 or float32 scalar, 0 at the start) -> float32 scalar. Federated methods hand it
            the number of the round, and it is constant within one; training on pooled data hands it fractions as well.
        batch_size: B.
        epochs: passes over the examples, or 0.
        steps: number of steps, or 0. Exactly one of `epochs` and `steps` is positive.
        persistent: whether the optimizer's state survives until the holder trains again; else it starts afresh each time.
        prox_mu: weight of FedProx's term mu/2 ||w - w_start||^2 over parameters (Li et al. 2020, Eq. 2); 0: none.
        rounds: R, the rounds of the run, over which a method may anneal something.
        unrolled: whether the program has every step written out, in place of a loop; see `steps.repeat`.
        counts: how many labeled and unlabeled examples each client has, NumPy int32 [K, 2], for shapes that must fit the
            largest client; None where they are not known.
    """

    optimizer: optax.GradientTransformation
    learning_rate: Callable[[jax.Array], jax.Array]
    batch_size: int
    epochs: int = 0
    steps: int = 0
    persistent: bool = True
    prox_mu: float = 0.0
    rounds: int = 1
    unrolled: bool = False
    counts: np.ndarray | None = None

    def init(self, params: PyTree) -> PyTree:
        """The optimizer state that the holder keeps between trainings, `()` if none."""
        return self.optimizer.init(params) if self.persistent else ()

    def init_many(self, params: PyTree, num_holders: int) -> PyTree:
        """`init` for each of K holders, with leading axis K."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_holders, *x.shape)), self.init(params))

    def resume(self, kept: PyTree, params: PyTree) -> PyTree:
        """The optimizer state to start a training with, from what was kept."""
        return kept if self.persistent else self.optimizer.init(params)

    def schedule(self, key: jax.Array, mask: jax.Array) -> batching.Schedule:
        """Shuffled batches over the examples in `mask` bool [n]."""
        return batching.shuffled(key, mask, self.batch_size, epochs=self.epochs, steps=self.steps)

    def paired_schedule(
        self,
        key: jax.Array,
        labeled: jax.Array,
        unlabeled: jax.Array,
        unlabeled_batch_size: int,
        *,
        larger_counts: bool = False,
        entries: jax.Array | None = None,
    ) -> batching.PairedSchedule:
        """A batch of labeled and one of unlabeled examples per step, over the examples in the masks bool [n] and bool [m].

        `larger_counts` and `entries`, how many of an unlabeled batch are used: see `batching.paired`.
        """
        sizes, length = (self.batch_size, unlabeled_batch_size), {"epochs": self.epochs, "steps": self.steps}
        return batching.paired(key, (labeled, unlabeled), sizes, larger_counts=larger_counts, entries=entries, **length)


class Step(NamedTuple):
    """The result of one gradient computation.

    Attributes:
        grad: the gradient.
        batch_stats: the batch's norm statistics.
        metrics: to be added up over the steps.
        taken: bool scalar, whether the step is taken: one that is not leaves weights, statistics and the optimizer's state as
            they are, though its metrics count. None: every step is.
        teacher_stats: the norm statistics of the teacher's batch, for a teacher that keeps its own.
        teacher: the teacher after this step, where the step itself trains it.
    """

    grad: PyTree
    batch_stats: PyTree
    metrics: Metrics
    taken: jax.Array | None = None
    teacher_stats: PyTree = ()
    teacher: PyTree = ()


class Trained(NamedTuple):
    """The result of local training.

    Attributes:
        weights: the weights after the last step.
        kept: the optimizer state to keep, `()` where the training is not persistent.
        metrics: the steps' metrics, added up.
        images: int32 scalar, examples that the steps went through (forward and backward).
        teacher: the teacher after the last step, `()` where there is none.
        passes: what all steps took; while they run, nothing.
    """

    weights: Weights
    kept: PyTree
    metrics: Metrics
    images: jax.Array
    teacher: PyTree = ()
    passes: Passes = Passes()


View = Callable[[jax.Array, jax.Array], jax.Array]
"""(key, images uint8 [B, H, W, ch]) -> the network's inputs, one of `Views`."""
Gradient = Callable[..., Step]
"""(weights, a Batch or Pair, the step's key) -> Step; with the teacher as a fourth argument where the training has one."""
Selection = Callable[[jax.Array, jax.Array], jax.Array]
"""(logits [B, C], labels int32 [B]) -> bool [B], the labeled examples that a step's loss keeps."""


class Teacher(NamedTuple):
    """What follows the weights step by step, and is read by the gradient: an average of theirs, as a rule.

    Attributes:
        start: a pytree, such as parameters or `Weights`.
        follow: (teacher, the weights after a step, that step, its batch) -> teacher.
    """

    start: PyTree
    follow: Callable[[PyTree, Weights, Step, Any], PyTree]


def train(
    task: Task,
    training: Training,
    gradient: Gradient,
    start: tuple[Weights, PyTree],
    schedule: batching.Schedule | batching.PairedSchedule,
    *,
    learning_rate: jax.Array,
    key: jax.Array,
    teacher: Teacher | None = None,
) -> Trained:
    """Runs `schedule.steps` steps w <- w - lr direction(gradient), in a loop whose length is the holder's own.

    Args:
        task: the network.
        training: optimizer, batch size and FedProx's mu.
        gradient: (weights, batch, key) -> Step, with the teacher as a fourth argument where there is one.
        start: (weights, kept optimizer state).
        schedule: the batches, or pairs of batches.
        learning_rate: float32 scalar.
        key: PRNG key; step s draws from fold_in(key, s).
        teacher: what follows the weights; None: nothing.
    """
    weights, kept = start
    anchor = weights.params

    def take(s: jax.Array) -> batching.Batch | batching.Pair:
        if isinstance(schedule, batching.PairedSchedule):
            return batching.take_pair(schedule, s, training.batch_size)
        return batching.take(schedule, s, training.batch_size)

    first, of_step = passes.count(gradient, weights, take(jnp.int32(0)), key, *((teacher.start,) if teacher else ()))
    metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first.metrics)

    def step(s: jax.Array, trained: Trained) -> Trained:
        batch = take(s)
        read = (trained.teacher,) if teacher else ()
        result = gradient(trained.weights, batch, jax.random.fold_in(key, s), *read)
        result = proximal(training, result, trained.weights.params, anchor)
        new, opt_state = descend(task, training, trained.weights, trained.kept, result, learning_rate)
        return Trained(
            new,
            opt_state,
            jax.tree.map(jnp.add, trained.metrics, result.metrics),
            trained.images + batch.real,
            teacher.follow(trained.teacher, new, result, batch) if teacher else (),
        )

    images, followed = jnp.zeros((), jnp.int32), teacher.start if teacher else ()
    start_state = Trained(weights, training.resume(kept, anchor), metrics, images, followed)
    end = steps.repeat(schedule, step, start_state, unrolled=training.unrolled)._replace(passes=of_step.times(schedule.steps))
    return end if training.persistent else end._replace(kept=())


def proximal(training: Training, result: Step, params: PyTree, anchor: PyTree) -> Step:
    """`result` with the gradient of FedProx's term, which pulls `params` towards those that the training began with."""
    if not is_on(training.prox_mu):
        return result
    return result._replace(grad=jax.tree.map(lambda g, w, a: g + training.prox_mu * (w - a), result.grad, params, anchor))


def descend(
    task: Task, training: Training, weights: Weights, kept: PyTree, result: Step, learning_rate: jax.Array
) -> tuple[Weights, PyTree]:
    """One step w <- w - lr direction(gradient), with the tracked statistics: (weights, optimizer state)."""
    direction, new_kept = training.optimizer.update(result.grad, kept, weights.params)
    params = jax.tree.map(lambda w, d: w - learning_rate * d, weights.params, direction)
    new = (Weights(params, task.track(weights.stats, result.batch_stats)), new_kept)
    if (taken := result.taken) is None:
        return new
    return jax.tree.map(lambda x, old: jnp.where(taken, x, old), new, (weights, kept))


def cross_entropy_step(
    task: Task,
    weights: Weights,
    views: jax.Array,
    labels: jax.Array,
    used: jax.Array,
    mask: jax.Array,
    key: jax.Array,
    selection: Selection | None = None,
) -> Step:
    """`loss_step` for the mean cross-entropy of hard labels int32 [B] over the `used` bool [B] examples in the `selection`.

    Where there is none the gradient is 0.
    """
    return loss_step(task, weights, views, lambda logits: labeled_loss(logits, labels, used, selection), mask, key)


def loss_step(
    task: Task,
    weights: Weights,
    views: jax.Array,
    loss: Callable[[jax.Array], tuple[jax.Array, Mean]],
    mask: jax.Array,
    key: jax.Array,
) -> Step:
    """The gradient of a loss of a batch's outputs.

    Args:
        task: the network.
        weights: its weights.
        views: float32 [B, H, W, ch].
        loss: logits [B, C] -> the loss, and the same as a metric.
        mask: bool [B], the real examples, which batch norm sees.
        key: PRNG key of the step; dropout draws from `dropout_key(key)`.

    Returns:
        Step with the metric `loss`.
    """

    def value(params: PyTree) -> tuple[jax.Array, tuple[Mean, PyTree]]:
        logits, batch_stats = task.train_logits(weights._replace(params=params), views, mask, dropout_key(key))
        total, metric = loss(logits)
        return total, (metric, batch_stats)

    grad, (metric, batch_stats) = jax.grad(value, has_aux=True)(weights.params)
    return Step(grad, batch_stats, {"loss": metric})


def labeled_loss(
    logits: jax.Array, labels: jax.Array, used: jax.Array, selection: Selection | None = None
) -> tuple[jax.Array, Mean]:
    """Mean cross-entropy of logits [B, C] over the `used` bool [B] examples in the `selection`: the loss, and as a metric."""
    return mean_loss(losses.cross_entropy(logits, labels), used if selection is None else used & selection(logits, labels))


def mean_loss(values: jax.Array, used: jax.Array) -> tuple[jax.Array, Mean]:
    """The mean of losses float32 [B] over the `used` bool [B] examples, 0 if there is none: the loss, and as a metric."""
    return losses.masked_mean(values, used), mean(values, used)


def supervised_gradient(
    task: Task, examples: Examples | Mixture, *, view: View | None = None, selection: Selection | None = None
) -> Gradient:
    """The gradient of the mean cross-entropy of labeled examples ((FL)^2, Eq. 2).

    Args:
        task: the network.
        examples: with their labels.
        view: how they are seen; None: in the view of labeled examples.
        selection: which of a batch's examples the mean is over, by their outputs; None: all.
    """
    assert examples.labels is not None
    labels, view = examples.labels, view or task.views.labeled

    def gradient(weights: Weights, batch: batching.Batch, key: jax.Array) -> Step:
        views = view(key, examples.take(batch.positions))
        return cross_entropy_step(task, weights, views, labels[batch.positions], batch.mask, batch.mask, key, selection)

    return gradient


def class_probabilities(task: Task, weights: Weights, examples: Examples, key: jax.Array | None) -> tuple[jax.Array, Passes]:
    """Softmax outputs of every example outside of training, under one random weak view each or in the plain view.

    Args:
        task: the network.
        weights: its weights.
        examples: n rows.
        key: PRNG key; example i draws its weak view from fold_in(key, i), whatever batch it is in. None: plain views.

    Returns:
        float32 [n, C], rows beyond `examples.count` unspecified; and the passes that it took.
    """
    n = examples.index.shape[0]
    size = min(task.batch_size, n)
    num_batches = -(-examples.count // size)

    def views_of(positions: jax.Array) -> jax.Array:
        if key is None:
            return task.views.plain(examples.take(positions))
        return jax.vmap(lambda i: task.views.weak(jax.random.fold_in(key, i), examples.take(i[None]))[0])(positions)

    def step(s: jax.Array, probs: jax.Array) -> jax.Array:
        batch = batching.in_order(s, examples.count, n, size)
        outputs = jax.nn.softmax(task.eval_logits(weights, views_of(batch.positions), batch.mask))
        return jax.lax.dynamic_update_slice(probs, outputs, (s * size, 0))

    none = jnp.zeros((-(-n // size) * size, task.num_classes), jnp.float32)
    _, of_batch = passes.count(step, jnp.int32(0), none)
    return jax.lax.fori_loop(0, num_batches, step, none)[:n], of_batch.times(num_batches)


def trainable(accepted: jax.Array, mask: jax.Array, batches: str) -> jax.Array:
    """Which examples local batches are drawn from: bool [n].

    Args:
        accepted: bool [n], examples whose pseudo-label is accepted.
        mask: bool [n], real examples.
        batches: `all` real examples, or the `accepted` ones. A client that accepts nothing draws from none and so takes no
            step: it returns the model that it received.
    """
    return accepted if batches == "accepted" else mask & jnp.any(accepted)


def data_weight(task: Task, shard: Shard) -> jax.Array:
    """A client's aggregation weight by its data, float32 scalar; 0 where it has none.

    Where clients hold labels: |D_s| + |D_u| (FedAvg, FedDure). Where the server alone does: 1, a uniform average, which is what
    the methods with labels at the server do ((FL)^2's baselines, SemiFL, FedMatch, FedCon).
    """
    count = shard.labeled.count + shard.unlabeled.count
    return count.astype(jnp.float32) if "clients" in task.labels_at else jnp.where(count > 0, 1.0, 0.0)


def client_metrics(
    trained: Trained, *, down: PyTree, up: PyTree, sends: jax.Array | bool = True, besides: Passes | None = None
) -> Metrics:
    """A client's metrics: its steps' (under `client/`, unless their name has a group), bytes received and sent, images, passes.

    Args:
        trained: its training.
        down: the arrays it received.
        up: the arrays it sends.
        sends: bool scalar, whether it sends them at all.
        besides: passes through networks besides the training's.
    """
    return {
        **{name if "/" in name else f"client/{name}": value for name, value in trained.metrics.items()},
        "comm/bytes_down": Sum(jnp.int32(num_bytes(down))),
        "comm/bytes_up": Sum(jnp.where(sends, jnp.int32(num_bytes(up)), 0)),
        "perf/client_images": Sum(trained.images),
        **passes.metrics(trained.passes.plus(besides) if besides else trained.passes),
    }

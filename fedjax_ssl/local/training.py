"""The one loop of mini-batch steps, of a client or of the server.

The steps change a carry, as a rule a `TrainState`: the weights, and what accompanies them.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool

from fedjax_ssl.arrays import Array, Count, Key, Mask, Number, PyTree, Scalar
from fedjax_ssl.data import batching
from fedjax_ssl.local.counters import count_step
from fedjax_ssl.local.optimizers import is_on
from fedjax_ssl.local.task import Task, Weights
from fedjax_ssl.metrics import Metrics, Sum, add, whole

Carry = TypeVar("Carry")


class TrainState(NamedTuple):
    """A network in training: its weights, the state of their optimizer, and what accompanies them.

    The gradient of each step is given the `companions`, such as a teacher or a second network; a step may also update them
    from the weights.
    """

    weights: Weights
    optimizer: PyTree
    companions: tuple[PyTree, ...] = ()


class Gradients(NamedTuple):
    """What a step computes: a gradient like the parameters, its batch's norm statistics, and metrics, which are added up."""

    grad: PyTree
    batch_stats: PyTree
    metrics: Metrics
    taken: Bool[Array, ""] | None = None  # whether the step is taken; None: always
    follow: Callable[[Weights], tuple[PyTree, ...]] | None = None  # new weights -> the new companions; None: they do not change


GradientFn = Callable[..., Gradients]  # of the weights, a Batch or Pair, the step's key, and the companions
Loss = Callable[[Weights], tuple[Scalar, PyTree, Metrics]]  # its value, the batch's norm statistics, and the step's metrics


def gradients(loss: Loss, weights: Weights) -> Gradients:
    """The Gradients of a loss of `weights` with respect to their parameters."""

    def value(params: PyTree) -> tuple[Scalar, tuple[PyTree, Metrics]]:
        total, batch_stats, metrics = loss(weights._replace(params=params))
        return total, (batch_stats, metrics)

    grad, (batch_stats, metrics) = jax.grad(value, has_aux=True)(weights.params)
    return Gradients(grad, batch_stats, metrics)


@runtime_checkable
class AnySchedule(Protocol):
    """Which examples each local step sees; see `fedjax_ssl.data.batching`."""

    @property
    def steps(self) -> Count | int:
        """The number of steps, an int32 scalar or an int."""

    def take(self, step: Count) -> PyTree:
        """The batch of a step; its `real` is the number of its examples."""


class Training(NamedTuple):
    """How a client, or the server, trains: for a number of epochs or of steps; the other of the two is 0.

    `learning_rate` is a function of the time in rounds, an int32 or float32 scalar that begins at 0. Federated methods call it
    with the index of the round. Training on pooled data calls it for every step, with a fractional time and, as a second
    argument, the length of the step in rounds, by default 1.
    """

    optimizer: optax.GradientTransformation  # without the learning rate
    learning_rate: Callable[..., Scalar]
    batch_size: int  # B
    epochs: int = 0  # passes over the examples
    steps: int = 0
    persistent: bool = True  # whether the optimizer state survives until the next training
    unlabeled_epochs: int = 0  # epochs of a client without labels, if some clients have all labels; 0: as many as `epochs`
    prox_mu: float = 0.0  # weight of FedProx's term mu/2 ||w - w_start||^2 over parameters (Li et al. 2020, Eq. 2); 0: none

    def init(self, params: PyTree) -> PyTree:
        """The stored optimizer state before the first training; `()` where none is stored between trainings."""
        return self.optimizer.init(params) if self.persistent else ()

    def start(self, params: PyTree, stored: PyTree) -> PyTree:
        """The optimizer state that a training of `params` starts from, given the `stored` one."""
        return stored if self.persistent else self.optimizer.init(params)

    def stored(self, optimizer: PyTree) -> PyTree:
        """What is stored of the optimizer state that a training ends with."""
        return optimizer if self.persistent else ()

    def schedule(self, key: Key, mask: Mask) -> batching.Schedule:
        """Shuffled batches over the examples in `mask` [n]."""
        return batching.shuffled(key, mask, self.batch_size, epochs=self.epochs, steps=self.steps)

    def paired_schedule(
        self,
        key: Key,
        labeled: Bool[Array, " n"],
        unlabeled: Bool[Array, " m"],
        unlabeled_batch_size: int,
        *,
        larger_counts: bool = False,
        entries: Count | None = None,
    ) -> batching.PairedSchedule:
        """One labeled and one unlabeled batch per step, over examples in masks bool [n] and [m]; see `batching.paired`."""
        sizes, length = (self.batch_size, unlabeled_batch_size), {"epochs": self.epochs, "steps": self.steps}
        return batching.paired(key, (labeled, unlabeled), sizes, larger_counts=larger_counts, entries=entries, **length)


class Trained(NamedTuple):
    """A finished training: the last carry, the sums of the steps' metrics, and the numbers of examples and steps (int32)."""

    carry: PyTree
    metrics: Metrics
    images: Sum
    steps: Count


def train(
    carry: Carry, step: Callable[[Carry, PyTree, Key], tuple[Carry, Metrics]], schedule: AnySchedule, key: Key
) -> Trained:
    """Runs `step` on (carry, a Batch or Pair, its key) for each batch of the schedule; step s has the key fold_in(key, s)."""

    @jax.jit  # traced once, for the shapes of its metrics and for the loop
    def numbered(s: Count, carry: Carry) -> tuple[Carry, Metrics, Count]:
        batch = schedule.take(s)
        new, metrics = step(carry, batch, jax.random.fold_in(key, s))
        return new, metrics, batch.real

    def body(s: Count, trained: Trained) -> Trained:
        new, metrics, images = numbered(count_step(s), trained.carry)
        return Trained(new, add(trained.metrics, metrics), trained.images.plus(Sum(images)), s + 1)

    _, shapes, _ = jax.eval_shape(numbered, 0, carry)  # 0 has the type of the loop's counter
    metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda one: add(one, one), shapes))
    return jax.lax.fori_loop(0, schedule.steps, body, Trained(carry, metrics, whole(0), jnp.zeros((), jnp.int32)))


@jax.named_scope("optimizer")
def apply_gradients(
    task: Task, training: Training, state: TrainState, gradients: Gradients, learning_rate: Number, *, anchor: PyTree = None
) -> TrainState:
    """One step w <- w - lr direction(g + mu (w - anchor)), with the running statistics of batch norm and the companions.

    `anchor` are the parameters at the start of the training, for FedProx's term; None: no term.
    """
    weights, grad, taken = state.weights, gradients.grad, gradients.taken
    if anchor is not None and is_on(training.prox_mu):
        grad = jax.tree.map(lambda g, w, a: g + training.prox_mu * (w - a), grad, weights.params, anchor)
    direction, optimizer = training.optimizer.update(grad, state.optimizer, weights.params)
    params = jax.tree.map(lambda w, d: w - learning_rate * d, weights.params, direction)
    stepped = Weights(params, task.update_stats(weights.stats, gradients.batch_stats))
    new = TrainState(stepped, optimizer, gradients.follow(stepped) if gradients.follow else state.companions)
    return new if taken is None else optax.tree.where(taken, new, state)


def minimize(
    task: Task,
    training: Training,
    gradient: GradientFn,
    state: TrainState,
    schedule: AnySchedule,
    *,
    learning_rate: Number,
    key: Key,
) -> Trained:
    """Gradient steps of one network by `train`; the optimizer state in `state` and in the result is what `training` stores."""
    anchor = state.weights.params

    def step(state: TrainState, batch: PyTree, key: Key) -> tuple[TrainState, Metrics]:
        gradients = gradient(state.weights, batch, key, *state.companions)
        return apply_gradients(task, training, state, gradients, learning_rate, anchor=anchor), gradients.metrics

    trained = train(state._replace(optimizer=training.start(anchor, state.optimizer)), step, schedule, key)
    return trained._replace(carry=trained.carry._replace(optimizer=training.stored(trained.carry.optimizer)))

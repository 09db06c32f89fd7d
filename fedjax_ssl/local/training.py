"""Local training: the one loop of mini-batch steps, of a client or of the server.

What the steps change is a carry. In the plain case it is a `Fit`, a network with its optimizer state. What follows the weights
(an average of them, regulators, a second network) is a further part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.data import batching
from fedjax_ssl.local.optimizers import is_on
from fedjax_ssl.local.task import Task, Weights
from fedjax_ssl.metrics import Metrics

PyTree = Any
Carry = TypeVar("Carry")


class Fit(NamedTuple):
    """A network in training: its weights, and the state of their optimizer."""

    weights: Weights
    optimizer: PyTree


class Gradients(NamedTuple):
    """The result of one gradient computation.

    Attributes:
        grad: like the parameters.
        batch_stats: the batch's norm statistics.
        metrics: to be added up over the steps.
    """

    grad: PyTree
    batch_stats: PyTree
    metrics: Metrics


GradientFn = Callable[[Weights, Any, jax.Array], Gradients]
"""(weights, a Batch or Pair, the step's key) -> Gradients."""
Step = Callable[[Carry, Any, jax.Array], tuple[Carry, Metrics]]
"""(carry, a Batch or Pair, the step's key) -> (carry, metrics)."""


class Schedule(Protocol):
    """Which examples each local step sees; see `fedjax_ssl.data.batching`."""

    @property
    def steps(self) -> Any:
        """How many steps there are: an int32 scalar, or a number."""

    def take(self, step: jax.Array) -> Any:
        """The batch of a step, of which `real` says how many examples it has."""


class Training(NamedTuple):
    """How a client, or the server, trains.

    Attributes:
        optimizer: direction of descent before the learning rate, as an optax transformation.
        learning_rate: time in rounds (int32 or float32 scalar, 0 at the start) -> float32 scalar. Federated methods hand it
            the number of the round, and it is constant within one; training on pooled data hands it fractions as well.
        batch_size: B.
        epochs: passes over the examples, or 0.
        steps: number of steps, or 0. Exactly one of `epochs` and `steps` is positive.
        persistent: whether the optimizer state survives until the next training; else it starts afresh each time.
        prox_mu: weight of FedProx's term mu/2 ||w - w_start||^2 over parameters (Li et al. 2020, Eq. 2); 0: none.
    """

    optimizer: optax.GradientTransformation
    learning_rate: Callable[[jax.Array], jax.Array]
    batch_size: int
    epochs: int = 0
    steps: int = 0
    persistent: bool = True
    prox_mu: float = 0.0

    def init(self, params: PyTree) -> PyTree:
        """The optimizer state that is kept between trainings; `()` where it is not."""
        return self.optimizer.init(params) if self.persistent else ()

    def init_clients(self, params: PyTree, num_clients: int) -> PyTree:
        """`init` for each of K clients, with leading axis K."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_clients, *x.shape)), self.init(params))

    def start(self, weights: Weights, optimizer: PyTree) -> Fit:
        """What a training starts from, given the optimizer state that was kept."""
        return Fit(weights, optimizer if self.persistent else self.optimizer.init(weights.params))

    def keep(self, optimizer: PyTree) -> PyTree:
        """What is kept of the optimizer state that a training ends with."""
        return optimizer if self.persistent else ()

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


class Trained(NamedTuple):
    """The result of local training.

    Attributes:
        carry: what the steps changed, after the last one.
        metrics: the steps' metrics, added up.
        images: int32 scalar, examples that the steps went through (forward and backward).
    """

    carry: Any
    metrics: Metrics
    images: jax.Array


def train(carry: Carry, step: Step, schedule: Schedule, key: jax.Array) -> Trained:
    """Runs `schedule.steps` steps in a loop that is as long as the client's own.

    Args:
        carry: what the steps change.
        step: (carry, batch, key) -> (carry, metrics).
        schedule: the batches.
        key: PRNG key; step s draws from fold_in(key, s).
    """

    @jax.jit  # traced once, for the shapes of its metrics and for the loop
    def numbered(s: jax.Array, carry: Carry) -> tuple[Carry, Metrics, jax.Array]:
        batch = schedule.take(s)
        new, metrics = step(carry, batch, jax.random.fold_in(key, s))
        return new, metrics, batch.real

    def body(s: jax.Array, trained: Trained) -> Trained:
        new, metrics, images = numbered(s, trained.carry)
        return Trained(new, jax.tree.map(jnp.add, trained.metrics, metrics), trained.images + images)

    _, shapes, _ = jax.eval_shape(numbered, 0, carry)  # a number of the type that the loop counts with
    metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, schedule.steps, body, Trained(carry, metrics, jnp.zeros((), jnp.int32)))


def apply_gradients(
    task: Task,
    training: Training,
    fit: Fit,
    gradients: Gradients,
    learning_rate: jax.Array,
    *,
    anchor: PyTree = None,
    where: jax.Array | None = None,
) -> Fit:
    """One step w <- w - lr direction(g + mu (w - anchor)), with the running statistics of batch norm.

    Args:
        task: the network.
        training: optimizer, and FedProx's mu.
        fit: before the step.
        gradients: g, and the batch's statistics.
        learning_rate: float32 scalar.
        anchor: the parameters that FedProx's term pulls towards, those that the training began with; None: no term.
        where: bool scalar, whether the step is taken; None: it is.
    """
    weights, grad = fit.weights, gradients.grad
    if anchor is not None and is_on(training.prox_mu):
        grad = jax.tree.map(lambda g, w, a: g + training.prox_mu * (w - a), grad, weights.params, anchor)
    direction, optimizer = training.optimizer.update(grad, fit.optimizer, weights.params)
    params = jax.tree.map(lambda w, d: w - learning_rate * d, weights.params, direction)
    new = Fit(Weights(params, task.track(weights.stats, gradients.batch_stats)), optimizer)
    return new if where is None else jax.tree.map(lambda x, old: jnp.where(where, x, old), new, fit)


def minimize(
    task: Task,
    training: Training,
    gradient: GradientFn,
    fit: Fit,
    schedule: Schedule,
    *,
    learning_rate: jax.Array,
    key: jax.Array,
) -> Trained:
    """The plain case of `train`: gradient steps of one network. The carry is a Fit, its optimizer state as it is kept.

    Args:
        task: the network.
        training: optimizer and FedProx's mu.
        gradient: of a step.
        fit: the weights to start from, and the optimizer state that was kept.
        schedule: the batches.
        learning_rate: float32 scalar.
        key: PRNG key.
    """
    anchor = fit.weights.params

    def step(fit: Fit, batch: Any, key: jax.Array) -> tuple[Fit, Metrics]:
        gradients = gradient(fit.weights, batch, key)
        return apply_gradients(task, training, fit, gradients, learning_rate, anchor=anchor), gradients.metrics

    trained = train(training.start(*fit), step, schedule, key)
    return trained._replace(carry=trained.carry._replace(optimizer=training.keep(trained.carry.optimizer)))

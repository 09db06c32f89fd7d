"""Forward passes without training over a client's examples."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int32

from fedjax_ssl.arrays import Array, Count, Inputs, Key
from fedjax_ssl.data import batching
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local.task import Task, Weights

_batch_size: contextvars.ContextVar[int] = contextvars.ContextVar("forward_batch_size", default=250)


@contextlib.contextmanager
def forward_batches_of(size: int) -> Iterator[None]:
    """Within it, programs are traced whose forward passes without training have `size` examples each."""
    token = _batch_size.set(size)
    try:
        yield
    finally:
        _batch_size.reset(token)


def class_probabilities(task: Task, weights: Weights, examples: Examples, key: Key | None) -> Float32[Array, "n C"]:
    """Softmax outputs outside of training, float32 [n, C], of n examples; rows beyond `examples.count` are unspecified.

    Example i has a weak view drawn from fold_in(key, i), whatever batch it is in; without a key it has the plain view.
    """
    n = examples.index.shape[0]
    size = min(_batch_size.get(), n)

    def views_of(positions: Int32[Array, " B"]) -> Inputs:
        if key is None:
            return task.views.plain(examples.take(positions))
        return jax.vmap(lambda i: task.views.weak(jax.random.fold_in(key, i), examples.take(i[None]))[0])(positions)

    def step(s: Count, probs: Float32[Array, "rows C"]) -> Float32[Array, "rows C"]:
        batch = batching.in_order(s, examples.count, n, size)
        outputs = jax.nn.softmax(task.eval_logits(weights, views_of(batch.positions), batch.mask))
        return jax.lax.dynamic_update_slice(probs, outputs, (s * size, 0))

    zeros = jnp.zeros((-(-n // size) * size, task.num_classes), jnp.float32)
    return jax.lax.fori_loop(0, -(-examples.count // size), step, zeros)[:n]

"""What several processes, each with devices of its own, get across: arrays, and words.

All processes have to call these functions in the same order. In one process they do what their names say, and nothing more.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from fedjax_ssl.arrays import PyTree


def is_first() -> bool:
    """Whether this is process 0, which alone reads and writes a run's folder."""
    return jax.process_index() == 0


def put(tree: PyTree, where: PyTree) -> PyTree:
    """`jax.device_put`, onto the devices of all processes, each of which has the whole of `tree` and places its part."""
    if jax.process_count() == 1:
        return jax.device_put(tree, where)

    def placed(x: Any, place: Sharding) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, place, host.__getitem__)  # device_put would compare it everywhere

    return jax.tree.map(lambda place, part: jax.tree.map(lambda x: _of_data(placed, x, place), part), where, tree)


def fetched(tree: PyTree) -> PyTree:
    """Arrays in NumPy, the whole of each in every process; typed keys stay JAX's, on a device of the process."""

    def whole(x: jax.Array) -> np.ndarray:
        if isinstance(x.sharding, NamedSharding) and not (x.is_fully_addressable or x.is_fully_replicated):
            # One leaf at a time: for a moment each device has the whole of it.
            x = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
        return np.asarray(x)

    return jax.tree.map(lambda x: _of_data(whole, x), tree)


def from_first(tree: PyTree) -> PyTree:
    """Process 0's `tree`, bit for bit, as `fetched` returns it; the other processes give one of the same shapes and dtypes."""
    if jax.process_count() == 1:
        return tree

    def sent(x: Any) -> np.ndarray:
        content = np.ascontiguousarray(x).reshape(-1).view(np.uint8)  # it is added to zeros, and -0. + 0. is 0.
        return np.asarray(multihost_utils.broadcast_one_to_all(content)).view(x.dtype).reshape(x.shape)

    return jax.tree.map(lambda x: _of_data(sent, x), tree)


def meet() -> None:
    """Lets the devices find each other, for which Gloo gives them 30 s: do it before processes are further apart."""
    multihost_utils.sync_global_devices("fedjax_ssl")
    everywhere = Mesh(jax.devices(), "all")
    ones = put(np.ones(jax.device_count()), NamedSharding(everywhere, PartitionSpec("all")))
    jax.block_until_ready(jax.jit(jnp.sum, out_shardings=NamedSharding(everywhere, PartitionSpec()))(ones))


def exchanged(value: Any) -> list[Any]:
    """The values of all processes, in their order: what JSON knows."""
    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    size = int(multihost_utils.process_allgather(np.int32(len(text))).max())
    texts = multihost_utils.process_allgather(np.frombuffer(text.ljust(size), np.uint8))
    return [json.loads(row.tobytes()) for row in texts]


def largest(number: int) -> int:
    """The largest of the processes' numbers."""
    return number if jax.process_count() == 1 else int(multihost_utils.process_allgather(np.int32(number)).max())


def is_key(x: Any) -> bool:
    """Whether something is an array of typed PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _of_data(function: Callable[..., Any], x: Any, *args: Any) -> Any:
    """`function` of an array, or of the integers of typed keys, which become keys again."""
    if not is_key(x):
        return function(x, *args)
    return jax.random.wrap_key_data(function(jax.random.key_data(x), *args), impl=jax.random.key_impl(x))

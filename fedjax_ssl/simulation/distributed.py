"""How several processes, each with its own devices, exchange arrays and texts.

All processes have to call these functions in the same order. In a single process nothing is exchanged.

When a process dies, an exchange may fail on one device of another process while that process's next device still waits for a
message. On CPUs the waiting device would accept a message of a later exchange instead, which ends the process with a stack
trace. So no exchange may begin after one has failed: the results of a program are waited for before the next program begins,
and XLA may not combine several sums into one operation, because this continues with the other sums after one of them has
failed (`program.ON_CPU`).
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
            x = _everywhere(x)
        return np.asarray(jax.block_until_ready(x))

    return jax.tree.map(lambda x: _of_data(whole, x), tree)


def from_first(tree: PyTree) -> PyTree:
    """Process 0's `tree`, bit for bit, as `fetched` returns it; other processes give a tree of the same shapes and dtypes."""
    if jax.process_count() == 1:
        return tree

    def sent(x: Any) -> np.ndarray:
        content = np.ascontiguousarray(x).reshape(-1).view(np.uint8)  # of the numbers 0. and -0. either may be the larger one
        rows = _rows(content if is_first() else np.zeros_like(content))
        whole = jax.jit(_largest_of, out_shardings=_replicated(rows))(rows)
        return np.asarray(jax.block_until_ready(whole)).view(x.dtype).reshape(x.shape)

    return jax.tree.map(lambda x: _of_data(sent, x), tree)


def meet() -> None:
    """Connects the devices of all processes, which have to call this within 30 s of each other (Gloo's limit)."""
    largest(0)


def exchanged(value: Any) -> list[Any]:
    """A list of the values of all processes, in their order; a value is anything that JSON can hold."""
    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    texts = _gathered(np.frombuffer(text.ljust(largest(len(text))), np.uint8))
    return [json.loads(row.tobytes()) for row in texts]


def largest(number: int) -> int:
    """The largest of the processes' numbers."""
    return number if jax.process_count() == 1 else int(_gathered(np.int32(number)).max())


def _gathered(x: np.ndarray | np.generic) -> np.ndarray:
    """The arrays of all processes, which have one shape, along a new first axis."""
    try:
        return np.asarray(jax.block_until_ready(_everywhere(_rows(x))))[_firsts()]
    except ValueError as error:  # Gloo's, where another process has died; a ValueError would be taken for wrong input
        raise RuntimeError(f"nothing came from another process: {error}") from error


def _rows(x: np.ndarray | np.generic) -> jax.Array:
    """A row on each device: its process's `x`. Processes may have more or fewer devices."""
    place = NamedSharding(Mesh(jax.devices(), "all"), PartitionSpec("all"))
    return jax.make_array_from_callback((jax.device_count(), *x.shape), place, lambda _: x[None])


def _firsts() -> np.ndarray:
    """The place among all devices of each process's first one."""
    return np.unique([device.process_index for device in jax.devices()], return_index=True)[1]


def _everywhere(x: jax.Array) -> jax.Array:
    """An array whose parts lie on several devices, whole on each of them."""
    return jax.jit(_same, out_shardings=_replicated(x))(x)


def _replicated(x: jax.Array) -> NamedSharding:
    assert isinstance(x.sharding, NamedSharding)
    return NamedSharding(x.sharding.mesh, PartitionSpec())


def _same(x: jax.Array) -> jax.Array:  # one function, so that its program is compiled once
    return x


def _largest_of(rows: jax.Array) -> jax.Array:
    return rows.max(0)


def is_key(x: Any) -> bool:
    """Whether something is an array of typed PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _of_data(function: Callable[..., Any], x: Any, *args: Any) -> Any:
    """`function` of an array, or of the integers of typed keys, which become keys again."""
    if not is_key(x):
        return function(x, *args)
    return jax.random.wrap_key_data(function(jax.random.key_data(x), *args), impl=jax.random.key_impl(x))

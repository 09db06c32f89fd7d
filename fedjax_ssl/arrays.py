"""The types of arrays in annotations, and a check that two pytrees have the same ones.

`Float[Array, "B C"]` is a float array with the axes B and C (jaxtyping).

Axis letters: R runs, K clients in all, M clients of a cohort, N pooled examples, n examples of the largest client, S local
steps, B batch, C classes, H W ch of an image, V stored views and D features of a text. Tests check the annotations on every
call (`tests/conftest.py`); a run does not check them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import Bool, Float, Float32, Int, Int32, Shaped

if TYPE_CHECKING:
    Array: TypeAlias = jax.Array
    Stored: TypeAlias = Any
else:
    Array = jax.Array | np.ndarray | np.generic  # tests call functions of JAX with NumPy's arrays, too
    Stored = Array  # in structures whose data are NumPy's on the host and JAX's on a device: mypy takes either

PyTree: TypeAlias = Any
Key = jaxtyping.Key[jax.Array, ""]  # one typed PRNG key (`jax.random.key`)
Number = float | int | Shaped[Array, ""]
Scalar = Float[Array, ""]
Count = Int32[Array, ""]

Logits = Float[Array, "B C"]
Probs = Float[Array, "B C"]
Labels = Int[Array, " B"]
Mask = Bool[Array, " B"]
PerExample = Float32[Array, " B"]

Inputs = Float[Array, "B ..."]  # what a network takes: normalized images, or a text's features
Maps = Float[Array, "B H W ch"]
NewMaps = Float[Array, "B _ _ _"]  # of another size
Features = Float[Array, "B F"]  # what a classifier gets, in the dtype of the activations
Outputs = Float32[Array, "B F"]  # what a network gives: logits, or the features of its last layer

Params: TypeAlias = jaxtyping.PyTree[Float[Array, "..."]]  # a network's parameters, or their gradient


def shown(x: PyTree) -> str:
    """An array's dtype and shape, `float32[2, 3]`."""
    aval = jax.typeof(x)
    return f"{aval.dtype}{list(aval.shape)}"


def check_alike(what: str, got: PyTree, accepted: PyTree, like: str) -> None:
    """Raises ValueError, with one line, where `got` has another structure, shape or dtype than `accepted`.

    Also while tracing. `what` is the function and the part of its result, `like` says what it has to be like.
    """
    of_got, of_accepted = ({keystr(path): x for path, x in tree_leaves_with_path(tree)} for tree in (got, accepted))
    for path in [*of_accepted, *of_got]:
        pair = [shown(tree[path]) if path in tree else "nothing" for tree in (of_got, of_accepted)]
        if pair[0] != pair[1]:
            raise ValueError(f"{what}: got {pair[0]}{path and f' at {path}'}, accepted: {pair[1]}, as {like}")
    if (found := jax.tree.structure(got)) != (wanted := jax.tree.structure(accepted)):  # type: ignore[operator]
        raise ValueError(f"{what}: got {found}, accepted: {wanted}, as {like}")


def digest(arrays: PyTree, before: Any = None) -> Any:
    """A hash of arrays, with their dtypes and shapes. `before` is an earlier hash, which is updated with these arrays."""
    found = hashlib.blake2b(digest_size=16) if before is None else before
    for array in map(np.ascontiguousarray, jax.tree.leaves(arrays)):
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.data)
    return found


def check_update(update: PyTree, message: tuple[PyTree, PyTree]) -> None:
    """Raises ValueError for an array of an update that has another shape than those that were broadcast under its name.

    JAX would broadcast axes of size 1 and subtract without an error. Float arrays may differ in precision. Two arrays have the
    same name where the path of one ends with that of the other: `params/kernel` of an update is `weights/params/kernel` of the
    broadcast. A path made only of tuple or list positions does not count as a name. If the update is a single array, it is
    compared with every broadcast array.
    """
    sent = [leaf for part in message for leaf in jax.tree_util.tree_leaves_with_path(part)]
    for path, x in jax.tree_util.tree_leaves_with_path(update):
        alike = [y for where, y in sent if not path or _same_name(path, where)]
        if alike and not any(_is_like(x, y) for y in alike):
            at = jax.tree_util.keystr(path)
            got = f"got {shown(x)}{at and f' at {at}'}"
            raise ValueError(f"client_update: update: {got}, accepted: {shown(alike[0])}, as it was broadcast")


def _is_like(x: Any, y: Any) -> bool:
    """Whether two arrays have one shape, and one dtype or floats of any precision."""
    dtypes = [jnp.result_type(one) for one in (x, y)]
    are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return jnp.shape(x) == jnp.shape(y) and (are_floats or dtypes[0] == dtypes[1])


def _same_name(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    size = min(len(one), len(other))
    end = one[-size:]
    return end == other[-size:] and any(not isinstance(key, jax.tree_util.SequenceKey) for key in end)

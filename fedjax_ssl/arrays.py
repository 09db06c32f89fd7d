"""The types of arrays in annotations: `Float[Array, "B C"]` is a float array with the axes B and C (jaxtyping).

Axis letters: R runs, K clients in all, M clients of a cohort, N pooled examples, n examples of the largest client, S local
steps, B batch, C classes, H W ch of an image, V stored views and D features of a text. Tests check the annotations on every
call (`tests/conftest.py`); a run does not check them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jaxtyping
import numpy as np
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


def digest(arrays: PyTree, before: Any = None) -> Any:
    """A hash of arrays, with their dtypes and shapes; `before` is one that goes on with them."""
    found = hashlib.blake2b(digest_size=16) if before is None else before
    for array in map(np.ascontiguousarray, jax.tree.leaves(arrays)):
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.data)
    return found

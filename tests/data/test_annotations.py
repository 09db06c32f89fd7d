"""The import hook of `tests/conftest.py`: calls with other shapes, dtypes or keys than the annotations' fail."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from fedjax_ssl.data import batching, presets
from fedjax_ssl.ssl import losses, thresholds


@pytest.mark.parametrize(
    "call",
    [
        lambda: thresholds.per_class(0.5, jnp.ones((2, 3))),
        lambda: losses.masked_mean(jnp.ones(3), jnp.ones(4, bool)),
        lambda: losses.cross_entropy(jnp.ones((2, 3)), jnp.ones(2)),
        lambda: batching.shuffled(jax.random.PRNGKey(0), jnp.ones(3, bool), 2, epochs=1),
        lambda: presets.measured(np.zeros((2, 8, 8), np.uint8)),
        lambda: jax.jit(jax.vmap(thresholds.per_class, (None, 0)))(0.5, jnp.ones((2, 3, 4))),
    ],
)
def test_a_call_with_another_shape_or_dtype_fails(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call()

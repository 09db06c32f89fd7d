"""How a network's parameters start: the defaults of PyTorch and of Flax, and what the papers' own code sets by hand."""

import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import DTypeLike, Float
from pydantic import Field

from fedjax_ssl.arrays import Array, Key

Initializer = Callable[..., Float[Array, "*_"]]
InitializationName = Annotated[
    Literal["torch", "flax", "kaiming"],
    Field(description="How parameters start: as in PyTorch, as in Flax, or by He's rule as (FL)^2's code sets them."),
]


def _as_matrix(initializer: Initializer) -> Initializer:
    """`initializer` drawn for the matrix [fan_in, F] that a kernel [..., F] is, convolution or linear."""

    # XLA takes four times as long to compile a generator for four axes as for two.
    def init(key: Key, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Float[Array, "*_"]:
        return initializer(key, (math.prod(shape[:-1]), shape[-1]), dtype).reshape(shape)

    return init


# PyTorch's default for a weight, convolution or linear: kaiming_uniform_(a=sqrt(5)), which is U(+-1/sqrt(fan_in)).
torch_uniform = _as_matrix(nn.initializers.variance_scaling(1.0 / 3.0, "fan_in", "uniform"))

# Flax's default, and Keras's VarianceScaling(): a normal distribution cut off at two standard deviations, variance 1/fan_in.
lecun_normal = _as_matrix(nn.initializers.lecun_normal())


def kaiming_fan_out(key: Key, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Float[Array, "*_"]:
    """N(0, 2 / (kh kw F)) for a kernel of shape [kh, kw, ch, F]: PyTorch's `kaiming_normal_`, mode fan_out, gain of ReLU."""
    kh, kw, _, features = shape
    # Drawn flat, for the reason in `_as_matrix`.
    return math.sqrt(2.0 / (kh * kw * features)) * jax.random.normal(key, (math.prod(shape),), dtype).reshape(shape)


def torch_bias(fan_in: int) -> Initializer:
    """PyTorch's default for a bias, U(-1/sqrt(fan_in), 1/sqrt(fan_in)); fan_in is that of the layer's kernel."""
    bound = 1.0 / math.sqrt(fan_in)

    def init(key: Key, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Float[Array, "*_"]:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def zero_bias(fan_in: int) -> Initializer:
    """Zeros, whatever the fan-in."""
    del fan_in
    return nn.initializers.zeros


class Initialization(NamedTuple):
    """How the layers of a network start; `bias` is called with the fan-in. Batch norm always starts at scale 1 and bias 0."""

    conv_kernel: Initializer
    linear_kernel: Initializer
    bias: Callable[[int], Initializer]


INITIALIZATIONS: dict[str, Initialization] = {
    "torch": Initialization(torch_uniform, torch_uniform, torch_bias),
    "flax": Initialization(lecun_normal, lecun_normal, zero_bias),
    "kaiming": Initialization(kaiming_fan_out, torch_uniform, zero_bias),  # set by hand in (FL)^2's and SemiFL's code
}

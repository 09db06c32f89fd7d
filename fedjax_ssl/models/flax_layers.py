"""Flax's own layers in a federated simulation: batch norm without padded examples, convolutions that are fast in a loop."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Float

from fedjax_ssl.arrays import Array, Mask
from fedjax_ssl.models.convolution import LOWERINGS
from fedjax_ssl.models.norm import Norm, normalize


def aware_of(mask: Mask | None, conv: str) -> nn.module.Interceptor:
    """An interceptor for `nn.intercept_methods` that replaces the computation of flax's layers.

    `nn.BatchNorm` becomes `norm.normalize` of the real examples, whose statistics it stores as they are, whatever its momentum.
    `nn.Conv` is lowered as `conv` says where it is two-dimensional, with one stride and no dilation, groups or precision.
    `nn.Dropout` drops nothing where there is no key for it.
    """

    def intercept(
        layer_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: nn.module.InterceptorContext
    ) -> Any:
        layer = context.module
        if context.method_name != "__call__":
            return layer_call(*args, **kwargs)
        if isinstance(layer, nn.BatchNorm) and not layer.is_initializing():
            return _batch_norm(layer, mask, *args, **kwargs)
        if isinstance(layer, nn.Dropout) and not layer.has_rng(layer.rng_collection):
            return args[0] if args else kwargs["inputs"]
        if isinstance(layer, nn.Conv) and conv != "xla" and layer.conv_general_dilated is None:
            layer = layer.clone(parent=layer.scope, conv_general_dilated=functools.partial(conv_as, conv))
            return layer(*args, **kwargs)
        return layer_call(*args, **kwargs)

    return intercept


def _batch_norm(
    layer: nn.BatchNorm, real: Mask | None, x: Float[Array, "B *rest F"], use_running_average: bool | None = None, **_: object
) -> Float[Array, "B *rest F"]:
    if layer.axis not in (-1, x.ndim - 1) or layer.axis_name is not None:
        raise ValueError(f"nn.BatchNorm: got axis={layer.axis}, axis_name={layer.axis_name}, accepted: -1 and None")
    if real is not None and len(x) != len(real):
        raise ValueError(f"nn.BatchNorm: got {len(x)} rows of {len(real)} examples, accepted: one row of an example")
    train = not nn.merge_param("use_running_average", layer.use_running_average, use_running_average)
    scale = layer.get_variable("params", "scale").astype(jnp.float32) if layer.use_scale else 1.0
    bias = layer.get_variable("params", "bias").astype(jnp.float32) if layer.use_bias else 0.0
    mean: Array
    var: Array
    if layer.has_variable("batch_stats", "mean"):
        mean, var = (layer.get_variable("batch_stats", name) for name in ("mean", "var"))
    elif train:  # what is never evaluated, such as FedCon's predictor, has no statistics
        mean, var = jnp.zeros(x.shape[-1]), jnp.ones(x.shape[-1])
    else:
        raise ValueError(f"nn.BatchNorm: got no statistics of {layer.name}, accepted: `mean` and `var`, to evaluate with")
    y, mean, var = normalize(x, real, Norm(mean, var, scale, bias, layer.epsilon), train=train)
    if train:
        layer.put_variable("batch_stats", "mean", mean)
        layer.put_variable("batch_stats", "var", var)
    return y if layer.dtype is None else y.astype(layer.dtype)


def conv_as(
    conv: str, x: Array, kernel: Array, strides: Sequence[int], padding: str | Sequence[tuple[int, int]], **options: Any
) -> Array:
    """`lax.conv_general_dilated` as `nn.Conv` calls it, in the form `conv` where that can be."""
    dilated = any(n != 1 for name in ("lhs_dilation", "rhs_dilation") for n in options[name])
    special = dilated or options["feature_group_count"] != 1 or options.get("precision") is not None
    if kernel.ndim != 4 or len(set(strides)) > 1 or special or x.dtype != kernel.dtype:
        return lax.conv_general_dilated(x, kernel, strides, padding, **options)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    same = len({n for pair in padding for n in pair}) == 1
    if not same:
        x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    return LOWERINGS[conv](x, kernel, strides[0], padding[0][0] if same else 0)

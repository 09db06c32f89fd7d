"""Networks of one's own: any flax.linen module class, or an NNX module through an adapter."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

COLLECTIONS = frozenset({"params", "batch_stats"})


def arguments(module: type[nn.Module] | nn.Module) -> frozenset[str]:
    """Which arguments a network takes besides its inputs: of `mask`, `train` and `features_only`."""
    return frozenset(inspect.signature(type(module).__call__ if isinstance(module, nn.Module) else module.__call__).parameters)


def check_module(name: str, module: Any) -> None:
    """Raises ValueError, in one line that says what is missing, where a class is no network.

    A network is a flax.linen module class with a field `num_classes`, called as `(x, train)`.
    """
    where = f"register_model: got {name!r}, "
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{where}accepted: a name of letters, digits and underscores")
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        raise ValueError(f"{where}which is no flax.linen module class; nnx: see fedjax_ssl.models.from_nnx")
    fields = {field.name for field in dataclasses.fields(module)}
    if "num_classes" not in fields:
        raise ValueError(f"{where}a module without the field num_classes")
    if "train" not in arguments(module):
        raise ValueError(f"{where}a module whose __call__ has no argument `train`, accepted: __call__(self, x, train)")


def check_outputs(module: nn.Module, variables: Any, logits: Any) -> None:
    """Raises ValueError where a network has other collections than parameters and batch-norm statistics, or other outputs."""
    name, classes = type(module).__name__, module.num_classes  # type: ignore[attr-defined]
    if strange := sorted(set(variables) - COLLECTIONS):
        raise ValueError(f"{name}: got variables of the collection {strange[0]}, accepted: params and batch_stats")
    if logits.shape != (1, classes):
        raise ValueError(f"{name}: got outputs of shape {logits.shape} for one example, accepted: logits (1, {classes})")


def adapted_layers(mask: jax.Array | None) -> Any:
    """Within it, flax's own Dropout drops nothing without a key, and its BatchNorm is as `fedjax_ssl.models.norm.BatchNorm`:
    its statistics are of the real examples alone, and it stores those of this batch. A batch without any changes nothing.
    """

    def intercept(call: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if isinstance(module, nn.Dropout) and not module.has_rng(module.rng_collection):
            return args[0]
        if not isinstance(module, nn.BatchNorm) or context.method_name != "__call__":
            return call(*args, **kwargs)
        x = args[0]
        real = jnp.ones(x.shape[:1], bool) if mask is None else mask
        count = jnp.sum(real) * (x.size // (x.shape[0] * x.shape[-1]))
        shaped = (real | (count == 0)).reshape(-1, *[1] * (x.ndim - 1))
        before = dict(module.variables.get("batch_stats", {}))
        object.__setattr__(module, "momentum", 0.0)  # of this call's copy: what is stored is the batch's
        y = call(*args, **{**kwargs, "mask": jnp.broadcast_to(shaped, x.shape)})
        if before and module.is_mutable_collection("batch_stats"):
            after = module.variables["batch_stats"]
            changed = jnp.any(after["mean"] != before["mean"]) | jnp.any(after["var"] != before["var"])
            unbiased = jnp.where(changed, count / jnp.maximum(count - 1, 1), 1.0)
            for key, factor in (("mean", 1.0), ("var", unbiased)):
                new = jnp.where(count > 0, after[key] * factor, before[key])
                module.put_variable("batch_stats", key, jax.lax.stop_gradient(new))
        return jnp.where(shaped, y, 0)

    return nn.intercept_methods(intercept)


def from_nnx(factory: Callable[..., nnx.Module], **options: Any) -> type[nn.Module]:
    """A flax.linen module class of an NNX network, for `register_model` and `build(model=)`.

    Args:
        factory: (num_classes, *, rngs, **options) -> a module, called as `(x)`; dropout follows `train`.
        **options: further arguments.

    Raises:
        ValueError: when it is built, where the network has nnx.BatchNorm, which would see padded examples.
    """

    class FromNNX(nn.Module):
        num_classes: int

        @nn.compact
        def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
            def made(key: jax.Array) -> nnx.Module:
                return factory(self.num_classes, rngs=nnx.Rngs(params=key, dropout=0), **options)

            def parameters(key: jax.Array) -> dict[str, Any]:
                return nnx.to_pure_dict(nnx.state(made(key), nnx.Param))

            network = made(jax.random.key(0))  # for its structure: its parameters are replaced
            if any(isinstance(part, nnx.BatchNorm) for _, part in nnx.iter_modules(network)):
                raise ValueError(f"{self.name}: got nnx.BatchNorm, accepted: other norms, or a flax.linen module")
            state = nnx.state(network, nnx.Param)
            nnx.replace_by_pure_dict(state, self.param("network", parameters))
            nnx.update(network, state)
            if train and self.has_rng("dropout"):
                network.train()
                nnx.reseed(network, dropout=self.make_rng("dropout"))
            else:
                network.eval()
            return network(x)

    FromNNX.__name__ = FromNNX.__qualname__ = getattr(factory, "__name__", "FromNNX")
    return FromNNX

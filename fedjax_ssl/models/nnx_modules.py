"""`flax.nnx` modules as networks: `register_model(name, from_nnx(MyModule))`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_ssl.arrays import Array, Inputs, Mask
from fedjax_ssl.models.flax_layers import conv_as
from fedjax_ssl.models.layers import Conv
from fedjax_ssl.models.norm import Norm, normalize


def from_nnx(factory: Any) -> type[nn.Module]:
    """The linen module of an nnx module, to be registered or built like any other.

    `factory` is its class, or a function that makes an instance: `(num_classes, *, rngs, image_shape, ...)`. ValueError if
    `num_classes` or `rngs` is missing. `image_shape`, the shape of one input, may be left out; other arguments have defaults,
    and are options. Instances are called with x, and with `train` if they take it; `train()` or `eval()` is called before.
    Variables are `nnx.Param`, `nnx.BatchStat` and those of `rngs`.
    """
    if not callable(factory) or isinstance(factory, nnx.Module):
        raise ValueError(
            f"from_nnx: got {type(factory).__name__}, an instance, accepted: its class, or a function that makes one"
        )
    made_by: Callable[..., Any] = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    arguments = inspect.signature(made_by).parameters
    if missing := [name for name in ("num_classes", "rngs") if name not in arguments]:
        raise ValueError(f"{factory.__name__}: got no argument {' and '.join(missing)}, accepted: (num_classes, *, rngs, ...)")
    hints = get_type_hints(made_by, include_extras=True)
    options = [p for p in arguments.values() if p.name not in ("self", "num_classes", "rngs", "image_shape")]
    fields = {"num_classes": int, "conv": Callable, **{p.name: hints.get(p.name, Any) for p in options}}
    values = {p.name: p.default for p in options if p.default is not p.empty}
    static = {"options": tuple(p.name for p in options), "of_shape": "image_shape" in arguments}
    body = {"__annotations__": fields, "conv": Conv, **values, "factory": staticmethod(factory), **static}
    return type(factory.__name__, (_NNX,), body)


class _BatchNorm(nnx.BatchNorm):
    """Batch norm that leaves out padded examples, those of `real` False, and stores the batch's statistics as they are.

    It has the variables of the `layer` that it replaces, and all its other public attributes.
    """

    def __init__(self, layer: nnx.BatchNorm, real: Mask | None) -> None:
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        self.real = nnx.data(real)

    def __call__(self, x: Array, use_running_average: bool | None = None, **_: object) -> Array:
        train = not (self.use_running_average if use_running_average is None else use_running_average)
        scale = 1.0 if self.scale is None else self.scale[...].astype(jnp.float32)
        bias = 0.0 if self.bias is None else self.bias[...].astype(jnp.float32)
        layer = Norm(self.mean[...], self.var[...], scale, bias, self.epsilon)
        y, self.mean[...], self.var[...] = normalize(x, self.real, layer, train=train)
        return y


class _NNX(nn.Module):
    """An nnx module whose parameters and statistics are linen's, by the names of its attributes."""

    @nn.compact
    def __call__(self, x: Inputs, mask: Mask | None = None, train: bool = False) -> Array:
        """See ModelFns."""
        first = self.is_initializing()
        drops = self.has_rng("dropout")
        rngs = nnx.Rngs(self.make_rng("params") if first else 0, dropout=self.make_rng("dropout") if drops else 0)
        shape = {"image_shape": x.shape[1:]} if self.of_shape else {}
        options = {name: getattr(self, name) for name in self.options}
        model = self.factory(num_classes=self.num_classes, rngs=rngs, **shape, **options)
        _, params, *rest = nnx.split(model, nnx.Param, nnx.BatchStat, nnx.RngState, ...)
        stats, _, others = rest
        if others:
            raise ValueError(f"{type(self).__name__}: got variables {', '.join(others)}, accepted: nnx.Param and nnx.BatchStat")
        if first:
            self._store(params=params, batch_stats=stats)
        else:
            for collection, state, dtype in (("params", params, x.dtype), ("batch_stats", stats, jnp.float32)):
                names = {str(path[0]) for path in dict(nnx.to_flat_state(state))}
                values: dict[Any, Any] = flatten_dict({name: self.get_variable(collection, name) for name in names})
                flat = nnx.to_flat_state(state)
                new = {path: leaf.replace(values[tuple(map(str, path))].astype(dtype)) for path, leaf in flat}
                nnx.update(model, nnx.from_flat_state(new))
        (model.train if train else model.eval)()
        if not drops:
            model.set_attributes(deterministic=True, raise_if_not_found=False)
        lowering = getattr(self.conv, "keywords", {}).get("lowering", "xla")  # `registry.build` gives a partial of Conv

        def aware(_: object, layer: Any) -> Any:
            if isinstance(layer, nnx.BatchNorm):
                return _BatchNorm(layer, mask)
            if isinstance(layer, nnx.Conv):
                layer.conv_general_dilated = functools.partial(conv_as, lowering)
            return layer

        model = nnx.recursive_map(aware, model)
        outputs = model(x, **({"train": train} if "train" in inspect.signature(model.__call__).parameters else {}))
        if train:
            self._store(batch_stats=nnx.state(model, nnx.BatchStat))
        return outputs

    def _store(self, **collections: nnx.State) -> None:
        for collection, state in collections.items():
            flat = {tuple(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
            for name, value in unflatten_dict(flat).items():
                self.put_variable(collection, name, value)

"""The networks by name, and how to add one's own."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, get_type_hints

import jax.numpy as jnp
import pydantic
from flax import linen as nn

from fedjax_ssl import origins
from fedjax_ssl.models.cnn import CNN, CifarCNN, EmnistCNN, MnistCNN, RscCNN
from fedjax_ssl.models.convolution import LOWERINGS
from fedjax_ssl.models.layers import DTYPES, Conv
from fedjax_ssl.models.mlp import MLP, Linear
from fedjax_ssl.models.network import ModelFns, arguments, pure
from fedjax_ssl.models.resnet import ResNet
from fedjax_ssl.models.resnet9 import ResNet9
from fedjax_ssl.models.wide_resnet import WideResNet
from fedjax_ssl.options import Options, Positive, did_you_mean, parse


class Model(NamedTuple):
    """A registered network; see `register_model`."""

    module: type[nn.Module]
    image_size: int = 0  # the side of the images it is made for, to which smaller ones are padded; 0: it takes any
    features: bool = False  # whether it takes vectors [B, D] too

    @property
    def options(self) -> type[Options]:
        """The class of its own options, `model.*`."""
        return _options_class(self.module)  # type: ignore[arg-type]


MODELS: dict[str, Model] = {
    "wide_resnet": Model(WideResNet),
    "resnet": Model(ResNet),
    "resnet9": Model(ResNet9, image_size=32),
    "cifar_cnn": Model(CifarCNN, image_size=32),
    "mnist_cnn": Model(MnistCNN),
    "emnist_cnn": Model(EmnistCNN),
    "rsc_cnn": Model(RscCNN),
    "cnn": Model(CNN),
    "mlp": Model(MLP, features=True),
    "linear": Model(Linear, features=True),
}

BUILT_IN = frozenset(MODELS)


def register_model(name: str, module: type[nn.Module], *, image_size: int = 0, features: bool = False) -> None:
    """Registers a network under `model.name`; the other arguments are the fields of `Model`.

    Registering the same name again replaces it.

    `module` is a class with a field `num_classes`. Its instances are called with (x, train): x is images [B, H, W, ch] or
    features [B, D], and `train`, which may be missing, is positional or a keyword. They return logits [B, C]. Batch norm and
    dropout are flax's own. Other fields have defaults: they are its options, `model.<field>`; but `conv` and `dtype` are set
    from `execution`. Instances may also take `mask` and `features_only` (see `pure`); a method `first_blocks` names the layers
    that FedTriNet shares. For a `flax.nnx` module see `from_nnx`.

    ValueError for another kind of module, or a name that is the package's or not of letters, digits and underscores.
    """
    if name in BUILT_IN or not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"register_model: got the name {name!r}, accepted: a new name of letters, digits and underscores")
    _options_class(_checked(module))
    origins.note("model", name, module)
    MODELS[name] = Model(module, image_size, features)


def build(
    name: str | type[nn.Module],
    *,
    num_classes: int,
    conv: str = "xla",
    dtype: str = "float32",
    **options: Any,
) -> ModelFns:
    """The network `name` for C classes: a key of MODELS, or a module's class as for `register_model`.

    `conv` is a key of LOWERINGS (`resolve_conv` gives a platform's fast one). `dtype`, one of DTYPES, is that of the arithmetic
    and the activations; the last layer of our own networks, parameters, statistics and logits are always float32.
    `MODELS[name].options` has the options. ValueError for unknown arguments, an option's value that its annotation excludes,
    or a module that is not as `register_model` describes.
    """
    _check_known("conv", conv, LOWERINGS)
    _check_known("dtype", dtype, DTYPES)
    if isinstance(name, str):
        _check_known("name", name, MODELS)
    model = MODELS[name] if isinstance(name, str) else Model(_checked(name))
    if type(num_classes) is not int or num_classes < 1:
        raise ValueError(f"num_classes: got {num_classes!r}, accepted: a whole number >= 1")
    chosen = dict(parse(model.options, options))
    execution = {"conv": functools.partial(Conv, lowering=conv, dtype=dtype), "dtype": jnp.dtype(dtype)}
    given = {f.name: execution[f.name] for f in dataclasses.fields(model.module) if f.name in execution}
    module = model.module(num_classes=num_classes, **given, **chosen)
    return pure(module, num_classes=num_classes, conv=conv, dtype=dtype)


def name_of(module: type[nn.Module]) -> str:
    """The name of a module's class in MODELS; a class that is not there is registered under its own name."""
    for name, model in MODELS.items():
        if model.module is module:
            return name
    name = getattr(module, "__name__", "model")
    register_model(name, module)
    return name


def feature_models() -> tuple[str, ...]:
    """The networks that take vectors of features as well as images: they have no convolutions."""
    return tuple(name for name, model in MODELS.items() if model.features)


def _checked(module: object) -> Any:
    """A module's class; ValueError where it is not as `register_model` describes."""
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        got = f"class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ValueError(f"model: got {got}, accepted: a class of flax.linen modules, or from_nnx of a flax.nnx module")
    if "num_classes" not in (field.name for field in dataclasses.fields(module)):
        raise ValueError(f"{module.__name__}: got no field num_classes, accepted: `num_classes: int` among its fields")
    arguments(module)
    return module


@functools.cache
def _options_class(module: Any) -> type[Options]:
    """The class of a module's options: its fields, with the types, bounds and descriptions of their annotations.

    A plain `int` is 1 or more. ValueError for an option without a default.
    """
    missing, hints, options = dataclasses.MISSING, get_type_hints(module, include_extras=True), {}
    for field in dataclasses.fields(module):
        if field.name in ("num_classes", "conv", "dtype", "parent", "name"):
            continue
        if field.default is field.default_factory is missing:
            accepted = "options with defaults"
            raise ValueError(f"{module.__name__}: got {field.name} without a default, accepted: {accepted}")
        default = field.default_factory() if field.default is missing else field.default  # type: ignore[operator]
        kind: Any = Positive if hints[field.name] is int else hints[field.name]
        options[field.name] = (kind, default)
    return pydantic.create_model(module.__name__, __base__=Options, **options)  # type: ignore[call-overload]


def _check_known(what: str, got: str, accepted: Iterable[str]) -> None:
    if got not in accepted:
        raise ValueError(f"{what}: got {got!r}, accepted: {', '.join(sorted(accepted))}{did_you_mean(got, accepted)}")

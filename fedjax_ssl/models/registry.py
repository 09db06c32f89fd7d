"""The networks by name, and how to add one's own."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import jax.numpy as jnp
from flax import linen as nn

from fedjax_ssl.models.cnn import CNN, CifarCNN, EmnistCNN, MnistCNN
from fedjax_ssl.models.convolution import LOWERINGS
from fedjax_ssl.models.layers import DTYPES, Conv
from fedjax_ssl.models.mlp import MLP, Linear, Predictor
from fedjax_ssl.models.network import ModelFns, arguments, pure
from fedjax_ssl.models.resnet import ResNet
from fedjax_ssl.models.resnet9 import ResNet9
from fedjax_ssl.models.wide_resnet import WideResNet


class Model(NamedTuple):
    """A network that has a name; see `register_model`."""

    module: type[nn.Module]
    image_size: int = 0  # the side of the images it is made for, to which smaller ones are padded; 0: it takes any
    features: bool = False  # whether it takes vectors [B, D] too
    first_blocks: frozenset[str] = frozenset()  # the layers that FedTriNet shares, as named at the top of its parameters


MODELS: dict[str, Model] = {
    "wide_resnet": Model(WideResNet),
    "resnet": Model(ResNet),
    "resnet9": Model(ResNet9, image_size=32),
    "cifar_cnn": Model(CifarCNN, image_size=32),
    "mnist_cnn": Model(MnistCNN),
    "emnist_cnn": Model(EmnistCNN),
    "cnn": Model(CNN),
    "mlp": Model(MLP, features=True),
    "linear": Model(Linear, features=True),
}

BUILT_IN = frozenset(MODELS)


def register_model(
    name: str, module: type[nn.Module], *, image_size: int = 0, features: bool = False, first_blocks: Iterable[str] = ()
) -> None:
    """Makes a network known as `model.name`, with the other fields of a Model; one's own gives way to another of its name.

    The module is a class with a field `num_classes`, whose instances are called with (x, train): images [B, H, W, ch] or
    features [B, D], and whether they train (positional or keyword, may be missing). It returns logits [B, C]. Batch norm and
    dropout are flax's own. Other fields have defaults: they are its options, `model.<field>`; but `conv` and `dtype` are set
    from `execution`. It may take `mask` and `features_only` too (see `pure`). A `flax.nnx` module: `from_nnx`.

    ValueError for another kind of module, or a name that is the package's or not of letters, digits and underscores.
    """
    if name in BUILT_IN or not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"register_model: got the name {name!r}, accepted: a new name of letters, digits and underscores")
    _options(module)
    MODELS[name] = Model(module, image_size, features, frozenset(first_blocks))


def build(
    name: str | type[nn.Module] | nn.Module | ModelFns,
    *,
    num_classes: int,
    conv: str = "xla",
    dtype: str = "float32",
    **options: Any,
) -> ModelFns:
    """The network `name` for C classes: a key of MODELS, a module's class as for `register_model`, an instance, or ModelFns.

    `conv` is a key of LOWERINGS (`resolve_conv` gives a platform's fast one). `dtype` is that of the arithmetic and
    the activations, one of DTYPES; the last layer of our own networks, parameters, statistics and logits are float32 always.
    `default_options` names the options. ValueError for unknown arguments, an option's value that its annotation excludes, or a
    module that is not as `register_model` describes.
    """
    _check_known("conv", conv, LOWERINGS)
    _check_known("dtype", dtype, DTYPES)
    if isinstance(name, nn.Module | ModelFns):
        if options:
            raise ValueError(f"{', '.join(options)}: got options for a finished network, accepted: none")
        return name if isinstance(name, ModelFns) else pure(name, num_classes=num_classes, conv=conv, dtype=dtype)
    model = _find(name) if isinstance(name, str) else Model(name)
    title = name if isinstance(name, str) else getattr(name, "__name__", str(name))
    check_options(title, {"num_classes": num_classes, **options}, model.module)
    execution = {"conv": functools.partial(Conv, lowering=conv, dtype=dtype), "dtype": jnp.dtype(dtype)}
    given = {f.name: execution[f.name] for f in dataclasses.fields(model.module) if f.name in execution}
    module = model.module(num_classes=num_classes, **given, **options)
    return pure(module, num_classes=num_classes, conv=conv, dtype=dtype, first_blocks=model.first_blocks)


def check_options(name: str, options: Mapping[str, object], module: Any = None) -> None:
    """ValueError where network `name` of MODELS, or this module, has no such option, or none of such a value."""
    module = module or _find(name).module
    known, accepted = _options(module), get_type_hints(module)
    for option, value in options.items():
        if option not in {"num_classes", *known}:
            raise ValueError(f"model.{option}={value!r}: no option of {name}; accepted: {', '.join(known) or 'none'}")
        if not _fits(value, accepted[option]):
            raise ValueError(f"model.{option}={value!r} for {name}: accepted: {_described(accepted[option])}")


def accepted_options(name: str) -> dict[str, str]:
    """What each option of network `name` of MODELS accepts, in words."""
    module = _find(name).module
    hints = get_type_hints(module)
    return {option: _described(hints[option]) for option in _options(module)}


def name_of(module: type[nn.Module]) -> str:
    """The name of a module's class in MODELS, in which it is entered under its own where it is not yet."""
    for name, model in MODELS.items():
        if model.module is module:
            return name
    name = getattr(module, "__name__", "model")
    register_model(name, module)
    return name


def default_options(name: str) -> dict[str, Any]:
    """The options of network `name` of MODELS, with their defaults; ValueError for an unknown name."""
    return _options(_find(name).module)


def image_size(name: str) -> int:
    """The side of the images that network `name` is made for; 0: any."""
    return MODELS[name].image_size if name in MODELS else 0


def feature_models() -> tuple[str, ...]:
    """The networks that take vectors of features as well as images: they have no convolutions."""
    return tuple(name for name, model in MODELS.items() if model.features)


def predictor(hidden: int) -> ModelFns:
    """BYOL's predictor (`Predictor`), with features [B, F] where networks have images: `init` takes the shape (F,)."""
    return pure(Predictor(hidden))


def _options(module: object) -> dict[str, Any]:
    """The options of a module's class with their defaults; ValueError where it is not as `register_model` describes."""
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        got = f"class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ValueError(f"model: got {got}, accepted: a class of flax.linen modules, or from_nnx of a flax.nnx module")
    fields = {field.name: field for field in dataclasses.fields(module)}
    if "num_classes" not in fields:
        raise ValueError(f"{module.__name__}: got no field num_classes, accepted: `num_classes: int` among its fields")
    arguments(module)
    options = {name: field for name, field in fields.items() if name not in {"num_classes", "conv", "dtype", "parent", "name"}}
    missing = dataclasses.MISSING
    if without := [name for name, field in options.items() if field.default is field.default_factory is missing]:
        raise ValueError(f"{module.__name__}: got {', '.join(without)} without a default, accepted: options with defaults")
    return {n: f.default_factory() if f.default is missing else f.default for n, f in options.items()}  # type: ignore[operator]


def _find(name: str) -> Model:
    _check_known("name", name, MODELS)
    return MODELS[name]


def _check_known(what: str, got: str, accepted: Iterable[str]) -> None:
    if got not in accepted:
        nearest = difflib.get_close_matches(str(got), accepted, n=1, cutoff=0.0)
        raise ValueError(f"{what}={got!r}: unknown; accepted: {', '.join(sorted(accepted))}; nearest: {nearest[0]!r}")


def _fits(got: object, wanted: Any) -> bool:
    """Whether `got` is of the annotated type: one of a Literal's values, an integer >= 1, ..."""
    origin = get_origin(wanted)
    if origin is Literal:
        return any(type(got) is type(value) and got == value for value in get_args(wanted))
    if origin in (Union, types.UnionType):
        return any(_fits(got, each) for each in get_args(wanted))
    if wanted is float:
        return type(got) in (int, float)
    if wanted is int:
        return type(got) is int and got >= 1
    if isinstance(wanted, type) and origin is None:
        return type(got) is wanted
    return not isinstance(origin, type) or isinstance(got, origin)


def _described(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return f"one of {', '.join(map(str, get_args(wanted)))}"
    if wanted is int:
        return "an integer >= 1"
    return f"a {wanted.__name__}" if get_origin(wanted) is None else str(wanted)

"""Networks as pure functions: `build(name, num_classes=C)` gives `ModelFns`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_ssl.models.cnn import CNN, CifarCNN, EmnistCNN, MnistCNN
from fedjax_ssl.models.convolution import LOWERINGS, resolve_conv
from fedjax_ssl.models.layers import DTYPES, Conv
from fedjax_ssl.models.mlp import MLP, Linear
from fedjax_ssl.models.plugins import arguments, check_module, check_outputs, from_nnx, adapted_layers
from fedjax_ssl.models.predictor import Predictor
from fedjax_ssl.models.resnet import ResNet
from fedjax_ssl.models.resnet9 import ResNet9
from fedjax_ssl.models.wide_resnet import WideResNet

__all__ = [
    "FEATURE_MODELS",
    "IMAGE_SIZE",
    "MODELS",
    "ModelFns",
    "build",
    "check_options",
    "default_options",
    "from_nnx",
    "name_of",
    "predictor",
    "register_model",
    "resolve_conv",
]

PyTree = Any

MODELS: dict[str, Any] = {
    "wide_resnet": WideResNet,
    "resnet": ResNet,
    "resnet9": ResNet9,
    "cifar_cnn": CifarCNN,
    "mnist_cnn": MnistCNN,
    "emnist_cnn": EmnistCNN,
    "cnn": CNN,
    "mlp": MLP,
    "linear": Linear,
}

FEATURE_MODELS = ("linear", "mlp")
"""Networks without convolutions, which take vectors of features as well as images."""

BUILT_IN = frozenset(MODELS)

IMAGE_SIZE = {"resnet9": 32, "cifar_cnn": 32}
"""The side of the images that these networks are made for, by their last pool or first linear layer."""


class Apply(Protocol):
    """The signature of `ModelFns.apply` and `ModelFns.features`."""

    def __call__(
        self,
        params: PyTree,
        stats: PyTree,
        images: jax.Array,
        *,
        mask: jax.Array | None = None,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, PyTree]:
        """See ModelFns."""


def _inputs_as_features(
    params: PyTree,
    stats: PyTree,
    images: jax.Array,
    *,
    mask: jax.Array | None = None,
    train: bool = False,
    key: jax.Array | None = None,
) -> tuple[jax.Array, PyTree]:
    """The features of a network that is all classifier: its flattened inputs."""
    del params, mask, train, key
    return images.reshape(images.shape[0], -1), stats


class ModelFns(NamedTuple):
    """A network as pure functions.

    Attributes:
        init: (key, image_shape) -> (params, stats). params: float32 pytree with leaves `kernel`, `bias` (convolutions, linear
            layers) and `scale`, `bias` (batch norm); stats: batch-norm statistics, leaves `mean` and `var`, `{}` if there is
            no batch norm.
        apply: (params, stats, images, *, mask=None, train=False, key=None) -> (logits, batch_stats). images: float32
            [B, H, W, ch], normalized; mask: bool [B], which examples are real (None: all), the others cannot change a real
            one's logits, the statistics or a gradient, even if they hold NaN; key: PRNG key of the dropout masks in training,
            the same key drawing the same masks (None, or train=False: no dropout); logits: float32 [B, C]. With train=True
            every batch norm normalizes by this batch's real examples, and batch_stats (like stats) holds the batch's mean and
            unbiased variance, without gradient (`stats` itself if no example is real); otherwise it normalizes by stats, and
            batch_stats is stats.
        features: as apply, up to the classifier: (features float32 [B, F], batch_stats). The classifier is the last linear
            layer, in `mnist_cnn`, `emnist_cnn` and `cifar_cnn` all linear layers, with the dropout that may stand before
            them. The classifier's parameters may be left out.
        backbone: () -> the layers that `features` consists of, by their names at the top of params and stats; all others are
            the classifier's. A network of one's own may leave both out: it is all classifier.
        first_blocks: () -> the layers of the first blocks, which FedTriNet shares, named likewise: the first two convolutions
            (`mnist_cnn`, `emnist_cnn`, `cifar_cnn`, `cnn`), the stem and the first stage (residual networks), the hidden layer
            (`mlp`); with their batch norm. None of `linear`, nor of a network that leaves it out.
    """

    init: Callable[[jax.Array, tuple[int, ...]], tuple[PyTree, PyTree]]
    apply: Apply
    features: Apply = _inputs_as_features
    backbone: Callable[[], frozenset[str]] = frozenset
    first_blocks: Callable[[], frozenset[str]] = frozenset


def build(name: str, *, num_classes: int, conv: str = "im2col", dtype: str = "float32", **options: Any) -> ModelFns:
    """The network `name` of MODELS for C classes.

    Args:
        name: key of MODELS.
        num_classes: C.
        conv: how convolutions are lowered, a key of LOWERINGS (see `resolve_conv` for "auto").
        dtype: of the arithmetic and the activations of all layers but the last, "float32" or "bfloat16"; parameters,
            statistics and logits are float32 always.
        **options: the attributes of the network's class that `default_options` names.

    Raises:
        ValueError: unknown name, option, conv or dtype, or an option's value that its annotation excludes.
    """
    _check_known("name", name, MODELS)
    _check_known("conv", conv, LOWERINGS)
    _check_known("dtype", dtype, DTYPES)
    network = MODELS[name]
    _check_value(name, "num_classes", num_classes, int)
    check_options(name, options)
    fields = {field.name for field in dataclasses.fields(network)}
    of_conv = {"conv": functools.partial(Conv, lowering=conv, dtype=dtype)} if "conv" in fields else {}
    return _pure(network(num_classes=num_classes, **of_conv, **options), dtype)


def default_options(name: str) -> dict[str, Any]:
    """The options of network `name` of MODELS, with their defaults.

    Raises:
        ValueError: unknown name.
    """
    _check_known("name", name, MODELS)
    common = {"num_classes", "conv", "parent", "name"}
    return {field.name: field.default for field in dataclasses.fields(MODELS[name]) if field.name not in common}


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError, naming the key of `model`, where network `name` does not have such options or values."""
    known, accepted = default_options(name), get_type_hints(MODELS[name])
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"model.{option}={value!r}: no option of {name}; accepted: {', '.join(known) or 'none'}")
        _check_value(name, option, value, accepted[option])


def predictor(hidden: int) -> ModelFns:
    """BYOL's predictor (`Predictor`), with features [B, F] where networks have images: `init` takes the shape (F,)."""
    return _pure(Predictor(hidden), "float32")


def register_model(name: str, module: type[nn.Module], *, image_size: int = 0, features: bool = False) -> None:
    """Makes a network known by a name, for `model.name` in configs.

    Args:
        name: the new name, of letters, digits and underscores.
        module: a flax.linen module class with a field `num_classes`, called as `(x, train)`: x [B, H, W, ch] (or [B, D]) ->
            logits [B, C]. Its other fields are options of `model`. flax's BatchNorm and Dropout work as they are.
        image_size: the side of the images that it is made for; 0: any.
        features: whether it also takes vectors of features.

    Raises:
        ValueError: the name is that of another network, or the class is none; one line says what is missing.
    """
    global FEATURE_MODELS
    check_module(name, module)
    if name in BUILT_IN:
        raise ValueError(f"register_model: got the name {name!r}, which is taken, accepted: another name")
    MODELS[name] = module
    if image_size:
        IMAGE_SIZE[name] = image_size
    if features and name not in FEATURE_MODELS:
        FEATURE_MODELS = (*FEATURE_MODELS, name)


def name_of(module: type[nn.Module]) -> str:
    """The name of a network's class in MODELS, in which it is entered under its own where it is not yet."""
    for name, known in MODELS.items():
        if known is module:
            return name
    name = getattr(module, "__name__", "model")
    register_model(name, module)
    return name


def _pure(module: nn.Module, dtype: str) -> ModelFns:
    takes = arguments(module)

    def init(key: jax.Array, image_shape: tuple[int, ...]) -> tuple[PyTree, PyTree]:
        images = jnp.zeros((1, *image_shape), dtype)
        keywords = {"train": False} if "train" in takes else {}
        if hasattr(module, "num_classes"):
            check_outputs(module, *jax.eval_shape(lambda k: module.init_with_output(k, images, **keywords)[::-1], key))
        # Under jit only what the parameters depend on is computed, not a forward pass.
        variables = jax.jit(lambda key: module.init(key, images, **keywords))(key)
        return variables["params"], variables.get("batch_stats", {})

    def forward(**only: Any) -> Apply:
        def apply(
            params: PyTree,
            stats: PyTree,
            images: jax.Array,
            *,
            mask: jax.Array | None = None,
            train: bool = False,
            key: jax.Array | None = None,
        ) -> tuple[jax.Array, PyTree]:
            if mask is not None:
                # Padding may hold anything; as zeros it keeps NaN out of every sum over the batch that a gradient takes.
                images = jnp.where(mask.reshape(mask.shape + (1,) * (images.ndim - 1)), images, 0.0)
            variables = {"params": params, "batch_stats": stats}
            keys = {"dropout": key} if train and key is not None else {}
            keywords = {name: value for name, value in {"mask": mask, "train": train, **only}.items() if name in takes}
            with adapted_layers(mask):
                images = images.astype(dtype)
                outputs, updated = module.apply(variables, images, **keywords, rngs=keys, mutable=["batch_stats"])
            if "mask" not in takes:
                outputs = outputs.astype(jnp.float32)
            return outputs, updated.get("batch_stats", stats) if stats else {}

        return jax.jit(apply, static_argnames="train")  # a program that applies it in ten places traces it once

    if "features_only" not in takes:  # all classifier
        return ModelFns(init, forward(), first_blocks=getattr(module, "first_blocks", frozenset))

    @functools.cache
    def backbone() -> frozenset[str]:
        init_features = functools.partial(module.init, features_only=True)
        # Any size that every network takes: layers do not change with it.
        variables = jax.eval_shape(init_features, jax.random.key(0), jnp.zeros((1, 32, 32, 3), dtype))
        return frozenset(variables.get("params", {}))

    return ModelFns(init, forward(), forward(features_only=True), backbone, getattr(module, "first_blocks", frozenset))


def _check_known(what: str, got: str, accepted: Iterable[str]) -> None:
    if got not in accepted:
        nearest = difflib.get_close_matches(str(got), accepted, n=1, cutoff=0.0)
        raise ValueError(f"{what}={got!r}: unknown; accepted: {', '.join(sorted(accepted))}; nearest: {nearest[0]!r}")


def _check_value(name: str, option: str, got: Any, wanted: Any) -> None:
    """Raises ValueError where `got` is not of the annotated type `wanted`: one of a Literal's values, an integer >= 1, ..."""
    if get_origin(wanted) is Literal:
        values = get_args(wanted)
        fits = any(type(got) is type(value) and got == value for value in values)
        accepted = f"one of {', '.join(map(str, values))}"
    else:
        fits = type(got) is wanted and (wanted is not int or got >= 1)
        accepted = "an integer >= 1" if wanted is int else f"a {wanted.__name__}"
    if not fits:
        raise ValueError(f"model.{option}={got!r} for {name}: accepted: {accepted}")

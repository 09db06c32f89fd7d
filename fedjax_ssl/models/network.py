"""The package's networks as modules, and any `flax.linen` module as pure functions that know of padded examples."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_ssl.arrays import Features, Inputs, Key, Logits, Mask, Outputs, PyTree
from fedjax_ssl.models.flax_layers import aware_of
from fedjax_ssl.models.initializers import torch_uniform
from fedjax_ssl.models.layers import Conv


class Network(nn.Module):
    """A network of the package: `classifier(features(images))`, whose `ModelFns.first_blocks` are `shared_layers`."""

    shared_layers: ClassVar[tuple[str, ...]] = ()
    num_classes: int
    conv: Callable[..., nn.Module] = Conv

    @nn.nowrap
    def first_blocks(self) -> frozenset[str]:
        """See ModelFns."""
        return frozenset(self.shared_layers)

    @nn.compact
    def __call__(self, images: Inputs, train: bool = False, features_only: bool = False) -> Outputs:
        """Logits, or the features before the classifier, of images [B, H, W, ch] or, if it takes them, vectors."""
        x = self.features(images, train)
        self.sow("intermediates", "features", x)  # only for `ModelFns.both`
        return x.astype(jnp.float32) if features_only else self.classifier(x)

    def features(self, images: Inputs, train: bool) -> Features:
        """The inputs of the classifier, in the dtype of the activations."""
        raise NotImplementedError

    def classifier(self, x: Features) -> Logits:
        """A linear layer that starts as PyTorch's, with bias 0."""
        return nn.Dense(self.num_classes, kernel_init=torch_uniform)(x.astype(jnp.float32))


@runtime_checkable
class Apply(Protocol):
    """The signature of `ModelFns.apply` and `ModelFns.features`."""

    def __call__(
        self,
        params: PyTree,
        stats: PyTree,
        images: Inputs,
        *,
        mask: Mask | None = None,
        train: bool = False,
        key: Key | None = None,
    ) -> tuple[Features, PyTree]:
        """See ModelFns."""


def _inputs_as_features(params: PyTree, stats: PyTree, images: Inputs, **_: object) -> tuple[Features, PyTree]:
    """The features of a network that is all classifier: its flattened inputs."""
    del params
    return images.reshape(images.shape[0], -1), stats


class ModelFns(NamedTuple):
    """A network as pure functions.

    Parameters are a float32 pytree with leaves `kernel`, `bias`, and `scale` of batch norm; statistics of batch norm are one
    with leaves `mean` and `var`, or `{}`. `apply` gives logits and batch statistics of normalized images. The examples
    that are real by the `mask` (None: all) are computed as if they were alone: the others change no logits, no statistics and
    no gradient, even if they hold NaN. With train=True every batch norm normalizes by the batch's real examples, and the
    statistics are their mean and unbiased variance, without gradient (`stats` itself if no example is real). Otherwise it
    normalizes by `stats`, and returns them. The key is for the dropout masks in training (None: no dropout).

    `features` gives the inputs of the classifier, whose parameters may be missing. The classifier is the last linear layer, or
    in `mnist_cnn`, `emnist_cnn` and `cifar_cnn` all linear layers, with dropout before them. `first_blocks` are the layers that
    FedTriNet shares, with their batch norm: the first two convolutions, or in residual networks the stem and the first stage,
    or in `mlp` the hidden layer. A module of your own that does not take `features_only` counts as a classifier as a whole.
    `both` gives logits and features of one forward pass; None: they need one each.
    """

    init: Callable[[Key, tuple[int, ...]], tuple[PyTree, PyTree]]  # (key, image_shape) -> (params, stats)
    apply: Apply
    features: Apply = _inputs_as_features
    backbone: Callable[[], frozenset[str]] = frozenset  # the layers of `features`, as named at the top of params and stats
    first_blocks: Callable[[], frozenset[str]] = frozenset  # named likewise
    both: Callable[..., tuple[tuple[Logits, Features], PyTree]] | None = None


def pure(
    module: nn.Module,
    *,
    num_classes: int | None = None,
    conv: str = "xla",
    dtype: str = "float32",
) -> ModelFns:
    """The pure functions of a module, which is called with (x, train), and with `mask` and `features_only` if it takes them.

    Flax's own layers are made aware of padded examples and of `conv` (see `flax_layers.aware_of`). Inputs are cast to `dtype`.
    The parameters are cast as well, except those of a Network or of a module that takes `mask` to look after padded examples
    itself: these get float32 parameters and choose their arithmetic themselves.

    With `num_classes` the shape of the outputs is checked at initialization. `first_blocks` (see ModelFns) are those that the
    module's method of that name gives, if it has one.
    """
    takes = arguments(type(module))
    forward = functools.partial(_forward, module, takes, conv, dtype)

    in_evaluation: dict[str, Any] = {"train": False} if "train" in takes else {}

    @functools.partial(jax.jit, static_argnums=1)  # computes only what the parameters depend on, not a forward pass
    def variables(key: Key, image_shape: tuple[int, ...]) -> PyTree:
        images = jnp.zeros((1, *image_shape), dtype)
        with nn.intercept_methods(aware_of(None, "xla")):
            outputs, created = module.init_with_output(key, images, **in_evaluation)
        _check(type(module).__name__, outputs, created, image_shape, num_classes)
        if created.get("batch_stats") and "train" not in takes:  # in evaluation it would normalize as in training
            accepted = "(x, train), with use_running_average=not train in batch norm"
            raise ValueError(f"{type(module).__name__}.__call__: got no argument train, accepted: {accepted}")
        return created

    def init(key: Key, image_shape: tuple[int, ...]) -> tuple[PyTree, PyTree]:
        created = variables(key, tuple(image_shape))
        return created.get("params", {}), created.get("batch_stats", {})

    @functools.cache
    def backbone() -> frozenset[str]:
        init_features = functools.partial(module.init, features_only=True, **in_evaluation)
        # Any size that every network takes: layers do not change with it.
        variables = jax.eval_shape(init_features, jax.random.key(0), jnp.zeros((1, 32, 32, 3), dtype))
        return frozenset(variables.get("params", {})) | frozenset(variables.get("batch_stats", {}))

    blocks = getattr(module, "first_blocks", frozenset)
    if "features_only" not in takes:
        return ModelFns(init, forward(), first_blocks=blocks)
    both = forward(sown=("features",)) if isinstance(module, Network) else None
    return ModelFns(init, forward(), forward(features_only=True), backbone, blocks, both)


def _forward(
    module: nn.Module, takes: frozenset[str], conv: str, dtype: str, sown: tuple[str, ...] = (), **only: bool
) -> Callable[..., Any]:
    """`ModelFns.apply` of a module that takes these arguments, of which `only` are given with a value of their own.

    Where there are names of values that the module has `sown`, the outputs are a tuple that ends with these.
    """

    def apply(
        params: PyTree, stats: PyTree, images: Inputs, *, mask: Mask | None = None, train: bool = False, key: Key | None = None
    ) -> tuple[Any, PyTree]:
        if mask is not None:
            # Padding may hold anything; as zeros it keeps NaN out of every sum over the batch that a gradient takes.
            images = jnp.where(mask.reshape(mask.shape + (1,) * (images.ndim - 1)), images, 0.0)
        if not (isinstance(module, Network) or "mask" in takes or dtype == "float32"):
            params = jax.tree.map(lambda x: x.astype(dtype), params)
        given: dict[str, Any] = {k: v for k, v in {"mask": mask, "train": train, **only}.items() if k in takes}
        keys = {"dropout": key} if train and key is not None else {}
        variables = {"params": params, "batch_stats": stats}
        with nn.intercept_methods(aware_of(mask, conv)):
            outputs, new = module.apply(
                variables, images.astype(dtype), **given, rngs=keys, mutable=["batch_stats"] + ["intermediates"] * bool(sown)
            )
        if sown:
            outputs = (outputs, *(new["intermediates"][name][0] for name in sown))
        return jax.tree.map(lambda x: x.astype(jnp.float32), outputs), new.get("batch_stats", {})

    return jax.jit(apply, static_argnames="train")  # a program that applies it in ten places traces it once


def arguments(module: type[nn.Module]) -> frozenset[str]:
    """Which of `train`, `mask` and `features_only` a module takes; ValueError if it takes no input, or needs another one."""
    names = ("train", "mask", "features_only")
    call = next((vars(c)["__call__"] for c in module.__mro__ if "__call__" in vars(c)), None)
    accepted = f"(x, train), and {' or '.join(names[1:])} if the network takes them"
    if call is None:
        raise ValueError(f"{module.__name__}.__call__: got none, accepted: {accepted}")
    _, *parameters = inspect.signature(call).parameters.values()
    accepts = [p.name for p in parameters]
    needed = [p for p in parameters[1:] if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    modes = {"deterministic", "training", "is_training", "use_running_average"}  # which nobody would set here
    if not parameters or parameters[0].name in names or any(p.name not in names for p in needed) or modes & {*accepts}:
        raise ValueError(f"{module.__name__}.__call__: got ({', '.join(accepts)}), accepted: {accepted}")
    return frozenset(names) & {*accepts}


def _check(name: str, outputs: object, variables: PyTree, image_shape: tuple[int, ...], num_classes: int | None) -> None:
    """Raises ValueError where outputs of one input are not logits, or variables not those of ModelFns."""
    shape = getattr(outputs, "shape", type(outputs).__name__)
    if num_classes is not None and shape != (1, num_classes):
        raise ValueError(f"{name}: got logits {shape} of one input {image_shape}, accepted: shape (1, {num_classes})")
    if others := sorted(set(variables) - {"params", "batch_stats"}):
        raise ValueError(f"{name}: got variables in {', '.join(others)}, accepted: params and batch_stats alone")
    leaves = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(variables.get("batch_stats", {}))}
    if leaves - {"mean", "var"}:
        raise ValueError(f"{name}: got batch_stats {', '.join(sorted(leaves))}, accepted: mean and var, as of nn.BatchNorm")

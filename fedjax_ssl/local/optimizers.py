"""Optimizers of clients and server as optax transformations: PyTorch's SGD, LARS, adaptive ones of optax, and FedOpt."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.arrays import Number, PyTree

DECOUPLED = ("adamw", "lion")
"""Optimizers whose weight decay is a part of the step and not of the gradient."""
TRUST = 1e-3  # LARS' trust coefficient: a kernel changes by this share of its norm in a step of learning rate 1


def is_on(number: Number) -> bool:
    """Whether a number switches a part of an optimizer on: it is positive, or traced; a number that is 0 switches it off."""
    return isinstance(number, jax.Array) or number > 0


def clipping(clip_norm: Number) -> optax.GradientTransformation:
    """Clipping to the largest global norm `clip_norm`; 0: none."""
    return optax.clip_by_global_norm(clip_norm) if is_on(clip_norm) else optax.identity()


def decayed_weights(weight_decay: Number, on: str = "all") -> optax.GradientTransformation:
    """Weight decay g <- g + wd w on `all` parameters, or on layers' `kernels` (FixMatch's and FreeMatch's code); 0: none."""
    if not is_on(weight_decay):
        return optax.identity()
    return optax.add_decayed_weights(weight_decay, mask=_are_kernels if on == "kernels" else None)


def _are_kernels(params: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, _: getattr(path[-1], "key", None) == "kernel", params)


def _momentum(momentum: Number, nesterov: bool) -> optax.GradientTransformation:
    return optax.trace(decay=momentum, nesterov=nesterov) if is_on(momentum) else optax.identity()


def torch_sgd(
    *, momentum: Number = 0.0, nesterov: bool = False, weight_decay: Number = 0.0, decay: str = "all", clip_norm: Number = 0.0
) -> optax.GradientTransformation:
    """SGD in PyTorch's form, before the learning rate.

        g <- clip(g);  g <- g + wd w;  m <- mu m + g;  direction = g + mu m (Nesterov) or m

    Clipping is by the global norm. The first step has m = g. `decay` is the argument `on` of `decayed_weights`.
    """
    return optax.chain(clipping(clip_norm), decayed_weights(weight_decay, decay), _momentum(momentum, nesterov))


def lars(*, momentum: Number = 0.0, nesterov: bool = False, weight_decay: Number = 0.0) -> optax.GradientTransformation:
    """LARS as SimCLR and BYOL use it (You et al. 2017), before the learning rate.

        g <- g + wd w;  g <- TRUST ||w|| / ||g|| g (1 g where either norm is 0);  m <- mu m + g;  direction = g + mu m or m

    The first two steps are for kernels alone, with the norms of one layer; biases and batch norm have plain SGD with momentum.
    The learning rate multiplies the result, momentum included; SimCLR multiplies each gradient by it before the momentum. The
    two differ only if the learning rate changes.
    """
    return optax.chain(
        decayed_weights(weight_decay, "kernels"),
        optax.masked(optax.scale_by_trust_ratio(trust_coefficient=TRUST), _are_kernels),
        _momentum(momentum, nesterov),
    )


def adaptive(
    name: str,
    *,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    decay: str = "all",
    clip_norm: Number = 0.0,
) -> optax.GradientTransformation:
    """Adam, AdamW, Lion or RMSProp by optax's rule, before the learning rate.

        adam, rmsprop:  g <- clip(g);  g <- g + wd w;  direction = rule(g)
        adamw, lion:    g <- clip(g);  direction = rule(g) + wd w

    Adam's rule reads `b1`, `b2` and `eps`, Lion's `b1` and RMSProp's `eps`. Lion's b2 is 0.99, and the decay of RMSProp's mean
    of squares is 0.9. Clipping is by the global norm. `decay` is the argument `on` of `decayed_weights`.
    """
    if name == "lion":
        rule = optax.scale_by_lion(b1=b1)
    elif name == "rmsprop":
        rule = optax.scale_by_rms(eps=eps)
    else:
        rule = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    decays = decayed_weights(weight_decay, decay)
    return optax.chain(clipping(clip_norm), *((rule, decays) if name in DECOUPLED else (decays, rule)))


Factors = Sequence[tuple[str, float]]  # patterns and factors


def path_of(path: tuple[object, ...]) -> str:
    """The path of a parameter in its tree, such as `Block_3/Conv_0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def first_found(patterns: Sequence[str], path: str) -> int:
    """The index of the first regular expression that is found in the path of a parameter; -1: none is."""
    return next((index for index, pattern in enumerate(patterns) if re.search(pattern, path)), -1)


def factor_of(factors: Factors, path: str) -> float:
    """The factor of the first pattern that is found in the path of a parameter, or 1."""
    index = first_found([pattern for pattern, _ in factors], path)
    return 1.0 if index < 0 else factors[index][1]


def is_fixed(factors: Factors, path: str) -> bool:
    """Whether the parameter of this path has the factor 0, and so is not trained."""
    return factor_of(factors, path) == 0


def with_factors(optimizer: optax.GradientTransformation, factors: Factors) -> optax.GradientTransformation:
    """The optimizer whose direction for each parameter is scaled by the parameter's factor, as its learning rate is then.

    A parameter with the factor 0 stays as it is: the optimizer does not see its gradient, which a compiled program then does
    not compute, and has no state for it.
    """

    def scaled(path: tuple[object, ...], direction: jax.Array) -> jax.Array:
        return factor_of(factors, path_of(path)) * direction

    def kinds(params: PyTree) -> PyTree:
        def kind(path: tuple[object, ...], _: jax.Array) -> str:
            return "fixed" if is_fixed(factors, path_of(path)) else "trained"

        return jax.tree_util.tree_map_with_path(kind, params)

    scaling = optax.stateless(lambda directions, _: jax.tree_util.tree_map_with_path(scaled, directions))
    trained = optax.chain(optimizer, scaling)
    if all(factor > 0 for _, factor in factors):
        return trained
    return optax.multi_transform({"trained": trained, "fixed": optax.set_to_zero()}, kinds)


class FedOptState(NamedTuple):
    """The average m of past updates (`()` for Adagrad), and the average or, for Adagrad, the sum v of their squares."""

    mean: PyTree
    squares: PyTree


def fed_opt(name: str, learning_rate: Number, *, b1: Number, b2: Number, tau: Number) -> optax.GradientTransformation:
    """FedAdagrad, FedYogi or FedAdam (Reddi et al. 2021, Algorithm 2): unlike optax's, without a correction of the bias.

        m = b1 m + (1 - b1) g,    w <- w - lr m / (sqrt(v) + tau),    v = tau^2 before the first step
        adam: v <- b2 v + (1 - b2) g^2    yogi: v <- v - (1 - b2) g^2 sign(v - g^2)    adagrad: v <- v + g^2, and b1 = 0

    g is the aggregated update, broadcast minus local.
    """

    def init(params: PyTree) -> FedOptState:
        mean = () if name == "adagrad" else jax.tree.map(jnp.zeros_like, params)
        return FedOptState(mean, jax.tree.map(lambda x: jnp.full_like(x, tau**2), params))

    def squared(v: jax.Array, g: jax.Array) -> jax.Array:
        if name == "adagrad":
            return v + g**2
        return b2 * v + (1 - b2) * g**2 if name == "adam" else v - (1 - b2) * g**2 * jnp.sign(v - g**2)

    def update(grads: PyTree, state: FedOptState, params: PyTree = None) -> tuple[PyTree, FedOptState]:
        del params
        mean = grads if name == "adagrad" else jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mean, grads)
        squares = jax.tree.map(squared, state.squares, grads)
        steps = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + tau), mean, squares)
        return steps, FedOptState(() if name == "adagrad" else mean, squares)

    return optax.GradientTransformation(init, update)

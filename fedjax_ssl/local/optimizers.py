"""Optimizers of clients and server as optax transformations: PyTorch's SGD, LARS, weight decay on chosen parameters."""

import jax
import optax

from fedjax_ssl.arrays import Number, PyTree

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

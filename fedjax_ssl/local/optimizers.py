"""What holders train with, as optax transformations: PyTorch's SGD, LARS, weight decay on chosen parameters."""

from __future__ import annotations

from typing import Any

import jax
import optax

PyTree = Any
TRUST = 1e-3
"""LARS' trust coefficient: by how much of its norm a layer's kernel changes in a step of learning rate 1."""
DECAYED = ("all", "kernels")


def is_on(number: Any) -> bool:
    """Whether a number of which 0 stands for `none` is another one; one that is traced is: see `experiment.runs.SWITCHES`."""
    return isinstance(number, jax.Array) or number > 0


def clipping(clip_norm: float) -> optax.GradientTransformation:
    """Clipping to the largest global norm `clip_norm`; 0: none."""
    return optax.clip_by_global_norm(clip_norm) if is_on(clip_norm) else optax.identity()


def decayed_weights(weight_decay: float, on: str = "all") -> optax.GradientTransformation:
    """Weight decay as part of the gradient, g <- g + wd w.

    Args:
        weight_decay: wd; 0: none.
        on: one of DECAYED: `all` parameters, or the `kernels` of convolutions and linear layers, which leaves out biases and
            batch norm (FixMatch's and FreeMatch's code).
    """
    if not is_on(weight_decay):
        return optax.identity()
    return optax.add_decayed_weights(weight_decay, mask=_are_kernels if on == "kernels" else None)


def _are_kernels(params: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, _: getattr(path[-1], "key", None) == "kernel", params)


def torch_sgd(
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay: str = "all",
    clip_norm: float = 0.0,
) -> optax.GradientTransformation:
    """SGD as PyTorch does it, before the learning rate.

        g <- clip(g);  g <- g + wd w;  m <- mu m + g;  direction = g + mu m (Nesterov) or m

    Clipping is by the global norm, before weight decay. The first step has m = g.

    Args:
        momentum: mu; 0: none.
        nesterov: Nesterov's form.
        weight_decay: wd.
        decay: what it covers, see `decayed_weights`.
        clip_norm: the largest global norm; 0: no clipping.
    """
    return optax.chain(
        clipping(clip_norm),
        decayed_weights(weight_decay, decay),
        optax.trace(decay=momentum, nesterov=nesterov) if is_on(momentum) else optax.identity(),
    )


def lars(*, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> optax.GradientTransformation:
    """LARS as SimCLR and BYOL use it (You et al. 2017), before the learning rate.

        g <- g + wd w;  g <- TRUST ||w|| / ||g|| g (1 g where either norm is 0);  m <- mu m + g;  direction = g + mu m or m

    The first two steps are for kernels alone: biases and batch norm's parameters have plain SGD with momentum. Norms are those
    of one layer. The learning rate stands outside of the momentum, which differs from SimCLR's only where it changes while
    the momentum is kept.

    Args:
        momentum: mu; 0: none.
        nesterov: Nesterov's form.
        weight_decay: wd.
    """

    return optax.chain(
        decayed_weights(weight_decay, "kernels"),
        optax.masked(optax.scale_by_trust_ratio(trust_coefficient=TRUST), _are_kernels),
        optax.trace(decay=momentum, nesterov=nesterov) if is_on(momentum) else optax.identity(),
    )

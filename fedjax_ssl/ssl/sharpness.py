"""Sharpness-aware perturbations of parameters (SAM, ASAM), and the consistency gradient of (FL)^2 that uses them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Int

from fedjax_ssl.arrays import Array, Logits, Params, PyTree, Scalar
from fedjax_ssl.ssl import losses


def _per_norm(rho: float, norm: Scalar) -> Scalar:
    # Without confident examples the gradient is 0, and so is the perturbation.
    return jnp.where(norm > 0, rho / jnp.where(norm > 0, norm, 1.0), 0.0)


def sam_perturbation(grad: Params, rho: float) -> Params:
    """SAM's perturbation eps = rho g / ||g||_2 (0 if g = 0), without gradient, by one norm of all parameters ((FL)^2, Eq. 12).

    >>> print(sam_perturbation({"w": jnp.array([3.0, 4.0])}, rho=0.5)["w"])
    [0.3 0.4]
    """
    scale = _per_norm(rho, optax.tree.norm(grad))
    return jax.lax.stop_gradient(jax.tree.map(lambda g: scale * g, grad))


def asam_perturbation(params: Params, grad: Params, rho: float, eta: float = 0.01) -> Params:
    """ASAM's eps = rho T^2 g / ||T g||_2 (0 if g = 0), without gradient (Kwon et al. 2021, p = 2; (FL)^2, Section 5.1).

    T is diagonal: |w| + eta for kernels and batch-norm scales, 1 for biases (leaves named `bias`), as in the authors' code.
    """

    def scaling(path: tuple[Any, ...], w: Array) -> Array:
        is_bias = getattr(path[-1], "key", None) == "bias"
        return jnp.ones_like(w) if is_bias else jnp.abs(w) + eta

    t = jax.tree_util.tree_map_with_path(scaling, params)
    scale = _per_norm(rho, optax.tree.norm(jax.tree.map(jnp.multiply, t, grad)))
    return jax.lax.stop_gradient(jax.tree.map(lambda t, g: scale * t * t * g, t, grad))


class Targets(NamedTuple):
    """A batch's pseudo-labels: L_a is over the accepted examples, L_p and L_cs over the confident ones."""

    label: Int[Array, " B"]
    accepted: Bool[Array, " B"]
    confident: Bool[Array, " B"]


class StepLosses(NamedTuple):
    """The losses of one step: L_a (Eq. 10), and L_cs (Eq. 13) or, for the SAM objective, L_p at W*."""

    accepted: Scalar
    second: Scalar


def consistency_gradient(
    forward: Callable[[Params], tuple[Logits, PyTree]],
    params: Params,
    targets: Targets,
    perturb: Callable[[Params, Params], Params],
    *,
    objective: str,
    weights: tuple[float, float] = (1.0, 1.0),
) -> tuple[Params, StepLosses, PyTree]:
    """(FL)^2's sharpness-aware consistency regularization (SACR): the gradient of one local step.

        L_a  = mean over accepted of CE(y_i, Q_i)                                      (Eq. 10)
        L_p  = mean over confident of CE(y_i, Q_i)                                     (Eq. 11)
        W*   = W + eps(grad L_p)                                                       (Eq. 12)
        L_cs = 1/|accepted| sum over confident of KL(sg[Q_i] || Q*_i), 0 if none is    (Eq. 13)
        g    = w_a grad_W L_a + w_cs grad_{W*} L_cs                                    (Eq. 14)

    Q_i and Q*_i are the outputs on the same strong view at W, `params`, and W*. `forward` returns the outputs and an auxiliary
    value; the one computed at W is returned. `perturb` makes eps from W and grad L_p. `objective` is `sacr`, or `sam`, which
    replaces L_cs by L_p evaluated at W*, the standard SAM objective (Figure 4). `weights` are (w_a, w_cs).
    """

    def clean(p: Params) -> tuple[tuple[Array, Array], tuple[Array, PyTree]]:
        logits, auxiliary = forward(p)
        ce = losses.cross_entropy(logits, targets.label)
        return (losses.masked_mean(ce, targets.accepted), losses.masked_mean(ce, targets.confident)), (logits, auxiliary)

    (loss_a, _), pullback, (clean_logits, auxiliary) = jax.vjp(clean, params, has_aux=True)
    one, zero = jnp.ones(()), jnp.zeros(())
    (grad_a,), (grad_p,) = pullback((one, zero)), pullback((zero, one))
    perturbed = jax.tree.map(jnp.add, params, perturb(params, grad_p))

    def second(p: Params) -> Scalar:
        logits, _ = forward(p)
        if objective == "sam":
            return losses.masked_mean(losses.cross_entropy(logits, targets.label), targets.confident)
        kl = losses.kl_divergence(clean_logits, logits)
        return losses.masked_mean(kl, targets.confident, jnp.sum(targets.accepted))

    loss_second, grad_second = jax.value_and_grad(second)(perturbed)
    w_a, w_cs = weights
    grad = jax.tree.map(lambda a, b: w_a * a + w_cs * b, grad_a, grad_second)
    return grad, StepLosses(loss_a, loss_second), auxiliary

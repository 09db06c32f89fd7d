"""FedDure's fine-grained regulator (F-reg), the small network that weighs unlabeled examples, and the gradient it learns by.

F-reg learns from what labeled examples say of a look-ahead network (a step of gradient descent that F-reg's weights shaped):

    phi-(w) = phi - eta grad_phi G(w, phi)                      (Eq. 4)
    the gradient for w of CE(y, f(x; phi-(w)))                  (Eq. 5)

With z = f(u; phi) the outputs that G is a function of, J their Jacobian and v = grad_phi CE at phi-, it equals

    -eta grad_w <grad_phi G(w, phi), v> = -eta grad_w <dG/dz, J v>

where only the small network is differentiated twice: z, J v and v take one pass of the large network each.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax

from fedjax_ssl.arrays import Key, Logits, Params, PerExample, Probs, Scalar
from fedjax_ssl.models.initializers import INITIALIZATIONS

HIDDEN = 128
"""Hidden units of F-reg (FedDure, Section 4.1)."""


def init(key: Key, num_classes: int) -> Params:
    """A fresh F-reg, C -> HIDDEN -> 1, with PyTorch's default initialization: 1,537 parameters for C = 10."""
    torch = INITIALIZATIONS["torch"]

    def linear(key: Key, fan_in: int, features: int) -> Params:
        kernel_key, bias_key = jax.random.split(key)
        return {
            "kernel": torch.linear_kernel(kernel_key, (fan_in, features)),
            "bias": torch.bias(fan_in)(bias_key, (features,)),
        }

    hidden_key, output_key = jax.random.split(key)
    return {"hidden": linear(hidden_key, num_classes, HIDDEN), "output": linear(output_key, HIDDEN, 1)}


def instance_weights(w: Params, probs: Probs) -> PerExample:
    """The weight in (0, 1) that F-reg of parameters `w` gives each example: sigmoid(MLP(probs)) (FedDure, Section 3.2)."""
    chex.assert_rank(probs, 2)
    hidden = jax.nn.relu(probs @ w["hidden"]["kernel"] + w["hidden"]["bias"])
    return jax.nn.sigmoid(hidden @ w["output"]["kernel"] + w["output"]["bias"])[:, 0]


def direct_gradient(
    loss: Callable[[Params, Logits], Scalar], w: Params, outputs: Logits, change: Logits, rate: float
) -> Params:
    """Eq. 5's gradient for w in the form above, -rate grad_w <dG/dz, J v>.

    Args:
        loss: (w, z) -> G.
        w: F-reg's parameters.
        outputs: z.
        change: J v, how z changes along v.
        rate: the look-ahead's learning rate.
    """

    def along(w: Params) -> Scalar:
        return -rate * jax.jvp(lambda z: loss(w, z), (outputs,), (change,))[1]

    return jax.grad(along)(w)


def nested_gradient(
    loss: Callable[[Params, Params], Scalar], labeled_loss: Callable[[Params], Scalar], w: Params, phi: Params, rate: float
) -> Params:
    """Eq. 5's gradient for w as it is written: the gradient through the look-ahead step, which contains a gradient itself.

    Args:
        loss: (w, phi) -> G.
        labeled_loss: phi -> CE(y, f(x; phi)).
        w: F-reg's parameters.
        phi: the network's parameters.
        rate: the look-ahead's learning rate.
    """

    def ahead(w: Params) -> Scalar:
        return labeled_loss(look_ahead(phi, jax.grad(loss, 1)(w, phi), rate))

    return jax.grad(ahead)(w)


def look_ahead(phi: Params, gradient: Params, rate: float) -> Params:
    """phi- = phi - rate gradient, plain gradient descent (Eq. 4)."""
    return jax.tree.map(lambda p, g: p - rate * g, phi, gradient)

"""FedDure's fine-grained regulator (F-reg), a small network that weighs unlabeled examples, and the gradient it learns by.

F-reg of parameters w minimizes the labeled loss of a look-ahead network, one step of gradient descent on the weighed loss G:

    phi-(w) = phi - eta grad_phi G(w, phi)                      (Eq. 4)
    the gradient for w of CE(y, f(x; phi-(w)))                  (Eq. 5)

With the outputs z = f(u; phi) of which G is a function, their Jacobian J and v = grad_phi CE at phi-, this gradient equals

    -eta grad_w <grad_phi G(w, phi), v> = -eta grad_w <dG/dz, J v>

where only the small network is differentiated twice.
"""

from collections.abc import Callable

import chex
import jax

from fedjax_ssl.arrays import Key, Logits, Params, PerExample, Probs, Scalar
from fedjax_ssl.models.initializers import INITIALIZATIONS

HIDDEN = 128  # hidden units of F-reg (FedDure, Section 4.1)


def init(key: Key, num_classes: int) -> Params:
    """Fresh parameters of F-reg, C -> HIDDEN -> 1, with PyTorch's default initialization."""
    torch = INITIALIZATIONS["torch"]

    def linear(key: Key, fan_in: int, features: int) -> Params:
        kernel_key, bias_key = jax.random.split(key)
        kernel = torch.linear_kernel(kernel_key, (fan_in, features))
        return {"kernel": kernel, "bias": torch.bias(fan_in)(bias_key, (features,))}

    hidden_key, output_key = jax.random.split(key)
    return {"hidden": linear(hidden_key, num_classes, HIDDEN), "output": linear(output_key, HIDDEN, 1)}


def instance_weights(w: Params, probs: Probs) -> PerExample:
    """The weight in (0, 1) that F-reg of parameters `w` gives each example: sigmoid(MLP(probs)) (FedDure, Section 3.2)."""
    chex.assert_rank(probs, 2)
    hidden = jax.nn.relu(probs @ w["hidden"]["kernel"] + w["hidden"]["bias"])
    return jax.nn.sigmoid(hidden @ w["output"]["kernel"] + w["output"]["bias"])[:, 0]


def meta_gradient(loss: Callable[[Params, Logits], Scalar], w: Params, outputs: Logits, change: Logits, rate: float) -> Params:
    """The gradient of Eq. 5 for w in its direct form, -rate grad_w <dG/dz, J v>.

    `loss` is (w, z) -> G, `outputs` is z, `change` is J v, and `rate` the learning rate eta of the look-ahead.
    """

    return jax.grad(lambda w: -rate * jax.jvp(lambda z: loss(w, z), (outputs,), (change,))[1])(w)


def gradient_step(parameters: Params, direction: Params, rate: float) -> Params:
    """Parameters - rate direction: the look-ahead (Eq. 4) along the gradient, or an optimizer's step."""
    return jax.tree.map(lambda p, d: p - rate * d, parameters, direction)

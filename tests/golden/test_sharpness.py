"""SAM's and ASAM's perturbations and SACR's gradient against NumPy, on a linear classifier whose gradients are written out."""

import jax
import numpy as np
import pytest

from fedjax_ssl.ssl import sharpness
from tests.golden.linear_clients import float32, gradient, norm, softmax

ETA, RHO = 0.01, 0.4


def asam(w, g, rho):
    t = {"kernel": np.abs(w["kernel"]) + ETA, "bias": 1.0}
    scale = rho / norm({name: t[name] * g[name] for name in g})
    return {name: scale * t[name] ** 2 * g[name] for name in g}


def sam(w, g, rho):
    return {name: rho * g[name] / norm(g) for name in g}


RULES = {
    "asam": (asam, lambda p, g: sharpness.asam_perturbation(p, g, RHO, ETA)),
    "sam": (sam, lambda p, g: sharpness.sam_perturbation(g, RHO)),
}
ACCEPTED, CONFIDENT = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], bool), np.array([1, 0, 0, 1, 1, 0, 0, 0, 1], bool)
NONE = np.zeros(9, bool)


class Case:
    """Nine examples of a linear classifier, whose gradients are taken at w."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.x, self.y = rng.standard_normal((9, 6)), rng.integers(0, 4, 9)
        self.w = {"kernel": rng.standard_normal((6, 4)), "bias": rng.standard_normal(4)}

    def outputs(self, w):
        return softmax(self.x @ w["kernel"] + w["bias"])

    def gradient(self, w, target, weights):
        """Of sum_i weights_i CE(target_i, outputs_i), or of the KL divergence: a target is constant."""
        return gradient(self.x, (self.outputs(w) - target) * weights[:, None])

    def forward(self, params):
        return np.float32(self.x) @ params["kernel"] + params["bias"], {"seen": jax.numpy.ones(())}

    def got(self, perturb, objective, weights=(1.0, 1.0), accepted=ACCEPTED, confident=CONFIDENT):
        targets = sharpness.Targets(np.int32(self.y), accepted, confident)
        return sharpness.consistency_gradient(
            self.forward, float32(self.w), targets, perturb, objective=objective, weights=weights
        )


def assert_same(got, expected, rtol=2e-4):
    for name, leaf in expected.items():
        np.testing.assert_allclose(got[name], leaf, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_perturbation_has_one_norm_and_asam_scales_kernels_and_norms_by_their_size(rule):
    case, rng = Case(), np.random.default_rng(1)
    g = {name: rng.standard_normal(leaf.shape) for name, leaf in case.w.items()}
    in_numpy, in_jax = RULES[rule]
    assert_same(in_jax(float32(case.w), float32(g)), in_numpy(case.w, g, RHO), rtol=1e-5)
    zeros = jax.tree.map(np.zeros_like, float32(g))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), in_jax(zeros, zeros))
    scale = np.float32([0.5, -2.0])  # batch norm's
    eps = in_jax({"scale": scale, "bias": np.ones(2)}, {"scale": np.ones(2, np.float32), "bias": np.zeros(2, np.float32)})
    t = np.abs(scale) + ETA if rule == "asam" else np.ones(2)
    np.testing.assert_allclose(eps["scale"], RHO * t**2 / np.linalg.norm(t), rtol=1e-5)


@pytest.mark.parametrize(("rule", "objective"), [("asam", "sacr"), ("sam", "sacr"), ("asam", "sam")])
def test_the_gradient_is_eq_14_or_that_of_the_perturbed_cross_entropy(rule, objective):
    case, (w_a, w_cs) = Case(), (1.5, 0.7)
    in_numpy, in_jax = RULES[rule]
    n_a, onehot, clean = ACCEPTED.sum(), np.eye(4)[case.y], case.outputs(case.w)
    of_confident = CONFIDENT / CONFIDENT.sum()
    grad_a = case.gradient(case.w, onehot, ACCEPTED / n_a)
    eps = in_numpy(case.w, case.gradient(case.w, onehot, of_confident), RHO)
    star = {name: case.w[name] + eps[name] for name in eps}
    # Eq. 13, or the second objective: cross-entropy at the perturbed weights, as the mean over the confident examples.
    second = case.gradient(star, *((clean, CONFIDENT / n_a) if objective == "sacr" else (onehot, of_confident)))
    grad, values, auxiliary = case.got(in_jax, objective, (w_a, w_cs))
    assert_same(grad, {name: w_a * grad_a[name] + w_cs * second[name] for name in eps})
    if objective == "sacr":
        kl = np.sum(clean * np.log(clean / case.outputs(star)), 1)
        np.testing.assert_allclose(values.second, np.sum(kl[CONFIDENT]) / n_a, rtol=1e-3)
    np.testing.assert_allclose(values.accepted, -np.log((clean * onehot).sum(1))[ACCEPTED].mean(), rtol=1e-5)
    assert set(auxiliary) == {"seen"}


@pytest.mark.parametrize("accepted", [ACCEPTED, NONE], ids=["accepted", "none"])
def test_without_confident_examples_the_gradient_is_that_of_the_accepted_alone(accepted):
    case = Case()
    expected = case.gradient(case.w, np.eye(4)[case.y], accepted / max(accepted.sum(), 1))
    grad, values, _ = case.got(RULES["asam"][1], "sacr", accepted=accepted, confident=NONE)
    assert_same(grad, expected, rtol=1e-5)
    assert values.second == 0
    assert (values.accepted == 0) == (not accepted.any())

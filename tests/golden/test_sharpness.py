"""SAM's and ASAM's perturbations and SACR's gradient against NumPy, on a linear classifier whose gradients are written out."""

import jax
import numpy as np
import pytest

from fedjax_ssl.ssl import sharpness

ETA = 0.01


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def cross_entropy_grad(w, b, x, y, weights):
    """d/d(w, b) of sum_i weights_i CE(y_i, softmax(x w + b))."""
    residual = (softmax(x @ w + b) - np.eye(w.shape[1])[y]) * weights[:, None]
    return x.T @ residual, residual.sum(0)


def kl_grad(w, b, x, target, weights):
    """d/d(w, b) of sum_i weights_i KL(target_i || softmax(x w + b)), the target constant."""
    residual = (softmax(x @ w + b) - target) * weights[:, None]
    return x.T @ residual, residual.sum(0)


def asam(w, b, gw, gb, rho):
    t = np.abs(w) + ETA
    norm = np.sqrt(np.sum((t * gw) ** 2) + np.sum(gb**2))
    return rho * t**2 * gw / norm, rho * gb / norm


def sam(w, b, gw, gb, rho):
    norm = np.sqrt(np.sum(gw**2) + np.sum(gb**2))
    return rho * gw / norm, rho * gb / norm


class Case:
    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.x = rng.standard_normal((9, 6))
        self.w, self.b = rng.standard_normal((6, 4)), rng.standard_normal(4)
        self.y = rng.integers(0, 4, 9)
        self.accepted = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], bool)
        self.confident = np.array([1, 0, 0, 1, 1, 0, 0, 0, 1], bool)
        self.params = {"dense": {"kernel": np.float32(self.w), "bias": np.float32(self.b)}}

    def forward(self, params):
        return np.float32(self.x) @ params["dense"]["kernel"] + params["dense"]["bias"], {"seen": jax.numpy.ones(())}

    def gradient(self, perturb, objective, weights=(1.0, 1.0), confident=None):
        targets = sharpness.Targets(np.int32(self.y), self.accepted, self.confident if confident is None else confident)
        return sharpness.consistency_gradient(self.forward, self.params, targets, perturb, objective=objective, weights=weights)


def test_asam_scales_kernels_by_their_size_and_biases_by_one():
    case = Case()
    rng = np.random.default_rng(1)
    gw, gb = rng.standard_normal((6, 4)), rng.standard_normal(4)
    grad = {"dense": {"kernel": np.float32(gw), "bias": np.float32(gb)}}
    eps = sharpness.asam_perturbation(case.params, grad, 0.3, ETA)
    expected_w, expected_b = asam(case.w, case.b, gw, gb, 0.3)
    np.testing.assert_allclose(eps["dense"]["kernel"], expected_w, rtol=1e-5)
    np.testing.assert_allclose(eps["dense"]["bias"], expected_b, rtol=1e-5)


def test_asam_scales_batch_norm_scales_too():
    scale = np.float32([0.5, -2.0])
    grad = {"norm": {"scale": np.float32([1.0, 1.0]), "bias": np.float32([0.0, 0.0])}}
    eps = sharpness.asam_perturbation({"norm": {"scale": scale, "bias": np.zeros(2, np.float32)}}, grad, 1.0, ETA)
    t = np.abs(scale) + ETA
    np.testing.assert_allclose(eps["norm"]["scale"], t**2 / np.linalg.norm(t), rtol=1e-5)


def test_sam_has_one_norm_over_all_parameters():
    grad = {"a": np.float32([3.0, 0.0]), "b": np.float32([[4.0]])}
    eps = sharpness.sam_perturbation(grad, 0.5)
    np.testing.assert_allclose(eps["a"], [0.3, 0.0], rtol=1e-6)
    np.testing.assert_allclose(eps["b"], [[0.4]], rtol=1e-6)


def test_a_zero_gradient_perturbs_nothing():
    zero = {"kernel": np.zeros((2, 2), np.float32), "bias": np.zeros(2, np.float32)}
    for eps in (sharpness.sam_perturbation(zero, 0.1), sharpness.asam_perturbation(zero, zero, 0.1)):
        np.testing.assert_array_equal(eps["kernel"], 0)
        np.testing.assert_array_equal(eps["bias"], 0)


@pytest.mark.parametrize("perturbation", ["asam", "sam"])
def test_sacr_gradient_is_eq_14(perturbation):
    case, rho, (w_a, w_cs) = Case(), 0.4, (1.5, 0.7)
    rule, ours = {
        "asam": (asam, lambda p, g: sharpness.asam_perturbation(p, g, rho, ETA)),
        "sam": (sam, lambda p, g: sharpness.sam_perturbation(g, rho)),
    }[perturbation]
    w, b, x, y = case.w, case.b, case.x, case.y
    n_a, n_f = case.accepted.sum(), case.confident.sum()
    grad_a = cross_entropy_grad(w, b, x, y, case.accepted / n_a)
    grad_p = cross_entropy_grad(w, b, x, y, case.confident / n_f)
    eps_w, eps_b = rule(w, b, *grad_p, rho)
    clean = softmax(x @ w + b)
    grad_cs = kl_grad(w + eps_w, b + eps_b, x, clean, case.confident / n_a)
    grad, values, auxiliary = case.gradient(ours, "sacr", (w_a, w_cs))
    np.testing.assert_allclose(grad["dense"]["kernel"], w_a * grad_a[0] + w_cs * grad_cs[0], rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(grad["dense"]["bias"], w_a * grad_a[1] + w_cs * grad_cs[1], rtol=2e-4, atol=1e-6)
    moved = softmax(x @ (w + eps_w) + b + eps_b)
    kl = np.sum(clean * (np.log(clean) - np.log(moved)), 1)
    np.testing.assert_allclose(values.second, np.sum(kl[case.confident]) / n_a, rtol=1e-3)
    ce = -np.log(clean[np.arange(9), y])
    np.testing.assert_allclose(values.accepted, ce[case.accepted].mean(), rtol=1e-5)
    assert set(auxiliary) == {"seen"}


def test_sam_objective_puts_the_perturbed_cross_entropy_in_place_of_the_consistency():
    case, rho = Case(), 0.4
    grad_a = cross_entropy_grad(case.w, case.b, case.x, case.y, case.accepted / case.accepted.sum())
    weights = case.confident / case.confident.sum()
    grad_p = cross_entropy_grad(case.w, case.b, case.x, case.y, weights)
    eps_w, eps_b = asam(case.w, case.b, *grad_p, rho)
    second = cross_entropy_grad(case.w + eps_w, case.b + eps_b, case.x, case.y, weights)
    grad, _, _ = case.gradient(lambda p, g: sharpness.asam_perturbation(p, g, rho, ETA), "sam")
    np.testing.assert_allclose(grad["dense"]["kernel"], grad_a[0] + second[0], rtol=2e-4, atol=1e-6)


def test_without_confident_examples_the_gradient_is_that_of_the_accepted_alone():
    case = Case()
    grad_a = cross_entropy_grad(case.w, case.b, case.x, case.y, case.accepted / case.accepted.sum())
    none = np.zeros(9, bool)
    grad, values, _ = case.gradient(lambda p, g: sharpness.asam_perturbation(p, g, 0.4), "sacr", confident=none)
    np.testing.assert_allclose(grad["dense"]["kernel"], grad_a[0], rtol=1e-5, atol=1e-6)
    assert values.second == 0


def test_without_accepted_examples_the_gradient_is_zero():
    case = Case()
    case.accepted = case.confident = np.zeros(9, bool)
    grad, values, _ = case.gradient(lambda p, g: sharpness.asam_perturbation(p, g, 0.4), "sacr")
    np.testing.assert_array_equal(grad["dense"]["kernel"], 0)
    assert values.accepted == 0

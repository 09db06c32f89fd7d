"""(FL)^2 against NumPy: a whole `client_update` with every metric, and CAT and SAM's and ASAM's perturbations by themselves.

The client is that of `linear_clients`, so that each gradient is written out, with other outputs.
"""

import jax
import numpy as np
import pytest

from fedjax_ssl.methods.fl2 import FL2Options, fl2
from fedjax_ssl.simulation.round import unrecorded
from fedjax_ssl.ssl import sharpness, thresholds
from tests.golden import linear_clients as lc

BATCH, EPOCHS, ETA, RHO = 4, 1, 0.01, 0.4

# Softmax outputs of the client's seven images. tau_k = .934, and class 0 leads pbar: tau(c) = (.934, .185, .170). So image 1 is
# confident (CONFIDENCE) without being accepted, images 4 and 6 are accepted without being confident.
OUTPUTS = np.reshape([995, 3, 2, 925, 30, 45, 990, 4, 6, 985, 10, 5, 60, 860, 80, 998, 1, 1, 120, 95, 785], (7, 3)) / 1000
CONFIDENCE = 0.91
TRUE_LABELS = np.array([0, 0, 1, 0, 1, 0, 0])


def asam(w, g, rho):
    t = {"kernel": np.abs(w["kernel"]) + ETA, "bias": 1.0}
    scale = rho / lc.norm({name: t[name] * g[name] for name in g})
    return {name: scale * t[name] ** 2 * g[name] for name in g}


def sam(w, g, rho):
    return {name: rho * g[name] / lc.norm(g) for name in g}


RULES = {
    "asam": (asam, lambda p, g: sharpness.asam_perturbation(p, g, RHO, ETA)),
    "sam": (sam, lambda p, g: sharpness.sam_perturbation(g, RHO)),
}


class Client(lc.Client):
    """The client with these outputs, and what (FL)^2 makes of it in float64."""

    def __init__(self):
        super().__init__(OUTPUTS, TRUE_LABELS)

    def expected(self, options: FL2Options, clip: float):
        """(update, weight, momentum, metrics as value or (total, weight)) of one client, as the paper's equations say."""
        w, m = dict(self.params), dict(self.momentum)
        probs = lc.outputs(w, self.weak)
        label, confidence = probs.argmax(1), probs.max(1)
        tau, mean = confidence.mean(), probs.mean(0)  # Eqs. 7, 8
        threshold = mean / mean.max() * tau  # Eq. 9
        accepted, confident = confidence > threshold[label], confidence > options.confidence
        # No decision hangs on float32, nor on > or >=.
        assert min(np.abs(confidence - threshold[label]).min(), np.abs(confidence - options.confidence).min()) > 1e-3
        assert accepted.astype(int).tolist() == [1, 0, 1, 1, 1, 1, 1]
        accepted = confident if options.threshold == "fixed" else accepted
        assert confident.astype(int).tolist() == [1, 1, 1, 1, 0, 1, 0]
        consistent = confident & accepted if options.consistency_on == "confident_accepted" else confident
        order = np.flatnonzero(accepted) if options.batches == "accepted" else np.arange(7)

        loss = consistency_loss = used = 0.0
        batches = np.split(order, range(BATCH, len(order), BATCH))
        steps, with_sacr = len(batches), options.consistency == "sacr"
        for at in batches:
            x, y, a, f = self.strong[at], label[at], accepted[at], consistent[at]
            clean = lc.outputs(w, x)
            grad_a = lc.gradient(x, lc.residual(clean, y) * (a / a.sum())[:, None])  # Eq. 10
            grad_p = lc.gradient(x, lc.residual(clean, y) * (f / f.sum())[:, None])  # Eq. 11
            star = lc.combine(np.add, w, RULES[options.perturbation][0](w, grad_p, options.rho))  # Eq. 12
            moved = lc.outputs(star, x)
            grad_cs = lc.gradient(x, (moved - clean) * (f / a.sum())[:, None])  # Eq. 13
            loss += lc.cross_entropy(clean, y)[a].sum()
            consistency_loss += (clean * np.log(clean / moved)).sum(1)[f].sum()
            used += a.sum()
            g = {name: grad_a[name] + with_sacr * options.consistency_weight * grad_cs[name] for name in w}  # Eq. 14
            if clip:
                assert lc.norm(g) > clip  # clipping acts
                g = {name: g[name] * clip / lc.norm(g) for name in w}
            w, m = lc.sgd(w, g, m, decay=lc.DECAY, nesterov=True)

        by_status = options.aggregation == "lsaa"
        right = int((accepted & (label == TRUE_LABELS)).sum())
        # Two batches of 4 to label 7 images; with SACR a step has two forward and three backward passes.
        forward, backward = 8 + steps * (1 + with_sacr) * BATCH, steps * (1 + 2 * with_sacr) * BATCH
        metrics = {
            "client/loss": (loss, used),
            "client/mask_rate": (accepted.sum(), 7),
            "client/threshold": (options.confidence if options.threshold == "fixed" else tau, 1),
            **lc.ratios(right, accepted.sum(), 7),
            **lc.costs(lc.BYTES, lc.BYTES + 4 * by_status, len(order), forward, backward),  # tau_k: Algorithm 1, line 24
        } | ({"client/consistency_loss": (consistency_loss, used)} if with_sacr else {})
        update = {name: self.params[name] - w[name] for name in w}
        return update, 1 - tau if by_status else 1.0, m, metrics  # Eq. 15


PAPER = {"confidence": CONFIDENCE}
RELEASED = {"confidence": CONFIDENCE, "strict": False, "batches": "accepted", "consistency_on": "confident_accepted"}
OTHER = {"perturbation": "sam", "rho": 0.5, "consistency_weight": 3.0, "aggregation": "uniform"}


@pytest.mark.parametrize(
    ("options", "clip"),
    [(PAPER, 0.0), (RELEASED, 0.1), (PAPER | OTHER, 0.0), (PAPER | {"threshold": "fixed", "consistency": "none"}, 0.0)],
    ids=["paper", "released", "no option at its default", "no CAT and no SACR"],
)
def test_a_client_update_is_what_the_equations_say(options, clip):
    client, options = Client(), FL2Options(**options)
    update, weight, momentum, metrics = client.expected(options, clip)
    got_update, got_weight, got_momentum, got_metrics = client.got(
        fl2, options, labels_at=("server",), clip=clip, batch_size=BATCH, epochs=EPOCHS
    )
    lc.assert_same(got_update, update)
    lc.assert_same(got_momentum, momentum)
    np.testing.assert_allclose(got_weight, weight, rtol=1e-5)
    assert set(unrecorded(got_metrics)) == set(metrics)
    for name, value in metrics.items():
        np.testing.assert_allclose(
            lc.numbers(got_metrics[name]), value, rtol=1e-3 if "consistency" in name else 1e-5, err_msg=name
        )


@pytest.mark.parametrize("n", [0, 1, 7, 50])
def test_cat_is_eqs_7_to_9_over_the_real_examples_and_zero_without_any(n):
    probs = lc.softmax(3 * np.random.default_rng(n).standard_normal((n, 5))).astype(np.float32)
    padded = np.concatenate([probs[: n // 2], np.full((3, 5), np.nan, np.float32), probs[n // 2 :]])
    got = thresholds.client_adaptive(padded, ~np.isnan(padded[:, 0]))
    tau, mean = (np.mean([max(row) for row in probs]), probs.mean(0)) if n else (0, np.ones(5))
    np.testing.assert_allclose(got.tau, tau, rtol=1e-6)
    np.testing.assert_allclose(got.per_class, mean / max(mean) * tau, rtol=1e-5)


ACCEPTED, CONFIDENT = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], bool), np.array([1, 0, 0, 1, 1, 0, 0, 0, 1], bool)
NONE = np.zeros(9, bool)


class Case:
    """Nine examples of a linear classifier, whose gradients are taken at w."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.x, self.y = rng.standard_normal((9, 6)), rng.integers(0, 4, 9)
        self.w = {"kernel": rng.standard_normal((6, 4)), "bias": rng.standard_normal(4)}

    def gradient(self, w, target, weights):
        """Of sum_i weights_i CE(target_i, outputs_i), or of the KL divergence: a target is constant."""
        return lc.gradient(self.x, (lc.outputs(w, self.x) - target) * weights[:, None])

    def forward(self, params):
        return np.float32(self.x) @ params["kernel"] + params["bias"], {"seen": jax.numpy.ones(())}

    def got(self, perturb, objective, weights=(1.0, 1.0), accepted=ACCEPTED, confident=CONFIDENT):
        targets = sharpness.Targets(np.int32(self.y), accepted, confident)
        return sharpness.consistency_gradient(
            self.forward, lc.float32(self.w), targets, perturb, objective=objective, weights=weights
        )


@pytest.mark.parametrize("rule", RULES)
def test_a_perturbation_has_one_norm_and_asam_scales_kernels_and_norms_by_their_size(rule):
    case, rng = Case(), np.random.default_rng(1)
    g = {name: rng.standard_normal(leaf.shape) for name, leaf in case.w.items()}
    in_numpy, in_jax = RULES[rule]
    lc.assert_same(in_jax(lc.float32(case.w), lc.float32(g)), in_numpy(case.w, g, RHO), 1e-6)
    zeros = jax.tree.map(np.zeros_like, lc.float32(g))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), in_jax(zeros, zeros))
    scale = np.float32([0.5, -2.0])  # batch norm's
    eps = in_jax({"scale": scale, "bias": np.ones(2)}, {"scale": np.ones(2, np.float32), "bias": np.zeros(2, np.float32)})
    t = np.abs(scale) + ETA if rule == "asam" else np.ones(2)
    np.testing.assert_allclose(eps["scale"], RHO * t**2 / np.linalg.norm(t), rtol=1e-5)


def test_the_second_objective_is_the_cross_entropy_at_the_perturbed_weights():
    """As the mean over the confident examples; SACR's, Eqs. 13 and 14, is in the client's update."""
    case, (w_a, w_p) = Case(), (1.5, 0.7)
    in_numpy, in_jax = RULES["asam"]
    onehot, of_confident = np.eye(4)[case.y], CONFIDENT / CONFIDENT.sum()
    grad_a = case.gradient(case.w, onehot, ACCEPTED / ACCEPTED.sum())
    eps = in_numpy(case.w, case.gradient(case.w, onehot, of_confident), RHO)
    star = {name: case.w[name] + eps[name] for name in eps}
    second = case.gradient(star, onehot, of_confident)
    grad, values, auxiliary = case.got(in_jax, "sam", (w_a, w_p))
    lc.assert_same(grad, {name: w_a * grad_a[name] + w_p * second[name] for name in eps})
    of_accepted = lc.cross_entropy(lc.outputs(case.w, case.x), case.y)[ACCEPTED]
    np.testing.assert_allclose(values.accepted, of_accepted.mean(), rtol=1e-5)
    assert set(auxiliary) == {"seen"}


@pytest.mark.parametrize("accepted", [ACCEPTED, NONE], ids=["accepted", "none"])
def test_without_confident_examples_the_gradient_is_that_of_the_accepted_alone(accepted):
    case = Case()
    expected = case.gradient(case.w, np.eye(4)[case.y], accepted / max(accepted.sum(), 1))
    grad, values, _ = case.got(RULES["asam"][1], "sacr", accepted=accepted, confident=NONE)
    lc.assert_same(grad, expected, 1e-6)
    assert values.second == 0
    assert (values.accepted == 0) == (not accepted.any())

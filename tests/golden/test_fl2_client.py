"""One whole (FL)^2 `client_update` against NumPy: pseudo-labels, CAT, SACR, local SGD, LSAA's weight and every metric.

The client is that of `linear_clients`, so that each gradient is written out, with other outputs.
"""

import numpy as np
import pytest

from fedjax_ssl.methods.fl2 import FL2Options, fl2
from tests.golden import linear_clients
from tests.golden import linear_clients as lc

BATCH, EPOCHS, ETA = 4, 1, 0.01

# Softmax outputs of the client's seven images. tau_k = .934, and class 0 leads pbar: tau(c) = (.934, .185, .170). So image 1 is
# confident (CONFIDENCE) without being accepted, images 4 and 6 are accepted without being confident.
OUTPUTS = np.reshape([995, 3, 2, 925, 30, 45, 990, 4, 6, 985, 10, 5, 60, 860, 80, 998, 1, 1, 120, 95, 785], (7, 3)) / 1000
CONFIDENCE = 0.91
TRUE_LABELS = np.array([0, 0, 1, 0, 1, 0, 0])


class Client(linear_clients.Client):
    """The client with these outputs, and what (FL)^2 makes of it in float64."""

    def __init__(self):
        super().__init__(OUTPUTS, TRUE_LABELS)

    def expected(self, options: FL2Options, clip: float):
        """(update, weight, momentum, metrics as value or (total, weight)) of one client, as the paper's equations say."""
        w, m = dict(self.params), dict(self.momentum)
        probs = lc.softmax(self.weak @ w["kernel"] + w["bias"])
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
            clean, onehot = lc.softmax(x @ w["kernel"] + w["bias"]), np.eye(lc.CLASSES)[y]
            grad_a = lc.gradient(x, (clean - onehot) * (a / a.sum())[:, None])  # Eq. 10
            grad_p = lc.gradient(x, (clean - onehot) * (f / f.sum())[:, None])  # Eq. 11
            t = {"kernel": np.abs(w["kernel"]) + ETA, "bias": np.ones(lc.CLASSES)}
            if options.perturbation == "sam":  # Eq. 12
                t = {name: np.ones_like(leaf) for name, leaf in w.items()}
            scale = options.rho / lc.norm({name: t[name] * grad_p[name] for name in w})
            star = {name: w[name] + scale * t[name] ** 2 * grad_p[name] for name in w}
            moved = lc.softmax(x @ star["kernel"] + star["bias"])
            grad_cs = lc.gradient(x, (moved - clean) * (f / a.sum())[:, None])  # Eq. 13
            loss += -np.log((clean * onehot).sum(1))[a].sum()
            consistency_loss += (clean * np.log(clean / moved)).sum(1)[f].sum()
            used += a.sum()
            g = {name: grad_a[name] + with_sacr * options.consistency_weight * grad_cs[name] for name in w}  # Eq. 14
            if clip:
                assert lc.norm(g) > clip  # clipping acts
                g = {name: g[name] * clip / lc.norm(g) for name in w}
            g = {name: g[name] + lc.DECAY * w[name] for name in w}
            m = {name: lc.MOMENTUM * m[name] + g[name] for name in w}
            w = {name: w[name] - lc.RATE * (g[name] + lc.MOMENTUM * m[name]) for name in w}

        size = 4 * sum(leaf.size for leaf in w.values())
        by_status = options.aggregation == "lsaa"
        right = int((accepted & (label == TRUE_LABELS)).sum())
        metrics = {
            "client/loss": (loss, used),
            "client/mask_rate": (accepted.sum(), 7),
            "client/threshold": (tau, 1),
            **lc.ratios(right, accepted.sum(), 7),
            "comm/bytes_down": (size,),
            "comm/bytes_up": (size + 4 * by_status,),  # tau_k travels too (Algorithm 1, line 24)
            "perf/client_images": (len(order),),
            # Two batches of 4 to label 7 images; with SACR a step has two forward and three backward passes.
            "cost/forward_passes": (8 + steps * (1 + with_sacr) * BATCH,),
            "cost/backward_passes": (steps * (1 + 2 * with_sacr) * BATCH,),
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
    assert set(got_metrics) == set(metrics)
    for name, value in metrics.items():
        np.testing.assert_allclose(got_metrics[name], value, rtol=1e-3 if "consistency" in name else 1e-5, err_msg=name)

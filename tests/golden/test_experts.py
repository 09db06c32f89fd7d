"""FedLabel's experts against NumPy: how sure an output is, whose label counts, and how much the other's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.ssl import experts

# Softmax outputs of the two experts on six images, and what they decide by variance (of three classes).
GLOBAL = np.array(
    [[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2], [0.6, 0.4, 0.0], [1 / 3, 1 / 3, 1 / 3]]
)
LOCAL = np.array(
    [[0.1, 0.6, 0.3], [0.05, 0.9, 0.05], [0.2, 0.7, 0.1], [0.5, 0.3, 0.2], [0.05, 0.15, 0.8], [1 / 3, 1 / 3, 1 / 3]]
)
SURER_LOCAL = [False, True, False, False, True, False]  # image 3 is a tie, as is 5: the global expert wins
SHIFT = np.array([[3.0], [3.0], [3.0], [0.0], [3.0], [0.0]])  # a softmax knows of no shift, but for rounding
LABEL = [0, 1, 1, 0, 2, 0]
AGREED = [False, False, True, True, False, True]


def logits(probs, shift=0.0):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.maximum(np.log(probs), -200) + shift, jnp.float32)


def variance(p):
    return ((p - 1 / 3) ** 2).sum(-1) / 2


def inverse_entropy(p):
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 / (-np.where(p > 0, p * np.log(p), 0).sum(-1) + 1e-5)


MEASURES = {"variance": variance, "entropy": inverse_entropy}


@pytest.mark.parametrize("name", MEASURES)
def test_the_surer_expert_decides_and_the_global_one_wins_a_tie(name):
    probs = np.concatenate([GLOBAL, LOCAL, np.eye(3)[:1]])
    np.testing.assert_allclose(experts.MEASURES[name](jnp.float32(probs)), MEASURES[name](probs), rtol=1e-5, atol=1e-9)
    got = experts.decide(logits(GLOBAL, SHIFT), logits(LOCAL), name)
    h = [MEASURES[name](p) for p in (GLOBAL, LOCAL)]
    assert got.local.tolist() == SURER_LOCAL == (h[1] > h[0] + 1e-9).tolist()
    assert got.label.tolist() == LABEL
    assert got.agreed.tolist() == AGREED
    best = np.where(np.array(SURER_LOCAL)[:, None], LOCAL, GLOBAL)
    np.testing.assert_allclose(got.confidence, best.max(1), rtol=1e-5)
    ratio = np.array([1.0 if i == 5 else min(a, b) / max(a, b) for i, (a, b) in enumerate(zip(*h, strict=True))])
    np.testing.assert_allclose(got.ratio, ratio, rtol=1e-4)
    other = np.where(np.array(SURER_LOCAL)[:, None], GLOBAL, LOCAL)
    np.testing.assert_allclose(jax.nn.softmax(got.other), other, atol=1e-6)

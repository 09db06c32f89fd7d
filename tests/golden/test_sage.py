"""SAGE against NumPy (Liu et al. 2025, as its released code has it): the local label's weight, and a whole `client_update`."""

import jax.numpy as jnp
import numpy as np

from fedjax_ssl.methods.sage import SageOptions, sage
from fedjax_ssl.ssl import correction
from tests.golden import linear_clients as lc

CONFIDENCE = 0.43
# Outputs of the broadcast model that are nearly equal for two classes, so that the local model soon prefers another one.
OUTPUTS = np.reshape([50, 48, 2, 47, 50, 3, 44, 10, 46, 8, 45, 47, 49, 47, 4, 30, 36, 34, 3, 50, 47], (7, 3)) / 100


def test_the_local_labels_weight_halves_every_twentieth_of_a_difference():
    differences, expected = [0, 0.01, 0.05, 0.1, 0.3], [1, 0.871, 0.5, 0.25, 0.016]  # the specification's values
    got = correction.local_weight(jnp.full(5, 0.9), 0.9 - jnp.float32(differences))
    np.testing.assert_allclose(got, expected, atol=5e-4)
    np.testing.assert_allclose(got, np.exp(-np.log(2) / 0.05 * np.array(differences)), rtol=1e-4)


def test_targets_are_the_global_label_unless_the_local_model_is_confident():
    local = jnp.float32([[0.97, 0.03], [0.97, 0.03], [0.6, 0.4], [0.6, 0.4], [0.97, 0.03]])
    other = jnp.float32([[0.98, 0.02], [0.05, 0.95], [0.04, 0.96], [0.45, 0.55], [0.4, 0.6]])
    targets, used = correction.soft_targets(local, other, jnp.ones(5, bool), 0.95)
    weights = 0.5 ** (np.abs([0.97 - 0.95, 0.97 - 0.6]) / 0.05)
    expected = [[1, 0], [weights[0], 1 - weights[0]], [0, 1], [0, 1], [weights[1], 1 - weights[1]]]
    np.testing.assert_allclose(targets, expected, rtol=1e-4, atol=1e-6)
    assert used.tolist() == [True, True, True, False, True]


def test_a_client_update_is_what_the_equations_say():
    client, loss, unlabeled_loss, seen, mixed = lc.Client(OUTPUTS), [], [], [], []
    first = lc.softmax(client.weak @ client.params["kernel"] + client.params["bias"])  # the broadcast model's outputs

    def gradients(w, labeled, unlabeled):
        x, y = client.labeled[labeled], lc.LABELS[labeled]
        p = lc.outputs(w, x)
        loss.extend(lc.cross_entropy(p, y))
        local, other = lc.outputs(w, client.weak[unlabeled]), first[unlabeled]
        c_l, c_g = local.max(1), other.max(1)
        assert np.abs([c_l - CONFIDENCE, c_g - CONFIDENCE]).min() > 1e-3
        weight = np.where(c_l >= CONFIDENCE, 0.5 ** (np.maximum(np.abs(c_l - c_g), 1e-6) / 0.05), 0.0)[:, None]
        target = weight * np.eye(lc.CLASSES)[local.argmax(1)] + (1 - weight) * np.eye(lc.CLASSES)[other.argmax(1)]
        used = (c_l >= CONFIDENCE) | (c_g >= CONFIDENCE)
        mixed.append((local.argmax(1) != other.argmax(1)) & (c_l >= CONFIDENCE))
        seen.append((target.argmax(1), lc.TRUE_LABELS[unlabeled], used))
        x_u = client.strong[unlabeled]
        p_u = lc.outputs(w, x_u)
        safe = np.where(target > 0, target, 1.0)
        unlabeled_loss.extend((target * (np.log(safe) - np.log(p_u))).sum(1)[used])
        return [(x, lc.residual(p, y) / len(y)), (x_u, (p_u - target) * used[:, None] / len(unlabeled))]

    expected = client.trained(gradients)
    options = SageOptions(confidence=CONFIDENCE, unlabeled_batch_size=lc.UNLABELED_BATCH)
    got = client.got(sage, options)
    assert np.concatenate(mixed).any()  # the two models disagree somewhere, where the local one is confident
    update, weight, momentum, metrics = got
    for leaves, wanted in zip((update, momentum), expected, strict=True):
        lc.assert_same(leaves, wanted)
    assert weight == lc.LABELED + lc.UNLABELED
    for name, values in {"client/loss": loss, "client/unlabeled_loss": unlabeled_loss}.items():
        np.testing.assert_allclose(lc.numbers(metrics[name]), (sum(values), len(values)), rtol=1e-4)
    lc.assert_metrics(
        {name: metrics[name] for name in metrics if name.startswith("diagnostics") or name == "client/mask_rate"},
        lc.diagnostics(*zip(*seen, strict=True)),
    )

"""Twin-sight against NumPy (Zhang et al. 2024, as its released code has it): both losses, and both kinds of clients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl.local import Broadcast, Server, Task, Training, Weights
from fedjax_ssl.method import DataSpec
from fedjax_ssl.methods.twinsight import TwinSightOptions, twinsight
from fedjax_ssl.models import build, pure
from fedjax_ssl.models.mlp import MLP
from fedjax_ssl.ssl import instances
from tests.golden import linear_clients as lc

RATE, HIDDEN, TEMPERATURE = 0.1, 8, 0.5
WEIGHTS = {"pseudo_weight": 0.7, "instance_weight": 0.4, "neighborhood_weight": 1.3}
THRESHOLDS = {"threshold_decay": 0.5, "smallest_threshold": 0.5, "largest_threshold": 0.7}


def cosines(h):
    unit = h / np.linalg.norm(h, axis=1, keepdims=True)
    return unit @ unit.T


def contrastive(z, temperature):
    """NT-Xent of 2B projections, the views of example i at i and B + i, from its definition."""
    n, s = len(z), np.exp(cosines(z) / temperature)
    return np.mean([-np.log(s[i, (i + n // 2) % n] / sum(s[i, k] for k in range(n) if k != i)) for i in range(n)])


def test_both_losses_of_features_are_those_of_the_definitions_whatever_the_padding_holds():
    rng, mask = np.random.default_rng(0), np.array([True, True, False, True])
    first, second = rng.standard_normal((2, 4, 5))
    expected = contrastive(np.concatenate([first[mask], second[mask]]), TEMPERATURE)
    difference = np.sum((cosines(first[mask]) - cosines(second[mask])) ** 2)
    first[2] = second[2] = np.nan
    first, second, mask = jnp.float32(first), jnp.float32(second), jnp.asarray(mask)
    np.testing.assert_allclose(instances.contrastive(first, second, mask, TEMPERATURE), expected, rtol=1e-5)
    np.testing.assert_allclose(instances.neighborhood(first, second, mask, 9), difference / 9, rtol=1e-5)
    gradient = jax.grad(
        lambda x: instances.contrastive(x, second, mask, TEMPERATURE) + instances.neighborhood(x, second, mask, 9)
    )
    assert np.all(np.isfinite(gradient(first)))
    none = jnp.zeros(4, bool)
    assert instances.contrastive(first, second, none, TEMPERATURE) == 0
    assert instances.neighborhood(first, second, mask, 0) == 0


def a_task():
    model = pure(MLP(num_classes=lc.CLASSES, hidden=HIDDEN), num_classes=lc.CLASSES)
    return Task(model, lc.VIEWS, lc.CLASSES, "static", labels_at=("clients",))


def hidden(layer, x):
    return np.maximum(x @ layer["kernel"] + layer["bias"], 0)


def projected(params, h):
    """Linear, batch norm of the batch, ReLU, linear."""
    x = h @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    norm = params["BatchNorm_0"]
    x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * norm["scale"] + norm["bias"]
    return hidden_out(params["Dense_1"], np.maximum(x, 0))


def hidden_out(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def loss_by_numpy(params, weak, strong, labels, divisor):
    """L of a batch of a labeled client, or, without labels, of an unlabeled one in its first step; the used pseudo-labels."""
    f, g = params["supervised"], params["unsupervised"]
    h = hidden(f["Dense_0"], weak)
    of_weak = lc.softmax(hidden_out(f["Dense_1"], h))
    both = hidden(g["Dense_0"], np.concatenate([weak, strong]))
    total = WEIGHTS["instance_weight"] * contrastive(projected(params["projection"], both), TEMPERATURE)
    total += WEIGHTS["neighborhood_weight"] * np.sum((cosines(h) - cosines(both[: len(weak)])) ** 2) / divisor
    if labels is not None:
        return total + np.mean(lc.cross_entropy(of_weak, labels)), None
    tau = 0.5 / lc.CLASSES + 0.5 * of_weak.max(1).mean()
    mean = 0.5 / lc.CLASSES + 0.5 * of_weak.mean(0)
    threshold = np.clip(tau * mean / mean.max(), THRESHOLDS["smallest_threshold"], THRESHOLDS["largest_threshold"])
    label = of_weak.argmax(1)
    used = of_weak.max(1) >= threshold[label]
    of_strong = lc.softmax(hidden_out(f["Dense_1"], hidden(f["Dense_0"], strong)))
    return total + WEIGHTS["pseudo_weight"] * np.sum(lc.cross_entropy(of_strong, label) * used) / len(weak), (label, used)


@pytest.mark.parametrize("divisor", ["pairs", "released"])
@pytest.mark.parametrize("kind", ["labeled", "unlabeled"])
def test_a_step_is_the_gradient_of_the_loss_for_both_networks(kind, divisor):
    labeled = kind == "labeled"
    data, number = lc.Client(), lc.LABELED if labeled else lc.UNLABELED
    client = lc.InOrder(optax.identity(), lambda _: RATE, batch_size=8, epochs=1)
    options = TwinSightOptions(temperature=TEMPERATURE, neighborhood_divisor=divisor, **WEIGHTS, **THRESHOLDS)
    server = Server(optax.sgd(1.0), None, 0, None)
    method = twinsight(task=a_task(), client=client, server=server, options=options)
    shape = data.pool.shape[1:]
    state, _ = method.init(jax.random.key(4), DataSpec(shape, lc.CLASSES, 2, 2))
    params = jax.tree.map(lambda x: x + (1.0 if x.ndim == 1 else 0.0), state.weights.params)  # features are not all 0
    shared = Broadcast(Weights(params, {}), jnp.float32(RATE), jnp.int32(0), 1)
    given = data.client_data(number if labeled else 0, 0 if labeled else number)
    output = jax.jit(method.client_update)(shared, (), client.init(params), given, jax.random.key(0))
    found = jax.tree.map(lambda x: np.float64(x) / RATE, output.update.params)

    params = jax.tree.map(np.float64, params)
    images = np.asarray(data.pool[data.labeled_index[:number] if labeled else data.index[:number]])
    weak, strong = (lc.plain(x).reshape(number, -1) for x in (images, images[:, :, ::-1]))
    square = number**2 if divisor == "pairs" else number ^ 2

    def value(params):
        return loss_by_numpy(params, weak, strong, lc.LABELS if labeled else None, square)

    total, pseudo = value(params)
    np.testing.assert_allclose(output.metrics["client/loss"].total, total, rtol=1e-5)
    rng = np.random.default_rng(0)
    for name in params:  # along random directions of each network's parameters
        along = {name: jax.tree.map(lambda x: rng.standard_normal(x.shape), params[name])}
        along = jax.tree.map(np.zeros_like, params) | along
        up, down = (value(jax.tree.map(lambda w, v, s=s: w + s * v, params, along))[0] for s in (1e-6, -1e-6))
        slope = sum(np.sum(g * v) for g, v in zip(jax.tree.leaves(found), jax.tree.leaves(along), strict=True))
        np.testing.assert_allclose(slope, (up - down) / 2e-6, rtol=2e-3, atol=1e-5)
    assert output.weight == number
    if labeled:
        assert output.metrics["client/mask_rate"].weight == 0
    else:
        _, used = pseudo
        assert 0 < used.sum() < number
        assert output.metrics["client/mask_rate"].total == used.sum()


def test_its_two_networks_have_the_papers_sizes():
    model = build("resnet", num_classes=10)
    task = Task(model, lc.VIEWS, 10, "running", labels_at=("clients",))
    client = Training(optax.identity(), lambda _: 0.1, 64, epochs=1)
    method = twinsight(task=task, client=client, server=Server(optax.sgd(1.0), None, 0, None))
    state, _ = jax.eval_shape(lambda key: method.init(key, DataSpec((32, 32, 3), 10, 2, 2)), jax.random.key(0))
    sizes = {name: sum(x.size for x in jax.tree.leaves(tree)) for name, tree in state.weights.params.items()}
    assert sizes["supervised"] == 11_173_962
    assert sizes["unsupervised"] + sizes["projection"] == 21_668_928

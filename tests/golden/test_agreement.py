"""Whose helpers a FedMatch client has, the image that clients are compared on, and the majority of labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.ssl import agreement


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2])
def test_helpers_are_the_nearest_other_clients_that_have_been_seen(share):
    nearest, rng = jax.jit(agreement.nearest, static_argnums=3), np.random.default_rng(3)
    for _ in range(20):
        embeddings = rng.dirichlet(np.ones(3), 6)
        embeddings[rng.integers(6)] = embeddings[0]  # a copy at distance 0, of itself perhaps
        seen, ids = rng.random(6) < share, rng.permutation(6)[:4]
        got = nearest(jnp.float32(embeddings), jnp.asarray(seen), jnp.asarray(ids), 2)
        assert got.ids.shape == got.found.shape == (4, 2)
        for k, who, found in zip(ids, np.asarray(got.ids), np.asarray(got.found), strict=True):
            others = [j for j in range(6) if seen[j] and j != k] if seen[k] else []  # none for a new client
            others.sort(key=lambda j, k=k: (np.linalg.norm(embeddings[j] - embeddings[k]), j))
            assert [int(j) for j in who[found]] == others[:2]


def test_the_embedding_image_is_truncated_noise():
    image = np.asarray(agreement.embedding_image((100, 100, 3)), float)
    assert 0 <= image.min() < 1 < 254 < image.max() <= 255
    # Of N(125, 125^2) between 0 and 255, by numerical integration.
    x = np.linspace(0, 255, 100_001)
    density = np.exp(-((x - 125) ** 2) / (2 * 125**2))
    mean = (x * density).sum() / density.sum()
    std = np.sqrt((x**2 * density).sum() / density.sum() - mean**2)
    np.testing.assert_allclose([image.mean(), image.std()], [mean, std], rtol=0.02)
    np.testing.assert_array_equal(image, agreement.embedding_image((100, 100, 3)))


@pytest.mark.parametrize(
    ("own", "helpers", "available", "expected"),
    [
        (2, (2, 0), (1, 1), 2),
        (0, (2, 2), (1, 1), 2),  # outvoted
        (2, (1, 0), (1, 1), 0),  # a tie of three: the lowest class
        (2, (0, 1), (1, 0), 0),  # of two
        (2, (0, 0), (0, 0), 2),  # nobody to ask
        (1, (0, 0), (0, 1), 0),
        (1, (2, 1), (0, 1), 1),
    ],
)
def test_the_majority_labels(own, helpers, available, expected):
    def logits(c):
        return jnp.full((1, 3), 5.0).at[0, c].set(7.0)

    got = agreement.label(logits(own), jnp.stack([logits(c) for c in helpers]), jnp.array(available, bool))
    assert got.tolist() == [expected]

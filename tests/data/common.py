"""What tests of sources share."""

import jax
import numpy as np
import pytest

from fedjax_ssl.data import sources


def message_of(error_type, call, *args, **kwargs):
    """The error's message, which has to be one line."""
    with pytest.raises(error_type) as error:
        call(*args, **kwargs)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


def in_memory(train, test, **more):
    """A dataset of pairs (images, labels)."""
    (images, labels), (test_images, test_labels) = train, test
    return sources.from_arrays(
        train_images=images, train_labels=labels, test_images=test_images, test_labels=test_labels, **more
    )


def labels_alone(labels, num_classes, clients=None):
    """A dataset without images, to draw splits of."""
    nothing = np.zeros(0)
    return sources.Dataset("labels", nothing, labels, nothing, nothing, num_classes, clients)


def picture(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def load_npz(tmp_path, arrays, name="npz", **more):
    np.savez(tmp_path / "data.npz", **arrays)
    return sources.load(name, path=str(tmp_path / "data.npz"), **more)


def many(augmentation, image, count, seed=0):
    """The augmentation of one image under so many keys."""
    keys = jax.random.split(jax.random.key(seed), count)
    return np.asarray(jax.jit(jax.vmap(augmentation, (0, None)))(keys, image))


def windows(image, pad, mode):
    """Every crop of the padded image, by NumPy: its bytes -> its place."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode=mode)
    corners = np.ndindex(2 * pad + 1, 2 * pad + 1)
    return {padded[top : top + height, left : left + width].tobytes(): (top, left) for top, left in corners}


def same(rows, others):
    return len(rows) == len(others) and all(map(np.array_equal, rows, others))


def as_rows(images, labels):
    """Examples as a sorted list of (pixels, label): equal whatever their order."""
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def check_contract(dataset):
    for images, labels in [dataset[1:3], dataset[3:5]]:
        assert (images.dtype, images.ndim) == (np.uint8, 4)
        assert (labels.dtype, labels.shape) == (np.int32, images.shape[:1])
        assert 0 <= labels.min() <= labels.max() < dataset.num_classes
    assert set(dataset.train_labels.tolist()) == set(range(dataset.num_classes))


def check_equal(dataset, train, test):
    check_contract(dataset)
    assert as_rows(*dataset[1:3]) == as_rows(*train)
    assert as_rows(*dataset[3:5]) == as_rows(*test)

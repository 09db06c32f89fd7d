"""Datasets that need no file: scikit-learn's digits, and synthetic images."""

import numpy as np

from fedjax_ssl.data.sources.checks import Dataset, Part, dataset
from fedjax_ssl.data.sources.resplit import stratified


def digits() -> Dataset:
    """scikit-learn's 1,797 images of 8 x 8 pixels, in a fixed split of 1,437 training and 360 test images."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images[..., None] * (255.0 / 16.0)).astype(np.uint8)  # its pixels are 0..16
    train, test, _ = stratified(Part(images, bunch.target), 1437, 360, seed=0)
    return dataset("digits", train, test, 10)


def synthetic(
    *,
    num_train: int = 2000,
    num_test: int = 500,
    image_shape: tuple[int, int, int] = (8, 8, 1),
    num_classes: int = 10,
    noise: float = 64.0,
    seed: int = 0,
) -> Dataset:
    """Random images around one random picture per class: learnable, without any file.

    image = clip(picture[label] + noise z, 0, 255), picture ~ U(0, 255) and z ~ N(0, 1) per pixel, with balanced classes.
    """
    if not 2 <= num_classes <= num_train or num_test < 1:
        raise ValueError(
            f"synthetic: got num_classes={num_classes}, num_train={num_train}, num_test={num_test}: "
            "accepted are 2 <= num_classes <= num_train and num_test >= 1"
        )
    rng = np.random.default_rng(seed)
    pictures = rng.uniform(0.0, 255.0, (num_classes, *image_shape))

    def draw(size: int) -> Part:
        labels = rng.permutation(np.arange(size) % num_classes)
        images = pictures[labels] + noise * rng.standard_normal((size, *image_shape))
        return Part(np.clip(np.rint(images), 0, 255).astype(np.uint8), labels)

    return dataset("synthetic", draw(num_train), draw(num_test), num_classes)

"""Sources: every format ends in the same checked arrays, pixel for pixel, and wrong input in one clear line."""

import re

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedjax_ssl.data import sources
from fedjax_ssl.data.catalog import DATASETS
from tests.data.common import as_rows, check_contract, in_memory, load_npz, message_of, picture, same
from tests.engine import run_python


def test_digits_holds_every_bundled_image_once_scaled_and_stratified():
    dataset = sources.load("digits")
    check_contract(dataset)
    assert dataset.train_images.shape == (1437, 8, 8, 1)
    assert dataset.test_images.shape == (360, 8, 8, 1)
    bunch = load_digits()
    expected = np.array([[[round(v * 255 / 16)] for v in image.ravel()] for image in bunch.images], np.uint8)
    assert sorted(as_rows(*dataset[1:3]) + as_rows(*dataset[3:5])) == as_rows(expected, bunch.target)
    share = np.bincount(bunch.target) * 360 / 1797
    assert np.abs(np.bincount(dataset.test_labels) - share).max() < 1
    assert same(dataset[1:5], sources.load("digits", seed=1)[1:5])


def test_synthetic_is_learnable_and_follows_the_seed():
    dataset = sources.load("synthetic", seed=3)
    check_contract(dataset)
    flat = lambda images: images.reshape(len(images), -1).astype(float)  # noqa: E731
    means = np.stack([flat(dataset.train_images)[dataset.train_labels == c].mean(0) for c in range(10)])
    distance = ((flat(dataset.test_images)[:, None] - means) ** 2).sum(-1)
    assert (distance.argmin(1) == dataset.test_labels).mean() > 0.95
    assert np.bincount(dataset.train_labels).tolist() == [200] * 10
    assert (dataset.train_labels[:-1] == dataset.train_labels[1:]).mean() < 0.2  # not sorted
    assert np.array_equal(dataset.train_images, sources.load("synthetic", seed=3).train_images)
    assert not np.array_equal(dataset.train_images, sources.load("synthetic", seed=4).train_images)
    dataset = sources.synthetic(num_train=7, num_test=2, image_shape=(4, 6, 3), num_classes=3)
    check_contract(dataset)
    assert dataset.train_images.shape == (7, 4, 6, 3)
    assert np.bincount(dataset.train_labels).tolist() == [3, 2, 2]
    assert "num_classes=8" in message_of(ValueError, sources.synthetic, num_train=7, num_classes=8)


RESPLIT = (0.8, 0.05, 0.15)


def tagged(size, first, classes=2, shape=(3, 4)):
    """`size` distinguishable images, the first pixel counting up from `first`, and labels counting round."""
    images = picture(size, *shape, seed=first)
    images.reshape(size, -1)[:, 0] = np.arange(first, first + size)
    return images, np.arange(size) % classes


def medmnist(sizes=(40, 20, 20), classes=2, shape=(3, 4), **changes):
    """Arrays as MedMNIST stores them: gray images without a channel axis, labels uint8 [N, 1]."""
    arrays, first = {}, 0
    for split, size in zip(("train", "val", "test"), sizes, strict=True):
        images, labels = tagged(size, first, classes, shape)
        arrays |= {f"{split}_images": images, f"{split}_labels": labels[:, None].astype(np.uint8)}
        first += size
    return {key: value for key, value in (arrays | changes).items() if value is not None}


def test_npz_reads_both_kinds_of_keys_and_no_validation_part(tmp_path):
    arrays = [*tagged(10, 0, 3, (4, 5, 3)), *tagged(6, 10, 3, (4, 5, 3))]
    dataset = load_npz(tmp_path, dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True)))
    check_contract(dataset)
    assert same(dataset[1:5], arrays)
    arrays = medmnist()
    dataset = load_npz(tmp_path, arrays | {"notes": np.array([{"pickled": "and therefore not looked at"}])})
    check_contract(dataset)
    for split, got in (("train", dataset[1:3]), ("test", dataset[3:5])):
        assert same(got, (arrays[f"{split}_images"][..., None], arrays[f"{split}_labels"][:, 0]))


def test_npz_resplit_merges_everything_and_stratifies(tmp_path):
    arrays = medmnist()
    dataset = load_npz(tmp_path, arrays, resplit=RESPLIT, seed=1)
    check_contract(dataset)
    assert np.bincount(dataset.train_labels).tolist() == [32, 32]
    assert np.bincount(dataset.test_labels).tolist() == [6, 6]
    splits = ((arrays[f"{split}_images"], arrays[f"{split}_labels"][:, 0]) for split in ("train", "val", "test"))
    kept = as_rows(*dataset[1:3]) + as_rows(*dataset[3:5])
    assert len(set(kept)) == 76  # no image in both, 4 held out
    assert set(kept) <= {row for split in splits for row in as_rows(*split)}
    assert set((dataset.train_images[:, 0, 0, 0] // 20).tolist()) == {0, 1, 2, 3}  # 0, 1: train; 2: val; 3: test
    again, other = (load_npz(tmp_path, arrays, resplit=RESPLIT, seed=seed) for seed in (1, 2))
    for part, images in ((dataset.origins.train, dataset.train_images), (dataset.origins.test, dataset.test_images)):
        places = [re.fullmatch(r"(train|val|test)\[(\d+)\]", origin).groups() for origin in part]
        assert np.array_equal([arrays[f"{split}_images"][int(at)] for split, at in places], images[..., 0])
    assert (dataset.origins.kind, dataset.whole == again.whole == other.whole != "") == ("original", True)
    assert np.array_equal(dataset.test_images, again.test_images)
    assert not np.array_equal(dataset.test_images, other.test_images)


def test_arguments_of_npz_are_refused_elsewhere():
    message = message_of(ValueError, sources.load, "digits", path="a.npz")
    assert "path='a.npz' is for npz, image_folder, parquet, text_features and their kind, got name='digits'" in message
    for name in ("digits", "ag_news", "synthetic"):
        message = message_of(ValueError, sources.load, name, resplit=[1])
        assert "resplit=[1] is for datasets of images that are stored" in message


def test_medmnist_is_read_in_color_and_has_all_its_classes(tmp_path):
    arrays = medmnist((80, 16, 24), 8, (28, 28, 3))
    assert np.array_equal(load_npz(tmp_path, arrays, "bloodmnist").train_images, arrays["train_images"])
    message = message_of(ValueError, load_npz, tmp_path, medmnist((80, 16, 24), 5, (28, 28, 3)), "bloodmnist")
    assert message == "bloodmnist: got 5 classes, and it has 8: check that these are all its data"


BY_PATH = [name for name, about in DATASETS.items() if about.kind in sources.GENERIC]


@pytest.mark.parametrize("name", [*sources.GENERIC, *BY_PATH])
def test_a_missing_file_says_what_to_give_or_to_fetch(tmp_path, name):
    about, missing = DATASETS.get(name), str(tmp_path / "missing")
    what = "folder" if (about.kind if about else name) in ("image_folder", "parquet") else "file"
    assert message_of(FileNotFoundError, sources.load, name, path=missing).startswith(f"path={missing}: no such {what}: give")
    if about is None:
        assert message_of(ValueError, sources.load, name) == f"name={name!r} needs path: give the {what} to read"
    else:
        message = message_of(FileNotFoundError, sources.load, name, data_dir=str(tmp_path))
        assert f"run fedjax-ssl prepare {name} --data_dir={tmp_path}, or set data.download=true" in message


TRAIN, TEST = tagged(10, 0), tagged(6, 10)


def test_padding_puts_zeros_all_round():
    dataset = in_memory(TRAIN, TEST)  # 3 x 4 pixels
    larger = sources.padded(dataset, 6)
    check_contract(larger)
    assert larger.train_images.shape == (10, 6, 6, 1)
    assert np.array_equal(larger.train_images[:, 1:4, 1:5], dataset.train_images)
    assert np.array_equal(larger.test_images[:, 1:4, 1:5], dataset.test_images)
    assert larger.train_images.sum() == dataset.train_images.sum()
    message = message_of(ValueError, sources.padded, dataset, 3)
    assert message == "data.image_size: got 3 for images of 4 x 3 pixels, accepted: 0, or 4 and more"


def test_importing_sources_imports_nothing_slow():
    code = "import sys, fedjax_ssl.data.sources; print([m for m in ('tensorflow_datasets', 'sklearn') if m in sys.modules])"
    assert run_python("-c", code) == "[]\n"

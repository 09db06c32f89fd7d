"""Sources: every format ends in the same checked arrays, pixel for pixel, and wrong input in one clear line."""

import io
import json
import shutil
import socket
import subprocess
import sys

import cv2
import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from sklearn.datasets import load_digits

from fedjax_ssl.data import sources


def message_of(error_type, call, *args, **kwargs):
    """The error's message, which has to be one line."""
    with pytest.raises(error_type) as error:
        call(*args, **kwargs)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


def as_rows(images, labels):
    """Examples as a sorted list of (pixels, label): equal whatever their order."""
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def check_contract(dataset):
    for images, labels in [dataset[1:3], dataset[3:5]]:
        assert images.dtype == np.uint8
        assert images.ndim == 4
        assert labels.dtype == np.int32
        assert labels.shape == images.shape[:1]
        assert 0 <= labels.min() <= labels.max() < dataset.num_classes
    assert set(dataset.train_labels.tolist()) == set(range(dataset.num_classes))


# --- digits and synthetic ----------------------------------------------------------------------------------------------


def test_digits_holds_every_bundled_image_once_scaled_and_stratified():
    dataset = sources.load("digits")
    check_contract(dataset)
    assert dataset.train_images.shape == (1437, 8, 8, 1)
    assert dataset.test_images.shape == (360, 8, 8, 1)
    bunch = load_digits()
    expected = np.array([[[round(v * 255 / 16)] for v in image.ravel()] for image in bunch.images], np.uint8)
    images = np.concatenate([dataset.train_images, dataset.test_images])
    labels = np.concatenate([dataset.train_labels, dataset.test_labels])
    assert as_rows(images, labels) == as_rows(expected, bunch.target)
    share = np.bincount(bunch.target) * 360 / 1797
    assert np.abs(np.bincount(dataset.test_labels) - share).max() < 1
    other_seed = sources.load("digits", seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(dataset[1:5], other_seed[1:5], strict=True))


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


def test_synthetic_takes_sizes():
    dataset = sources.synthetic(num_train=7, num_test=2, image_shape=(4, 6, 3), num_classes=3)
    check_contract(dataset)
    assert dataset.train_images.shape == (7, 4, 6, 3)
    assert np.bincount(dataset.train_labels).tolist() == [3, 2, 2]
    assert "num_classes=8" in message_of(ValueError, sources.synthetic, num_train=7, num_classes=8)


# --- npz ---------------------------------------------------------------------------------------------------------------


def tagged(size, first, classes=2, shape=(3, 4)):
    """`size` distinguishable images, the first pixel counting up from `first`, and labels counting round."""
    images = np.random.default_rng(first).integers(0, 256, (size, *shape)).astype(np.uint8)
    images.reshape(size, -1)[:, 0] = np.arange(first, first + size)
    return images, np.arange(size) % classes


def medmnist(**changes):
    """Arrays as MedMNIST stores them: gray images without a channel axis, labels uint8 [N, 1]."""
    arrays = {}
    for split, size, first in [("train", 40, 0), ("val", 20, 40), ("test", 20, 60)]:
        images, labels = tagged(size, first)
        arrays |= {f"{split}_images": images, f"{split}_labels": labels[:, None].astype(np.uint8)}
    return {key: value for key, value in (arrays | changes).items() if value is not None}


def load_npz(tmp_path, arrays, **kwargs):
    np.savez(tmp_path / "data.npz", **arrays)
    return sources.load("npz", path=str(tmp_path / "data.npz"), **kwargs)


def test_npz_reads_plain_keys_with_channels(tmp_path):
    arrays = [*tagged(10, 0, 3, (4, 5, 3)), *tagged(6, 10, 3, (4, 5, 3))]
    dataset = load_npz(tmp_path, dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True)))
    check_contract(dataset)
    for got, expected in zip(dataset[1:5], arrays, strict=True):
        assert np.array_equal(got, expected)


def test_npz_reads_medmnist_keys_and_holds_validation_out(tmp_path):
    arrays = medmnist()
    dataset = load_npz(tmp_path, arrays)
    check_contract(dataset)
    for got, expected in [(dataset[1:3], "train"), (dataset[3:5], "test")]:
        assert np.array_equal(got[0], arrays[f"{expected}_images"][..., None])
        assert np.array_equal(got[1], arrays[f"{expected}_labels"][:, 0])


def test_npz_resplit_merges_everything_and_stratifies(tmp_path):
    arrays = medmnist()
    dataset = load_npz(tmp_path, arrays, resplit=[0.8, 0.05, 0.15], seed=1)
    check_contract(dataset)
    assert len(dataset.train_labels) == 64
    assert len(dataset.test_labels) == 12
    assert np.bincount(dataset.train_labels).tolist() == [32, 32]
    assert np.bincount(dataset.test_labels).tolist() == [6, 6]
    merged = {
        image.tobytes(): int(label[0])
        for split in ("train", "val", "test")
        for image, label in zip(arrays[f"{split}_images"], arrays[f"{split}_labels"], strict=True)
    }
    kept = as_rows(dataset.train_images, dataset.train_labels) + as_rows(dataset.test_images, dataset.test_labels)
    assert len(dict(kept)) == 76  # no image in both, 4 held out
    assert all(merged[pixels] == label for pixels, label in kept)
    assert set((dataset.train_images[:, 0, 0, 0] // 20).tolist()) == {0, 1, 2, 3}  # 0, 1: train; 2: val; 3: test


def test_npz_resplit_follows_the_seed(tmp_path):
    draw = lambda seed: load_npz(tmp_path, medmnist(), resplit=(0.8, 0.0, 0.2), seed=seed)  # noqa: E731
    assert np.array_equal(draw(1).test_images, draw(1).test_images)
    assert not np.array_equal(draw(1).test_images, draw(2).test_images)
    assert len(draw(1).train_labels) + len(draw(1).test_labels) == 80


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_images": np.zeros((40, 3, 4), np.float32)}, "npz train: images have dtype float32: scale them to 0..255"),
        ({"test_images": np.zeros((20, 3, 4), int)}, "npz test: images have dtype int64"),
        ({"train_images": np.zeros((40, 12), np.uint8)}, "npz train: images have shape (40, 12): needed is [N, H, W]"),
        ({"train_images": np.zeros((0, 3, 4), np.uint8)}, "npz train: images have shape (0, 3, 4)"),
        ({"test_images": np.zeros((20, 4, 4), np.uint8)}, "(3, 4, 1) and test images (4, 4, 1): resize them"),
        ({"train_labels": np.zeros((40, 2), int)}, "npz train: labels have shape (40, 2)"),
        ({"train_labels": np.zeros(40)}, "npz train: labels have dtype float64: store them as integers"),
        ({"train_labels": np.zeros(39, int)}, "npz train: 40 images but 39 labels"),
        ({"train_labels": np.arange(40) % 2 - 1}, "npz train: labels range from -1 to 0: number the classes 0..C-1"),
        ({"train_labels": np.arange(40) % 2 + 2**40}, "npz train: labels range from 1099511627776"),
        ({"train_labels": np.arange(40) % 2 * 2}, "npz: no training example of class 1 (2 of 3 classes occur)"),
        ({"test_labels": np.full(20, 2)}, "npz: no training example of class 2 (2 of 3 classes occur)"),
        ({"test_labels": np.full(20, 10**9)}, "npz: no training example of class 2 (2 of 1000000001 classes occur)"),
        ({"test_images": None}, "holds train_images, train_labels, val_images, val_labels, test_labels: needed are"),
        ({"train_images": np.array([{}] * 40)}, "cannot be read as plain arrays (Object arrays cannot be loaded"),
    ],
)
def test_npz_says_what_is_wrong_with_the_arrays(tmp_path, changes, expected):
    assert expected in message_of(ValueError, load_npz, tmp_path, medmnist(**changes))


@pytest.mark.parametrize(
    ("resplit", "expected"),
    [
        ([0.8, 0.2], "resplit=(0.8, 0.2): give three fractions"),
        ([0.8, 0.1, 0.2], "add up to 1"),
        ([1.0, 0.0, 0.0], "train and test above 0"),
        ([1.2, -0.4, 0.2], "resplit=(1.2, -0.4, 0.2)"),
        ([0.99, 0.0, 0.01], "leaves classes without a training or test example"),
    ],
)
def test_npz_says_what_is_wrong_with_the_fractions(tmp_path, resplit, expected):
    assert expected in message_of(ValueError, load_npz, tmp_path, medmnist(), resplit=resplit)


def test_npz_resplit_checks_the_splits_before_it_merges_them(tmp_path):
    resplit = [0.8, 0.05, 0.15]
    wrong_type = medmnist(val_images=np.zeros((20, 3, 4)))
    assert "npz val: images have dtype float64" in message_of(ValueError, load_npz, tmp_path, wrong_type, resplit=resplit)
    wrong_size = medmnist(val_images=np.zeros((20, 4, 4), np.uint8))
    assert "[(3, 4, 1), (4, 4, 1)]" in message_of(ValueError, load_npz, tmp_path, wrong_size, resplit=resplit)


def test_npz_says_what_is_wrong_with_the_file(tmp_path):
    missing, text, other = (str(tmp_path / name) for name in ("missing.npz", "text.npz", "other.npz"))
    assert "needs path" in message_of(ValueError, sources.load, "npz")
    assert f"path={missing}: no such file" in message_of(FileNotFoundError, sources.load, "npz", path=missing)
    assert "no such file" in message_of(FileNotFoundError, sources.load, "npz", path=str(tmp_path))
    for content in (b"", b"x_train,y_train\n1,2\n"):
        (tmp_path / "text.npz").write_bytes(content)
        assert f"path={text} is not an .npz archive" in message_of(ValueError, sources.load, "npz", path=text)
    shutil.make_archive(str(tmp_path / "other"), "zip", tmp_path, "text.npz")
    (tmp_path / "other.zip").rename(other)
    assert f"path={other} holds text.npz: needed are x_train" in message_of(ValueError, sources.load, "npz", path=other)


def test_npz_says_that_an_archive_is_damaged(tmp_path):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, **medmnist())
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)
    assert "cannot be read as plain arrays" in message_of(ValueError, sources.load, "npz", path=str(path))


def test_arguments_of_npz_are_refused_elsewhere():
    assert "path='a.npz' is for name='npz' alone" in message_of(ValueError, sources.load, "digits", path="a.npz")
    assert "resplit=[1]" in message_of(ValueError, sources.load, "cifar10", resplit=[1])


# --- TensorFlow Datasets -----------------------------------------------------------------------------------------------


class _Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A dataset small enough to be built in a test, without TensorFlow: the encoder's bytes are stored as they are."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # otherwise checksum files are looked for beside this file, with a package that TFDS does not declare
    SHAPE = (6, 5, 3)
    SPLITS = (("train", 23), ("test", 9))

    def _info(self):
        features = {"image": tfds.features.Image(shape=self.SHAPE), "label": tfds.features.ClassLabel(num_classes=3)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    @classmethod
    def examples(cls, size):
        shape = tuple(side or 7 for side in cls.SHAPE)
        return np.random.default_rng(size).integers(0, 256, (size, *shape)).astype(np.uint8), np.arange(size) % 3

    def _split_generators(self, _):
        return {split: self._generate_examples(size) for split, size in self.SPLITS}

    def _generate_examples(self, size):
        for i, (image, label) in enumerate(zip(*self.examples(size), strict=True)):
            png = io.BytesIO()
            Image.fromarray(image.squeeze(-1) if image.shape[2] == 1 else image).save(png, "PNG")
            yield i, {"image": io.BytesIO(png.getvalue()), "label": int(label)}


class TinyRgb(_Tiny, skip_registration=True):
    pass


class TinyGray(_Tiny, skip_registration=True):
    SHAPE = (6, 5, 1)


class TinyTrainOnly(_Tiny, skip_registration=True):
    SPLITS = (("train", 3),)


class TinyAnySize(_Tiny, skip_registration=True):
    SHAPE = (None, None, 3)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    tfds.disable_progress_bar()
    folder = tmp_path_factory.mktemp("tfds")
    for builder in (TinyRgb, TinyGray, TinyTrainOnly, TinyAnySize):
        builder(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("chunk", [1000, 4])
@pytest.mark.parametrize("builder", [TinyRgb, TinyGray])
def test_tfds_pixels_and_labels_are_the_stored_ones(tiny_dir, no_network, monkeypatch, builder, chunk):
    monkeypatch.setattr(sources, "_CHUNK", chunk)  # 23 examples in chunks of 4: the last one is shorter
    dataset = sources.load(builder.name, data_dir=str(tiny_dir))
    check_contract(dataset)
    assert dataset.num_classes == 3
    assert dataset.train_images.shape == (23, *builder.SHAPE)
    assert as_rows(dataset.train_images, dataset.train_labels) == as_rows(*builder.examples(23))
    assert as_rows(dataset.test_images, dataset.test_labels) == as_rows(*builder.examples(9))


def test_tfds_default_folder_is_that_of_tfds(tiny_dir, no_network, monkeypatch):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tiny_dir))
    assert sources.load("tiny_gray").train_images.shape == (23, 6, 5, 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cifar01", "did you mean 'cifar10'?"),
        ("CIFAR10", "did you mean 'cifar10'?"),
        ("digit", "did you mean 'digits'?"),
        ("", "accepted are digits, npz, synthetic, a TFDS name such as cifar10"),
        ("../cifar10", "unknown dataset name='../cifar10'"),
        ("huggingface:mnist", "unknown dataset name='huggingface:mnist'"),
        ("qqqqqqqqqq", "see tensorflow.org/datasets/catalog"),
    ],
)
def test_tfds_unknown_names_get_the_nearest_without_network(tiny_dir, no_network, name, expected):
    assert expected in message_of(ValueError, sources.load, name, data_dir=str(tiny_dir))


def test_tfds_unprepared_datasets_say_where_and_how_without_network(tiny_dir, no_network):
    for name in ("cifar100", "cifar10", "emnist/byclass", "mnist:9.9.9"):
        message = message_of(FileNotFoundError, sources.load, name, data_dir=str(tiny_dir))
        assert f"TFDS dataset '{name}' is not prepared in data_dir={tiny_dir}: point data_dir" in message
        assert f"tfds.builder('{name}', data_dir='{tiny_dir}', file_format='array_record').download_and_prepare()" in message
    message = message_of(FileNotFoundError, sources.load, "cifar10", data_dir=str(tiny_dir / "nowhere"))
    assert f"data_dir={tiny_dir}/nowhere, which does not exist" in message


def test_tfds_says_what_a_dataset_lacks(tiny_dir):
    load = lambda name: message_of(ValueError, sources.load, name, data_dir=str(tiny_dir))  # noqa: E731
    assert "has splits train: needed are train and test" in load("tiny_train_only")
    assert "has features image, label: needed are a class `label` and a uint8 `image` of fixed size" in load("tiny_any_size")


def store_as_tfrecord(folder):
    info = folder / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fileFormat": "tfrecord"}))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: next(folder.glob("*train*")).unlink(), "tiny_rgb/1.0.0 is damaged"),
        (lambda folder: next(folder.glob("*test*")).write_bytes(b"short"), "tiny_rgb/1.0.0 is damaged"),
        (lambda folder: (folder / "features.json").write_text("{"), "tiny_rgb in data_dir="),
        (store_as_tfrecord, "stored as tfrecord, which needs TensorFlow: prepare it with file_format='array_record'"),
    ],
)
def test_tfds_says_that_the_files_are_unusable(tiny_dir, tmp_path, damage, expected):
    shutil.copytree(tiny_dir / "tiny_rgb", tmp_path / "tiny_rgb")
    damage(tmp_path / "tiny_rgb" / "1.0.0")
    assert expected in message_of(ValueError, sources.load, "tiny_rgb", data_dir=str(tmp_path))


def test_an_image_that_does_not_decode_is_an_error():
    good = cv2.imencode(".png", np.zeros((2, 3, 3), np.uint8))[1].tobytes()
    assert sources._decode(good, (2, 3, 3)).shape == (2, 3, 3)
    for encoded, shape in [(b"junk", (2, 3, 3)), (good[:30], (2, 3, 3)), (good, (3, 3, 3))]:
        assert "does not decode to shape" in message_of(ValueError, sources._decode, encoded, shape)


def test_tfds_labels_outside_the_declared_classes_are_an_error(tiny_dir, monkeypatch):
    for label, expected in [(3, "label 3 is out of range for 3 classes: give labels 0..2"), (-1, "labels range from -1 to -1")]:
        split = sources._Split(np.zeros((4, 2, 2, 1), np.uint8), np.full(4, label))
        monkeypatch.setattr(sources, "_read_tfds", lambda *_, split=split: split)
        assert expected in message_of(ValueError, sources.load, "tiny_rgb", data_dir=str(tiny_dir))


def check_against_pillow(builder, split, images, labels):
    source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    assert len(images) == len(labels) == len(source)
    for i in [0, 1, 999, 1000, 1001, len(source) - 1, *np.random.default_rng(0).integers(0, len(source), 50).tolist()]:
        example = source[i]
        expected = np.asarray(Image.open(io.BytesIO(example["image"])))
        assert np.array_equal(images[i], expected.reshape(images.shape[1:]))
        assert labels[i] == example["label"]


def test_tfds_real_cifar10_equals_pillows_decoding(tfds_dir, no_network):
    dataset = sources.load("cifar10", data_dir=tfds_dir)
    check_contract(dataset)
    assert np.bincount(dataset.train_labels).tolist() == [5000] * 10
    assert np.bincount(dataset.test_labels).tolist() == [1000] * 10
    builder = tfds.builder("cifar10", data_dir=tfds_dir)
    check_against_pillow(builder, "train", dataset.train_images, dataset.train_labels)
    check_against_pillow(builder, "test", dataset.test_images, dataset.test_labels)


def test_tfds_real_gray_images_equal_pillows_decoding(tfds_dir):
    builder = tfds.builder("mnist", data_dir=tfds_dir)
    check_against_pillow(builder, "test", *sources._read_tfds(builder, "test"))


def test_importing_sources_imports_nothing_slow():
    code = "import sys, fedjax_ssl.data.sources; print([m for m in ('tensorflow_datasets', 'sklearn') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"

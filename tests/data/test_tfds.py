"""TensorFlow Datasets: pixel for pixel what is stored, in small datasets made here and in the real ones, without network."""

import io
import json
import shutil
import socket

import cv2
import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from fedjax_ssl.data import presets, sources
from fedjax_ssl.data.catalog import DATASETS, ORIGINALS, SIZES
from fedjax_ssl.data.sources import checks, stand_in
from fedjax_ssl.data.sources import tfds as reader
from tests.data.common import as_rows, check_contract, check_equal, message_of, picture


class _Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A dataset small enough to be built in a test, without TensorFlow: the encoder's bytes are stored as they are."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # otherwise checksum files are looked for beside this file, with a package that TFDS does not declare
    MORE = ()  # other features, and what they hold

    def _info(self):
        features = {"image": tfds.features.Image(shape=self.SHAPE), "label": tfds.features.ClassLabel(num_classes=self.CLASSES)}
        features |= {name: feature for name, feature, _ in self.MORE}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    @classmethod
    def examples(cls, size):
        shape = tuple(side or 7 for side in cls.SHAPE)
        return picture(size, *shape, seed=size), np.arange(size) % cls.CLASSES

    def _split_generators(self, _):
        return {split: self._generate_examples(size) for split, size in self.SPLITS.items()}

    def _generate_examples(self, size):
        for i, (image, label) in enumerate(zip(*self.examples(size), strict=True)):
            png = io.BytesIO()
            Image.fromarray(image.squeeze(-1) if image.shape[2] == 1 else image).save(png, "PNG")
            more = {name: value for name, _, value in self.MORE}
            yield i, {"image": io.BytesIO(png.getvalue()), "label": int(label), **more}


def builder(name, shape, classes, splits, **more):
    return type(_Tiny)(name, (_Tiny,), {"SHAPE": shape, "CLASSES": classes, "SPLITS": splits, **more}, skip_registration=True)


RGB = builder("TinyRgb", (6, 5, 3), 3, {"train": 23, "test": 9})
GRAY = builder("TinyGray", (6, 5, 1), 3, {"train": 23, "test": 9})
TRAIN_ONLY = builder("TinyTrainOnly", (6, 5, 3), 3, {"train": 3})
ANY_SIZE = builder("TinyAnySize", (None, None, 3), 3, {"train": 23, "test": 9})
ID, COARSE = ("id", tfds.features.Text(), "00001"), ("coarse_label", tfds.features.ClassLabel(num_classes=20), 7)
CIFAR100 = builder("Cifar100", (32, 32, 3), 100, {"train": 200, "test": 100}, MORE=(COARSE, ID))
SVHN = builder("SvhnCropped", (32, 32, 3), 10, {"train": 20, "test": 10, "extra": 30}, MORE=(ID,))
BY_CLASS = tfds.core.BuilderConfig(name="byclass")
EMNIST = builder("Emnist", (28, 28, 1), 62, {"train": 62, "test": 62}, BUILDER_CONFIGS=(BY_CLASS,))
NAMED = {"cifar100": CIFAR100, "svhn_cropped": SVHN, "emnist/byclass": EMNIST}


@pytest.fixture
def no_network(monkeypatch):
    for owner, name in ((socket.socket, "connect"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, None)  # a call fails


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """Small datasets, some with the names, features, sizes, classes and splits of TFDS's own."""
    tfds.disable_progress_bar()
    folder = tmp_path_factory.mktemp("tfds")
    for made in (*NAMED.values(), RGB, GRAY, TRAIN_ONLY, ANY_SIZE):
        made(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


@pytest.mark.parametrize("name", NAMED)
def test_tfds_known_datasets_are_read_from_their_own_features_and_splits(tiny_dir, no_network, name):
    builder, about = NAMED[name], DATASETS[name]
    dataset = sources.load(name, data_dir=str(tiny_dir))
    check_contract(dataset)
    assert (dataset.name, dataset.num_classes) == (name, about.classes)
    for split, images, labels in [("train", *dataset[1:3]), ("test", *dataset[3:5])]:
        stored, expected = builder.examples(builder.SPLITS[split])
        if name == "emnist/byclass":
            stored = stored.swapaxes(1, 2)  # NIST's rows are columns
        assert as_rows(images, labels) == as_rows(stored, expected)


@pytest.mark.parametrize("resplit", [None, (0.5, 0.1, 0.4)])
def test_a_stand_in_has_the_sizes_that_the_metadata_say_and_reads_no_example(tiny_dir, no_network, tmp_path, resplit):
    real = sources.load("cifar100", data_dir=str(tiny_dir), resplit=resplit)
    for folder in (tiny_dir / "cifar100").glob("*"):
        (tmp_path / "cifar100" / folder.name).mkdir(parents=True)
        for file in folder.glob("*.json"):
            shutil.copy(file, tmp_path / "cifar100" / folder.name)
    made = stand_in.load("cifar100", str(tmp_path), resplit)
    check_contract(made)
    assert [(array.shape, array.dtype) for array in made[1:5]] == [(array.shape, array.dtype) for array in real[1:5]]
    assert (made.name, made.num_classes, made.classes) == (real.name, 100, ())
    assert made.sizes_from.startswith(f"TFDS's metadata in {tmp_path}")
    assert stand_in.load("nobody_knows_it", str(tmp_path), resplit) is None


def test_a_stand_in_of_what_is_not_there_has_the_catalogs_sizes(no_network, tmp_path):
    assert set(SIZES) == set(ORIGINALS) - {"ag_news"}
    made = stand_in.load("bloodmnist", str(tmp_path), (0.8, 0.05, 0.15))
    assert (made.train_images.shape, made.test_images.shape) == ((13_674, 28, 28, 3), (2_564, 28, 28, 3))
    assert np.ptp(np.bincount(made.train_labels)) <= 14  # 8 classes in each of 14 blocks
    assert (stand_in.load("breastmnist", None, None).train_images.shape, made.sizes_from) == ((546, 28, 28, 1), "the catalog")


@pytest.mark.parametrize("name", ["cifar10", "mnist", "fashion_mnist"])
def test_the_catalogs_sizes_are_those_of_the_real_datasets(tfds_dir, name):
    info, sizes = reader.prepared(name, tfds_dir).info, SIZES[name]
    numbers = [info.splits[split].num_examples for split in ("train", "test")]
    assert (info.features["image"].shape, *numbers) == (sizes.shape, sizes.train, sizes.test)


def test_tfds_splits_are_merged_and_split_anew(tiny_dir, no_network):
    dataset = sources.load("cifar100", data_dir=str(tiny_dir), resplit=(0.5, 0.1, 0.4))
    check_contract(dataset)
    assert (len(dataset.train_labels), len(dataset.test_labels), dataset.num_classes) == (150, 120, 100)
    stored = [as_rows(*CIFAR100.examples(size)) for size in CIFAR100.SPLITS.values()]
    both = as_rows(*(np.concatenate(pair) for pair in zip(dataset[1:3], dataset[3:5], strict=True)))
    assert set(both) <= set(stored[0]) | set(stored[1])


@pytest.mark.parametrize("chunk", [1000, 4])
@pytest.mark.parametrize("builder", [RGB, GRAY])
def test_tfds_pixels_and_labels_are_the_stored_ones(tiny_dir, no_network, monkeypatch, builder, chunk):
    monkeypatch.setattr(reader, "_CHUNK", chunk)  # 23 examples in chunks of 4: the last one is shorter
    dataset = sources.load(builder.name, data_dir=str(tiny_dir))
    check_equal(dataset, builder.examples(23), builder.examples(9))
    assert (dataset.num_classes, dataset.train_images.shape) == (3, (23, *builder.SHAPE))


def test_tfds_default_folder_is_that_of_tfds(tiny_dir, no_network, monkeypatch):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tiny_dir))
    assert sources.load("tiny_gray").train_images.shape == (23, 6, 5, 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cifar01", "did you mean 'cifar10'?"),
        ("CIFAR10", "did you mean 'cifar10'?"),
        ("digit", "did you mean 'digits'?"),
        ("", "accepted: npz, image_folder, parquet, text_features, synthetic, digits, cifar10, cifar100, svhn_cropped"),
        ("../cifar10", "unknown dataset name='../cifar10'"),
        ("huggingface:mnist", "unknown dataset name='huggingface:mnist'"),
        ("qqqqqqqqqq", "or what TFDS has prepared in data_dir="),
        ("emnist/letters", "did you mean 'emnist/byclass'?"),
        ("mnist:9.9.9", "did you mean 'mnist'?"),
    ],
)
def test_tfds_unknown_names_get_the_nearest_without_network(tiny_dir, no_network, name, expected):
    assert expected in message_of(ValueError, sources.load, name, data_dir=str(tiny_dir))


def test_tfds_unprepared_datasets_say_where_and_how_without_network(tiny_dir, no_network):
    for name in ("fashion_mnist", "cifar10"):
        message = message_of(FileNotFoundError, sources.load, name, data_dir=str(tiny_dir))
        assert f"data_dir={tiny_dir} holds {name} neither prepared by TFDS nor as its original files" in message
        assert f"run fedjax-ssl prepare {name} --data_dir={tiny_dir}, or set data.download=true" in message


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
        (lambda folder: (folder / "dataset_info.json").write_text("{"), "tiny_rgb in data_dir="),
        (store_as_tfrecord, "stored as tfrecord, which needs TensorFlow: prepare it with file_format='array_record'"),
    ],
)
def test_tfds_says_that_the_files_are_unusable(tiny_dir, tmp_path, damage, expected):
    shutil.copytree(tiny_dir / "tiny_rgb", tmp_path / "tiny_rgb")
    damage(tmp_path / "tiny_rgb" / "1.0.0")
    assert expected in message_of(ValueError, sources.load, "tiny_rgb", data_dir=str(tmp_path))


def test_an_image_that_does_not_decode_is_an_error():
    good = cv2.imencode(".png", np.zeros((2, 3, 3), np.uint8))[1].tobytes()
    assert reader.decode(good, (2, 3, 3)).shape == (2, 3, 3)
    for encoded, shape in [(b"junk", (2, 3, 3)), (good[:30], (2, 3, 3)), (good, (3, 3, 3))]:
        assert "does not decode to shape" in message_of(ValueError, reader.decode, encoded, shape)


def test_tfds_labels_outside_the_declared_classes_are_an_error(tiny_dir, monkeypatch):
    for label, expected in [(3, "label 3 is out of range for 3 classes: give labels 0..2"), (-1, "labels range from -1 to -1")]:
        part = checks.Part(np.zeros((4, 2, 2, 1), np.uint8), np.full(4, label))
        monkeypatch.setattr(reader, "read", lambda *_, part=part: part)
        assert expected in message_of(ValueError, sources.load, "tiny_rgb", data_dir=str(tiny_dir))


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["cifar10", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mnist", "fashion_mnist"))]
)
def test_tfds_real_datasets_equal_pillows_decoding_and_have_the_normalization_that_is_listed(tfds_dir, no_network, name):
    dataset = sources.load(name, data_dir=tfds_dir)
    check_contract(dataset)
    about = DATASETS[name]
    assert dataset.num_classes == about.classes
    assert len(dataset.train_labels) == {"cifar10": 50_000}.get(name, 60_000)
    assert dataset.classes[:2] == {"mnist": (), "cifar10": ("airplane", "automobile")}.get(name, ("T-shirt/top", "Trouser"))
    if name != "mnist":
        assert np.bincount(dataset.train_labels).tolist() == [len(dataset.train_labels) // 10] * 10
    for split, images, labels in [("train", *dataset[1:3]), ("test", *dataset[3:5])]:
        stored = tfds.builder(name, data_dir=tfds_dir).as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
        assert len(images) == len(labels) == len(stored)
        for i in [0, 1, 999, 1000, 1001, len(stored) - 1, *np.random.default_rng(0).integers(0, len(stored), 50).tolist()]:
            expected = np.asarray(Image.open(io.BytesIO(stored[i]["image"])))
            assert np.array_equal(images[i], expected.reshape(images.shape[1:]))
            assert labels[i] == stored[i]["label"]
    mean, std = presets.measured(dataset.train_images)
    np.testing.assert_allclose(mean, about.mean, atol=2e-4)
    np.testing.assert_allclose(std, about.std, atol=2e-4)

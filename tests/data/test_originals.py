"""Original files: read, they are what TFDS prepares of them, example by example and in its order."""

import pathlib

import cv2
import numpy as np
import pytest
import tensorflow_datasets as tfds

from fedjax_ssl.data import sources
from fedjax_ssl.data.catalog import DATASETS, ORIGINALS
from fedjax_ssl.data.sources import originals
from fedjax_ssl.data.sources.resplit import Splits
from tests.data import archives
from tests.data.common import as_rows, check_contract, message_of, picture, same
from tests.data.test_folders import CINIC, write_tree
from tests.data.test_tfds import NAMED, tiny_dir  # noqa: F401  # datasets that TFDS itself prepared

PACKED = {"cifar100": archives.cifar100, "svhn_cropped": archives.svhn, "emnist/byclass": archives.emnist}


@pytest.mark.parametrize("name", PACKED)
def test_original_files_are_what_tfds_prepares_in_its_order(tiny_dir, server, kept, name):  # noqa: F811
    builder = NAMED[name]
    parts = [builder.examples(builder.SPLITS[split]) for split in ("train", "test")]
    archives.serve(server, name, PACKED[name](*parts))
    got = originals.load(name, kept, Splits())
    check_contract(got)
    assert same(got[1:5], sources.load(name, data_dir=str(tiny_dir))[1:5])
    assert (got.name, got.num_classes) == (name, DATASETS[name].classes)


def test_svhns_further_images_come_after_its_training_images_where_they_are_asked_for(server, kept):
    train, test, extra = ((picture(size, 32, 32, 3, seed=size), np.arange(size) % 10) for size in (30, 10, 50))
    for name in ("svhn_cropped", "svhn_cropped/extra"):  # in one folder
        archives.serve(server, name, archives.svhn(train, test, extra))
    got, fewer = (originals.load(name, kept, Splits()) for name in ("svhn_cropped/extra", "svhn_cropped"))
    assert same((got.train_images[:30], got.train_labels[:30]), (fewer.train_images, fewer.train_labels))
    assert as_rows(got.train_images[30:], got.train_labels[30:]) == as_rows(*extra)
    assert len(server.asked) == 3


def test_cinic10s_archive_is_its_unpacked_folder(server, kept, tmp_path):
    write_tree(tmp_path / "cinic", classes=CINIC, splits=(("train", 3), ("valid", 3), ("test", 2)), shape=(32, 32, 3))
    gray = cv2.imencode(".png", picture(32, 32))[1].tobytes()  # some of ImageNet's are
    (tmp_path / "cinic/train/airplane/n9.png").write_bytes(gray)
    archives.serve(server, "cinic10", archives.cinic10(tmp_path / "cinic"))
    for resplit in (None, (0.5, 0.2, 0.3)):
        got = originals.load("cinic10", kept, Splits(resplit))
        check_contract(got)
        assert same(got[1:5], sources.load("cinic10", path=str(tmp_path / "cinic"), resplit=resplit)[1:5])
    own, folder = originals.load("cinic10", kept, Splits(validation=True)), str(tmp_path / "cinic")
    assert same(own.validation[:2], sources.load("cinic10", path=folder, validation=True).validation[:2])
    assert own.validation.labels.tolist() == sorted([*range(10)] * 3)


def test_medmnist_is_read_and_ag_news_says_what_its_texts_need(server, kept, tmp_path):
    arrays = {f"{s}_images": picture(n, 28, 28, 3) for s, n in (("train", 16), ("val", 8), ("test", 8))}
    arrays |= {f"{s}_labels": np.arange(n)[:, None] % 8 for s, n in (("train", 16), ("val", 8), ("test", 8))}
    np.savez(tmp_path / "blood.npz", **arrays)
    archives.serve(server, "bloodmnist", {"bloodmnist.npz": (tmp_path / "blood.npz").read_bytes()})
    assert np.array_equal(originals.load("bloodmnist", kept, Splits()).train_images, arrays["train_images"])
    own = originals.load("bloodmnist", kept, Splits(validation=True)).validation
    assert same(own[:2], (arrays["val_images"], arrays["val_labels"][:, 0]))
    assert len(originals.load("bloodmnist", kept, Splits((0.5, 0.25, 0.25), validation=True)).validation.labels) == 8
    contents = {"train.csv": b'"3","Oil","Up"\n', "test.csv": b'"1","Peace","Now"\n'}
    archives.serve(server, "ag_news", contents)
    message = message_of(ValueError, originals.load, "ag_news", kept, Splits())
    command = f"run fedjax-ssl text_features --train={kept}/originals/ag_news/train.csv --test="
    assert message.startswith("name='ag_news' needs path: its texts are there")
    assert command in message


def test_files_of_another_format_are_one_line(server, kept):
    for name, contents in {
        "cifar10": {"cifar-10-binary.tar.gz": archives.tar_gz({"a.bin": b"1234"})},
        "mnist": dict.fromkeys([file.name for file in ORIGINALS["mnist"]], b"no gzip"),
        "emnist/byclass": {"gzip.zip": b"no zip"},
        "svhn_cropped": {"train_32x32.mat": b"no matrix", "test_32x32.mat": b"no matrix"},
        "cinic10": {"CINIC-10.tar.gz": archives.tar_gz({"train/a/b.png": b"no image"})},
    }.items():
        archives.serve(server, name, contents)
        assert "are not in their format" in message_of(ValueError, originals.load, name, kept, Splits()), name


def test_the_catalog_has_the_files_and_checksums_that_tfds_lists():
    root = pathlib.Path(tfds.__file__).parent
    lists = [*root.glob("url_checksums/*.txt"), *root.glob("datasets/*/checksums.tsv")]
    rows = [line.split("\t") for path in lists for line in path.read_text().splitlines() if "\t" in line]
    published = {row[0]: row[1:3] for row in rows}
    ours = {file.url: [str(file.size), file.checksum.removeprefix("sha256:")] for files in ORIGINALS.values() for file in files}
    by_tfds = {file.url for files in ORIGINALS.values() for file in files if file.publisher == "TFDS"}
    assert len(by_tfds) == 14
    assert {url: ours[url] for url in by_tfds} == {url: published[url] for url in by_tfds}
    assert set(ORIGINALS) == set(DATASETS) - {"digits"}


FIRST = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], "fashion_mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]}
"""The first training labels of the authors' files."""


def authors_order(name, tfds_dir):
    """The examples of a dataset that TFDS prepared, as its authors have them."""
    stored, parts = sources.load(name, data_dir=tfds_dir), {}
    for split, images, labels in [("train", *stored[1:3]), ("test", *stored[3:5])]:
        order = originals.tfds_order(split, len(labels))
        if name == "cifar10":  # says itself which is which
            source = tfds.builder(name, data_dir=tfds_dir).as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
            order = np.array([int(example["id"][-5:]) for example in source.__getitems__(range(len(source)))])
        back = np.argsort(order)
        parts[split] = images[back], labels[back]
    assert parts["train"][1][:10].tolist() == FIRST.get(name, parts["train"][1][:10].tolist())
    return stored, parts["train"], parts["test"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "mnist", "fashion_mnist"])
def test_real_datasets_rebuilt_and_fetched_equal_what_tfds_gives(server, kept, tfds_dir, name):
    stored, train, test = authors_order(name, tfds_dir)
    archives.serve(server, name, (archives.cifar10 if name == "cifar10" else archives.mnist)(train, test))
    server.cut = 5_000_000  # so that it takes several connections
    got = originals.load(name, kept, Splits())
    assert same(got[1:5], stored[1:5])
    assert [array.dtype for array in got[1:5]] == [np.uint8, np.int32] * 2
    assert any(wanted for _, wanted in server.asked)

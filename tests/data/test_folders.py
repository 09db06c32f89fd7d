"""Image folders: pixel for pixel what Pillow reads; `test_odd_inputs` has the wrong ones."""

import logging

import numpy as np
import pytest
from PIL import Image

from fedjax_ssl.data import sources
from tests.data.common import as_rows, check_contract, check_equal, picture

CINIC = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def write_tree(root, *, classes=("cat", "dog"), splits=(("train", 3), ("valid", 2), ("test", 2)), shape=(5, 4, 3)):
    """PNG files as CINIC-10 has them; returns split -> (images, labels)."""
    written = {}
    for split, size in splits:
        examples = []
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(size):
                image = picture(*shape, seed=[*split.encode(), label, i])
                Image.fromarray(image.squeeze(-1) if shape[-1] == 1 else image).save(root / split / name / f"n0_{i}.png")
                examples.append((image, label))
        written[split] = tuple(np.array(column) for column in zip(*examples, strict=True))
    return written


@pytest.mark.parametrize("chunk", [250, 2])
def test_cinic10_is_read_in_order_from_its_folders_and_its_validation_part_is_not(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("fedjax_ssl.data.sources.images._CHUNK", chunk)
    written = write_tree(tmp_path, classes=CINIC, shape=(32, 32, 3))
    (tmp_path / "README.md").write_text("not an image")
    (tmp_path / "train" / "cat" / "Thumbs.db").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    dataset = sources.load("cinic10", path=str(tmp_path))
    check_equal(dataset, written["train"], written["test"])
    assert (dataset.name, dataset.num_classes, dataset.train_images.shape) == ("cinic10", 10, (30, 32, 32, 3))


def test_gray_images_have_one_channel_unless_others_have_color(tmp_path, caplog):
    written = write_tree(tmp_path, shape=(5, 4, 1))
    with caplog.at_level(logging.INFO):
        check_equal(sources.load("image_folder", path=str(tmp_path)), written["train"], written["test"])
    assert caplog.messages == [f"{tmp_path}: classes are numbered: 0 = cat, 1 = dog"]
    color = picture(5, 4, 3)
    Image.fromarray(color).save(tmp_path / "test" / "dog" / "z.png")
    dataset = sources.load("image_folder", path=str(tmp_path))
    assert dataset.train_images.shape == (6, 5, 4, 3)
    assert as_rows(dataset.train_images[..., :1], dataset.train_labels) == as_rows(*written["train"])
    assert np.array_equal(dataset.train_images[..., 0], dataset.train_images[..., 2])
    assert np.array_equal(dataset.test_images[-1], color)


def test_jpegs_palettes_and_transparency_are_read_as_rgb(tmp_path):
    written = write_tree(tmp_path)
    folder = tmp_path / "test" / "dog"
    with Image.open(folder / "n0_0.png") as image:
        image.convert("P").save(folder / "n0_0.png")
        palette = np.asarray(image.convert("P").convert("RGB"))
    transparent = picture(5, 4, 4)
    Image.fromarray(transparent).save(folder / "n0_1.png")
    Image.fromarray(np.full((5, 4, 3), (200, 30, 90), np.uint8)).save(folder / "n0_2.JPG", quality=95)
    dataset = sources.load("image_folder", path=str(tmp_path))
    assert np.array_equal(dataset.test_images[2], palette)
    assert np.array_equal(dataset.test_images[3], transparent[..., :3])
    assert np.abs(dataset.test_images[4].astype(int) - [200, 30, 90]).max() <= 4
    assert np.array_equal(dataset.test_images[:2], written["test"][0][:2])


def test_resplit_merges_all_splits_or_splits_a_folder_of_classes(tmp_path):
    written = write_tree(tmp_path, splits=(("train", 10), ("valid", 5), ("test", 5)))
    dataset = sources.load("image_folder", path=str(tmp_path), resplit=(0.8, 0.05, 0.15))
    check_contract(dataset)
    assert (len(dataset.train_labels), len(dataset.test_labels)) == (32, 6)
    kept = as_rows(*dataset[1:3]) + as_rows(*dataset[3:5])
    assert len(set(kept)) == 38
    assert set(kept) <= {row for images, labels in written.values() for row in as_rows(images, labels)}
    for part, images in ((dataset.origins.train, dataset.train_images), (dataset.origins.test, dataset.test_images)):
        assert all(np.array_equal(Image.open(tmp_path / file), image) for file, image in zip(part, images, strict=True))
    assert dataset.origins.kind == "file"
    alone = sources.load("image_folder", path=str(tmp_path / "train"), resplit=(0.8, 0.0, 0.2))
    assert sorted(as_rows(*alone[1:3]) + as_rows(*alone[3:5])) == as_rows(*written["train"])

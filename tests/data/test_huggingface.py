"""Datasets of the Hugging Face Hub, from a server on the loopback, and folders of parquet files, both made by `datasets`."""

import os
import re
import subprocess
import sys

import cv2
import numpy as np
import pytest

from fedjax_ssl.data import sources
from fedjax_ssl.data.sources import Columns
from fedjax_ssl.experiment.build import build
from tests import tiny
from tests.commands import ROOT
from tests.hub import Hub

datasets = pytest.importorskip("datasets")
pillow = pytest.importorskip("PIL.Image")
PARTS = {"train": 60, "test": 20}


def pictures(number: int, height: int = 8, width: int = 8, colors: int = 0, seed: int = 0) -> np.ndarray:
    shape = (number, height, width, *[colors] * bool(colors))
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def write(folder, *, parts=None, features=None, **changes):
    """A folder of parquet files, with a column of images, one of classes and one of writers; returns the images by part."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for seed, (part, number) in enumerate((parts or PARTS).items()):
        found[part] = pictures(number, **changes, seed=seed)
        table = {
            "image": [pillow.fromarray(one) for one in found[part]],
            "label": [row % 3 for row in range(number)],
            "writer": [f"w{row % 6}" for row in range(number)],
        }
        kinds = {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["a", "b", "c"]),
            "writer": datasets.Value("string"),
        }
        made = datasets.Dataset.from_dict(table, features=datasets.Features(kinds))
        for key, column in (features or {}).items():
            made = made.add_column(key, column(number))
        made.to_parquet(folder / f"{part}-00000-of-00001.parquet")
    return found


def load(folder, tmp_path, *columns, **options):
    return sources.load("parquet", path=str(folder), data_dir=str(tmp_path / "data"), columns=Columns(*columns), **options)


def test_a_folder_of_parquet_files_is_read_and_its_images_are_decoded_once(tmp_path, monkeypatch):
    images = write(tmp_path / "own")
    data = load(tmp_path / "own", tmp_path, "", "", "writer")
    np.testing.assert_array_equal(data.train_images, images["train"][..., None])
    np.testing.assert_array_equal(data.test_images, images["test"][..., None])
    np.testing.assert_array_equal(data.train_labels, np.arange(60) % 3)
    np.testing.assert_array_equal(data.clients, np.arange(60) % 6)
    assert data.classes == ("a", "b", "c")
    kept = sorted((tmp_path / "data" / "huggingface" / "decoded").iterdir())
    assert len(kept) == 2
    with monkeypatch.context() as patched:
        patched.setattr("fedjax_ssl.data.sources.images.upright", lambda *_: pytest.fail("decoded anew"))
        np.testing.assert_array_equal(load(tmp_path / "own", tmp_path).train_images, data.train_images)
    kept[0].write_bytes(kept[0].read_bytes()[:-9])
    np.testing.assert_array_equal(load(tmp_path / "own", tmp_path).train_images, data.train_images)
    changed = write(tmp_path / "own", colors=3)  # other images in the same place
    np.testing.assert_array_equal(load(tmp_path / "own", tmp_path).train_images, changed["train"])


def test_images_are_resized(tmp_path):
    images = write(tmp_path / "own", height=12, width=16, colors=3)
    found = load(tmp_path / "own", tmp_path, "", "", "", 6).train_images
    expected = [cv2.resize(one, (6, 6), interpolation=cv2.INTER_AREA) for one in images["train"]]
    np.testing.assert_array_equal(found, expected)
    # an independent mean over the blocks, where the sides are whole multiples
    narrow = load(tmp_path / "own", tmp_path, "", "", "", 4).train_images.astype(float)
    blocks = images["train"].reshape(60, 4, 3, 4, 4, 3).mean((2, 4))
    assert np.abs(narrow - blocks).max() <= 0.5 + 1e-6


def test_clients_of_a_column_are_a_natural_split_and_a_test_part_may_be_drawn(tmp_path):
    write(tmp_path / "own", parts={"train": 60, "test": 20})
    keys = {
        "name": "parquet", "path": str(tmp_path / "own"), "data_dir": str(tmp_path / "data"), "partition": "natural",
        "client_column": "writer", "resplit": (0.7, 0.1, 0.2), "num_clients": 6, "num_labels": 6,
    }  # fmt: skip
    experiment = build(tiny.config("fixmatch", **{f"data__{key}": value for key, value in keys.items()}))
    assert experiment.problem.spec.num_clients == 6
    assert len(experiment.dataset.test_labels) == 16
    assert not {key for key in experiment.unread if key in ("data.client_column", "data.resize")}


WRONG = {
    "data.image_column: got 'picture', accepted: a column of parquet: image, label, writer": ({}, ("picture",), {}),
    "data.client_column: got 'who', accepted: a column of parquet: image, label, writer": ({}, ("", "", "who"), {}),
    "data.label_column: parquet has 2 columns that may be it (label, fine_label), accepted: one of its columns: ": (
        {"features": {"fine_label": lambda n: [0] * n}}, (), {},
    ),
    "parquet train[0] holds no image: give a column of encoded images as data.image_column": ({}, ("writer",), {}),
    "parquet has splits train: needed are train and test; data.resplit, such as": ({"parts": {"train": 60}}, (), {}),
    "parquet has no validation part of its own": ({}, (), {"validation": True}),
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_with_a_folder_is_one_line(tmp_path, line):
    made, columns, options = WRONG[line]
    write(tmp_path / "own", **made)
    with pytest.raises(ValueError, match=f"^{re.escape(line)}") as error:
        load(tmp_path / "own", tmp_path, *columns, **options)
    assert "\n" not in str(error.value)


def test_folders_that_are_not_there_empty_or_damaged_are_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder: give a folder of parquet files"):
        load(tmp_path / "none", tmp_path)
    (tmp_path / "own").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no parquet file: give train.parquet and test.parquet"):
        load(tmp_path / "own", tmp_path)
    write(tmp_path / "own")
    whole = (tmp_path / "own" / "test-00000-of-00001.parquet").read_bytes()
    (tmp_path / "own" / "test-00000-of-00001.parquet").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"cannot be read \(.*\): write its parquet files anew$"):
        load(tmp_path / "own", tmp_path)


LOADS = """
import sys
from fedjax_ssl.data import sources
try:
    data = sources.load(sys.argv[1], data_dir=sys.argv[2], download=sys.argv[3] == "fetch")
    print(data.train_images.shape, int(data.train_images.astype(int).sum()), data.classes)
except (ValueError, FileNotFoundError) as error:
    print(error)
"""


@pytest.mark.ci
def test_a_dataset_of_the_hub_is_fetched_once_and_then_read_without_it(tmp_path):
    images = write(tmp_path / "own")
    hub = Hub("me/small", tmp_path / "own")

    def loaded(name: str, how: str = "fetch") -> str:
        words = [sys.executable, "-c", LOADS, name, str(tmp_path / "data"), how]
        environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert "is not in" in loaded("hf/me/small", "offline")
    assert not hub.asked
    expected = f"(60, 8, 8, 1) {images['train'].astype(int).sum()} ('a', 'b', 'c')"
    assert loaded("hf/me/small") == expected
    assert any(path.endswith("train-00000-of-00001.parquet") for path in hub.asked)
    assert re.match(r"hf/me/other cannot be fetched \(.*me/other.*\): look at its name and the network$", loaded("hf/me/other"))
    asked = len(hub.asked)
    assert loaded("hf/me/small") == expected
    assert loaded("hf/me/small", "offline") == expected
    assert "hf/me/small@v9 is not in" in loaded("hf/me/small@v9", "offline")  # which may be another version
    hub.shutdown()
    hub.server_close()
    assert len(hub.asked) == asked
    assert loaded("hf/small").startswith("data.name: got hf/small, accepted: hf/OWNER/NAME, ")

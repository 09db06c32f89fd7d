"""Odd data of one's own: each gives one line, an error or a warning, that says what to do: `odd_inputs.txt` has them all."""

import io
import logging
import os
import shutil
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_ssl.data import sources
from tests.data.common import picture

pytestmark = pytest.mark.reliability

LABELS, RESPLIT = np.arange(20) % 2, (0.8, 0.0, 0.2)


def arrays(**changes):
    """Loads 20 training and 8 test images of 4 x 6 pixels from memory, with changes."""
    given = {"train_images": picture(20, 4, 6, 3), "train_labels": LABELS, "test_images": picture(8, 4, 6, 3, seed=1)}
    return lambda folder: sources.from_arrays(**{**given, "test_labels": LABELS[:8], **changes})


def npz(drop=(), resplit=None, content=None, **changes):
    """The same from a file, with the usual keys, less those in `drop`, or a file of that content."""
    given = {"x_train": picture(20, 4, 6, 3), "y_train": LABELS, "x_test": picture(8, 4, 6, 3, seed=1), "y_test": LABELS[:8]}

    def load(folder):
        np.savez(folder / "data.npz", **{key: value for key, value in {**given, **changes}.items() if key not in drop})
        if content is not None:
            (folder / "data.npz").write_bytes(content)
        return sources.load("npz", path=str(folder / "data.npz"), resplit=resplit)

    return load


def features(**changes):
    """Loads features of 20 training and 8 test texts, the training ones in two views, with changes."""
    rows = np.ones((20, 5), np.float32)
    given = {"train_features": rows, "train_strong_features": rows, "test_features": rows[:8]}
    given |= {"train_labels": LABELS, "test_labels": LABELS[:8]}
    return lambda folder: sources.from_features(**given | changes)


def damaged(folder):
    """Loads a file of which a part is overwritten."""
    npz()(folder)
    content = (folder / "data.npz").read_bytes()
    return npz(content=content[:200] + bytes(200) + content[400:])(folder)


def zipped():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("text.npz", "")
    return packed.getvalue()


def save(path, *shape, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(*shape, seed=seed)).save(path)


def classes(change=lambda root: None, **options):
    """Loads folders of two classes with three images of 6 x 4 pixels in each split, after a change."""

    def load(folder):
        for i in range(12):
            split, name = "train" if i < 6 else "test", "cat" if i % 2 else "dog"
            save(folder / split / name / f"{i}.png", 4, 6, 3, seed=i)
        change(folder)
        return sources.load("image_folder", path=str(folder), **options)

    return load


def flat(train="id,label\n0.png,0\n1,1\n2,0\n3,-1\n", test="id,label\n4,1\n5,0\n", change=lambda root: None, **options):
    """Loads four training and two test images with their tables."""

    def load(folder):
        for i in range(6):
            save(folder / ("train" if i < 4 else "test") / f"{i}.png", 4, 6, 3, seed=i)
        for name, text in (("train", train), ("test", test)):
            if text is not None:
                (folder / f"{name}.csv").write_text(text)
        change(folder)
        return sources.load("image_folder", path=str(folder), **options)

    return load


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def hidden(folder):
    for path in folder.rglob("*.png"):
        path.rename(path.with_suffix(".gif"))


def transparent(folder):
    Image.fromarray(picture(4, 6, 4)).save(folder / "test/cat/7.png")


def deep(folder):
    Image.fromarray(picture(4, 6).astype(np.uint16)).save(folder / "test/cat/7.png")


def several(folder, kind):
    """Puts a file of two images in the place of one, whatever its ending says."""
    first, *others = (Image.fromarray(picture(4, 6, 3, seed=seed)) for seed in (90, 91))
    first.save(folder / "test/cat/7.png", kind, save_all=True, append_images=others)


def piped(path):
    os.mkfifo(path)
    return path


def gigantic(folder):
    """A PNG of 2**31 - 1 pixels a side, of which nothing is there."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    (folder / "test/cat/7.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk)


def claims(folder, shape=(2**40, 32, 32, 3), size=20):
    """Loads a file whose training images have a header of another shape than `size` bytes."""
    npz()(folder)
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(folder / "data.npz") as old, zipfile.ZipFile(folder / "more.npz", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, content.getvalue() + bytes(size) if name == "x_train.npy" else old.read(name))
    return sources.load("npz", path=str(folder / "more.npz"))


def linked(folder):
    (folder / "train/cat").rename(folder.with_name(f"{folder.name}-cats"))
    (folder / "train/cat").symlink_to(folder.with_name(f"{folder.name}-cats"))


def pages(folder):
    (folder / "train/cat/notes.txt").write_text("")
    (folder / "train/cat/one.gif").write_bytes(b"GIF89a")
    save(folder / "train/stray.png", 4, 6, 3)


RGB = picture(20, 4, 6, 3)
ODD = {
    "channels first": arrays(train_images=np.moveaxis(picture(20, 32, 32, 3), -1, 1)),
    "RGBA": arrays(train_images=picture(20, 4, 6, 4), test_images=picture(8, 4, 6, 4, seed=1)),
    "16-bit": arrays(train_images=RGB.astype(np.uint16) * 257),
    "floats in 0..1": arrays(train_images=RGB / 255),
    "floats in 0..255": arrays(train_images=RGB.astype(np.float32)),
    "normalized floats": arrays(train_images=(RGB / 127.5 - 1).astype(np.float32)),
    "floats with NaN": arrays(train_images=np.full((20, 4, 6), np.nan)),
    "int64 images": arrays(test_images=picture(8, 4, 6, 3).astype(int)),
    "truth values": arrays(train_images=RGB > 127),
    "0 or 1 as uint8": arrays(train_images=(RGB > 127).astype(np.uint8)),
    "flat images": arrays(train_images=picture(20, 784)),
    "images of different sizes": arrays(train_images=[picture(4, 6), *[picture(4, 5)] * 19]),
    "an object array of images": arrays(train_images=np.array([picture(4, 6), None] * 10, dtype=object)),
    "no images": arrays(train_images=np.zeros((0, 4, 6), np.uint8), train_labels=np.zeros(0, int)),
    "other test shape": arrays(test_images=picture(8, 4, 5, 3)),
    "one constant image": arrays(train_images=np.where(np.arange(20)[:, None, None, None] == 3, 7, RGB).astype(np.uint8)),
    "copies": arrays(train_images=np.concatenate([RGB[:15], RGB[:5]])),
    "test images in training": arrays(test_images=RGB[:8]),
    "one class": arrays(train_labels=LABELS * 0, test_labels=LABELS[:8] * 0),
    "labels from 1": arrays(train_labels=LABELS + 1, test_labels=LABELS[:8] + 1),
    "fractions as labels": arrays(train_labels=LABELS / 3),
    "one-hot labels": arrays(train_labels=np.eye(2)[LABELS]),
    "text labels": arrays(train_labels=np.array(["cat", "dog"])[LABELS]),
    "objects as labels": arrays(train_labels=np.array([(1,), "a"] * 10, dtype=object)),
    "objects as labels, renumbered": arrays(train_labels=np.array([(1,), "a"] * 10, dtype=object), renumber_labels=True),
    "fractions as objects": arrays(train_labels=np.array([0.5, None] * 10, dtype=object), renumber_labels=True),
    "masked images": arrays(train_images=np.ma.masked_less(RGB, 3)),
    "a list with a masked image": arrays(train_images=[*RGB[:19], np.ma.masked_less(RGB[19], 9)]),
    "a masked test label": arrays(test_labels=np.ma.masked_array(LABELS[:8], LABELS[:8] == 1)),
    "a class that is named as missing": arrays(
        train_labels=["cat", "None", "dog", "cat"] * 5, test_labels=["cat"] * 8, renumber_labels=True
    ),
    "labels below -1": arrays(train_labels=LABELS - 2),
    "-1 in the test part": arrays(test_labels=LABELS[:8] - 1),
    "no label at all": arrays(train_labels=LABELS * 0 - 1),
    "more classes than said": arrays(num_classes=1),
    "fewer labels than images": arrays(train_labels=LABELS[:19]),
    "a class of the test part alone": arrays(test_labels=LABELS[:8] + 5, renumber_labels=True),
    "no test part": lambda folder: sources.from_arrays(train_images=RGB, train_labels=LABELS),
    "fewer clients than images": arrays(clients=np.arange(19)),
    "clients as floats": arrays(clients=np.arange(20) / 2),
    "an example of two clients": arrays(clients=[[0, 1, 2], [2, 3]]),
    "a position that is not there": arrays(clients=[[0, 1], [20]]),
    "too few names of classes": arrays(classes=["cat"]),
    "a name of two classes": npz(classes=np.array(["cat", "cat"])),
    "names of classes as a number": npz(classes=np.array(2)),
    "names of classes as bytes": npz(classes=np.array([b"cat", b"cat"])),
    "such a number, labels numbered": arrays(classes=np.array(2), renumber_labels=True),
    "a missing name": arrays(classes=np.array(["cat", None])),
    "a client without examples": arrays(clients=[[0, 1], []]),
    "npz without test part": npz(drop=("x_test", "y_test")),
    "npz of pickled objects": npz(x_train=np.array([{}] * 20)),
    "npz whose header claims more": claims,
    "npz of more than the memory": lambda folder: claims(folder, (10**8,), 10**8),
    "npz with clients, resplit": npz(client=LABELS, resplit=RESPLIT),
    "npz of huge labels": npz(y_train=LABELS + 2**40),
    "npz with a huge test label": npz(y_test=LABELS[:8] + 10**9),
    "npz with other test images, resplit": npz(x_test=picture(8, 4, 5, 3), resplit=RESPLIT),
    "npz with test images as floats, resplit": npz(x_test=np.zeros((8, 4, 6, 3)), resplit=RESPLIT),
    "two fractions": npz(resplit=(0.8, 0.2)),
    "fractions of more than all": npz(resplit=(0.8, 0.1, 0.2)),
    "no test fraction": npz(resplit=(1.0, 0.0, 0.0)),
    "a negative fraction": npz(resplit=(1.2, -0.4, 0.2)),
    "too small a test fraction": npz(resplit=(0.99, 0.0, 0.01)),
    "a folder as npz": lambda folder: sources.load("npz", path=str(folder)),
    "an empty npz": npz(content=b""),
    "a table as npz": npz(content=b"x_train,y_train\n1,2\n"),
    "an npz of texts": npz(content=zipped()),
    "a damaged npz": damaged,
    "features as float64": features(train_features=np.zeros((20, 5))),
    "features of two axes": features(test_features=np.zeros((8, 5, 1), np.float32)),
    "other test features": features(test_features=np.zeros((8, 4), np.float32)),
    "fewer strong features": features(train_strong_features=np.zeros((19, 5), np.float32)),
    "fewer labels than features": features(train_labels=LABELS[:19]),
    "a class of the test features alone": features(test_labels=LABELS[:8] + 1),
    "masked features": features(train_features=np.ma.masked_greater(np.ones((20, 5), np.float32), 0)),
    "features with NaN": features(test_features=np.full((8, 5), np.nan, np.float32)),
    "fewer clients than features": features(clients=np.arange(19)),
    "folders without test": classes(lambda root: shutil.rmtree(root / "test")),
    "an empty class": classes(lambda root: empty(root / "train/cat")),
    "an empty split": classes(lambda root: empty(root / "test")),
    "an empty pool": classes(lambda root: (root / "unlabeled").mkdir()),
    "a class that test lacks": classes(lambda root: shutil.rmtree(root / "test/cat")),
    "images of one kind that is not read": classes(hidden),
    "strays among the images": classes(pages),
    "two validation parts": classes(lambda root: [(root / name).mkdir() for name in ("val", "valid")]),
    "another size": classes(lambda root: save(root / "test/cat/7.png", 4, 5, 3)),
    "transparency": classes(transparent),
    "16-bit file": classes(deep),
    "a TIFF of two pages": classes(lambda root: several(root, "TIFF")),
    "an animated WebP": classes(lambda root: several(root, "WEBP")),
    "an animated PNG": classes(lambda root: several(root, "PNG")),
    "a named pipe as an image": classes(lambda root: piped(root / "test/cat/8.png")),
    "a named pipe as a table": classes(lambda root: piped(root / "train.csv")),
    "a named pipe as npz": lambda folder: sources.load("npz", path=str(piped(folder / "data.npz"))),
    "a damaged file": classes(lambda root: (root / "test/cat/7.png").write_bytes(b"junk")),
    "an image of 2**62 pixels": classes(gigantic),
    "a link out of the folder": classes(linked),
    "a link around": classes(lambda root: (root / "train/cat/again").symlink_to(root / "train")),
    "a link to nothing": classes(lambda root: (root / "train/cat/gone.png").symlink_to(root / "gone.png")),
    "an empty file": classes(lambda root: (root / "test/cat/7.png").write_bytes(b"")),
    "a class of the test folder alone": classes(lambda root: (root / "test" / "emu").mkdir()),
    "images without table or classes": flat(train=None),
    "a table for one split": flat(test=None),
    "a table with semicolons": flat(train="id;label\n0;1\n"),
    "an id without image": flat(train="id,label\n0,0\n1,1\n2,0\n3,-1\nnine,1\n"),
    "an image without row": flat(train="id,label\n0,0\n1,1\n"),
    "an id twice": flat(train="id,label\n0,0\n0.png,1\n2,0\n3,-1\n"),
    "an empty label": flat(train="id,label\n\n0,0\n\n1,\n2,0\n3,-1\n"),
    "a short row": flat(train="id,label\n0,0\n1\n"),
    "labels with zeros in front": flat(train="id,label\n0,00\n1,01\n2,0\n3,1\n"),
    "labels with signs": flat(train="id,label\n0,0\n1,+1\n2,0\n3,1\n"),
    "labels in Arabic digits": flat(train="id,label\n0,\u0660\n1,1\n2,0\n3,1\n"),
    "two columns of one name": flat(train="id,label,label\n0,0,1\n1,1,0\n2,0,1\n3,-1,-1\n"),
    "names as labels": flat(train="id,label\n0,cat\n1,dog\n2,cat\n3,-1\n"),
    "Latin-1": flat(change=lambda root: (root / "train.csv").write_bytes("id,label\n0,\xe9".encode("latin-1"))),
    "a class folder's image without client": classes(lambda root: (root / "train.csv").write_text("id,client\n0,ann\n")),
    "an empty client": classes(lambda root: (root / "train.csv").write_text("id,client\n0,\n")),
    "an id that fits two images": flat(train="id,label\n0,0\n", change=lambda root: save(root / "train/0.jpg", 4, 6, 3)),
}


LINES = dict(line.split(" -> ", 1) for line in Path(__file__).with_name("odd_inputs.txt").read_text().splitlines())


def line_of(load, folder, caplog):
    """The one line that loading gives: an error's, or a warning's; paths are below DIR."""
    with caplog.at_level(logging.WARNING):
        try:
            load(folder)
        except (ValueError, FileNotFoundError) as error:
            lines = [f"error: {error}"]
        else:
            lines = [f"warning: {message}" for message in caplog.messages]
    assert len(lines) == 1, lines
    assert len(lines[0].splitlines()) == 1
    return lines[0].replace(str(folder), "DIR")


@pytest.mark.parametrize("name", ODD)
def test_an_odd_input_gives_one_line(name, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sources.npz, "free_bytes", lambda: 50_000_000)
    assert line_of(ODD[name], tmp_path, caplog) == LINES[name]

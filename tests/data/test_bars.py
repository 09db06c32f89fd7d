"""Long work before a run shows a bar on a terminal, after a while, and nothing elsewhere."""

import io
import sys

import numpy as np
import pytest

from fedjax_ssl.data import bars, sources
from fedjax_ssl.data.dirichlet import dirichlet
from tests.data.test_folders import write_tree


class Terminal(io.StringIO):
    def isatty(self):
        return True


def split(folder):
    """A split of which no draw succeeds."""
    labels = np.arange(400) % 10
    dirichlet(labels, np.arange(400), 40, np.random.default_rng(0), alpha=0.01, min_size=1)


def folder_of_images(folder):
    write_tree(folder, splits=(("train", 10), ("test", 10)))
    sources.load("image_folder", path=str(folder))


def arrays(folder):
    images, labels = np.random.default_rng(0).integers(0, 256, (3000, 8, 8), np.uint8), np.arange(3000) % 2
    sources.from_arrays(train_images=images, train_labels=labels, test_images=images[:10] ^ 1, test_labels=labels[:10])


WORK = {split: "Dirichlet split: ", folder_of_images: "reading images: ", arrays: "looking for copies: "}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(
    ("stream", "after_s", "is_shown"), [(Terminal, 0.0, True), (Terminal, bars.AFTER_S, False), (io.StringIO, 0.0, False)]
)
def test_a_bar_is_shown_on_a_terminal_once_work_takes_long(tmp_path, monkeypatch, work, stream, after_s, is_shown):
    monkeypatch.setattr(bars, "AFTER_S", after_s)
    monkeypatch.setattr(sys, "stderr", shown := stream())
    work(tmp_path)
    assert (WORK[work] in shown.getvalue()) == is_shown
    assert is_shown or shown.getvalue() == ""

"""`python -m launch.preview`: text and picture of a config's split, and the keys of a split."""

import numpy as np
import pytest

from configs import common, splits
from fedjax_ssl.data import sources
from fedjax_ssl.experiment.build import drawn_runs
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.methods import METHODS
from launch import preview
from tests import tiny
from tests.commands import ROOT, launch, succeeded

DIGITS = f"--config={ROOT}/configs/digits.py:fixmatch,split=dir0.3"


def test_the_table_is_printed_and_the_picture_written_without_training(tmp_path):
    words = ("data.labels_at=clients", "data.num_labels=300", "data.min_size=5", "seed=3")
    done = launch(DIGITS, *(f"--config.{word}" for word in words), cwd=tmp_path, program=preview)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "digits-fixmatch-split=dir0.3: digits, seed 3"
    assert sum(line.split()[:1] == [str(k)] for k in range(20) for line in lines) == 20
    assert "unassigned: 0 training examples that nobody has" in lines
    assert lines[-1] == "picture: preview.png"
    assert [path.name for path in tmp_path.iterdir()] == ["preview.png"]
    assert (tmp_path / "preview.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_odd_about_the_data_is_said_and_unknown_classes_are_counted(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (200, 8, 8), np.uint8), np.arange(200) % 4
    labels[100:] = -1
    clients = np.arange(200) % 5
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images[:7], y_test=labels[:7], client=clients)
    words = ("data.name=npz", f"data.path={tmp_path}/own.npz", "data.partition=natural", "data.num_clients=5", "cohort_size=5")
    done = succeeded(DIGITS, *(f"--config.{word}" for word in words), cwd=tmp_path, program=preview)
    assert "npz: 7 of 7 test images are training images, too: remove them from one, or accuracy is too high" in done.stderr
    summary = {line[:20].strip(): line[20:].split() for line in done.stdout.splitlines()}
    assert summary["of unknown class"] == ["20", "20", "20.0", "20", "100"]
    assert summary["unlabeled"][-1] == "160"  # of 200, 40 labels are at the server


AT_CLIENTS = (*common.LABELS_AT_CLIENTS, *common.LABELS_AT_SOME_CLIENTS)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in AT_CLIENTS])
def test_methods_for_labels_at_the_server_refuse_the_others(method):
    with pytest.raises(ValueError, match=rf"^data.labels_at: got clients with method.name={method}, accepted: server$"):
        tiny.experiment(method, data__labels_at="clients")
    with pytest.raises(ValueError, match=rf"^data.reveal_labels: got True with method.name={method}, whose clients read no"):
        tiny.experiment(method, data__reveal_labels=True)


def test_statistics_that_are_not_static_need_no_data_of_the_clients():
    requires = tiny.experiment(
        "fixmatch", labels_at="clients", server__static_norm__data="all", model__norm="running"
    ).method.requires
    assert not requires.pool
    assert not requires.next_cohort


# --- the keys of a split -----------------------------------------------------------------------------------------------


def test_a_labeled_share_is_one_number_or_one_per_client():
    for given, kept in ((0.1, (0.1,)), ([0.1], (0.1,)), (1, (1.0,)), ((0.25, 0.5), (0.25, 0.5))):
        data = {"labels_at": "clients", "num_clients": 2, "labeled_fraction": given}
        settings = Settings.from_dict({"data": data, "cohort_size": 1})
        assert settings.data.labeled_fraction == kept


@pytest.mark.parametrize("name", splits.SPLITS)
def test_every_named_split_can_be_drawn(name):
    settings = Settings.from_dict(splits.get_config(name).to_dict() | {"model": {"name": "linear"}})
    how = settings.data
    labels, image = np.arange(50_000, dtype=np.int32) % 10, np.zeros((1, 2, 2, 3), np.uint8)
    dataset = sources.Dataset("cifar10", np.repeat(image, 50_000, 0), labels, np.repeat(image, 10, 0), labels[:10], 10)
    (holdings,) = drawn_runs(settings, dataset).assignments
    num_labeled = len(holdings.server) + sum(map(len, holdings.labeled))
    expected = 50_000 * np.mean(how.labeled_fraction) if how.labeled_fraction else how.num_labels
    rounding = 0.1 if how.label_selection == "stratified" else 0.02  # of 2.5 examples of each of a client's classes two
    assert abs(num_labeled - expected) < rounding * expected + 1
    assert holdings.unassigned < 1500

"""`python -m launch.preview`: text and picture of a config's split, one line for what is wrong; and the keys of a split."""

import inspect

import numpy as np
import pytest

from configs import common, splits
from fedjax_ssl.data import split
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.methods import METHODS
from launch import preview
from tests import tiny
from tests.experiment.commands import ROOT, launch, refused

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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.data.labels_at=client"], ["data.labels_at", "client", "server, clients"]),
        (["--config.data.labeled_frction=0.1"], ["config.data.labeled_frction", "did you mean config.data.labeled_fraction"]),
        (["--config.data.partition=class_grid"], ["num_clients=20", "give 100 clients"]),
        (["--output=/nowhere/preview.png"], ["--output", "/nowhere/preview.png"]),
    ],
)
def test_wrong_input_is_one_line_with_status_2(tmp_path, arguments, words):
    said = refused(DIGITS, *arguments, cwd=tmp_path, program=preview)
    assert all(word in said for word in words), said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", [name for name in METHODS if name not in common.LABELS_AT_CLIENTS])
def test_methods_for_labels_at_the_server_refuse_the_others(method):
    with pytest.raises(ValueError, match=rf"^data.labels_at: got clients with method.name={method}, accepted: server$"):
        tiny.experiment(method, data__labels_at="clients")
    with pytest.raises(ValueError, match=rf"^data.reveal_labels: got True with method.name={method}, whose clients read no"):
        tiny.experiment(method, data__reveal_labels=True)


@pytest.mark.parametrize("data", ["all", "labeled"])
def test_static_statistics_need_the_data_of_the_clients_where_these_have_the_labels(data):
    tiny.experiment("fixmatch", labels_at="clients", server__sbn_data=data, model__norm="running")
    with pytest.raises(ValueError, match=rf"^server.sbn_data: got {data} with data.labels_at=clients, accepted: cohort$"):
        tiny.experiment("fixmatch", labels_at="clients", server__sbn_data=data, model__norm="static")


def test_a_method_that_declares_the_clients_gets_their_labels(monkeypatch):
    supervised = METHODS["supervised"]

    def both(**parts):
        method = supervised(**parts)
        return method._replace(requires=method.requires._replace(labels_at=("server", "clients")))

    both.__signature__ = inspect.signature(supervised)
    monkeypatch.setitem(METHODS, "both", both)
    config = tiny.config("both", data__labels_at="clients", data__labeled_fraction=(0.25,))
    data = build(config).problem.data
    assert data.server.count.tolist() == [0]
    assert data.labeled.count.tolist() == [63] * 8  # of 250: 62.5, halves up
    assert data.unlabeled.count.tolist() == [187] * 8


# --- the keys of a split -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"labels_at": "clint"}, "data.labels_at: got 'clint', accepted: server, clients"),
        ({"label_selection": "equal"}, "data.label_selection: got 'equal', accepted: balanced, random"),
        ({"partition": "dirchlet"}, "(did you mean 'dirichlet'?)"),
        ({"labels_at": "clients", "labeled_partition": "idd"}, "data.labeled_partition: got 'idd', accepted: iid, "),
        ({"unlabeled_partition": "iid"}, "data.unlabeled_partition: got 'iid' with data.labels_at=server, accepted: "),
        ({"labeled_fraction": (0.1, 0.2)}, "data.labeled_fraction: got 2 numbers, accepted: one number"),
        ({"labels_at": "clients", "labeled_fraction": (0.1, 0.2)}, "got 2 numbers, accepted: one number, or 100, one per"),
        (
            {"labels_at": "clients", "labeled_partition": "iid", "labeled_fraction": (0.1,) * 100},
            "data.labeled_fraction: got 100 numbers, accepted: one number",
        ),
        ({"labeled_fraction": (1.5,)}, "data.labeled_fraction: got (1.5), accepted: numbers in [0, 1], not all 0"),
        ({"labeled_fraction": (0.0,)}, "data.labeled_fraction: got (0.0), accepted: numbers in [0, 1], not all 0"),
        ({"classes_per_client": 0}, "data.classes_per_client: got 0, accepted: a whole number >= 1"),
        ({"shards_per_client": 0}, "data.shards_per_client: got 0, accepted: a whole number >= 1"),
    ],
)
def test_wrong_keys_are_refused_before_any_data_are_read(keys, message):
    with pytest.raises(ValueError) as error:
        Settings.from_dict({"data": keys})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_labeled_share_is_one_number_or_one_per_client():
    for given, kept in ((0.1, (0.1,)), ([0.1], (0.1,)), (1, (1.0,)), ((0.25, 0.5), (0.25, 0.5))):
        data = {"labels_at": "clients", "num_clients": 2, "labeled_fraction": given}
        settings = Settings.from_dict({"data": data, "cohort_size": 1})
        assert settings.data.labeled_fraction == kept
    with pytest.raises(ValueError, match=r"^data.labeled_fraction: got 'many', accepted: numbers, separated by commas$"):
        Settings.from_dict({"data": {"labeled_fraction": ("many",)}})


@pytest.mark.parametrize("name", splits.SPLITS)
def test_every_named_split_can_be_drawn(name):
    settings = Settings.from_dict(splits.get_config(name).to_dict())
    how = settings.data.split
    labels = np.arange(50_000) % 10
    holdings = split.draw(split.Training(labels, 10), how, 0)
    num_labeled = len(holdings.server) + sum(map(len, holdings.labeled))
    expected = 50_000 * np.mean(how.labeled_fraction) if how.labeled_fraction else how.num_labels
    assert abs(num_labeled - expected) < 0.02 * expected + 1
    assert holdings.unassigned < 1500

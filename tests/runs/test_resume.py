"""2N rounds = N rounds + resume + N rounds, bit for bit, in all that persists: through files, and with batch norm.

`tests/contract` goes on from a state in memory and `test_run` compares logs; here the checkpoints of finished runs are compared
leaf by leaf: parameters, batch-norm statistics, the optimizers of server and clients, the round and the key.
"""

import jax
import numpy as np
import pytest

from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.expansion import ELSEWHERE, flattened, replaced
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.runs.checkpoint import Checkpoints
from fedjax_ssl.runs.folder import open_workdir
from fedjax_ssl.runs.run import Stop, run
from tests import tiny
from tests.commands import rows

pytestmark = pytest.mark.reliability


def config(method: str, labels_at: str):
    """Two of four clients a round, so that some take part again after the resume, with the momentum they kept."""
    quick = {"data__num_clients": 4, "cohort_size": 2, "client__epochs": 0, "client__steps": 2, "server__training__epochs": 1}
    quick |= {"network": "cnn", "rounds": 4, "execution__strategy": "scan", "execution__conv": "cpu"}
    return tiny.config(method, labels_at=labels_at, **tiny.confident(method) | quick)


def by_path(state):
    state = jax.device_get(state._replace(key=jax.random.key_data(state.key)))
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def restored(experiment, workdir):
    """The last checkpoint's round, and its leaves by path."""
    with Checkpoints(workdir) as checkpoints:
        number, state = checkpoints.restore(experiment.simulator.template())
    return number, by_path(state)


def assert_same_checkpoint(experiment, whole, parts):
    """The last checkpoints of two workdirs are alike; returns their leaves by path."""
    (last, expected), (other, got) = restored(experiment, whole), restored(experiment, parts)
    assert last == other == experiment.settings.rounds
    assert list(got) == list(expected)
    for path, leaf in expected.items():
        np.testing.assert_array_equal(got[path], leaf, err_msg=path)
    return expected


# One method with statistics, and with optimizers of server and clients; `tests/contract` has all of them, in memory.
@pytest.fixture(scope="module", params=tiny.params(fast=(), ci=(("fixmatch", "server"),)))
def runs(request, tmp_path_factory):
    """A method's experiment, its whole run, and the run in two parts. One build, whose programs compile once, serves all."""
    folder, given = tmp_path_factory.mktemp("-".join(request.param)), config(*request.param)
    whole, parts = folder / "whole", folder / "parts"
    experiment = build(given)
    for workdir, last in ((whole, None), (parts, 2), (parts, None)):
        open_workdir(workdir, given)
        run(experiment, workdir, Stop(), stop_after=last)
        if last:
            assert restored(experiment, workdir)[0] == last
    return experiment, whole, parts


def test_the_final_checkpoints_are_the_same_bits_and_the_logs_but_for_times(runs):
    experiment, whole, parts = runs
    expected = assert_same_checkpoint(experiment, whole, parts)

    # All that the comparison is about is there, and has moved since the beginning.
    start = by_path(experiment.simulator.initialize())

    def moved(*words):
        return [np.any(leaf != start[path]) for path, leaf in expected.items() if all(word in path for word in words)]

    assert all(moved("server", "params"))
    assert all(moved("server", "stats", "mean"))
    assert moved("server", "stats", "mean")
    at_server = experiment.settings.data.labels_at == "server"
    assert any(moved("server", "fine_tune") or moved("server", "optimizer")) or not at_server
    if experiment.method.requires.clients:
        assert any(moved("server", "optimizer"))
        assert any(moved("clients"))
    assert rows(whole) == rows(parts)
    assert [row["round"] for row in rows(whole)] == [1, 2, 3, 4]
    assert [("eval/accuracy" in row) for row in rows(whole)] == [False, True, False, True]


ELSE = dict(zip(ELSEWHERE, ("/there", "x", False, "mlflow", "ece", "stop"), strict=True))


def test_where_data_lie_and_metrics_go_makes_no_other_experiment(tmp_path):
    config = Settings.from_dict(tiny.config("fedavg")).to_dict()
    open_workdir(tmp_path, config)
    for key, value in ELSE.items():
        assert flattened(config)[key] != value
        open_workdir(tmp_path, replaced(config, key.split("."), value))
    with pytest.raises(ValueError, match=r"data\.alpha is 0\.3 there and 0\.7 here"):
        open_workdir(tmp_path, replaced(config, ["data", "alpha"], 0.7))


def test_a_run_of_a_version_without_a_key_goes_on_at_the_keys_default(tmp_path):
    config = Settings.from_dict(tiny.config("fedavg")).to_dict()
    older = {**config, "execution": {key: value for key, value in config["execution"].items() if key != "precision"}}
    open_workdir(tmp_path, older)
    changed = {**config, "execution": {**config["execution"], "precision": "float32"}}
    with pytest.raises(ValueError, match=r"execution\.precision is 'default' there and 'float32' here"):
        open_workdir(tmp_path, changed)
    open_workdir(tmp_path, config)

"""What a run will cost, before it begins."""

import re
import socket

import pytest

from configs import fl2_cifar10
from fedjax_ssl.experiment import estimate
from fedjax_ssl.experiment.build import build
from fedjax_ssl.runs import run
from tests import tiny
from tests.commands import succeeded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "labels_at", "network"),
    [("feddure", "clients", "mlp"), ("fixmatch", "server", "mlp"), ("fixmatch", "server", "cnn")],
)
def test_passes_are_those_of_a_round(method, labels_at, network):
    # With a threshold FixMatch's tiny network accepts other pseudo-labels in round 1; here it has none.
    all_pass = tiny.confident(method, 0.0) if method == "fixmatch" else {}
    experiment = tiny.experiment(method, labels_at=labels_at, network=network, **all_pass)
    found, before = estimate.counted(experiment)
    _, row = next(experiment.rounds())
    of_server = 10 * 20 if labels_at == "server" else 0  # ten epochs of 20 labels
    assert found.backward == row["cost/backward_passes"] + of_server
    collected = of_statistics(experiment) if network == "cnn" else 0
    assert found.forward == row["cost/forward_passes"] + of_server + collected
    assert before.backward == experiment.settings.server.training.pretrain * of_server
    assert before.forward == before.backward + collected
    up, down = estimate.traffic(experiment)
    assert up == row["comm/bytes_up"]
    assert row["comm/bytes_down"] <= down <= row["comm/bytes_down"] + 100  # with the round's number and learning rate


@pytest.mark.slow
def test_passes_are_those_of_a_round_where_pseudo_labels_decide():
    experiment = tiny.experiment("fl2", data__name="digits", data__num_labels=40, client__epochs=4, seed=3)
    found, _ = estimate.counted(experiment)
    _, row = next(experiment.rounds())
    assert found.backward - 10 * 40 == pytest.approx(row["cost/backward_passes"], rel=0.1)
    assert row["cost/backward_passes"] > 0  # so some are accepted, at the threshold of each client


def of_statistics(experiment):
    """The examples of which batch-norm statistics are collected, in whole batches: the server's, and all of a cohort."""
    server, data = experiment.settings.server, experiment.problem.data
    clients = data.unlabeled.index[: experiment.settings.cohort_size]  # all have equally many
    sizes = (server.static_norm.labeled_batch_size, 20), (server.static_norm.unlabeled_batch_size, clients.size)
    return sum(-(-number // min(size, number)) * min(size, number) for size, number in sizes)


def test_a_forward_passs_arithmetic_is_its_direct_convolutions():
    got = estimate.forward_flops({"name": "emnist_cnn", "variant": "plain", "norm": "static"}, 10, (32, 32, 3))
    products = 30 * 30 * 32 * 9 * 3 + 28 * 28 * 64 * 9 * 32 + 12544 * 128 + 128 * 10
    assert 2 * products < got < 1.02 * 2 * products  # besides them sums of biases, ReLU and pooling


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 second"), (119, "119 seconds"), (7000, "117 minutes"), (7200, "2 hours"), (916219, "11 days")],
)
def test_durations_in_words(seconds, words):
    assert estimate.duration(seconds) == words


def test_a_dry_run_says_what_a_run_is_and_writes_nothing(tmp_path):
    quick = ["--config.model.name=linear", "--config.data.weak=none", "--config.data.strong=none"]  # to compile
    words = [
        "--config=digits:fixmatch",
        *quick,
        "--config.rounds=2000000000",
        "--config.client.optimizer.learning_rate=11",
        "--dry_run",
    ]
    done = succeeded(*words, cwd=tmp_path)
    lines = dict(re.match(r"(\S+(?: round)?) +(.*)", line).groups() for line in done.stdout.splitlines())
    assert list(lines) == ["data", "clients", "server", "network", "a round", "traffic", "layout", "memory", "time"]
    assert lines["data"] == "digits: 1,437 training and 360 test examples, 8 x 8 x 1, 10 classes"
    assert lines["server"] == "40 labeled examples"
    assert re.match(r"1 x 2,000,000,000 rounds: about \d+ (minutes|hours|days)", lines["time"])
    assert "client.optimizer.learning_rate" in done.stderr  # such a value is hardly ever meant
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_the_costs_of_a_papers_setting_are_counted_without_its_data_and_without_compiling_a_round(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_SSL_DATA", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", None)  # a call fails
    experiment = build(fl2_cifar10.get_config().to_dict(), reads=False)
    lines = list(estimate.described(experiment))
    assert lines[0] == "data      cifar10: 50,000 training and 10,000 test examples, 32 x 32 x 3, 10 classes"
    assert lines[1].startswith("          not read: random images, as many as the catalog says, ")
    assert "clients   100, 10 a round; examples of each: 0 labeled, 499 unlabeled" in lines
    assert "a round   62,584 examples forward, 77,000 backward, 8.52e+04 GFLOP" in lines  # as with the data themselves
    assert "memory    185 MB of data on each device, 605 MB of states; a round's own is known once it is compiled" in lines
    assert "simulator" not in vars(experiment)  # which has the round's program
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_of_days_says_so_before_its_first_round(tmp_path, monkeypatch):
    began = []
    monkeypatch.setattr(run, "run", lambda experiment, *_, **__: began.append(experiment.settings.rounds))
    long = ("--config.data.name=synthetic", "--config.rounds=1000000", "--config.eval_every=1000")
    done = succeeded("--config=fl2_cifar10", *long, f"--workdir={tmp_path}")
    said = r"^1,000,000 rounds take about \d+ days here, by a rough estimate; --config=fl2_cifar10:small is the "
    assert re.search(said, done.stderr, re.MULTILINE), done.stderr
    assert began == [1_000_000]


@pytest.mark.parametrize("method", tiny.WITHOUT_CLIENTS)
def test_nothing_is_said_of_clients_where_a_method_has_none(caplog, method):
    with caplog.at_level("INFO"):
        experiment = build(tiny.config(method, data__num_clients=7))
    assert not [line for line in caplog.messages if "given to no client" in line or "have no" in line]
    assert not [line for line in estimate.described(experiment) if line.startswith("clients")]

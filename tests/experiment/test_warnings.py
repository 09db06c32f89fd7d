"""What is legal and hardly ever meant is said in a line before the run; what is too large is refused."""

import json
import logging
from typing import Literal

import jax
import pytest

from configs import digits
from fedjax_ssl.experiment import warnings
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.experiment.warnings import WARNINGS, Compared, warnings_of
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import convolution
from fedjax_ssl.options import Options
from fedjax_ssl.simulation import memory
from tests import average, tiny

ALPHA = {"data__partition": "dirichlet", "data__min_size": 0}
DOUBTFUL = [
    (
        "cbafed",
        {"client__unlabeled_wait": 4},
        "client.unlabeled_wait=4: clients without labels never take part",
    ),
    ("fl2", {"client__optimizer__learning_rate": 50.0}, "client.optimizer.learning_rate=50.0: networks hardly ever learn"),
    (
        "fl2",
        {"server__optimizer__learning_rate": 0.1},
        "server.optimizer.learning_rate=0.1: the global model takes less than half",
    ),
    (
        "fl2",
        {"server__optimizer__momentum": 0.9999},
        "server.optimizer.momentum=0.9999: updates are averaged over more than 1,000 steps",
    ),
    ("fl2", {"client__optimizer__weight_decay": 2.0}, "client.optimizer.weight_decay=2.0: the weights are drawn to 0"),
    ("fl2", {"client__optimizer__warmup_rounds": 4.0}, "client.optimizer.warmup_rounds=4.0: the warm-up lasts until the end"),
    ("fl2", {"client__optimizer__clip_norm": 1e-9}, "client.optimizer.clip_norm=1e-09: the steps almost vanish"),
    ("fedavg", {"method__prox_mu": 1e6}, "method.prox_mu=1000000.0: clients hardly leave the global model"),
    ("semifl", {"method__confidence": 0.0}, "method.confidence=0.0: every pseudo-label is accepted"),
    ("fixmatch", {"method__confidence": 1.0}, "method.confidence=1.0: hardly any pseudo-label is accepted"),
    ("fl2", {"method__consistency_weight": 1e5}, "method.consistency_weight=100000.0: other terms of the loss hardly count"),
    ("fedmatch", {"method__helpers": 8}, "method.helpers=8: there are fewer other clients"),
    ("fedsiam_d", {"method__pi_rounds": 2.0, "method__target_delay": 2}, "method.target_delay=2: with method.pi_rounds that"),
    (
        "fl2",
        {"network": "cnn", "model__norm": "running", "model__norm_momentum": 1e-6},
        "model.norm_momentum=1e-06: running statistics are averages over more than 10,000",
    ),
    ("fedavg", ALPHA | {"data__alpha": 1e-30}, "data.alpha=1e-30: a class goes to one client"),
    ("fedavg", ALPHA | {"data__alpha": 1e9}, "data.alpha=1000000000.0: the split is as `iid`"),
    ("fl2", {"data__num_labels": 7, "data__label_selection": "random"}, "data.num_labels=7: a class has no labeled example"),
    ("fl2", {"client__batch_size": 1000}, "client.batch_size=1000: no client has so many examples"),
    ("fl2", {"server__training__batch_size": 21}, "server.training.batch_size=21: the server has fewer labeled examples"),
    ("fl2", {"client__epochs": 501}, "client.epochs=501: a round has more epochs than most runs"),
    ("fl2", {"system__dropout": 1.0}, "system.dropout=1.0: no client's update ever arrives"),
    ("fl2", {"system__trace": "trace.csv"}, "system.trace=trace.csv: no client can ever be reached"),
    ("fl2", {"system__up": 1.0, "system__deadline_s": 60.0}, "system.deadline_s=60.0: even the fastest client takes longer"),
    (
        "fl2",
        {"server__optimizer__name": "adam"},
        "server.optimizer.name=adam: it steps with the average of the clients' updates",
    ),
    ("fixmatch", {"system__faulty": 0.01}, "system.faulty=0.01: of so few clients none is faulty"),
    (
        "fixmatch",
        {"server__aggregation": "krum", "server__assumed_faulty": 0.01},
        "server.assumed_faulty=0.01: of so few clients a round none is assumed faulty",
    ),
    (
        "fixmatch",
        {"server__aggregation": "krum", "server__assumed_faulty": 0.4},
        "server.assumed_faulty=0.4: Krum needs more than 2 f + 2 clients a round to bear f faulty ones",
    ),
    ("fl2", {"diagnostics__clients_every": 5}, "diagnostics.clients_every=5: no round's clients are recorded"),
    ("fl2", {"eval_every": 5}, "eval_every=5: only the last round is evaluated"),
]


@pytest.mark.parametrize(("method", "overrides", "line"), DOUBTFUL)
def test_a_doubtful_value_is_one_line_on_the_log(tmp_path, monkeypatch, caplog, method, overrides, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text("client,start,end\n")
    with caplog.at_level(logging.WARNING, "fedjax_ssl"):
        build(tiny.config(method, **overrides))
    said = [message for message in caplog.messages if message.startswith(line.split(":")[0])]
    assert len(said) == 1
    assert said[0].startswith(line)


class OddOptions(Options):
    class_weight: Literal["none", "balanced"] = "none"
    weight: float | None = None
    large: float | None = 1.0
    rates: tuple[float, ...] = (0.5,)


@pytest.mark.usefixtures("own_methods")
def test_options_of_ones_own_may_have_any_type_and_are_read_again():
    def odd(*, task, client, server, options=OddOptions()):
        return average.average(task=task, client=client, server=server)

    experiment = build(Settings.from_dict(tiny.config("fedavg")), method=odd)
    assert experiment.settings.method.name == "odd"
    again = Settings.from_dict(json.loads(json.dumps(experiment.settings.to_dict())))
    assert again.method == experiment.settings.method


def test_a_deadline_that_a_client_meets_is_not_doubtful(caplog):
    quickest = int(build(tiny.config("fl2")).problem.data.unlabeled.count.min())  # of its examples, one a second
    for deadline, late, number in ((quickest, "dropped", 0), (quickest - 1, "shortened", 0), (quickest - 1, "dropped", 1)):
        build(tiny.config("fl2", system__speed=1.0, system__deadline_s=float(deadline), system__late=late))
        assert len([message for message in caplog.messages if message.startswith("system.")]) == number


@pytest.mark.parametrize(("has_units", "dtype", "said"), [(True, "float32", 1), (True, "bfloat16", 0), (False, "float32", 0)])
def test_a_faster_dtype_of_this_processor_is_said(monkeypatch, caplog, has_units, dtype, said):
    monkeypatch.setattr(warnings, "multiplies_bfloat16", lambda: has_units)
    monkeypatch.setattr(convolution, "multiplies_bfloat16", lambda: has_units)
    monkeypatch.setattr(warnings, "FASTER_IN_BFLOAT16", ("mlp",))
    with caplog.at_level(logging.INFO, "fedjax_ssl"):
        build(tiny.config("fl2", execution__dtype=dtype))
    assert len([line for line in caplog.messages if line.startswith("this processor has units for bfloat16")]) == said


def test_each_doubt_has_a_case_and_shipped_settings_raise_none():
    assert len(DOUBTFUL) == len(WARNINGS)
    for method in METHODS:
        settings = Settings.from_dict(digits.get_config(method).to_dict())
        assert [*warnings_of(Compared(settings, num_classes=10, largest=71, at_server=40))] == []


@pytest.mark.parametrize(
    ("method", "overrides", "line"),
    [
        ("fl2", {"network": "cnn", "model__width": 4096}, r"model.name: got cnn width=4096, of 1,510,207,498 parameters"),
        ("fl2", {"data__image_size": 512}, r"data.image_size: got 512, 2,500 images of 0.655 GB in all, accepted: what"),
        ("fl2", {"model__hidden": 200_000}, r"model.name: got mlp hidden=200000, a server's state of 0.18 GB in all, accepted"),
        ("fedcon", {"method__head_hidden": 100_000}, r"data.num_clients: got 8, clients' states of \S+ GB in all, accepted"),
        ("fl2", {"server__training__epochs": 0, "server__training__steps": 10**7, "server__training__batch_size": 1000},
         r"server.training.steps: got 10000000, which train on 10,000,000,000 examples a round, accepted: at most 2,147,"),
        ("freematch_central", {"method__mu": 1000, "server__training__epochs": 10_000, "data__num_labels": 1000},
         r"server.training.epochs: got 10000, which train on 10,000,000,000 examples a round, accepted: at most 2,147,483,647"),
    ],
)  # fmt: skip
def test_what_is_too_large_is_refused_before_anything_is_allocated(monkeypatch, method, overrides, line):
    monkeypatch.setattr(memory, "free_bytes", lambda: 100_000_000)
    with pytest.raises(ValueError, match=f"^{line}"):
        build(tiny.config(method, **overrides))


def test_memory_is_that_of_all_devices_unless_it_is_the_hosts(monkeypatch):
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 1000}

    monkeypatch.setattr(memory, "free_bytes", lambda: 100)
    assert memory.available(on_host=False) == 90
    monkeypatch.setattr(jax, "devices", lambda: [Device(), Device()])
    monkeypatch.setattr(jax, "local_devices", jax.devices)
    assert (memory.available(on_host=False), memory.available(on_host=True)) == (2000, 90)

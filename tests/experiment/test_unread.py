"""Which settings a run reads: what the fields declare is what the traced programs do, and what is not read is named."""

import logging
import re
from typing import Any

import pytest

from configs import digits
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.expansion import flattened
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.experiment.unread import SAID, needs, readers
from fedjax_ssl.methods import METHODS
from tests import tiny
from tests.data.common import message_of
from tests.traced import digest, fields, others, with_value

BASE: dict[str, Any] = {
    "network": "cnn",
    "server__static_norm__labeled_batch_size": 7,
    "server__static_norm__unlabeled_batch_size": 33,
}
LARS, ADAM, ADAMW, LION = (
    {"client__optimizer__name": "lars"},
    {"client__optimizer__name": "adam", "server__training__optimizer__name": "adam"},
    {"client__optimizer__name": "adamw", "server__training__optimizer__name": "rmsprop"},
    {"client__optimizer__name": "lion", "server__training__optimizer__warmup_rounds": 2.0},
)
FALLING = {"client__optimizer__schedule": "step", "server__training__optimizer__schedule": "exponential"}
BRANCHES: list[tuple[str, dict[str, Any]]] = [
    ("fl2", {}),
    ("supervised", {}),
    ("fl2", {"method__threshold": "fixed", "method__consistency": "none", **LARS}),
    ("fl2", {"method__consistency": "sam", "method__consistency_on": "accepted", **ADAM}),
    (
        "fixmatch",
        {"method__pseudo_labels": "local", "server__static_norm__data": "all", "server__static_norm__order": "joined"},
    ),
    ("fixmatch", {"labels_at": "clients", "data__partition": "dirichlet", "data__min_size": 1}),
    ("semifl", {"method__mix": "none", "server__static_norm__data": "labeled"}),
    ("semifl", {"data__labeled": "none", "client__optimizer__momentum": 0.0, "server__training__optimizer__weight_decay": 0.0}),
    ("feddure", {}),
    ("feddure", {"method__regulators": "no_f", "method__unlabeled_batch_size": 5}),
    ("fedlabel", {"data__labeled": "none", "model__norm": "running"}),
    ("fedlabel", {"method__experts": "local", "method__augment": "none", "method__expert_view": "weak"}),
    ("fedsiam_d", {"method__curve": "rectangle", "method__consistency_weight": 0.0}),
    ("fedsiam_mt", {"labels_at": "clients", "network": "mlp"}),
    ("fedmatch", {"data__labeled": "none"}),
    ("fedmatch", {"labels_at": "clients"}),
    ("fedsem", {"data__labeled_fraction": (), "data__num_labels": 100, "data__labeled_partition": "shards"}),
    ("fedtrinet", {}),
    ("fedavg", {"data__exclude_labeled": False}),
    ("fedavg_pp", {}),
    ("uda", {"labels_at": "server", **LION}),
    ("semifl", {**ADAMW, **FALLING}),
    ("fedcon", {}),
    ("freematch_central", {}),
    ("fixmatch_central", {}),
    ("freematch", {}),
    ("sage", {}),
    ("feddb", {"client__compression": "topk"}),
    ("rscfed", {"labeled_cohort": 2}),
    ("cbafed", {"client__unlabeled_wait": 1}),
    ("twinsight", {"privacy__clip": 0.1, "privacy__noise": 0.5}),
    ("fixmatch", {"labels_at": "some_clients"}),
    ("fedavg", {"privacy__clip": 0.1, "system__faulty": 0.5, "server__aggregation": "mean"}),
]
ALIKE = re.compile(
    r"(execution|diagnostics|system)\.|data\.(name|data_dir|path|download|mean|std|image_size|resplit|renumber_labels|num_labels|min_size)"
    r"|.*\.(labeled_repeats|repeats_below|on_nonfinite)$|(model|method)\.name$"
    r"|(seeds|vary|values|log_to|eval_every|eval_metrics|checkpoint_every|rounds|seed|cohort_size)$"
)
"""Keys of where things are and how they are laid out, those of which other values have masks of other sizes, and one that only
rejects draws."""


def disagreements(tree: dict[str, Any], only: str = "") -> list[str]:
    """The keys that change what a run computes and are declared as not read, and the reverse."""
    experiment, before, wrong = build(tree), digest(tree), []
    flat = flattened(experiment.settings.to_dict())
    for key, field in fields(experiment.settings).items():
        if key not in flat or ALIKE.match(key) or isinstance(flat[key], tuple) or not re.match(only, key):
            continue
        tried, changes = 0, False
        for value in others(field, flat[key]):
            try:
                changes |= digest(with_value(tree, key, value)) != before
            except ValueError:  # a value that does not go with others
                continue
            tried += 1
            if changes:
                break
        if tried and changes == (key in experiment.unread):
            wrong.append(f"{key}={flat[key]} {'changes' if changes else 'does not change'} the run")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(("method", "overrides"), BRANCHES)
def test_what_is_declared_as_read_is_what_changes_a_run(method, overrides):
    assert disagreements(tiny.config(method, **{**BASE, **overrides})) == []


def test_the_loss_of_fl2_reads_what_it_declares():
    tree = tiny.config("fl2", method__consistency="none")
    assert disagreements(tree, only=r"method\.(perturbation|strict)|data\.(strong|reveal_labels)") == []
    assert {"method.rho", "method.perturbation", "method.confidence", "data.alpha"} <= build(tree).unread.keys()


@pytest.mark.ci
@pytest.mark.parametrize(
    "method", ["supervised", *(pytest.param(name, marks=pytest.mark.slow) for name in tiny.WITHOUT_CLIENTS[1:])]
)
def test_a_method_without_clients_has_the_same_programs_whatever_the_cohort(method):
    tree = tiny.config(method, network="linear")
    assert disagreements(tree, only=r"cohort_size|client\.(epochs|batch_size)|data\.num_clients") == []
    for key in ("cohort_size", "data.num_clients"):
        assert len({digest(with_value(tree, key, size)) for size in (5, 7)}) == 1


@pytest.mark.parametrize("method", tiny.WITHOUT_CLIENTS)
def test_examples_held_out_for_clients_are_declared_as_read_where_a_pool_lacks_them(method):
    tree = tiny.config(method, network="linear")
    assert disagreements(tree, only=r"data\.client_test_fraction") == []
    on = with_value(with_value(tree, "data.client_test_fraction", 0.2), "diagnostics.client_eval_every", 1)
    assert "data.client_test_fraction" not in build(on).unread


def test_a_strong_view_reads_the_weak_one_that_it_follows():
    assert "data.weak" not in build(tiny.config("fedlabel", data__labeled="none")).unread


def test_what_a_run_does_not_read_is_not_refused_whatever_it_is():
    config = digits.get_config("supervised")
    config.update_from_flattened_dict(
        {"cohort_size": 999, "client.epochs": 0, "client.steps": 0, "client.on_nonfinite": "stop", "seeds": 2}
    )
    assert len(build(config).runs) == 2
    build(tiny.config("fedavg", server__static_norm__data="all"))  # on a network without batch norm
    said = message_of(ValueError, build, tiny.config("fedavg", cohort_size=99))
    assert said == "cohort_size: got 99, accepted: 1 to data.num_clients = 8"


def test_a_switch_that_is_off_is_not_named(caplog):
    build(tiny.config("fl2", client__optimizer__momentum=0.0, client__optimizer__nesterov=False))
    assert not [message for message in caplog.messages if "does not read" in message]


IGNORED = [
    ("supervised", {"method__prox_mu": 5.0}, "method.prox_mu=5.0 (used only with a method with clients)"),
    ("fixmatch_central", {"system__dropout": 0.5}, "system.dropout=0.5 (used only with a method with clients)"),
    ("fl2", {"client__optimizer__name": "adam", "client__optimizer__momentum": 0.99},
     "client.optimizer.momentum=0.99 (used only with client.optimizer.name=sgd or lars)"),
    ("fl2", {"client__optimizer__name": "lars", "client__optimizer__decay": "kernels"},
     "client.optimizer.decay=kernels (used only with client.optimizer.name=sgd or adam or adamw or lion or rmsprop)"),
    ("fl2", {"client__optimizer__name": "rmsprop", "client__optimizer__b1": 0.5},
     "client.optimizer.b1=0.5 (used only with client.optimizer.name=adam or adamw or lion)"),
    ("fl2", {"client__optimizer__schedule_every": 5},
     "client.optimizer.schedule_every=5 (used only with client.optimizer.schedule=step or exponential)"),
    ("fedavg", {"server__training__optimizer__layers": "Conv=0"},
     "server.training.optimizer.layers=Conv=0 (used only with data.labels_at=server)"),
    ("fl2", {"data__shards_per_client": 7}, "data.shards_per_client=7 (used only with a partition by shards)"),
    ("fl2", {"data__min_size": 7}, "data.min_size=7 (used only with a partition by dirichlet)"),
    ("fedavg", {"data__strong": "semifl"}, "data.strong=semifl (used only with a method that trains on strong views)"),
    ("fedavg", {"server__training__pretrain": 3}, "server.training.pretrain=3 (used only with data.labels_at=server)"),
    ("fl2", {"model__norm": "running"}, "model.norm=running (used only with a network with batch norm)"),
    ("fl2", {"method__consistency": "none", "method__rho": 0.5},
     "method.rho=0.5 (used only with method.consistency=sacr or sam)"),
    ("fl2", {"system__window_s": 60.0}, "system.window_s=60.0 (used only with system.trace=diurnal)"),
    ("fl2", {"system__late": "shortened"}, "system.late=shortened (used only with system.deadline_s)"),
    ("fl2", {"system__bandwidth_sigma": 1.0}, "system.bandwidth_sigma=1.0 (used only with system.up; or system.down)"),
    ("fedsem", {"method__repeats_below": 0.5}, "method.repeats_below=0.5 (used only with method.labeled_repeats > 1)"),
    ("freematch_central", {"server__training__pretrain": 3},
     "server.training.pretrain=3 (used only with a method whose server trains before round 1)"),
    ("supervised", {"data__num_clients": 7}, "data.num_clients=7 (used only with a method that reads the clients' data)"),
    ("supervised", {"cohort_size": 3}, "cohort_size=3 (used only with a method that reads the clients' data)"),
    ("supervised", {"data__partition": "dirichlet", "data__alpha": 0.1}, "data.partition=dirichlet (used only with"),
    ("fedavg", {"data__labeled_fraction": (), "data__labeled_partition": "iid", "data__unlabeled_partition": "iid",
                "data__partition": "dirichlet", "data__alpha": 0.1}, "data.alpha=0.1 (used only with a partition by dirichlet"),
    ("fl2", {"data__data_dir": "/nowhere"}, "data.data_dir=/nowhere (used only with data that are read from files)"),
    ("fedavg", {"data__num_labels": 50}, "data.num_labels=50 (used only with data.labeled_fraction not set)"),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_what_the_digits_set_is_read_and_only_that_is_said_of_views(caplog, method):
    with caplog.at_level(logging.INFO, "fedjax_ssl"):
        experiment = build(digits.get_config(method))
    assert not [message for message in caplog.messages if "does not read" in message]
    said = " ".join(message for message in caplog.messages if " view: " in message)
    assert ("strong view: " in said) == ("strong" in experiment.method.requires.views)


@pytest.mark.parametrize(("method", "overrides", "said"), IGNORED)
def test_settings_that_a_run_does_not_read_are_named_in_one_warning(caplog, method, overrides, said):
    with caplog.at_level(logging.WARNING, "fedjax_ssl"):
        build(tiny.config(method, **overrides))
    (line,) = [message for message in caplog.messages if message.startswith("settings that this run does not read: ")]
    assert said in line


@pytest.mark.parametrize(
    ("method", "overrides", "key"),
    [
        ("fl2", {}, "data.alpha"),
        ("fedavg", {"client__optimizer__name": "adam"}, "client.optimizer.momentum"),
        ("fl2", {"method__consistency": "none"}, "method.rho"),
        ("supervised", {}, "server.optimizer.learning_rate"),
    ],
)
def test_a_number_that_nothing_reads_cannot_vary(method, overrides, key):
    with pytest.raises(ValueError, match=f"^vary: got '{re.escape(key)}', which this run does not read, accepted: with "):
        build(tiny.config(method, **overrides, vary=key, values=(0.1, 0.2)))


def test_phases_that_are_one_number_of_rounds_cannot_vary():
    with pytest.raises(ValueError, match=r"^values: got \(0.5, 0.55\) with vary=method.labeled_rounds, accepted: other values"):
        build(tiny.config("fedsem", vary="method.labeled_rounds", values=(0.5, 0.55)))


def test_every_value_that_varies_is_looked_at_for_doubts(caplog):
    for values in ((0.03, 50.0), (50.0, 0.03)):
        caplog.clear()
        build(tiny.config("fedavg", vary="client.optimizer.learning_rate", values=values))
        doubted = [message for message in caplog.messages if "networks hardly ever learn" in message]
        assert doubted == ["client.optimizer.learning_rate=50.0: networks hardly ever learn by steps of this size"]


def test_each_mark_names_keys_and_facts_that_there_are():
    for method in METHODS:
        asked = dict(readers(Settings.from_dict({"method": {"name": method}, "model": {"name": "cnn"}})))
        known = {*asked, *SAID}
        for key, levels in asked.items():
            assert {one for marks in levels for mark in marks for one in mark} <= known, key
            assert bool(levels) == bool(needs(levels))

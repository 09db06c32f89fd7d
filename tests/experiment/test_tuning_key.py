"""What a kept choice of a layout is of: which work, which machine, which versions."""

import dataclasses

import jax
import numpy as np
import pytest

from fedjax_ssl.experiment import machine, tuning
from tests.tiny import left_open as experiment


@pytest.mark.parametrize(
    "change",
    [
        {"client__batch_size": 32}, {"model__width": 5}, {"execution__dtype": "bfloat16"}, {"cohort_size": 7},
        {"client__optimizer__momentum": 0.0}, {"server__sbn_data": "labeled"}, {"server__epochs": 2},
        {"data__num_clients": 9}, {"method__divisor": "batch"}, {"data__weak": "none"},
    ],
)  # fmt: skip
def test_other_work_is_measured_anew(change):
    assert tuning.key(experiment()) != tuning.key(experiment(**change))


def test_other_machines_and_versions_measure_anew_and_what_changes_no_work_does_not(monkeypatch):
    usual = tuning.key(experiment())
    same = {"client__optimizer__learning_rate": 0.2, "method__confidence": 0.6}  # all labels are taken where it is measured
    assert usual == tuning.key(experiment(seed=1, rounds=9, execution__tune="always", **same))
    for owner, name, value in (
        (jax, "__version__", "9.9.9"),
        (tuning.metadata, "version", lambda name: "9.9.9"),
        (tuning, "processor", lambda: "another"),
        (tuning, "cores", lambda: 77),
        (tuning, "sources", lambda: "another version"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            assert tuning.key(experiment()) != usual
    for name in ("XLA_FLAGS", "GLIBC_TUNABLES"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "another=1")
            assert tuning.key(experiment()) != usual


def test_test_images_count_until_each_device_has_the_largest_forward_pass_that_is_tried():
    def of(number):
        given = experiment()
        test = type(given.problem.data.test)(np.zeros((number, 8, 8, 1), np.uint8), np.zeros(number, np.int32))
        return tuning.key(
            dataclasses.replace(given, problem=given.problem._replace(data=given.problem.data._replace(test=test)))
        )

    most = 1_000 * len(jax.devices())
    assert of(500) != of(1_000) != of(most) == of(50_000)


def test_steps_that_may_be_written_out_are_part_of_the_work():
    few = {"client__epochs": 0, "server__epochs": 0, "server__steps": 1}
    assert tuning.key(experiment(client__steps=2, **few)) != tuning.key(experiment(client__steps=8, **few))
    assert tuning.key(experiment(client__steps=2, **few))["steps"][0] == 2


def test_clients_that_differ_more_are_other_work():
    many_steps = {"client__epochs": 30}
    skewed = experiment(**many_steps, data__partition="dirichlet", data__alpha=0.1)
    assert tuning.key(experiment(**many_steps))["steps"] == tuning.key(skewed)["steps"] == []
    assert tuning.key(experiment(**many_steps)) | {"skew": []} == tuning.key(skewed) | {"skew": []}
    assert tuning.key(experiment(**many_steps)) != tuning.key(skewed)


def test_the_digest_of_the_sources_is_that_of_all_modules(monkeypatch, tmp_path):
    machine.sources.cache_clear()
    before = machine.sources()
    package = tmp_path / "package" / "experiment"
    package.mkdir(parents=True)
    (package / "machine.py").write_text("")
    monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
    machine.sources.cache_clear()
    empty = machine.sources()
    (package.parent / "added.py").write_text("x = 1")
    machine.sources.cache_clear()
    assert len({before, empty, machine.sources()}) == 3
    machine.sources.cache_clear()


def test_views_are_those_of_the_dataset_unless_they_are_named():
    def named(name, **views):
        given = experiment(data__labeled="crop1", **views)
        data = dataclasses.replace(given.settings.data, name=name)
        return dataclasses.replace(given, settings=dataclasses.replace(given.settings, data=data))

    for same, views in ((True, {}), (False, {"data__weak": "default"})):
        assert (tuning.key(named("mnist", **views)) == tuning.key(named("fashion_mnist", **views))) == same


def test_the_memory_that_there_is_counts(monkeypatch):
    usual = tuning.key(experiment())
    monkeypatch.setattr(tuning.memory, "total_bytes", lambda: 80 * 2**30)
    assert tuning.key(experiment()) == usual | {"memory_gb": 80}

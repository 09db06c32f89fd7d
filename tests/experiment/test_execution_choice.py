"""Which strategy `auto` is, and on how many devices."""

import dataclasses
import os
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from fedjax_ssl.data import batching
from fedjax_ssl.experiment import layout, many
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.methods import steps
from fedjax_ssl.simulation import simulator
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Program, compiler_options
from launch import command
from tests import tiny


@pytest.mark.parametrize(
    ("method", "overrides", "strategy", "devices"),
    [
        ("fedavg", {"cohort_size": 8}, "sharded", 4),  # the tests have 4 devices
        ("fedavg", {"cohort_size": 5}, "sharded", 3),  # in two turns, as on 4
        ("fedavg", {"cohort_size": 3}, "sharded", 3),
        ("fedavg", {"cohort_size": 1}, "scan", 1),
        ("fedavg", {"execution__devices": 1}, "scan", 1),
        ("fedavg", {"execution__devices": 2}, "sharded", 2),
        ("supervised", {}, "scan", 1),
    ],
)
def test_auto_shards_over_the_devices_that_the_cohort_can_use(method, overrides, strategy, devices):
    experiment = build(tiny.config(method, execution__strategy="auto", **overrides))
    assert experiment.layout.strategy == strategy
    assert len(experiment.simulator.template(0).key.sharding.device_set) == experiment.layout.devices == devices


@pytest.mark.parametrize(
    ("platform", "network", "norm", "size"),
    [
        ("cpu", "cnn", "static", layout.FORWARD_BATCH_SIZE_ON_A_CPU),
        ("cpu", "cnn", "batch", layout.FORWARD_BATCH_SIZE),  # its statistics are the batch's
        ("cpu", "linear", "static", layout.FORWARD_BATCH_SIZE),
        ("gpu", "cnn", "static", layout.FORWARD_BATCH_SIZE),
        ("tpu", "cnn", "static", layout.FORWARD_BATCH_SIZE),
    ],
)
def test_an_evaluation_has_few_examples_a_forward_pass_where_that_is_faster_and_no_other_result(platform, network, norm, size):
    settings = build(tiny.config("fedavg", network=network)).settings
    settings = dataclasses.replace(settings, model={**settings.model, "norm": norm})
    assert layout.evaluation_batch_size(platform, settings) == size


@pytest.mark.parametrize(("given", "size"), [({}, layout.FORWARD_BATCH_SIZE_ON_A_CPU), ({"execution__batch_size": 9}, 9)])
def test_predictions_have_as_many_images_a_pass_as_an_evaluation(given, size):
    experiment, sizes = tiny.left_open(**given), []

    def predict(_, images, mask):
        sizes.append((len(images), int(mask.sum())))
        return np.zeros((size, 3))

    experiment.__dict__["_predict"] = predict
    state, _ = experiment.simulator.initialize(0)
    assert experiment.predict(state, np.zeros((size + 1, 8, 8, 1), np.uint8)).shape == (size + 1, 3)
    assert sizes == [(size, size), (size, 1)]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, 3),
        ({"JAX_NUM_CPU_DEVICES": "5"}, 5),
    ],
)
def test_the_commands_make_a_device_of_each_core_unless_told_otherwise(environment, expected):
    inherited = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    code = "from launch import command; command.use_all_cores(); import jax; print(len(jax.devices('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=inherited | environment)
    assert int(done.stdout) == expected


def test_devices_of_the_commands_wait_for_each_other_as_long_as_clients_take():
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    code = "import os; from launch import command; command.use_all_cores(); print(os.environ['XLA_FLAGS'])"
    for given in ({}, {"XLA_FLAGS": f"--{command.MAY_WAIT[1]}=7"}):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=inherited | given)
        flags = dict(word.removeprefix("--").split("=") for word in done.stdout.split())
        assert flags == {command.MAY_WAIT[0]: "86400", command.MAY_WAIT[1]: "7" if given else "86400"}


def test_no_flag_is_set_on_a_jax_that_may_not_know_it(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setattr(jax, "__version_info__", command.MAY_WAIT_BELOW)
    command.use_all_cores()
    assert os.environ["XLA_FLAGS"] == ""


@pytest.mark.parametrize(
    ("method", "strategy", "conv"),
    [("fl2", "auto", "tiled"), ("fl2", "scan", "grouped"), ("fl2", "separate", "grouped"), ("supervised", "auto", "grouped")],
)
def test_on_a_gpu_kernels_that_clients_have_of_their_own_are_tiled(monkeypatch, method, strategy, conv):
    monkeypatch.setattr(layout, "available_devices", lambda settings: [types.SimpleNamespace(platform="gpu")])
    assert layout.resolve(Settings.from_dict(tiny.config(method, network="cnn", execution__strategy=strategy))).conv == conv


@pytest.mark.parametrize(
    ("cohort_size", "devices", "given"), [(1, 1, {}), (2, 2, {}), (4, 8, {}), (2, 2, {"strategy": "sharded", "chunk_size": 4})]
)
def test_a_gpu_with_one_client_has_no_kernels_of_several(monkeypatch, cohort_size, devices, given):
    monkeypatch.setattr(layout, "available_devices", lambda settings: [types.SimpleNamespace(platform="gpu")] * devices)
    of_execution = {f"execution__{name}": value for name, value in ({"strategy": "auto"} | given).items()}
    given = tiny.config("fl2", network="cnn", cohort_size=cohort_size, **of_execution)
    assert layout.resolve(Settings.from_dict(given)).conv == "grouped"


def test_a_cpu_program_is_compiled_at_level_2_unless_told_otherwise(monkeypatch):
    assert compiler_options("cpu") == {}  # the tests' own level goes first
    assert compiler_options("tpu") == {}
    assert compiler_options("gpu")["xla_gpu_exclude_nondeterministic_ops"] is True
    monkeypatch.delenv("XLA_FLAGS")
    assert compiler_options("cpu") == {"xla_backend_optimization_level": "2"}
    assert Program(lambda x: x + 1, Execution())(1.0) == 2.0  # XLA knows the option
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_gpu_exclude_nondeterministic_ops=false")
    assert compiler_options("gpu") == {"xla_gpu_enable_triton_gemm": False}


def test_an_option_that_xla_does_not_know_is_left_out_and_named(monkeypatch, caplog):
    options = {"xla_cpu_of_yesterday": True, "xla_backend_optimization_level": "1"}
    monkeypatch.setattr(simulator, "compiler_options", lambda platform, compiler: options)
    assert Program(lambda x: x + 1, Execution())(1.0) == 2.0
    assert [record.getMessage() for record in caplog.records if "xla" in record.getMessage()] == [
        f"XLA of jax {jax.__version__} has no option xla_cpu_of_yesterday: compiling without"
    ]
    monkeypatch.setattr(simulator, "compiler_options", lambda platform, compiler: {"xla_backend_optimization_level": "x"})
    with pytest.raises(jax.errors.JaxRuntimeError):
        Program(lambda x: x + 1, Execution())(1.0)


@pytest.mark.parametrize("data", ["device", "host"])
@pytest.mark.parametrize(("precision", "asked"), [("default", "DEFAULT"), ("tensorfloat32", "HIGH"), ("float32", "HIGHEST")])
def test_matrices_are_multiplied_in_the_precision_of_the_config(monkeypatch, precision, asked, data):
    experiment = build(tiny.config("fixmatch", execution__precision=precision, execution__data=data))
    texts = []

    def look(lowered, *_):
        texts.append(lowered.as_text())
        raise InterruptedError  # of each program only what it asks for is seen: nothing is compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", look)
    simulator, state = experiment.simulator, experiment.simulator.template(0)
    programs = [lambda: simulator.evaluate(state)]
    if data == "device":
        programs += [lambda: simulator.initialize(0), lambda: simulator.round(state)]
    for program in programs:
        with pytest.raises(InterruptedError):
            program()
    asked_for = [set(re.findall(r"precision = \[(\w+), (\w+)\]", text)) for text in texts]
    assert asked_for == [{(asked, asked)}] * len(programs)


@pytest.mark.parametrize(("variable", "folder"), [("XDG_CACHE_HOME", "fedjax_ssl"), ("JAX_COMPILATION_CACHE_DIR", "")])
def test_the_commands_keep_compiled_programs(tmp_path, variable, folder):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    code = "from launch import command; command.keep_programs(); import jax; jax.jit(jax.numpy.linalg.svd)(jax.numpy.eye(9))"
    environment = inherited | {variable: str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert list((tmp_path / folder).glob("jit_*-cache"))


@pytest.mark.parametrize("setting", ["a file in the way", "no home", "nobody", "none asked for"])
def test_the_commands_run_without_a_cache_where_there_cannot_be_one(tmp_path, setting):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    (tmp_path / "file").touch()
    environment = {
        "a file in the way": {"XDG_CACHE_HOME": str(tmp_path / "file")},
        "no home": {"HOME": str(tmp_path / "file"), "XDG_CACHE_HOME": ""},
        "nobody": {"XDG_CACHE_HOME": ""},
        "none asked for": {"HOME": str(tmp_path), "XDG_CACHE_HOME": "", "JAX_COMPILATION_CACHE_DIR": ""},
    }[setting]
    code = "from launch import command; command.keep_programs(); import jax; print(jax.jit(jax.numpy.sum)(jax.numpy.eye(9)))"
    if setting == "nobody":  # a user that the system does not know, as in a container
        code = f"import os; os.environ.pop('HOME', None); import pwd; pwd.getpwuid = dict().__getitem__; {code}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=inherited | environment, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("9.0\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_more_steps_than_can_be_written_out_are_refused():
    message = r"execution.steps: got unrolled with up to 65 steps of a client or of the server, accepted: loop, or at most 64"
    unrolled = {"execution__steps": "unrolled", "client__epochs": 0, "client__steps": 65}
    with pytest.raises(ValueError, match=message):
        build(tiny.config("fixmatch", **unrolled))
    with pytest.raises(ValueError, match=message):
        many.build(tiny.config("fixmatch", seeds=2, data__name="digits", **unrolled))
    with pytest.raises(ValueError, match="got 65 steps to write out, accepted: at most 64"):
        steps.repeat(batching.shuffled(jax.random.key(0), np.ones(65, bool), 1, epochs=1), max, 0, unrolled=True)


@pytest.mark.parametrize(
    ("method", "labels_at", "settings", "most"),
    [
        ("fixmatch", "server", {"client__steps": 3, "server__steps": 2}, 3),
        ("fixmatch", "server", {"client__steps": 3, "server__steps": 5}, 5),
        ("fedlabel", "clients", {"client__steps": 3, "method__unlabeled_steps": 7}, 7),
        ("fedmatch", "clients", {"client__steps": 4}, 4),
        ("fixmatch_central", "server", {"client__steps": 9, "server__steps": 6}, 6),
    ],
)
def test_the_most_steps_are_those_that_the_method_counts(method, labels_at, settings, most):
    none = {"client__epochs": 0, "server__epochs": 0, "server__steps": 1}
    assert tiny.experiment(method, labels_at=labels_at, **none | settings).most_steps == most


def test_the_most_steps_of_epochs_are_those_of_the_largest_client():
    experiment = tiny.experiment("fixmatch", client__epochs=3, server__epochs=1)
    settings, data = experiment.settings, experiment.problem.data
    counts = [data.unlabeled.index.shape[1], data.server.index.shape[1]]
    unlabeled = settings.method_options().unlabeled_batch_size or settings.client.batch_size
    assert experiment.most_steps == max(3 * -(-counts[0] // unlabeled), -(-counts[1] // settings.server.batch_size))

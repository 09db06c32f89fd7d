"""Which strategy `auto` is, on how many devices, with which lowering and options, and what the commands set up."""

import os
import pwd
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.layout import BATCH_SIZE, BATCH_SIZE_ON_CPU, resolve
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import Requires
from fedjax_ssl.models.convolution import onednn_conv
from fedjax_ssl.programs import keep_programs
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.program import Program, compiler_options
from fedjax_ssl.simulation.round import RunState
from launch import devices
from tests import tiny
from tests.engine import run_python

ALONE = Requires(clients=False)


def on(monkeypatch, platform, devices=1):
    """A machine with such devices, as far as layouts are chosen."""
    monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(platform=platform)] * devices)


def layout(requires=Requires(), runs=1, network="cnn", **overrides):
    given = {"execution__strategy": "auto", "cohort_size": 5, "data__num_clients": 20} | overrides
    return resolve(Settings.from_dict(tiny.config("fixmatch", network=network, **given)), requires, runs)


@pytest.mark.parametrize(
    ("overrides", "requires", "runs", "strategy", "devices"),
    [
        ({"cohort_size": 8}, Requires(), 1, "sharded", 4),  # the tests have 4 devices
        ({"cohort_size": 5}, Requires(), 1, "sharded", 3),  # in two turns, as on 4
        ({"cohort_size": 3}, Requires(), 1, "sharded", 3),
        ({"cohort_size": 1}, Requires(), 1, "scan", 1),
        ({"execution__devices": 1}, Requires(), 1, "scan", 1),
        ({"execution__devices": 2}, Requires(), 1, "sharded", 2),
        ({}, ALONE, 1, "scan", 1),
        ({}, Requires(), 2, "sharded", 2),
        ({}, Requires(), 3, "scan", 1),
        ({}, Requires(), 5, "scan", 1),  # in two turns
        ({"cohort_size": 1}, Requires(), 2, "scan", 1),
        ({"execution__strategy": "scan"}, Requires(), 2, "scan", 1),
        ({"execution__devices": 2}, Requires(), 2, "scan", 1),
        ({}, ALONE, 2, "scan", 1),
    ],
)
def test_auto_shards_over_the_devices_that_save_a_turn(overrides, requires, runs, strategy, devices):
    found = layout(requires, runs, **overrides)
    at_once = 3 if runs == 5 else runs
    assert (found.strategy, found.devices, found.runs_at_once) == (strategy, devices, at_once)


@pytest.mark.parametrize(
    ("platform", "network", "norm", "size"),
    [
        ("cpu", "cnn", "static", BATCH_SIZE_ON_CPU),
        ("cpu", "cnn", "batch", BATCH_SIZE),  # its statistics are the batch's
        ("cpu", "linear", "static", BATCH_SIZE),
        ("gpu", "cnn", "static", BATCH_SIZE),
        ("tpu", "cnn", "static", BATCH_SIZE),
    ],
)
def test_forward_passes_have_few_examples_where_that_is_faster_and_no_other_result(monkeypatch, platform, network, norm, size):
    on(monkeypatch, platform)
    assert layout(network=network, model__norm=norm).batch_size == size
    assert layout(network=network, model__norm=norm, execution__batch_size=7).batch_size == 7


@pytest.mark.parametrize(
    ("platform", "overrides", "requires", "conv", "strategy"),
    [
        ("gpu", {}, Requires(), "gpu", "vmap"),
        ("gpu", {"execution__strategy": "scan"}, Requires(), "xla", "scan"),
        ("gpu", {"cohort_size": 1}, Requires(), "xla", "vmap"),
        ("gpu 2", {"cohort_size": 2}, Requires(), "xla", "sharded"),  # a device with one client has no kernels of several
        ("gpu 8", {"cohort_size": 4}, Requires(), "xla", "sharded"),
        ("gpu 2", {"cohort_size": 4}, Requires(), "gpu", "sharded"),
        ("gpu", {}, ALONE, "xla", "vmap"),
        ("cpu", {}, Requires(), "cpu", "scan"),
        ("tpu", {}, Requires(), "xla", "vmap"),
        ("gpu", {"execution__conv": "xla"}, Requires(), "xla", "vmap"),
    ],
)
def test_the_lowering_is_the_platforms(monkeypatch, platform, overrides, requires, conv, strategy):
    name, _, devices = platform.partition(" ")
    on(monkeypatch, name, int(devices or 1))
    found = layout(requires, **overrides)
    assert (found.conv, found.strategy) == (conv, strategy)


def test_runs_of_an_accelerator_are_vmapped_where_all_clients_run_at_once(monkeypatch):
    on(monkeypatch, "gpu")
    assert layout(runs=3).vmap_runs
    assert layout(runs=3).conv == "gpu"
    assert not layout(runs=3, execution__strategy="chunked", execution__chunk_size=2).vmap_runs
    assert not layout(runs=1).vmap_runs
    on(monkeypatch, "cpu")
    assert not layout(runs=3).vmap_runs


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_chunks_without_a_size_begin_with_all_clients_and_are_halved_until_they_fit(monkeypatch, platform):
    on(monkeypatch, platform)
    settings = Settings.from_dict(tiny.config("fixmatch", execution__strategy="chunked"))
    found = resolve(settings, Requires())
    assert (found.strategy, found.chunk_size, found.devices) == ("chunked", 0, 1)
    execution = found.execution(settings)
    assert execution.auto_chunk
    assert found.after(execution.smaller(5)).chunk_size == 3
    given = Settings.from_dict(tiny.config("fixmatch", execution__strategy="chunked", execution__chunk_size=2))
    assert not resolve(given, Requires()).execution(given).auto_chunk


@pytest.mark.parametrize(("given", "size"), [({}, BATCH_SIZE_ON_CPU), ({"execution__batch_size": 9}, 9)])
def test_predictions_have_as_many_images_a_pass_as_an_evaluation(given, size):
    experiment, sizes = tiny.experiment("fixmatch", network="cnn", **given), []

    def predict(_, images, mask):
        sizes.append((len(images), int(mask.sum())))
        return np.zeros((size, 10))

    experiment.__dict__["_predict"] = predict
    state = RunState(server=None, clients=(), round=np.int32(0), key=None)
    assert experiment.predict(state, np.zeros((size + 1, 8, 8, 1), np.uint8)).shape == (size + 1, 10)
    assert sizes == [(size, size), (size, 1)]


def test_a_cpu_program_is_compiled_at_level_2_unless_told_otherwise(monkeypatch):
    assert "xla_backend_optimization_level" not in compiler_options("cpu")  # the tests' own level goes first
    assert compiler_options("tpu") == {}
    assert compiler_options("gpu")["xla_gpu_exclude_nondeterministic_ops"] is True
    monkeypatch.delenv("XLA_FLAGS")
    assert compiler_options("cpu")["xla_backend_optimization_level"] == "2"
    assert Program(lambda x: x + 1, Execution())(1.0) == 2.0  # XLA knows the option
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_gpu_exclude_nondeterministic_ops=false")
    assert compiler_options("gpu") == {"xla_gpu_enable_triton_gemm": False}


@pytest.mark.filterwarnings("error")
def test_what_jax_cannot_store_is_not_put_into_its_cache():
    """In XLA's oneDNN form of convolutions, where the processor has one."""
    images, kernel = jnp.ones((2, 8, 8, 8), jnp.bfloat16), jnp.ones((3, 3, 8, 8), jnp.bfloat16)
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        out = Program(lambda *both: onednn_conv(*both, 1, 1), Execution(conv="onednn"))(images, kernel)
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    assert float(out[0, 4, 4, 0]) == 72.0


def test_sums_over_cpu_devices_are_not_combined():
    """Two that are combined go on after one of them failed: see `distributed`."""
    everywhere = Mesh(np.array(jax.devices()), "all")
    parts, whole = NamedSharding(everywhere, PartitionSpec("all")), NamedSharding(everywhere, PartitionSpec())
    program = Program(lambda a, b: (a.sum(0), b.sum(0)), Execution(), out_shardings=(whole, whole))
    numbers = jax.device_put(np.ones((len(jax.devices()), 3), np.float32), parts)
    program(numbers, numbers + 1)
    assert len(re.findall(r" all-reduce(?:-start)?\(", program._compiled.as_text())) == 2


PRECISIONS = [("default", "DEFAULT", "device"), ("tensorfloat32", "HIGH", "device"), ("float32", "HIGHEST", "host")]


@pytest.mark.parametrize(("precision", "asked", "data"), PRECISIONS)
def test_matrices_are_multiplied_in_the_precision_of_the_config(monkeypatch, precision, asked, data):
    experiment = build(tiny.config("fixmatch", network="linear", execution__precision=precision, execution__data=data))
    texts = []

    def look(lowered, *_):
        texts.append(lowered.as_text())
        raise InterruptedError  # of each program only what it asks for is seen: nothing is compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", look)
    simulator, state = experiment.simulator, experiment.simulator.template()
    programs = [lambda: simulator.evaluate(state)]
    if data == "device":
        programs += [simulator.initialize, lambda: simulator.round(state)]
    for program in programs:
        with pytest.raises(InterruptedError):
            program()
    asked_for = [set(re.findall(r"precision = \[(\w+), (\w+)\]", text)) for text in texts]
    assert asked_for == [{(asked, asked)}] * len(programs)


@pytest.fixture
def updates(monkeypatch):
    """What the commands would set in JAX, which has begun already."""
    made = {}
    monkeypatch.setattr(jax.config, "update", made.__setitem__)
    return made


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
COUNTED = "--xla_force_host_platform_device_count=3"


@pytest.mark.parametrize(
    ("name", "value", "made"), [("XLA_FLAGS", "", CORES), ("XLA_FLAGS", COUNTED, None), ("JAX_NUM_CPU_DEVICES", "5", None)]
)
def test_the_commands_make_a_device_of_each_core_unless_told_otherwise(monkeypatch, updates, name, value, made):
    for variable in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    devices.use_all_cores()
    assert updates.get("jax_num_cpu_devices") == made


@pytest.mark.parametrize("given", [{}, {devices.MAY_WAIT[1]: "7"}])
def test_devices_of_the_commands_wait_for_each_other_as_long_as_clients_take(monkeypatch, updates, given):
    monkeypatch.setenv("XLA_FLAGS", " ".join(f"--{name}={value}" for name, value in given.items()))
    devices.use_all_cores()
    flags = dict(word.removeprefix("--").split("=") for word in os.environ["XLA_FLAGS"].split())
    assert flags == dict.fromkeys(devices.MAY_WAIT, "86400") | given
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "__version_info__", devices.MAY_WAIT_BELOW)  # a JAX that may not know them
    devices.use_all_cores()
    assert os.environ["XLA_FLAGS"] == ""


def test_the_commands_keep_compiled_programs_and_use_all_cores(tmp_path):
    """In a process of its own, in which JAX has not begun, with a config that uses it."""
    config = tmp_path / "config.py"
    config.write_text("import jax.numpy as jnp\ndef get_config():\n    return {'rounds': int(jnp.sum(jnp.ones(3)))}\n")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_FLAGS"))}
    code = (
        "from fedjax_ssl.programs import keep_programs; from launch import arguments; keep_programs(); import jax;"
        f"arguments.parse(arguments.Parser('run', None, has_config=True), ['--config={config}'], computes=True);"
        "jax.jit(jax.numpy.linalg.svd)(jax.numpy.eye(9)); print(len(jax.devices('cpu')))"
    )
    environment = inherited | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    assert int(run_python("-c", code, environment=environment)) == CORES
    assert list((tmp_path / "fedjax_ssl").glob("jit_*-cache"))


@pytest.mark.slow
def test_a_history_keeps_compiled_programs_also_where_jax_has_begun_and_leaves_a_folder_that_it_was_told(tmp_path):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_FLAGS"))}
    environment = inherited | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    code = (
        "import jax; jax.jit(jax.numpy.linalg.svd)(jax.numpy.eye(9)); {told}; import fedjax_ssl; from tests import tiny;"
        "fedjax_ssl.run(tiny.config('fedavg', network='linear', rounds=1))"
    )
    run_python("-c", code.format(told="pass"), environment=environment)
    assert list((tmp_path / "fedjax_ssl").glob("jit_rounds-*-cache"))
    told = f"jax.config.update('jax_compilation_cache_dir', {str(tmp_path / 'own')!r})"
    run_python("-c", code.format(told=told), environment=environment | {"XDG_CACHE_HOME": str(tmp_path / "none")})
    assert list((tmp_path / "own").glob("jit_rounds-*-cache"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("setting", ["a file in the way", "no home", "nobody", "another folder", "none asked for"])
def test_the_commands_run_without_a_cache_where_there_cannot_be_one_or_another_is_asked_for(
    tmp_path, monkeypatch, updates, setting
):
    (tmp_path / "file").touch()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    environment = {
        "a file in the way": {"XDG_CACHE_HOME": str(tmp_path / "file")},
        "no home": {"HOME": str(tmp_path / "file"), "XDG_CACHE_HOME": ""},
        "nobody": {"XDG_CACHE_HOME": ""},
        "another folder": {"JAX_COMPILATION_CACHE_DIR": "/elsewhere"},
        "none asked for": {"XDG_CACHE_HOME": "", "JAX_COMPILATION_CACHE_DIR": ""},
    }[setting]
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    if setting == "nobody":  # a user that the system does not know, as in a container
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    keep_programs()
    assert "jax_compilation_cache_dir" not in updates
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

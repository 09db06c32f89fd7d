"""Which strategy `auto` is, and on how many devices."""

import os
import subprocess
import sys

import pytest

from fedjax_ssl.experiment.build import build
from tests import tiny


@pytest.mark.parametrize(
    ("method", "overrides", "strategy", "devices"),
    [
        ("fedavg", {}, "sharded", 4),  # the tests have 4 devices
        ("fedavg", {"cohort_size": 3}, "sharded", 3),
        ("fedavg", {"cohort_size": 1}, "scan", 1),
        ("fedavg", {"execution__devices": 1}, "scan", 1),
        ("fedavg", {"execution__devices": 2}, "sharded", 2),
        ("supervised", {}, "scan", 1),
    ],
)
def test_auto_shards_over_the_devices_that_the_cohort_can_use(method, overrides, strategy, devices):
    experiment = build(tiny.config(method, execution__strategy="auto", **overrides))
    assert experiment.layout["strategy"] == strategy
    assert len(experiment.simulator.template(0).key.sharding.device_set) == devices


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


@pytest.mark.parametrize(("variable", "folder"), [("XDG_CACHE_HOME", "fedjax_ssl"), ("JAX_COMPILATION_CACHE_DIR", "")])
def test_the_commands_keep_compiled_programs(tmp_path, variable, folder):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    code = "from launch import command; command.keep_programs(); import jax; jax.jit(jax.numpy.linalg.svd)(jax.numpy.eye(9))"
    environment = inherited | {variable: str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert list((tmp_path / folder).glob("jit_*-cache"))

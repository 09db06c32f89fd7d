"""Where a round's time goes: what instructions compute, and their kinds."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import profile, programs, round_time
from fedjax_ssl.models.convolution import xla_conv


def test_products_and_convolutions_are_counted_where_they_are_called():
    def program(images, kernel, x):
        maps = xla_conv(images, kernel, 2, 1)  # [4, 4, 4, 5]
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ x), maps.reshape(4, 80)), maps + 1

    arrays = jnp.ones((4, 8, 8, 3)), jnp.ones((3, 3, 3, 5)), jnp.ones((80, 80))
    found = programs.instructions_of(jax.jit(program).lower(*arrays).compile().as_text())
    counted = {one["flops"] for one in found.values()} - {0.0}
    assert counted == {2.0 * 4 * 4 * 4 * 5 * 27, 2.0 * 4 * 80 * 80}
    assert all(one["bytes"] > 0 for one in found.values() if one["flops"])


def test_kinds_add_up_to_the_round_beside_what_the_machine_needs():
    def one(seconds, operation="fusion", scope="", flops=0.0, size=0.0):
        return {"seconds": seconds, "operation": operation, "scope": scope, "flops": flops, "bytes": size}

    inside = "jit(rounds)/while/body/jit(apply)/CNN/CNN.features/"
    found = [
        one(3.0, flops=2e9, size=1e12, scope=f"{inside}Conv_0/dot"),
        one(1.0, size=4e9, scope=f"{inside}Conv_0/pad"),
        one(0.5, size=1e9, scope=f"{inside}BatchNorm_0/mul"),
        one(0.25, scope=f"{inside}max"),
        one(0.25, scope="jit(rounds)/while/body/optimizer/sub"),
        one(0.5, "copy"),
        one(0.5, scope="jit(rounds)/exp"),
    ]
    kinds = profile.by_kind(found, 7.0, 1e9, 2e9)
    seconds = {kind: of["seconds"] for kind, of in kinds.items()}
    halves = {"norm": 0.5, "copies": 0.5, "rest": 0.5}
    assert seconds == {"products": 3.0, "conv": 1.0, "waiting": 1.0, "network": 0.25, "optimizer": 0.25, **halves}
    assert sum(seconds.values()) == 7.0
    assert [kinds[kind]["least_s"] for kind in ("products", "conv", "norm")] == [2.0, 2.0, 0.5]


@pytest.mark.slow
def test_a_real_round_has_its_kinds_of_work(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    session = programs.Session()
    workload = round_time.WORKLOADS["fl2_cnn"]
    config = round_time.config_of(workload, "usual", 1, 1)
    config["model"] = {"name": "cnn", "width": 4}
    session.build(config, {"count": workload.images + 10, "shape": workload.shape})
    session.rounds(1)
    found = session.profile()
    kinds = profile.by_kind(found["instructions"], found["seconds"], 1e12, 1e12)
    assert {"products", "conv", "norm", "rest"} <= kinds.keys()
    assert sum(of["seconds"] for of in kinds.values()) == pytest.approx(found["seconds"], rel=1e-6)
    images = sum(one["flops"] for one in found["instructions"])
    assert images > 64 * programs.Session().forward_flops(config["model"], workload.shape)

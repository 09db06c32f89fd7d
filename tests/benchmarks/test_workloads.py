"""What the benchmark of local steps runs: what it counts, and how it lays a combination out."""

import jax
import pytest

from benchmarks import workloads
from benchmarks.workloads import Case, Workload
from fedjax_ssl import arithmetic, models

CASE = Case("small", "im2col", "scan", "default", "float32", cohort=5, steps=3)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    model = {"name": "cnn", "width": 2}
    monkeypatch.setitem(workloads.WORKLOADS, "small", Workload({"name": "fl2"}, model, (8, 8, 1), "server", 16, {}, 1))


def test_a_round_is_its_passes_and_the_servers():
    """A second count: examples that passed through, as a round reports them, times what one example takes."""
    counted = workloads.arithmetic_of(CASE)
    rounds = workloads.experiment(CASE).rounds()
    (_, first), (_, second) = next(rounds), next(rounds)
    passes = [second[key] - first[key] for key in ("cost/forward_passes", "cost/backward_passes")]
    assert passes[1] == 3 * 5 * 3 * 16  # ways back of a step, clients, steps, images
    model = models.build("cnn", num_classes=10, width=2, conv="grouped")
    params, stats = model.init(jax.random.key(0), (8, 8, 1))
    forward = arithmetic.count(model.apply, params, stats, jax.ShapeDtypeStruct((1, 8, 8, 1), "float32")).flops
    first_layer = 2 * 22 * 22 * 2  # nobody asks for a gradient for the images
    back = 2 * forward - first_layer
    of_server = 10 * (forward + back) + 10 * forward  # a step on ten labels, whose statistics are taken then
    assert counted.flops == passes[0] * forward + passes[1] * back + of_server


def test_a_count_is_of_the_work_and_not_of_its_layout():
    counted = workloads.arithmetic_of(CASE)
    assert workloads.arithmetic_of(CASE._replace(conv="winograd", loop="vmap", compiler="lean")) == counted
    assert workloads.arithmetic_of(CASE._replace(loop=workloads.TUNED, conv="")) == counted
    bfloat16 = workloads.arithmetic_of(CASE._replace(dtype="bfloat16"))
    assert bfloat16.flops == counted.flops
    assert bfloat16.bytes == pytest.approx(counted.bytes / 2, rel=0.05)  # the last layer is float32


def layout(**changes):
    settings = workloads.execution(CASE._replace(**changes))
    return [settings.get(key) for key in ("strategy", "chunk_size", "steps")]


def test_a_loop_is_over_the_clients_of_each_device(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: [None] * 2)
    assert layout(loop="scan") == ["sharded", 1, "loop"]
    assert layout(loop="vmap") == layout(loop="4") == ["sharded", 3, "loop"]
    assert layout(loop="2") == ["sharded", 2, "loop"]
    assert layout(loop="unrolled") == ["sharded", 1, "unrolled"]
    assert layout(loop="separate") == ["separate", None, "unrolled"]


def test_a_loop_on_one_device_has_the_name_that_a_run_has_for_it(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: [None])
    assert layout(loop="scan") == layout(loop="1") == ["scan", None, "loop"]
    assert layout(loop="vmap") == layout(loop="5") == layout(loop="7") == ["vmap", None, "loop"]
    assert layout(loop="4") == ["chunked", 4, "loop"]
    assert layout(loop="unrolled") == ["scan", None, "unrolled"]


def test_the_usual_layout_is_among_the_fixed_ones():
    usual = workloads.experiment(CASE._replace(loop=workloads.USUAL)).layout
    assert workloads.experiment(CASE._replace(conv="winograd", loop="scan")).layout == usual


def test_a_combination_is_built_over_all_devices(monkeypatch):
    assert len(jax.devices()) == 4
    made = workloads.experiment(CASE._replace(cohort=8, loop="vmap", dtype="tensorfloat32"))
    assert made.layout[:-1] == ("sharded", 2, 4, "im2col", "loop", "default")
    assert (made.settings.execution.dtype, made.settings.execution.precision) == ("float32", "tensorfloat32")
    assert workloads.experiment(CASE._replace(loop="separate")).layout.devices == 3  # five in two turns
    monkeypatch.setattr(workloads, "tune", lambda made, give_up: (made.layout.conv, give_up()))
    assert workloads.experiment(CASE._replace(loop=workloads.TUNED, conv=""), lambda: 7) == ("winograd", 7)

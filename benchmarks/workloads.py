"""What `benchmarks/round_time.py` measures: methods on networks, the combinations they run in, and their rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl import arithmetic, build, tune
from fedjax_ssl.arithmetic import Arithmetic
from fedjax_ssl.data.sources import from_arrays
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.round import initialize, run_round


class Workload(NamedTuple):
    """A method on a network.

    Attributes:
        method: its settings.
        model: the network's.
        image_shape: of the images.
        labels_at: where the labels are.
        batch_size: of a client's step (of its labeled examples where it has labels).
        optimizer: of the clients.
        steps_on_cpu: local steps that a round on a CPU has, which is to take seconds.
    """

    method: dict[str, Any]
    model: dict[str, Any]
    image_shape: tuple[int, int, int]
    labels_at: str
    batch_size: int
    optimizer: dict[str, Any]
    steps_on_cpu: int

    @property
    def unlabeled_batch_size(self) -> int:
        """Of a client's step, besides `batch_size`; 0 where the same examples are seen in several views."""
        return self.method.get("unlabeled_batch_size", 0)


class Case(NamedTuple):
    """One combination.

    Attributes:
        workload: a key of WORKLOADS.
        conv: the lowering of convolutions.
        loop: `scan`, `vmap`, `unrolled`, `separate`, a number of clients to a chunk, USUAL or TUNED.
        compiler: one of COMPILERS.
        dtype: a key of DTYPES.
        cohort: M.
        steps: S, of a client.
    """

    workload: str
    conv: str
    loop: str
    compiler: str
    dtype: str
    cohort: int
    steps: int

    @property
    def work(self) -> tuple[str, str, int, int]:
        """What is done, however it is laid out."""
        return self.workload, self.dtype, self.cohort, self.steps


WORKLOADS = {
    "fl2_wrn28_2": Workload({"name": "fl2"}, {"name": "wide_resnet"}, (32, 32, 3), "server", 32, {}, 2),
    "feddure_resnet9": Workload(
        {"name": "feddure", "unlabeled_batch_size": 90},
        {"name": "resnet9", "variant": "feddure", "norm": "running"},
        (32, 32, 3),
        "clients",
        10,
        {"name": "adam", "learning_rate": 5e-4},
        1,
    ),
    "fl2_cnn": Workload({"name": "fl2"}, {"name": "cnn", "width": 32}, (8, 8, 1), "server", 32, {}, 4),
    "fedsiam_mnist_cnn": Workload(
        {"name": "fedsiam_pi"}, {"name": "mnist_cnn", "norm": "running"}, (28, 28, 1), "clients", 10, {"learning_rate": 0.01}, 4
    ),
    "fedavg_emnist_cnn": Workload(
        {"name": "fedavg"}, {"name": "emnist_cnn"}, (32, 32, 3), "clients", 10, {"learning_rate": 0.01}, 4
    ),
}
DTYPES = {
    "float32": {"dtype": "float32", "precision": "float32"},
    "tensorfloat32": {"dtype": "float32", "precision": "tensorfloat32"},
    "bfloat16": {"dtype": "bfloat16", "precision": "default"},
}
"""What arithmetic is done in, as settings of `execution`: tensorfloat32 is the precision in which float32 is multiplied."""
WRITTEN_OUT = ("unrolled", "separate")
"""Loops over clients whose local steps are written out."""
USUAL, TUNED = "usual", "tuned"
"""The layout that a run has where nothing is said, and measured or not."""


def per_device(cohort: int) -> int:
    """How many clients of a cohort each device has at most."""
    return -(-cohort // len(jax.devices()))


def execution(case: Case) -> dict[str, Any]:
    """The settings of a combination's execution, over all the devices there are, as `launch.run` has it."""
    dtype = DTYPES[case.dtype]
    if case.loop in (USUAL, TUNED):
        return {**dtype}
    layout = {"conv": case.conv, "compiler": case.compiler, "steps": "unrolled" if case.loop in WRITTEN_OUT else "loop"}
    if case.loop == "separate":
        return {**dtype, **layout, "strategy": "separate"}
    own = per_device(case.cohort)
    together = own if case.loop == "vmap" else int(case.loop) if case.loop.isdecimal() else 1
    if own < case.cohort:
        return {**dtype, **layout, "strategy": "sharded", "chunk_size": min(together, own)}
    if 1 < together < own:
        return {**dtype, **layout, "strategy": "chunked", "chunk_size": together}
    return {**dtype, **layout, "strategy": "scan" if together == 1 else "vmap"}


def experiment(case: Case, give_up: Callable[[], bool] = lambda: False, *, test_images: int = 10) -> Experiment:
    """A round of the combination's workload: S local steps of each of the cohort's clients, and one of the server.

    Args:
        case: the combination.
        give_up: of a tuned one, as in `fedjax_ssl.tune`.
        test_images: how many an evaluation has.
    """
    made = _built(case, execution(case), test_images)
    return tune(made, give_up=give_up) if case.loop == TUNED else made


def _built(case: Case, settings: dict[str, Any], test_images: int = 10) -> Experiment:
    workload, cohort = WORKLOADS[case.workload], case.cohort
    at_clients = workload.labels_at == "clients"
    per_client = workload.batch_size + (workload.unlabeled_batch_size or workload.batch_size)
    count = cohort * per_client + 10
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (count, *workload.image_shape), np.uint8), np.arange(count) % 10
    test = rng.integers(0, 256, (test_images, *workload.image_shape), np.uint8)
    local = {"optimizer": workload.optimizer, "batch_size": workload.batch_size, "epochs": 0, "steps": case.steps}
    labeled = {"labeled_fraction": (workload.batch_size / per_client,)} if at_clients else {"num_labels": 10}
    return build(
        {
            "method": workload.method,
            "model": workload.model,
            "data": {"labels_at": workload.labels_at, "num_clients": cohort, "weak": "none", "strong": "none", **labeled},
            "client": local,
            "server": {"epochs": 0, "steps": 1, "pretrain": 0} | ({} if at_clients else {"sbn_data": "labeled"}),
            "cohort_size": cohort,
            "rounds": 10**6,
            "eval_every": 10**6,
            "execution": settings,
        },
        from_arrays(train_images=images, train_labels=labels, test_images=test, test_labels=np.arange(test_images) % 10),
    )


def arithmetic_of(case: Case) -> Arithmetic:
    """What a round of the combination computes, clients and server, as direct convolutions and whatever its own lowering."""
    return _arithmetic(case._replace(conv="grouped", loop="unrolled", compiler="default"))


@functools.cache
def _arithmetic(case: Case) -> Arithmetic:
    """The count of a round whose steps are written out, so that the trace tells how many there are."""
    made = _built(case, {**execution(case), "strategy": "scan", "chunk_size": 0})
    method, data, spec, size = made.problem
    state, _ = jax.eval_shape(lambda data, key: initialize(method, data, spec, size, key), data, jax.random.key(0))
    return arithmetic.count(lambda state, data: run_round(method, state, data, size, Execution(chunk_size=1)), state, data)

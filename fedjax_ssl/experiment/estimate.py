"""What a run will cost, before it begins: examples that pass the network, arithmetic, bytes and seconds.

Passes are those of round 1 with a tiny network in place of the experiment's, which takes the same steps. Where pseudo-labels
decide the number of steps, that number differs somewhat. Where few pseudo-labels pass a threshold in round 1, as with SemiFL
and FixMatch, later rounds have more steps: on the digits up to four times the arithmetic. Seconds are the arithmetic divided
by what this machine computes in a second, which is a rough figure.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import models
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.federated import Pool
from fedjax_ssl.experiment.experiment import COSTS, Experiment
from fedjax_ssl.experiment.settings import ModelSettings
from fedjax_ssl.local.forward_passes import forward_batches_of
from fedjax_ssl.method import Method
from fedjax_ssl.metrics import num_bytes, whole
from fedjax_ssl.options import plural
from fedjax_ssl.simulation.costs import Passes, with_passes
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.round import RunState, run_client, run_round
from fedjax_ssl.simulation.source import DeviceSource, Problem, RunInputs, cpu

SHARE = {"cpu": 0.5, "gpu": 0.1, "tpu": 0.1}
"""The share of large matrix products' speed that rounds reach: .2 to .9 on CPUs, .09 on an H200 (benchmarks/speed.md)."""
SLOW = 3e10  # floating-point operations a second, fewer than any machine of today does
WORTH_S = 600.0  # a run that takes less on a slow machine needs no estimate


class Estimate(NamedTuple):
    """What an experiment costs."""

    round: Passes  # examples in one round of one run, at clients and server
    forward_flops: float  # floating-point operations of one example
    seconds: float  # of all runs together, without compilation


def estimate(experiment: Experiment) -> Estimate:
    """The cost of an experiment; compiles a small program for it."""
    settings, problem = experiment.settings, experiment.problem
    of_round, before = counted(experiment)
    validation = problem.data.validation
    examples = len(problem.test.labels) + (0 if validation is None else int(validation.count[0]))
    evaluation = examples * len(experiment.method.predict)
    examples = before.as_forward + settings.rounds * of_round.as_forward
    examples += -(-settings.rounds // settings.eval_every) * evaluation
    forward = _forward_flops(experiment)
    flops = len(experiment.runs) * examples * forward
    seconds = flops / (products_per_s() * SHARE.get(jax.default_backend(), 0.1))
    return Estimate(of_round, forward, seconds)


def may_be_long(experiment: Experiment) -> bool:
    """Whether a run may take so long that an estimate is worth its seconds, by how many examples its clients have."""
    settings, data, client = experiment.settings, experiment.problem.data, experiment.settings.client
    per_client = client.steps * client.batch_size + client.epochs * float(np.mean(data.labeled.count + data.unlabeled.count))
    examples = len(experiment.runs) * settings.rounds * settings.cohort_size * per_client
    return examples * Passes(1, 1).as_forward * _forward_flops(experiment) / SLOW > WORTH_S


def counted(experiment: Experiment) -> tuple[Passes, Passes]:
    """Examples that pass the network in round 1 of the first run, at clients and server, and before it."""
    size = experiment.layout.batch_size
    source, arguments = _first_run(experiment.problem, experiment.tiny_method(experiment.problem.first_number))

    def program(inputs: RunInputs, key: jax.Array, pools: tuple[Pool, Pool]) -> tuple[Passes, Passes, Passes]:
        (state, _), preparing = with_passes(source.initialize)(inputs, key, pools)
        ready = source.open(state, inputs, pools)

        def of_round(state: RunState) -> PyTree:
            return run_round(ready._replace(state=state), Execution(chunk_size=1, batch_size=size))

        (_, metrics), at_server = with_passes(of_round)(ready.state)  # the clients count by their metrics
        at_clients = (metrics.get(name, whole(0)) for name in COSTS[2:])
        return Passes(*at_clients), at_server, preparing

    with forward_batches_of(size), jax.default_device(cpu() if experiment.problem.on_host else None):
        found = jax.device_get(jax.jit(program)(*arguments))
    at_clients, at_server, preparing = (Passes(*map(int, passes)) for passes in found)
    return at_clients.plus(at_server), preparing


def traffic(experiment: Experiment) -> tuple[int, int]:
    """The most bytes that the clients of a round send and receive, by the shapes of what is sent."""
    method = experiment.method._replace(prepare=lambda server, data, key: (server, {}))  # which is slow to trace
    source, arguments = _first_run(experiment.problem, method)

    def of_client(inputs: RunInputs, key: jax.Array, pools: tuple[Pool, Pool]) -> tuple[PyTree, PyTree]:
        state, _ = source.initialize(inputs, key, pools)
        ready = source.open(state, inputs, pools)
        one = jax.tree.map(lambda x: x[0], ready.inputs)
        return run_client(ready.method, ready.shared, one).update, (ready.shared[0], one.per_client)

    shapes = jax.eval_shape(of_client, *arguments)
    up, down = (experiment.problem.spec.cohort_size * num_bytes(tree) for tree in shapes)
    return up, down


def _first_run(problem: Problem, method: Method) -> tuple[DeviceSource, tuple[RunInputs, jax.Array, tuple[Pool, Pool]]]:
    """The source of a problem's first run with another method, and the arguments of its `initialize`."""
    source = DeviceSource(problem._replace(method=lambda _: method, system=None))  # all that clients would do
    return source, (RunInputs(problem.tables[0], None), jax.random.key(problem.seeds[0]), source.pools)


def forward_flops(model: Mapping[str, Any], num_classes: int, shape: tuple[int, ...]) -> float:
    """Floating-point operations of the forward pass of one example of a shape, with convolutions as XLA has them.

    `model` is a config's group of that name.
    """
    options = {key: value for key, value in model.items() if key not in ModelSettings.model_fields}
    network = models.build(model["name"], num_classes=num_classes, conv="xla", **options)
    params, stats = jax.eval_shape(lambda: network.init(jax.random.key(0), shape))
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    analysis = jax.jit(network.apply).lower(params, stats, image).cost_analysis() or {}
    return float(analysis.get("flops", 0.0))


def _forward_flops(experiment: Experiment) -> float:
    spec = experiment.problem.spec
    return forward_flops(dict(experiment.settings.model), spec.num_classes, spec.image_shape)


def products_per_s() -> float:
    """Floating-point operations a second of large matrix products, on all devices together."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    product = jax.jit(jnp.matmul)
    matrices = [jax.device_put(np.full((size, size), 1 / size, np.float32), device) for device in jax.local_devices()]
    seconds = []
    for _ in range(4):  # the first one compiles
        began = time.perf_counter()
        matrices = jax.block_until_ready([product(x, x) for x in matrices])
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 * jax.device_count() / min(seconds[1:])


def duration(seconds: float) -> str:
    """A time in words, with the precision of an estimate."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return plural(max(round(seconds), 1), "second")


def described(experiment: Experiment) -> Iterator[str]:
    """Lines that say what an experiment is and costs, as `launch.run --dry_run` prints them; compiles no round."""
    settings, problem, found = experiment.settings, experiment.problem, estimate(experiment)
    data, spec, runs = problem.data, problem.spec, len(experiment.runs)
    per_client = {name: np.asarray(table.count) for name, table in (("labeled", data.labeled), ("unlabeled", data.unlabeled))}
    ends = {name: sorted({int(x.min()), int(x.max())}) for name, x in per_client.items()}
    counts = ", ".join(f"{' to '.join(f'{end:,}' for end in own)} {name}" for name, own in ends.items())
    per_round = found.round.as_forward * found.forward_flops
    shape = " x ".join(map(str, spec.image_shape))
    examples = f"{len(data.train.labels):,} training and {len(data.test.labels):,} test examples, {shape}"
    yield f"data      {settings.data.name}: {examples}, {spec.num_classes} classes"
    if says := experiment.dataset.sizes_from:
        yield f"          not read: random images, as many as {says} says, in classes of equal size, give what is below"
    if experiment.method.requires.clients:
        yield f"clients   {spec.num_clients:,}, {spec.cohort_size:,} a round; examples of each: {counts}"
    yield f"server    {plural(data.server.count.sum(), 'labeled example')}"
    network = f"{experiment.num_params:,} parameters, {found.forward_flops / 1e6:,.3g} MFLOP forward an example"
    yield f"network   {settings.model.name}: {network}"
    yield f"a round   {found.round.forward:,} examples forward, {found.round.backward:,} backward, {per_round / 1e9:,.3g} GFLOP"
    up, down = traffic(experiment)
    yield f"traffic   at most {up / 1e6:,.3g} MB up and {down / 1e6:,.3g} MB down a round"
    devices = plural(experiment.layout.devices, "device")
    yield f"layout    {experiment.layout.strategy}, {devices} for a run's clients"
    yield f"memory    {_memory(experiment)}"
    rounds = f"{runs} x {plural(settings.rounds, 'round')}"
    yield f"time      {rounds}: about {duration(found.seconds)} without compilation, a rough figure"


def _memory(experiment: Experiment) -> str:
    """What is known of a run's memory before a round is compiled: its data, and the states of server and clients."""
    problem = experiment.problem
    data = num_bytes((problem.train, problem.test, problem.tables))
    states = len(experiment.runs) * num_bytes(jax.eval_shape(lambda: experiment.method.init(jax.random.key(0), problem.spec)))
    where = f"on the {'disk' if problem.on_disk else 'host'}" if problem.on_host else "on each device"
    return f"{data / 1e6:,.3g} MB of data {where}, {states / 1e6:,.3g} MB of states; a round's own is known once it is compiled"

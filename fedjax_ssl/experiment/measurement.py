"""A small piece of an experiment's own work, on which layouts are timed, and how long the whole of it will take."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import arithmetic, models
from fedjax_ssl.data.federated import TABLES, FederatedData, Pool, Table
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.layout import convolves
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.methods import SERVER_ALONE

LONG_S = 6000.0
"""A run is worth tuning for that takes longer: the five minutes that a search may take at least are a twentieth of it."""
FASTEST = {"cpu": 1e11, "gpu": 5e13, "tpu": 2e13}
"""Floating-point operations per second that a run does at most, all in all, by platform."""
SLOWEST = 0.1
"""The share of these at which the smallest networks run."""
FEW_STEPS = 8
"""Local steps up to which writing them out is tried: compiling takes long."""
BATCHES = 2
"""Batches that a client has on average, where it takes more than a few steps."""
LONGEST = 4
"""How many times as much as the average a client has at most."""
LEAST_RUNS, LEAST_S, ENOUGH_S = 2, 0.5, 3.0
"""A layout is measured alone for so many runs and seconds at least; a run is enough that takes ENOUGH_S."""
LEAST_TURNS, TURNS_S, MOST_S = 3, 3.0, 20.0
"""Two layouts are compared for so many turns and seconds at least; but after MOST_S none is begun unless more are asked for."""
CLEAR = 1.3
"""How many times as long a candidate takes that is clearly slower."""


def forward_sizes(settings: Settings) -> tuple[int, ...]:
    """Examples per forward pass of an evaluation that are tried beside the usual number."""
    if jax.default_backend() != "cpu":
        return (1_000, 4_000)
    return (50, 100) if convolves(settings) else (1_000,)  # 1,000 are slow with convolutions (`benchmarks.evaluation`)


def images_a_device() -> int:
    """Images of each device in an evaluation that is measured, whole batches of all sizes."""
    return 1_000 if jax.default_backend() == "cpu" else 4_000


def has_few_steps(experiment: Experiment) -> bool:
    """Whether steps are taken, and neither a client nor the server takes more of them than are tried written out."""
    return 0 < experiment.most_steps <= FEW_STEPS


def clients_a_device(settings: Settings) -> int:
    """Clients that stand for those of a CPU's device: one takes what another takes, but small ones may run together."""
    return 2 if convolves(settings) else 8


def piece(experiment: Experiment) -> tuple[Settings, FederatedData]:
    """The settings and data of the measurement: clients with few batches each, or with all they have, if they take few steps.

    Every pseudo-label is accepted, so that clients have something to do at once. On a CPU a few clients on each device of the
    layout stand for the cohort, on an accelerator there are as many as in it. They are spread evenly from the client that has
    most to the one that has least, and what they have is cut in proportion, so that clients differ as in the whole.
    """
    settings, data = experiment.settings, experiment.problem.data
    on_cpu = jax.default_backend() == "cpu"
    size = min(settings.cohort_size, clients_a_device(settings) * experiment.layout.devices if on_cpu else settings.cohort_size)
    options, client, server = settings.method_options(), settings.client, settings.server
    average, of_server = None, None
    if not has_few_steps(experiment):
        average = BATCHES * max(client.batch_size, getattr(options, "unlabeled_batch_size", 0))
        of_server = BATCHES * server.batch_size
        client = dataclasses.replace(client, epochs=min(client.epochs, 1), steps=min(client.steps, BATCHES))
        server = dataclasses.replace(server, epochs=min(server.epochs, 1), steps=min(server.steps, BATCHES))
    small = dataclasses.replace(
        settings,
        method=accepting_all(settings),
        client=client,
        server=dataclasses.replace(server, pretrain=0),
        data=dataclasses.replace(settings.data, num_clients=size, labeled_fraction=()),  # they are split already
        cohort_size=size,
    )
    rows = spread(counts(data), size)
    alone = np.zeros(1, int)
    cut = data._replace(
        labeled=_cut(data.labeled, rows, average),
        unlabeled=_cut(data.unlabeled, rows, average),
        client_data=_cut(data.client_data, rows, average),
        server=_cut(data.server, alone, of_server),
        pooled=_cut(data.pooled, alone, average),
    )
    cut = cut._replace(test=Pool(*(x[: evaluated_images(experiment)] for x in data.test)))
    return small, _with_its_images_alone(cut)


def accepting_all(settings: Settings) -> dict[str, Any]:
    """The method's settings, so that it takes every pseudo-label."""
    options, all_ = settings.method_options(), {"confidence": 0.0, "threshold": "fixed"}
    return {**settings.method, **{name: value for name, value in all_.items() if hasattr(options, name)}}


def evaluated_images(experiment: Experiment) -> int:
    """How many images of the test set matter for how fast it is evaluated: so many that no device is idle in any batches."""
    return min(len(experiment.problem.data.test.labels), images_a_device() * experiment.layout.devices)


def counts(data: FederatedData) -> np.ndarray:
    """How many examples each client has, int [K]."""
    return np.asarray(data.labeled.count + data.unlabeled.count)


def spread(counts: np.ndarray, size: int) -> np.ndarray:
    """Clients, int [size], at even distances in the order of what they have, the one with most first."""
    order = np.argsort(-counts, kind="stable")
    return order[((np.arange(size) + 0.5) * len(order) / size).astype(int)]


def skew(data: FederatedData) -> list[float]:
    """How much the clients differ in what they have: quartiles and maximum over the mean, to a tenth."""
    held = counts(data)
    return [round(float(q), 1) for q in np.quantile(held, (0.25, 0.5, 0.75, 1.0)) / max(held.mean(), 1)]


def _with_its_images_alone(data: FederatedData) -> FederatedData:
    """The data without the training images that no table refers to: while a layout is measured, others hold theirs as well."""
    tables = {name: getattr(data, name) for name in TABLES}
    used = np.unique(np.concatenate([np.ravel(table.index) for table in tables.values()]))
    train = jax.tree.map(lambda x: np.asarray(x)[used], data.train)
    cut = {name: table._replace(index=np.int32(np.searchsorted(used, table.index))) for name, table in tables.items()}
    return data._replace(train=train, **cut)


def _cut(table: Table, rows: np.ndarray, average: int | None) -> Table:
    """Some rows of an index table, cut in proportion to `average` entries on average; None: whole."""
    index, count = np.asarray(table.index)[rows], np.asarray(table.count)[rows]
    if average is None:
        return Table(index, count)
    share = min(1.0, average / max(count.mean(), 1.0))
    count = np.minimum(np.ceil(share * count), LONGEST * average).astype(np.int32)
    return Table(index[:, : max(count.max(), 1)], count)


class Timed:
    """A piece of work that can be timed again. Its rounds are the last tenth of the run's, as some methods do less in the first
    ones, again and again.

    Args:
        piece: as `piece` has its settings and data.
        evaluates: whether its evaluation is timed, in place of its rounds.

    Attributes:
        piece, evaluates: as given.
        seconds: the least that a dispatch, or an evaluation, took.
        works: whether its clients did anything: those that find no pseudo-label confident enough take no step.
    """

    def __init__(self, piece: Experiment, *, evaluates: bool) -> None:
        self.piece, self.evaluates, self.seconds = piece, evaluates, math.inf
        together = piece.settings.execution.rounds_per_dispatch
        self._last, self._dispatched = max(1, piece.settings.rounds // (10 * together)), 0
        self._first = np.int32(piece.settings.rounds - self._last * together)
        self._state = piece.simulator.initialize(piece.settings.seed)[0]
        row = self._run()  # compiles, and warms up
        self.works = row.get("perf/client_images", 1) > 0
        began, runs = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < LEAST_S or (runs < LEAST_RUNS and spent < ENOUGH_S):
            self.once()
            runs += 1

    def _run(self) -> dict[str, float]:
        if self.evaluates:
            return self.piece.simulator.evaluate(self._state)
        if self._dispatched % self._last == 0:
            self._state = self._state._replace(round=jax.device_put(self._first, self._state.round.sharding))
        self._dispatched += 1
        self._state, (row, *_) = self.piece.simulator.dispatch(self._state)
        return row

    def once(self) -> float:
        """The seconds of one more run."""
        began = time.perf_counter()
        self._run()
        seconds = time.perf_counter() - began
        self.seconds = min(self.seconds, seconds)
        return seconds

    def times(self, other: Timed, stop: Callable[[], bool], *, least_turns: int) -> float:
        """How many times as long as a candidate this takes: the median over turns, as the machine is now faster, now slower.

        In a turn this runs first and last, and the candidate twice in between, so that neither gains where it becomes slower.

        Args:
            other: the candidate.
            stop: whether the turns so far have to do.
            least_turns: so many at least, where `stop` does not say so; after them a candidate is given up that is clearly
                slower in each.
        """
        self._dispatched = other._dispatched = 0  # the same rounds
        began, ratios = time.perf_counter(), list[float]()
        while True:
            first, *twice, last = (one.once() for one in (self, other, other, self))
            ratios.append((first + last) / sum(twice))
            spent = time.perf_counter() - began
            enough = spent >= MOST_S or (len(ratios) >= LEAST_TURNS and spent >= TURNS_S)
            if (len(ratios) >= least_turns and (enough or max(ratios) < 1 / CLEAR)) or stop():
                return statistics.median(ratios)


def may_be_long(experiment: Experiment) -> bool:
    """Whether a run may have so much to compute that tuning pays, were its network one of the slowest of its size."""
    of_example = 6 * _forward_flops(experiment, experiment.problem.spec.image_shape)  # forward and twice back, of two views
    flops = experiment.settings.rounds * _examples(experiment) * of_example
    return flops / (SLOWEST * FASTEST.get(jax.default_backend(), 2e13)) > LONG_S


def run_s(experiment: Experiment, piece: Experiment, seconds: float) -> float:
    """About how many seconds a run takes, by those of a dispatch of its piece; its evaluation is not counted."""
    of_round = seconds / experiment.settings.execution.rounds_per_dispatch
    return of_round * experiment.settings.rounds * _examples(experiment) / max(_examples(piece), 1)


def _examples(experiment: Experiment) -> float:
    """About how many examples the steps of a round go through."""
    settings, (_, data, _, cohort_size) = experiment.settings, experiment.problem
    server = settings.method["name"] in SERVER_ALONE
    training, unlabeled = settings.server if server else settings.client, 0
    held = np.asarray(data.server.count if server else data.labeled.count + data.unlabeled.count)
    if not server:
        unlabeled = getattr(settings.method_options(), "unlabeled_batch_size", 0)
    if settings.data.labels_at == "clients" and unlabeled:  # the labeled examples count the steps
        held, counted, of_step = data.labeled.count, training.batch_size, training.batch_size + unlabeled
    else:
        counted = of_step = unlabeled or training.batch_size
    steps = training.steps or training.epochs * -(-held.mean() // counted)
    return steps * of_step * (1 if server else cohort_size)


def _forward_flops(experiment: Experiment, shape: tuple[int, ...]) -> float:
    """Floating-point operations of a forward pass of one example, by its convolutions and matrix products."""
    settings = experiment.settings
    options = {k: v for k, v in settings.model.items() if k not in ("name", "norm", "norm_momentum")}
    model = models.build(settings.model["name"], num_classes=experiment.problem.spec.num_classes, conv="grouped", **options)
    params, stats = jax.eval_shape(lambda key: model.init(key, shape), jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    return float(arithmetic.count(functools.partial(model.apply, train=False), params, stats, image).flops)

"""Which layout is the fastest here: a short measurement on a small piece of an experiment's own work, kept on disk.

What `execution.*` leaves open begins as `layout.resolve` has it. Then one thing after another is tried (another lowering of
convolutions, the compiler's other options, another loop over clients, steps written out), and kept where it is faster. Layouts
are compared on a few clients with two batches each, whole rounds of them, in turns, by the least time.

    experiment = fedjax_ssl.tune(fedjax_ssl.build(config))
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import models
from fedjax_ssl.data.federated import TABLES, FederatedData, Table
from fedjax_ssl.experiment.build import FEATURE_MODELS, assembled
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.layout import Layout
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.experiment.writers import write_json
from fedjax_ssl.methods import SERVER_ALONE
from fedjax_ssl.simulation.round import RunState

PyTree = Any
_log = logging.getLogger(__name__)

LAYOUT = "layout.json"
FORM = 2
"""Of what is kept on disk: counted up where the candidates change, or how they are measured."""
GAIN = 1.05
"""How many times as fast a candidate must be to be taken: less is noise."""
LONG_S = 600.0
ASSUMED = {"cpu": 1e11, "gpu": 2e13, "tpu": 2e13}
"""A run is worth tuning for that would take LONG_S seconds at so many floating-point operations per second, all in all."""
FEW_STEPS = 8
"""Local steps up to which writing them out is tried: compiling takes long."""
BATCHES = 2
"""Batches that a client has in the measurement, where it takes more than a few steps."""
LEAST_ROUNDS, LEAST_S = 2, 0.5
"""How long a layout is measured at a time."""
LIMIT_S = 300.0
"""Seconds after which no other layout is tried: compiling a large network takes a minute on a CPU."""


def tuned(experiment: Experiment, *, give_up: Callable[[], bool] = lambda: False) -> Experiment:
    """The experiment in the fastest layout among those that its settings leave open.

    Measures where no result is kept (see `cache_folder`) for the same work on the same devices, in a minute or more.

    Args:
        experiment: as `build` made it.
        give_up: asked between candidates; once it is true, the best so far is taken, and nothing is kept.
    """
    path = _path(key(experiment))
    layout = _kept(path)
    if layout is None:
        _log.info("looking for the fastest layout, kept for the next time")
        found = list(search(experiment, give_up))
        layout = found[-1][0]
        if path is not None and not give_up() and not math.isnan(found[-1][1]):
            _keep(path, {"key": key(experiment), "layout": layout._asdict(), "steps": found})
    return in_layout(experiment, layout)


def in_layout(experiment: Experiment, layout: Layout) -> Experiment:
    """The experiment in another layout; its settings stay as they are."""
    settings, problem = experiment.settings, experiment.problem
    changed = assembled(layout.pinned(settings), experiment.views, problem.spec, problem.data, given=settings)
    return dataclasses.replace(changed, settings=settings)


def for_run(experiment: Experiment, workdir: pathlib.Path, give_up: Callable[[], bool]) -> Experiment:
    """The experiment in the layout of the run in a folder: the one that is noted there, or chosen now and noted.

    So a run that goes on does so bit for bit. A run that began without a note goes on as its settings say; one whose devices
    are not there any more has to be in another layout, and differs in rounding from then on.

    Args:
        experiment: as `build` made it.
        workdir: a folder that `loop.open_workdir` has accepted.
        give_up: as in `tuned`.
    """
    path, tune = workdir / LAYOUT, experiment.settings.execution.tune
    noted = _kept(path)
    same_kind = noted is not None and json.loads(path.read_text()).get("platform") == jax.default_backend()
    if noted is not None and same_kind and noted.devices <= len(jax.devices()):
        return in_layout(experiment, noted) if noted != experiment.layout else experiment
    if noted is not None:
        there = f"{len(jax.devices())} of {jax.default_backend()}"
        _log.warning("%s: got %d devices, there are %s here: going on in another layout", path, noted.devices, there)
    begun = (workdir / "metrics.jsonl").exists()
    if begun and noted is None and path.exists():
        _log.warning("%s: cannot be read: going on in a layout that may differ, and then differs in rounding", path)
    if not begun and (tune == "always" or (tune == "auto" and is_long(experiment))):
        experiment = tuned(experiment, give_up=give_up)
        if give_up():  # it stops before round 1, and looks again when it starts again
            return experiment
    note(experiment.layout, workdir)
    return experiment


def note(layout: Layout, workdir: pathlib.Path, **more: Any) -> None:
    """Writes down in which layout a folder's run is, and what else is to be found there again."""
    write_json(workdir / LAYOUT, {"layout": layout._asdict(), "platform": jax.default_backend(), **more})


def is_long(experiment: Experiment) -> bool:
    """Whether a run has so much to compute that tuning pays."""
    of_example = 6 * _forward_flops(experiment, experiment.problem.spec.image_shape)  # forward and twice back, of two views
    flops = experiment.settings.rounds * _examples(experiment) * of_example
    return flops / ASSUMED.get(jax.default_backend(), 2e13) > LONG_S


def _examples(experiment: Experiment) -> float:
    """About how many examples the steps of a round go through."""
    settings, (_, data, _, cohort_size) = experiment.settings, experiment.problem
    server = settings.method["name"] in SERVER_ALONE
    training, unlabeled = settings.server if server else settings.client, 0
    counts = np.asarray(data.server.count if server else data.labeled.count + data.unlabeled.count)
    if not server:
        unlabeled = getattr(settings.method_options(), "unlabeled_batch_size", 0)
    if settings.data.labels_at == "clients" and unlabeled:  # the labeled examples count the steps
        counts, counted, of_step = data.labeled.count, training.batch_size, training.batch_size + unlabeled
    else:
        counted = of_step = unlabeled or training.batch_size
    steps = training.steps or training.epochs * -(-counts.mean() // counted)
    return steps * of_step * (1 if server else cohort_size)


def _forward_flops(experiment: Experiment, shape: tuple[int, ...]) -> float:
    """Floating-point operations of a forward pass of one example, as XLA counts them."""
    settings = experiment.settings
    options = {k: v for k, v in settings.model.items() if k not in ("name", "norm", "norm_momentum")}
    model = models.build(settings.model["name"], num_classes=experiment.problem.spec.num_classes, conv="grouped", **options)
    params, stats = jax.eval_shape(lambda key: model.init(key, shape), jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    lowered = jax.jit(lambda p, s, x: model.apply(p, s, x, train=False)[0]).lower(params, stats, image)
    return float((lowered.cost_analysis() or {}).get("flops", 0.0))


def key(experiment: Experiment) -> dict[str, Any]:
    """What a choice depends on: the work's shapes and settings, what of the layout is given, the devices and JAX's version."""
    settings, spec = experiment.settings, experiment.problem.spec
    device = jax.devices()[0]
    return {
        "form": FORM,
        "method": dict(settings.method),
        "model": dict(settings.model),
        "image_shape": list(spec.image_shape),
        "num_classes": spec.num_classes,
        "labels_at": settings.data.labels_at,
        "client": [settings.client.batch_size, settings.client.optimizer.name, settings.client.epochs, settings.client.steps],
        "server": [settings.server.batch_size, settings.server.optimizer.name, settings.server.epochs, settings.server.steps],
        "pretrain": min(settings.server.pretrain, 2),
        "few_steps": has_few_steps(experiment),
        "views": [settings.data.weak, settings.data.strong, settings.data.labeled, settings.data.reveal_labels],
        "cohort_size": settings.cohort_size,
        "execution": {k: v for k, v in dataclasses.asdict(settings.execution).items() if k != "tune"},
        "device": f"{len(jax.devices())} x {device.platform} {device.device_kind}",
        "host": platform.node() if device.platform == "cpu" else "",  # a home may be that of many machines
        "jax": jax.__version__,
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def cache_folder() -> pathlib.Path | None:
    """Where what has been found out about a machine is kept: `~/.cache/fedjax_ssl`, made where it is missing.

    None where it cannot be: without a home, or where it cannot be written to. XDG_CACHE_HOME goes first.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(caches, "fedjax_ssl")
    if not folder.is_absolute():  # a user without a home: "~" stays as it is
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _path(of: Mapping[str, Any]) -> pathlib.Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()[:20]
    return folder / "layouts" / f"{digest}.json"


def _keep(path: pathlib.Path, found: Mapping[str, Any]) -> None:
    """Writes what was found; where it cannot be, as on a full disk, it is measured again the next time."""
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, found)
    except OSError as error:
        _log.warning("%s: not written (%s)", path, error.strerror)


def _kept(path: pathlib.Path | None) -> Layout | None:
    """The layout that a file holds; None where there is none, or none that can be read."""
    if path is None:
        return None
    try:
        return Layout(**json.loads(path.read_text())["layout"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def has_few_steps(experiment: Experiment) -> bool:
    """Whether neither a client nor the server takes more steps than are tried written out."""
    return experiment.most_steps <= FEW_STEPS


def convolves(experiment: Experiment) -> bool:
    """Whether the network has convolutions."""
    return experiment.settings.model["name"] not in FEATURE_MODELS


def moves(settings: Settings, layout: Layout, *, convolves: bool, few_steps: bool) -> list[dict[str, Any]]:
    """What is tried, one after another, as changes of the best layout so far; only of what the settings leave open.

    On a CPU clients run one after another on each device, and inside loops only the lowerings that avoid XLA's gradients of
    convolutions are worth a try.
    """
    given = settings.execution
    fixed = {name for name, value in dataclasses.asdict(given).items() if value not in ("auto", 0)}
    if given.data == "host" or given.rounds_per_dispatch > 1:
        fixed.add("strategy")
    trains_clients = settings.method["name"] not in SERVER_ALONE
    on_cpu = jax.default_backend() == "cpu"
    lowerings = ("banded", "im2col", "shifted") if on_cpu else ("im2col", "shifted")
    tried: list[dict[str, Any]] = [{"conv": conv} for conv in lowerings] if convolves else []
    if on_cpu:
        tried.insert(0, {"compiler": "lean"})
    else:
        usual = "sharded" if layout.strategy == "sharded" else "chunked"
        sizes = [size for size in (4, 1) if size < -(-settings.cohort_size // layout.devices)]
        tried += [{"strategy": usual, "chunk_size": size} for size in sizes if trains_clients]
    if few_steps:
        tried.append({"steps": "unrolled"})
    if trains_clients:
        separate = {"strategy": "separate", "chunk_size": 1}
        no_loop = few_steps and "steps" not in fixed
        tried.append({**separate, "steps": "unrolled"} if no_loop else separate)
        if no_loop and convolves and settings.server.pretrain <= 1:  # no loop is left around XLA's convolution
            tried.append({**separate, "steps": "unrolled", "conv": "grouped"})
    return [move for move in tried if not fixed & move.keys()]


def search(experiment: Experiment, give_up: Callable[[], bool]) -> Iterator[tuple[Layout, float]]:
    """The layouts that were the best, one after another, each with the seconds of a round of the measurement."""
    settings, data = measured(experiment)
    spec = experiment.problem.spec._replace(num_clients=settings.data.num_clients)

    def prepared(layout: Layout) -> _Timed | None:
        try:
            timed = _Timed(assembled(layout.pinned(settings), experiment.views, spec, data, given=settings))
        except (ValueError, RuntimeError) as error:  # out of memory, or an option that this XLA does not know
            _log.info("  %s: %s", describe(layout), str(error).strip().splitlines()[0])
            return None
        _log.info("  %s: %.4g s", describe(layout), timed.seconds)
        return timed

    layout, began = experiment.layout, time.perf_counter()
    best = prepared(layout)
    if best is None or not best.works:
        yield layout, math.nan
        return
    yield layout, best.seconds
    for move in moves(experiment.settings, layout, convolves=convolves(experiment), few_steps=has_few_steps(experiment)):
        if give_up() or time.perf_counter() - began > LIMIT_S:
            return
        candidate = layout._replace(**move)
        if candidate == layout:
            continue
        other = prepared(candidate)
        if other is None:
            continue
        if other.seconds < 1.3 * best.seconds:
            for one in (best, other, best, other):  # in turns, as other programs on the machine come and go
                one.measure()
        if other.seconds * GAIN < best.seconds:
            layout, best = candidate, other
            yield layout, best.seconds


def describe(layout: Layout) -> str:
    """A layout in a few words."""
    clients = f"{layout.strategy} {layout.chunk_size}" if layout.strategy in ("chunked", "sharded") else layout.strategy
    return f"{clients}, {layout.conv}, {layout.steps}, {layout.compiler}"


class _Timed:
    """A piece of work that can be timed again.

    Attributes:
        seconds: the least that a round took.
        works: whether its clients did anything: those that find no pseudo-label confident enough take no step.
    """

    def __init__(self, piece: Experiment) -> None:
        self._simulator = piece.simulator
        self._state: RunState = piece.simulator.initialize(piece.settings.seed)[0]
        self.seconds = math.inf
        self._state, (row, *_) = piece.simulator.dispatch(self._state)  # compiles, and warms up
        self.works = row.get("perf/client_images", 1) > 0
        self.measure()

    def measure(self) -> None:
        """Some more rounds."""
        began, rounds = time.perf_counter(), 0
        while rounds < LEAST_ROUNDS or time.perf_counter() - began < LEAST_S:
            started, rounds = time.perf_counter(), rounds + 1
            self._state, _ = self._simulator.dispatch(self._state)
            self.seconds = min(self.seconds, time.perf_counter() - started)


def measured(experiment: Experiment) -> tuple[Settings, FederatedData]:
    """The settings and data of the measurement: clients with two batches each, or with all they have, if they take few steps.

    Every pseudo-label is accepted, so that clients have something to do from the first round on. On a CPU two clients on each
    device stand for the cohort, as one takes what another takes; on an accelerator the whole cohort.
    """
    settings, data = experiment.settings, experiment.problem.data
    size = min(settings.cohort_size, 2 * len(jax.devices())) if jax.default_backend() == "cpu" else settings.cohort_size
    options, client, server = settings.method_options(), settings.client, settings.server
    batch_size = max(client.batch_size, getattr(options, "unlabeled_batch_size", 0))
    per_client = data.held.index.shape[1] if has_few_steps(experiment) else BATCHES * batch_size
    if not has_few_steps(experiment):
        client = dataclasses.replace(client, epochs=min(client.epochs, 1), steps=min(client.steps, BATCHES))
    small = dataclasses.replace(
        settings,
        method={**settings.method, **({"confidence": 0.0} if hasattr(options, "confidence") else {})},
        client=client,
        server=dataclasses.replace(server, epochs=min(server.epochs, 1), steps=min(server.steps, BATCHES), pretrain=0),
        data=dataclasses.replace(settings.data, num_clients=size, labeled_fraction=settings.data.labeled_fraction[:1]),
        cohort_size=size,
        rounds=10**6 * settings.execution.rounds_per_dispatch,
    )
    largest = np.argsort(-np.asarray(data.labeled.count + data.unlabeled.count), kind="stable")[:size]
    alone = np.zeros(1, int)
    return small, _with_its_images_alone(
        data._replace(
            labeled=_cut(data.labeled, largest, per_client),
            unlabeled=_cut(data.unlabeled, largest, per_client),
            held=_cut(data.held, largest, per_client),
            server=_cut(data.server, alone, BATCHES * server.batch_size),
            pooled=_cut(data.pooled, alone, per_client),
        )
    )


def _with_its_images_alone(data: FederatedData) -> FederatedData:
    """The data without the training images that no table refers to: while a layout is measured, others hold theirs as well."""
    tables = {name: getattr(data, name) for name in TABLES}
    used = np.unique(np.concatenate([np.ravel(table.index) for table in tables.values()]))
    train = jax.tree.map(lambda x: np.asarray(x)[used], data.train)
    cut = {name: table._replace(index=np.int32(np.searchsorted(used, table.index))) for name, table in tables.items()}
    return data._replace(train=train, **cut)


def _cut(table: Table, rows: np.ndarray, columns: int) -> Table:
    """Some rows of an index table, of each the first few entries."""
    return Table(np.asarray(table.index)[rows, :columns], np.minimum(np.asarray(table.count)[rows], columns))

"""From a config to an experiment: the one place where settings become real arguments."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl import models
from fedjax_ssl.data import presets, sources, split
from fedjax_ssl.data.augment import Views
from fedjax_ssl.experiment.settings import ExecutionSettings, OptimizerSettings, Settings
from fedjax_ssl.method import DataSpec
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.local import Training, torch_sgd
from fedjax_ssl.methods.server import Server, StaticNorm
from fedjax_ssl.methods.task import Task
from fedjax_ssl.simulation.client_store import HostSimulator
from fedjax_ssl.simulation.execution import Execution, client_mesh
from fedjax_ssl.simulation.round import RunState
from fedjax_ssl.simulation.simulator import Problem, Simulator

PyTree = Any

FEATURE_MODELS = ("linear", "mlp")
"""Models that take vectors, not only images."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment that is ready to run.

    Attributes:
        settings: what it was built from.
        problem: method, data and cohort size.
        simulator: its programs.
        num_params: parameters of the network.
    """

    settings: Settings
    problem: Problem
    simulator: Simulator | HostSimulator
    num_params: int

    def start(self) -> RunState:
        """The state before round 1."""
        return self.simulator.initialize(self.settings.seed)[0]

    def rounds(self, state: RunState | None = None) -> Iterator[tuple[RunState, dict[str, float]]]:
        """Runs the rounds that are left, one per step: (state, metrics), evaluated where the settings say so.

        Each step consumes the state before it: keep `jax.device_get(state)` if you need an old one.

        Args:
            state: where to go on from; None: a new run.
        """
        state = self.start() if state is None else state
        for number in range(int(state.round) + 1, self.settings.rounds + 1):
            state, metrics = self.simulator.round(state)
            if self.evaluates(number):
                metrics |= self.simulator.evaluate(state)
            yield state, {"round": number, **metrics}

    def evaluates(self, number: int) -> bool:
        """Whether the model is evaluated after round `number`, counted from 1."""
        return number % self.settings.eval_every == 0 or number == self.settings.rounds

    def predict(self, state: RunState, images: np.ndarray) -> np.ndarray:
        """Logits float32 [B, C] of the global model for uint8 images [B, H, W, ch], or float32 features [B, 1, D].

        Images have the size that the dataset has here: where `data.image_size` padded it, pad them likewise.
        """
        return np.asarray(self._predict(state.server, jnp.asarray(images)))

    @functools.cached_property
    def _predict(self) -> Callable:
        return jax.jit(self.problem.method.predict)


def build(config: Mapping[str, Any] | Settings, dataset: sources.Dataset | None = None) -> Experiment:
    """An experiment from a config; reads the data, compiles nothing.

    Args:
        config: nested mappings with the keys of `Settings` (an ml_collections.ConfigDict, or plain dicts), or Settings.
        dataset: data in memory, from `fedjax_ssl.data.sources.from_arrays` or `from_features`; they take the place of what
            `data.name`, `data_dir`, `path` and `resplit` say, and give `data.name` their own name. None: as the config says.

    Raises:
        ValueError: for a wrong key, value or dataset, with one line that names it.
        FileNotFoundError: for missing data.
    """
    settings = config if isinstance(config, Settings) else Settings.from_dict(config)
    options = settings.method_options()
    execution = _execution(settings.execution, settings.cohort_size)
    settings, dataset, views = _data(settings, dataset)
    spec = DataSpec(_input_shape(settings, dataset, views), dataset.num_classes, settings.data.num_clients)
    data = split.labels_at_server(
        dataset,
        num_labels=settings.data.num_labels,
        num_clients=settings.data.num_clients,
        scheme=settings.data.partition,
        alpha=settings.data.alpha,
        min_size=settings.data.min_size,
        exclude_labeled=settings.data.exclude_labeled,
        seed=settings.seed,
    )
    task = _task(settings, views, dataset.num_classes, execution)
    method = METHODS[settings.method["name"]](task=task, client=_client(settings), server=_server(settings), options=options)
    problem = Problem(method, data, spec, settings.cohort_size)
    on_host = settings.execution.data == "host"
    if on_host and settings.server.sbn_data == "all" and task.norm == "static":
        raise ValueError("execution.data: got host with server.sbn_data=all, accepted: device, or server.sbn_data=cohort")
    simulator = (HostSimulator if on_host else Simulator)(problem, execution, settings.execution.batch_size)
    return Experiment(settings, problem, simulator, _num_params(task, spec))


def _data(settings: Settings, dataset: sources.Dataset | None) -> tuple[Settings, sources.Dataset, Views]:
    """The dataset as the network's views take it, the views, and the settings with the name of what was read."""
    data = settings.data
    if dataset is None:
        dataset = sources.load(
            data.name,
            data_dir=data.data_dir or None,
            path=data.path or None,
            resplit=data.resplit or None,
            seed=settings.seed,
        )
    else:
        data = dataclasses.replace(data, name=dataset.name, data_dir="", path="", resplit=())
    views = presets.make(dataset, mean=data.mean, std=data.std, weak=data.weak, strong=data.strong)  # measured unpadded
    if data.image_size:
        dataset = sources.padded(dataset, data.image_size)
    return dataclasses.replace(settings, data=data), dataset, views


def _input_shape(settings: Settings, dataset: sources.Dataset, views: Views) -> tuple[int, ...]:
    """The shape of one of the network's inputs: (H, W, ch), or (D,) for features."""
    one = jax.ShapeDtypeStruct((1, *dataset.train_images.shape[1:]), dataset.train_images.dtype)
    shape = jax.eval_shape(views.plain, one).shape[1:]
    if len(shape) == 1 and settings.model["name"] not in FEATURE_MODELS:
        accepted = ", ".join(FEATURE_MODELS)
        raise ValueError(f"model.name: got {settings.model['name']} for text features, accepted: {accepted}")
    return shape


def _task(settings: Settings, views: Views, num_classes: int, execution: Execution) -> Task:
    options = {k: v for k, v in settings.model.items() if k not in ("name", "norm")}
    model = models.build(
        settings.model["name"],
        num_classes=num_classes,
        conv=models.resolve_conv(settings.execution.conv, jax.default_backend(), kernels_vmapped=execution.chunk_size != 1),
        dtype=settings.execution.dtype,
        **options,
    )
    return Task(
        model=model, views=views, num_classes=num_classes, norm=settings.model["norm"], batch_size=settings.execution.batch_size
    )


def _num_params(task: Task, spec: DataSpec) -> int:
    shapes = jax.eval_shape(lambda key: task.init(key, spec.image_shape).params, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _client(settings: Settings) -> Training:
    client = settings.client
    training = _training(client.optimizer, settings.rounds, client.batch_size, client.epochs, client.steps)
    return training._replace(prox_mu=settings.method.get("prox_mu", 0.0))


def _server(settings: Settings) -> Server:
    server = settings.server
    return Server(
        optimizer=optax.sgd(server.learning_rate, momentum=server.momentum or None),
        fine_tune=_training(server.optimizer, settings.rounds, server.batch_size, server.epochs, server.steps),
        pretrain=server.pretrain,
        static_norm=StaticNorm(
            server.sbn_data, server.sbn_weighting, server.sbn_labeled_batch_size, server.sbn_unlabeled_batch_size
        ),
    )


def _training(optimizer: OptimizerSettings, rounds: int, batch_size: int, epochs: int, steps: int) -> Training:
    return Training(
        optimizer=_transformation(optimizer),
        learning_rate=_schedule(optimizer, rounds),
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        persistent=optimizer.persistent,
    )


def _transformation(optimizer: OptimizerSettings) -> optax.GradientTransformation:
    if optimizer.name == "adam":
        return optax.chain(
            optax.clip_by_global_norm(optimizer.clip_norm) if optimizer.clip_norm else optax.identity(),
            optax.add_decayed_weights(optimizer.weight_decay) if optimizer.weight_decay else optax.identity(),
            optax.scale_by_adam(),
        )
    return torch_sgd(
        momentum=optimizer.momentum,
        nesterov=optimizer.nesterov,
        weight_decay=optimizer.weight_decay,
        clip_norm=optimizer.clip_norm,
    )


def _schedule(optimizer: OptimizerSettings, rounds: int) -> Callable[[jax.Array], jax.Array]:
    """Round, 0-based -> learning rate. Cosine: lr/2 (1 + cos(pi t / R)) for round t + 1 of R ((FL)^2, Table 4)."""
    if optimizer.schedule == "constant":
        return lambda _: jnp.float32(optimizer.learning_rate)
    return lambda t: optimizer.learning_rate / 2 * (1 + jnp.cos(jnp.pi * t.astype(jnp.float32) / rounds))


def _execution(settings: ExecutionSettings, cohort_size: int) -> Execution:
    """The strategy's chunk size and mesh.

    `auto`: over several devices `sharded`; else, measured on WRN-28-2, `scan` on a CPU, where convolutions with a kernel per
    client are slower than one client after another, and `vmap` on an accelerator, which one client does not fill.
    """
    available = jax.devices()
    devices = settings.devices or 1
    if devices > len(available):
        raise ValueError(f"execution.devices: got {devices}, accepted: at most {len(available)}, the devices there are")
    strategy = settings.strategy
    one_by_one = available[0].platform == "cpu"
    if strategy == "auto":
        strategy = "sharded" if devices > 1 else "scan" if one_by_one else "vmap"
    if strategy != "sharded" and devices > 1:
        raise ValueError(f"execution.devices: got {devices} with strategy={strategy}, accepted: 1, or strategy=sharded")
    if strategy == "sharded":
        return Execution(settings.chunk_size or (1 if one_by_one else 0), client_mesh(devices))
    return Execution({"vmap": 0, "scan": 1, "chunked": settings.chunk_size}[strategy])

"""From a config to an experiment: the one place where settings become real arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl import models
from fedjax_ssl.data import presets, sources, split
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.experiment.experiment import Experiment, most_steps
from fedjax_ssl.experiment.layout import FORWARD_BATCH_SIZE, resolve
from fedjax_ssl.experiment.settings import ClientSettings, OptimizerSettings, ServerSettings, Settings
from fedjax_ssl.method import DataSpec, Method
from fedjax_ssl.methods import METHODS, steps
from fedjax_ssl.methods.local import Training
from fedjax_ssl.methods.optimizers import clipping, decayed_weights, is_on, lars, torch_sgd
from fedjax_ssl.methods.server import Server, StaticNorm
from fedjax_ssl.methods.task import NORM_DEFAULTS, Task
from fedjax_ssl.simulation.client_store import HostSimulator
from fedjax_ssl.simulation.separate import SeparateSimulator
from fedjax_ssl.simulation.simulator import Problem, Simulator


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
    if settings.is_several:
        raise ValueError("seeds, vary: got several runs, accepted: one; fedjax_ssl.experiment.many.build makes several")
    plan = plan_of(settings, dataset, resolve(settings).conv)
    return assembled(plan.settings, plan.views, plan.spec, plan.split())


def assembled(
    settings: Settings, views: Views, spec: DataSpec, data: FederatedData, *, given: Settings | None = None
) -> Experiment:
    """An experiment from settings and split data, in the layout that the settings say.

    Args:
        settings: of all but the data.
        views: how networks see the data.
        spec: static facts about the data, but for `client_rows`.
        data: the split data.
        given: the settings before a layout was pinned in them, if one was: what they leave open may shrink to fit into memory.

    Raises:
        ValueError: for settings that do not go together.
    """
    layout = resolve(settings)
    with naming("model"):
        # As it was given: a pass over a client's examples computes its last batch whole, for which a size that was measured on
        # the test set may be far too large.
        task = _task(given or settings, views, spec.num_classes, layout.conv)
    spec = spec._replace(client_rows=data.unlabeled.index.shape[1])
    method = method_of(settings, settings.method_options(), task, counts_of(data))
    problem = Problem(method, data, spec, settings.cohort_size)
    on_host = settings.execution.data == "host"
    if on_host and not problem.method.host_data:
        raise ValueError(f"execution.data: got host with method.name={settings.method['name']}, accepted: device")
    if on_host and settings.server.sbn_data == "all" and settings.model["norm"] == "static":
        raise ValueError("execution.data: got host with server.sbn_data=all, accepted: device, or server.sbn_data=cohort")
    if layout.steps == "unrolled":
        check_unrolled(problem)
    kind = HostSimulator if on_host else SeparateSimulator if layout.strategy == "separate" else Simulator
    simulator = kind(problem, layout.execution(given or settings), layout.forward_batch_size)
    with naming("model"):
        num_params = _num_params(task, spec)
    return Experiment(settings, problem, simulator, num_params, layout, views)


def method_of(settings: Settings, options: Any, task: Task, counts: np.ndarray | None = None) -> Method:
    """The method of the settings, with its own options; `counts`: see `Training`."""
    client = _client(settings)._replace(counts=counts)
    return METHODS[settings.method["name"]](task=task, client=client, server=_server(settings), options=options)


class Plan(NamedTuple):
    """Settings whose names have become things, before data are split.

    Attributes:
        settings: with the name of the dataset that was read.
        options: the method's own.
        dataset: as the network's views take it.
        views: of its examples.
        spec: static facts about it, but for `client_rows`.
        conv: the lowering of convolutions.
    """

    settings: Settings
    options: Any
    dataset: sources.Dataset
    views: Views
    spec: DataSpec
    conv: str

    def task(self) -> Task:
        """The network and its views."""
        with naming("model"):
            return _task(self.settings, self.views, self.spec.num_classes, self.conv)

    def method(self, counts: np.ndarray | None = None) -> Method:
        """The method; `counts`: see `Training`."""
        return method_of(self.settings, self.options, self.task(), counts)

    def split(self) -> FederatedData:
        """The dataset, split."""
        with naming("data"):
            return split.federate(self.dataset, self.settings.data, self.settings.seed)

    def of(self, settings: Settings) -> Plan:
        """The plan of another run on the same dataset, whose seed or a number of whose settings differ; checked likewise."""
        read = self.settings.data
        data = dataclasses.replace(settings.data, name=read.name, data_dir=read.data_dir, path=read.path, resplit=read.resplit)
        plan = self._replace(settings=dataclasses.replace(settings, data=data), options=settings.method_options())
        _check_scenario(plan.settings, plan.method())
        return plan

    def num_params(self) -> int:
        """Parameters of the network."""
        with naming("model"):
            return _num_params(self.task(), self.spec)


def plan_of(settings: Settings, dataset: sources.Dataset | None, conv: str) -> Plan:
    """Reads the data and checks what does not depend on their split.

    Args:
        settings: of one run.
        dataset: see `build`.
        conv: the lowering of convolutions.

    Raises:
        ValueError, FileNotFoundError: as `build`.
    """
    options = settings.method_options()
    settings, dataset, views = _data(settings, dataset)
    spec = DataSpec(_input_shape(settings, dataset, views), dataset.num_classes, settings.data.num_clients)
    plan = Plan(settings, options, dataset, views, spec, conv)
    _check_scenario(settings, plan.method())
    return plan


def counts_of(data: FederatedData) -> np.ndarray:
    """How many labeled and unlabeled examples each client has, int32 [K, 2]."""
    return np.stack([data.labeled.count, data.unlabeled.count], axis=1)


@contextlib.contextmanager
def naming(group: str) -> Iterator[None]:
    """Within it, errors about an argument name its config key: `num_labels=3 ...` becomes `data.num_labels=3 ...`."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        separator = "." if re.match(r"\w+=", str(error)) else ": "
        raise kind(f"{group}{separator}{error}") from error


def load_dataset(settings: Settings) -> sources.Dataset:
    """The dataset that the settings name.

    Raises:
        ValueError: for an unknown or unusable dataset.
        FileNotFoundError: for missing data.
    """
    data = settings.data
    with naming("data"):
        return sources.load(
            data.name,
            data_dir=data.data_dir or None,
            path=data.path or None,
            resplit=data.resplit or None,
            seed=settings.seed,
        )


def _data(settings: Settings, dataset: sources.Dataset | None) -> tuple[Settings, sources.Dataset, Views]:
    """The dataset as the network's views take it, the views, and the settings with the name of what was read."""
    data = settings.data
    if dataset is None:
        dataset = load_dataset(settings)
    else:
        data = dataclasses.replace(data, name=dataset.name, data_dir="", path="", resplit=())
    with naming("data"):
        views = presets.make(dataset, mean=data.mean, std=data.std, weak=data.weak, strong=data.strong, labeled=data.labeled)
        size = data.image_size or _size_needed(settings.model["name"], dataset)
        if size:
            dataset = sources.padded(dataset, size)
    return dataclasses.replace(settings, data=data), dataset, views


def _size_needed(model: str, dataset: sources.Dataset) -> int:
    """The side that images have to be padded to for a network that is made for one; 0: none."""
    size = models.IMAGE_SIZE.get(model, 0)
    return 0 if dataset.holds_features or max(dataset.train_images.shape[1:3]) >= size else size


def _input_shape(settings: Settings, dataset: sources.Dataset, views: Views) -> tuple[int, ...]:
    """The shape of one of the network's inputs: (H, W, ch), or (D,) for features."""
    one = jax.ShapeDtypeStruct((1, *dataset.train_images.shape[1:]), dataset.train_images.dtype)
    shape = jax.eval_shape(views.plain, one).shape[1:]
    if len(shape) == 1 and settings.model["name"] not in models.FEATURE_MODELS:
        accepted = ", ".join(models.FEATURE_MODELS)
        raise ValueError(f"model.name: got {settings.model['name']} for text features, accepted: {accepted}")
    return shape


def _check_scenario(settings: Settings, method: Method) -> None:
    """Raises ValueError where the labels are not where the method reads them."""
    data, name = settings.data, settings.method["name"]
    if data.labels_at not in method.labels_at:
        accepted = " or ".join(method.labels_at)
        raise ValueError(f"data.labels_at: got {data.labels_at} with method.name={name}, accepted: {accepted}")
    if data.reveal_labels and "clients" not in method.labels_at:
        raise ValueError(f"data.reveal_labels: got True with method.name={name}, whose clients read no labels, accepted: False")
    training = settings.server.training
    if training not in method.server_training:
        raise ValueError(f"server.training: got {training} with method.name={name}, accepted: after")
    if data.labels_at == "clients" and training != "after":
        raise ValueError(f"server.training: got {training} with data.labels_at=clients, accepted: after")
    sbn_data = settings.server.sbn_data
    if data.labels_at == "clients" and settings.model["norm"] == "static" and sbn_data != "cohort":
        raise ValueError(f"server.sbn_data: got {sbn_data} with data.labels_at=clients, accepted: cohort")


def check_unrolled(problem: Problem) -> None:
    """Raises ValueError where there are too many steps to write out."""
    if (most := most_steps(problem)) > steps.MOST_UNROLLED:
        raise ValueError(
            f"execution.steps: got unrolled with up to {most} steps of a client or of the server, accepted: loop, or at most "
            f"{steps.MOST_UNROLLED}"
        )


def _task(settings: Settings, views: Views, num_classes: int, conv: str) -> Task:
    options = {k: v for k, v in settings.model.items() if k not in ("name", *NORM_DEFAULTS)}
    model = models.build(
        settings.model["name"],
        num_classes=num_classes,
        conv=conv,
        dtype=settings.execution.dtype,
        **options,
    )
    at, revealed = settings.data.labels_at, settings.data.reveal_labels
    return Task(
        model=model,
        views=views,
        num_classes=num_classes,
        labels_at=("server", "clients") if revealed and at == "server" else (at,),
        batch_size=settings.execution.batch_size or FORWARD_BATCH_SIZE,
        **{key: settings.model[key] for key in NORM_DEFAULTS},
    )


def _num_params(task: Task, spec: DataSpec) -> int:
    shapes = jax.eval_shape(lambda key: task.init(key, spec.image_shape).params, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _client(settings: Settings) -> Training:
    client = settings.client
    return _training(settings, client)._replace(prox_mu=settings.method.get("prox_mu", 0.0))


def _server(settings: Settings) -> Server:
    server = settings.server
    return Server(
        optimizer=optax.sgd(server.learning_rate, momentum=server.momentum if is_on(server.momentum) else None),
        fine_tune=_training(settings, server),
        pretrain=server.pretrain,
        static_norm=StaticNorm(
            server.sbn_data, server.sbn_weighting, server.sbn_labeled_batch_size, server.sbn_unlabeled_batch_size
        ),
        training=server.training,
        rounds=settings.rounds,
        cohort_size=settings.cohort_size,
    )


def _training(settings: Settings, holder: ClientSettings | ServerSettings) -> Training:
    return Training(
        optimizer=_transformation(holder.optimizer),
        learning_rate=_schedule(holder.optimizer, settings.rounds),
        batch_size=holder.batch_size,
        epochs=holder.epochs,
        steps=holder.steps,
        persistent=holder.optimizer.persistent,
        rounds=settings.rounds,
        unrolled=settings.execution.steps == "unrolled",
    )


def _transformation(optimizer: OptimizerSettings) -> optax.GradientTransformation:
    if optimizer.name == "lars":
        return optax.chain(
            clipping(optimizer.clip_norm),
            lars(momentum=optimizer.momentum, nesterov=optimizer.nesterov, weight_decay=optimizer.weight_decay),
        )
    if optimizer.name == "adam":
        return optax.chain(
            clipping(optimizer.clip_norm),
            decayed_weights(optimizer.weight_decay, optimizer.decay),
            optax.scale_by_adam(),
        )
    return torch_sgd(
        momentum=optimizer.momentum,
        nesterov=optimizer.nesterov,
        weight_decay=optimizer.weight_decay,
        decay=optimizer.decay,
        clip_norm=optimizer.clip_norm,
    )


def _schedule(optimizer: OptimizerSettings, rounds: int) -> Callable[[jax.Array], jax.Array]:
    """Time in rounds, 0 at the start and R at the end -> learning rate.

    Cosine: lr/2 (1 + cos(pi t / R)) ((FL)^2, Table 4). Cosine_7_16: lr cos(7/16 pi t / R) (Sohn et al. 2020, Section 2.4).
    """
    rate = optimizer.learning_rate
    if optimizer.schedule == "constant":
        return lambda _: jnp.float32(rate)
    if optimizer.schedule == "cosine_7_16":
        return lambda t: rate * jnp.cos(7 / 16 * jnp.pi * t.astype(jnp.float32) / rounds)
    return lambda t: rate / 2 * (1 + jnp.cos(jnp.pi * t.astype(jnp.float32) / rounds))

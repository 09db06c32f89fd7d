"""From a config to an experiment: the one place where settings become real arguments."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.errors import ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError

from fedjax_ssl import methods, models
from fedjax_ssl.data import presets, sources, split
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.federated import TABLES, FederatedData, widened
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.layout import Layout, resolve
from fedjax_ssl.experiment.runs import Run, replaced, replaced_fields, runs_of
from fedjax_ssl.experiment.settings import ClientSettings, OptimizerSettings, ServerSettings, Settings
from fedjax_ssl.local.optimizers import clipping, decayed_weights, is_on, lars, torch_sgd
from fedjax_ssl.local.server import Server, StaticNorm
from fedjax_ssl.local.task import NORM_DEFAULTS, Task
from fedjax_ssl.local.training import Training
from fedjax_ssl.method import DataSpec, Method
from fedjax_ssl.simulation.source import Problem


def build(
    config: Mapping[str, Any] | Settings,
    dataset: sources.Dataset | None = None,
    *,
    method: Callable[..., Method] | None = None,
    model: Any = None,
    layout: Layout | None = None,
) -> Experiment:
    """An experiment from a config; reads the data, compiles nothing.

    Args:
        config: nested mappings with the keys of `Settings` (an ml_collections.ConfigDict, or plain dicts), or Settings.
        dataset: data in memory, from `fedjax_ssl.data.sources.from_arrays` or `from_features`, in place of what `data.name`,
            `data_dir`, `path` and `resplit` say; `data.name` is its own name then. None: as the config says.
        method: a method's factory, with its default options, in place of what `method` says. None: as the config says.
        model: a network, in place of what `model.name` and its options say: see `fedjax_ssl.models.register_model`.
        layout: how the work is laid out; None: as `execution` says.

    Raises:
        ValueError: for a wrong key, value or dataset, with one line that names it.
        FileNotFoundError: for missing data.
    """
    if not isinstance(config, Settings):
        config = dict(config)
        if method is not None:
            config["method"] = {"name": methods.name_of(method)}
        if model is not None:
            norms = {key: value for key, value in dict(config.get("model", {})).items() if key in NORM_DEFAULTS}
            config["model"] = {"name": models.name_of(model), **norms}
        config = Settings.from_dict(config)
    runs = runs_of(config)
    plan = plan_of(runs[0].settings, dataset)
    plans = [plan.of(run.settings) for run in runs]
    if len(runs) > 1:
        _check_shared_images(config, dataset)
    runs = tuple(run._replace(settings=own.settings) for run, own in zip(runs, plans, strict=True))
    data = [own.split() for own in plans]
    data = widened(data) if len(data) > 1 else data
    counts = np.concatenate([np.stack([own.labeled.count, own.unlabeled.count], axis=1) for own in data])
    batch_size = plan.settings.client.batch_size
    plan = plan._replace(options=plan.options.for_run(config.rounds, counts, batch_size))
    layout = layout or resolve(plan.settings, plan.method().requires, len(runs))
    plan = plan._replace(conv=layout.conv)
    return _assemble(config, runs, plan, data, layout)


def _assemble(settings: Settings, runs: tuple[Run, ...], plan: Plan, data: list[FederatedData], layout: Layout) -> Experiment:
    """The experiment of runs whose data are split."""
    is_traced = bool(settings.vary) and not settings.vary.startswith("data.")  # a split's number is not read by the programs

    def method_of(number: Any) -> Method:
        return plan.varied(settings.vary, number).method()

    problem = Problem(
        method=method_of,
        train=data[0].train,
        test=data[0].test,
        tables=tuple({name: getattr(own, name) for name in TABLES} for own in data),
        seeds=tuple(run.settings.seed for run in runs),
        numbers=tuple(run.number for run in runs if run.number is not None) if is_traced else None,
        spec=plan.spec._replace(client_rows=data[0].unlabeled.index.shape[1]),
        rounds=settings.rounds,
        on_host=settings.execution.data == "host",
    )
    with naming("model"):
        num_params = _num_params(plan.task(), plan.spec)
    experiment = Experiment(runs, problem, layout, plan.method(), num_params, plan.views)
    if is_traced:
        _check_traced(experiment, settings.vary)
    return experiment


def _check_traced(experiment: Experiment, key: str) -> None:
    """Raises ValueError where Python code decides something by the number, which is a traced one in the programs."""
    try:
        experiment.simulator.trace()
    except (ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError):
        name = experiment.settings.method["name"]
        raise ValueError(
            f"vary: got {key!r}, by which the program of method.name={name} is chosen, accepted: a number that one program can "
            "have many values of; run one after another instead"
        ) from None


def _check_shared_images(settings: Settings, dataset: sources.Dataset | None) -> None:
    """Raises ValueError where runs with several seeds would not share their images."""
    if dataset is None and settings.seeds > 1 and (settings.data.resplit or settings.data.name == "synthetic"):
        what = "data.resplit" if settings.data.resplit else "data.name=synthetic"
        raise ValueError(f"seeds: got {settings.seeds} with {what}, which the seed draws, accepted: 1, as runs share images")


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
    conv: str = "xla"

    def task(self) -> Task:
        """The network and its views."""
        with naming("model"):
            return _task(self.settings, self.views, self.spec.num_classes, self.conv)

    def method(self) -> Method:
        """The method."""
        settings = self.settings
        factory = methods.METHODS[settings.method["name"]]
        return factory(task=self.task(), client=_client(settings), server=_server(settings), options=self.options)

    def split(self) -> FederatedData:
        """The dataset, split."""
        with naming("data"):
            return split.federate(self.dataset, self.settings.data.split, self.settings.seed)

    def of(self, settings: Settings) -> Plan:
        """The plan of another run on the same dataset, whose seed or a number of whose settings differ; checked likewise."""
        read = self.settings.data
        data = replaced_fields(settings.data, name=read.name, data_dir=read.data_dir, path=read.path, resplit=read.resplit)
        plan = self._replace(settings=replaced_fields(settings, data=data), options=settings.method_options())
        _check_scenario(plan.settings, plan.method())
        return plan

    def varied(self, key: str, number: Any) -> Plan:
        """The plan with `number`, a traced scalar, under a dotted key, unchecked; None: as it is."""
        if number is None:
            return self
        path = key.split(".")
        is_option = path[0] == "method" and hasattr(self.options, path[1])
        options = replaced(self.options, path[1:], number) if is_option else self.options
        return self._replace(settings=replaced(self.settings, path, number), options=options)


def plan_of(settings: Settings, dataset: sources.Dataset | None) -> Plan:
    """Reads the data and checks what does not depend on their split.

    Args:
        settings: of one run.
        dataset: see `build`.

    Raises:
        ValueError, FileNotFoundError: as `build`.
    """
    options = settings.method_options()
    settings, dataset, views = _data(settings, dataset)
    shape = _input_shape(settings, dataset, views)
    return Plan(
        settings, options, dataset, views, DataSpec(shape, dataset.num_classes, settings.data.num_clients, settings.cohort_size)
    )


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
        data = replaced_fields(data, name=dataset.name, data_dir="", path="", resplit=())
    with naming("data"):
        views = presets.make(dataset, mean=data.mean, std=data.std, weak=data.weak, strong=data.strong, labeled=data.labeled)
        size = data.image_size or _size_needed(settings.model["name"], dataset)
        if size:
            dataset = sources.padded(dataset, size)
    return replaced_fields(settings, data=data), dataset, views


def _size_needed(model: str, dataset: sources.Dataset) -> int:
    """The side that images have to be padded to for a network that is made for one; 0: none."""
    size = models.image_size(model)
    return 0 if dataset.holds_features or max(dataset.train_images.shape[1:3]) >= size else size


def _input_shape(settings: Settings, dataset: sources.Dataset, views: Views) -> tuple[int, ...]:
    """The shape of one of the network's inputs: (H, W, ch), or (D,) for features."""
    one = jax.ShapeDtypeStruct((1, *dataset.train_images.shape[1:]), dataset.train_images.dtype)
    shape = jax.eval_shape(views.plain, one).shape[1:]
    if len(shape) == 1 and settings.model["name"] not in models.feature_models():
        accepted = ", ".join(models.feature_models())
        raise ValueError(f"model.name: got {settings.model['name']} for text features, accepted: {accepted}")
    return shape


def _check_scenario(settings: Settings, method: Method) -> None:
    """Raises ValueError where the labels are not where the method reads them."""
    data, name = settings.data, settings.method["name"]
    requires = method.requires
    if data.labels_at not in requires.labels_at:
        accepted = " or ".join(requires.labels_at)
        raise ValueError(f"data.labels_at: got {data.labels_at} with method.name={name}, accepted: {accepted}")
    if data.reveal_labels and "clients" not in requires.labels_at:
        raise ValueError(f"data.reveal_labels: got True with method.name={name}, whose clients read no labels, accepted: False")
    training = settings.server.training
    if training not in requires.server_training:
        raise ValueError(f"server.training: got {training} with method.name={name}, accepted: after")
    if data.labels_at == "clients" and training != "after":
        raise ValueError(f"server.training: got {training} with data.labels_at=clients, accepted: after")
    sbn_data = settings.server.sbn_data
    if data.labels_at == "clients" and settings.model["norm"] == "static" and sbn_data != "cohort":
        raise ValueError(f"server.sbn_data: got {sbn_data} with data.labels_at=clients, accepted: cohort")


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
    )


def _training(settings: Settings, owner: ClientSettings | ServerSettings) -> Training:
    return Training(
        optimizer=_transformation(owner.optimizer),
        learning_rate=_schedule(owner.optimizer, settings.rounds),
        batch_size=owner.batch_size,
        epochs=owner.epochs,
        steps=owner.steps,
        persistent=owner.optimizer.persistent,
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

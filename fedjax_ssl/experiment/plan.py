"""A run before its data are split: its dataset, views, task and method, from its settings."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from fedjax_ssl import methods, models
from fedjax_ssl.data import presets, sources
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.sources import stand_in
from fedjax_ssl.experiment import export, sizes, start_weights
from fedjax_ssl.experiment.arguments import faults_of, naming, server_of, training_of
from fedjax_ssl.experiment.expansion import Run, replaced
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.layers import factors_of
from fedjax_ssl.experiment.scenario import check_scenario
from fedjax_ssl.experiment.settings import ModelSettings, Settings, own_options, typed
from fedjax_ssl.local.task import Task, Weights
from fedjax_ssl.method import DataSpec, Method
from fedjax_ssl.simulation.contract import check_method
from fedjax_ssl.simulation.round import RunState
from fedjax_ssl.wrappers import compression, fixed, kinds, privacy, robust


class Plan(NamedTuple):
    """A run before its data are split: its settings, the padded dataset, and its sizes without `client_rows`.

    In `settings.method` each phase is a number of rounds, unlike in the run's own settings.
    """

    settings: Settings
    dataset: sources.Dataset
    views: Views
    spec: DataSpec
    stored_shape: tuple[int, ...]  # of one example, before images are padded
    conv: str = "xla"
    has_batch_norm: bool = True
    start: Mapping[str, np.ndarray] = MappingProxyType({})  # the weights that do not start at random, by their names
    fixed: Mapping[str, np.ndarray] = MappingProxyType({})  # the parameters that are not trained, by their names

    def task(self) -> Task:
        """The network and its views."""
        settings, num_classes = self.settings, self.spec.num_classes
        at = "server" if settings.data.labels_at == "server" else "clients"
        revealed, dtype, given = settings.data.reveal_labels, settings.execution.dtype, settings.model
        with naming("model"):
            model = models.build(given.name, num_classes=num_classes, conv=self.conv, dtype=dtype, **own_options(given))
            return Task(
                model=start_weights.started(model, self.start, self.fixed) if self.start else model,
                views=self.views,
                num_classes=num_classes,
                labels_at=("server", "clients") if revealed and at == "server" else (at,),
                norm="running" if given.norm == "static" and not self.has_batch_norm else given.norm,  # collects no statistics
                norm_momentum=given.norm_momentum,
            )

    def method(self, task: Task | None = None) -> Method:
        """The method, with the plan's task where it has been made."""
        settings, options = self.settings, self.settings.method
        client = training_of(settings, settings.client)._replace(prox_mu=options.prox_mu)
        task, factory = task or self.task(), methods.METHODS[options.name]
        made = check_method(factory(task=task, client=client, server=server_of(settings), options=options))
        numbers = {"num_clients": self.spec.num_clients, "num_classes": self.spec.num_classes}
        if settings.data.labels_at == "some_clients":
            made = kinds.with_kinds(made, kinds.Kinds(settings.client.unlabeled_rate, settings.client.unlabeled_wait))
        made = robust.with_faulty_clients(made, faults_of(settings), **numbers)
        factors = factors_of("client.optimizer.layers", settings.client.optimizer.layers)
        made = fixed.with_fixed(made, factors)
        made = compression.with_compression(made, settings.client.compression, settings.client.compression_share)
        made = privacy.with_privacy(made, settings.privacy.clip, settings.privacy.noise, self.spec.cohort_size)
        return robust.with_aggregation(made, settings.server.aggregation, settings.server.assumed_faulty)

    def with_tiny_network(self) -> Self:
        """The plan with a tiny network and plain views, whose clients take the same steps on the same examples.

        A network of feature vectors is counted as one without batch norm.
        """
        has_norm = self.has_batch_norm and len(self.spec.image_shape) > 1  # views without gradient cost less without batch norm
        tiny = {"name": "cnn", "width": 1} if has_norm else {"name": "mlp", "hidden": 8}  # with one unit classes may be alike
        model = typed(ModelSettings, {key: getattr(self.settings.model, key) for key in ModelSettings.model_fields} | tiny)
        plain = self.views.plain
        views = Views(plain, *[lambda _, images: plain(images)] * 3)
        settings = self.settings.model_copy(update={"model": model})
        return self._replace(settings=settings, views=views, conv="xla", has_batch_norm=has_norm, start={}, fixed={})

    def weights(self) -> Weights:
        """The shapes of the network's weights."""
        task = self.task()
        with naming("model"):
            return jax.eval_shape(lambda key: task.init(key, self.spec.image_shape), jax.random.key(0))

    def started(self, start: tuple[Experiment, RunState] | None) -> Self:
        """The plan with the weights of `start`, or those that `model.init` names."""
        given = self.settings.model
        if not (given.init or start):
            if given.trainable:
                accepted = "with model.init, which has the parameters that are not trained"
                raise ValueError(f"model.trainable: got {given.trainable} with random weights, accepted: {accepted}")
            return self
        weights = self.weights()
        with naming("model.init"):
            arrays = export.named_arrays(*start) if start else start_weights.read(given.init, given.name, own_options(given))
            plan = self._replace(start=start_weights.matched(arrays, weights, given.init or "start"))
        return plan._replace(fixed=start_weights.fixed(given.trainable, plan.start, weights)) if given.trainable else plan

    def of(self, settings: Settings) -> Self:
        """The plan of another run on the same dataset, whose seed or one of whose numbers differs."""
        alike = ("name", "data_dir", "path", "resplit", "renumber_labels", "weak", "strong", "labeled")
        where = {key: getattr(self.settings.data, key) for key in alike}
        data, options = settings.data.model_copy(update=where), settings.method.for_rounds(settings.rounds)
        plan = self._replace(settings=settings.model_copy(update={"data": data, "method": options}))
        check_scenario(plan.settings, plan.method(), plan.spec, has_batch_norm=plan.has_batch_norm)
        return plan

    def resolved(self, run: Run, vary: str) -> Run:
        """The run with the plan's settings of data; if `vary` is the key of a `Phase`, the run's number is in rounds."""
        number = getattr(self.settings.method, vary.removeprefix("method."), run.number)
        return run._replace(settings=run.settings.model_copy(update={"data": self.settings.data}), number=number)

    def varied(self, key: str, number: Any) -> Self:
        """The plan with `number`, which may be traced, under a dotted key; None: unchanged."""
        return self if number is None else self.with_values({key: number})

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """The plan with unchecked values under dotted keys."""
        settings = self.settings
        for key, value in values.items():
            settings = replaced(settings, key.split("."), value)
        return self._replace(settings=settings)


def plan_of(settings: Settings, dataset: sources.Dataset | None, *, reads: bool = True) -> Plan:
    """Reads the data of one run, unless `dataset` has them; arguments and errors are as in `build`."""
    data, model, options = settings.data, settings.model.name, settings.method.for_rounds(settings.rounds)
    if dataset is None:
        dataset = load_dataset(settings, reads=reads)
    else:
        data = data.model_copy(
            update={"name": dataset.name, "data_dir": "", "path": "", "resplit": (), "renumber_labels": False}
        )
    data = data if dataset.holds_features else data.resolved()
    stored_shape = dataset.train_images.shape[1:]
    with naming("data"):
        views = presets.make(dataset, mean=data.mean, std=data.std, weak=data.weak, strong=data.strong, labeled=data.labeled)
        size = data.image_size
        if not size and not dataset.holds_features and max(dataset.train_images.shape[1:3]) < models.MODELS[model].image_size:
            size = models.MODELS[model].image_size
        if size:
            sizes.check_images(dataset, size)
            dataset = sources.padded(dataset, size)
    one = jax.ShapeDtypeStruct((1, *dataset.train_images.shape[1:]), dataset.train_images.dtype)
    shape = jax.eval_shape(views.plain, one).shape[1:]
    if len(shape) == 1 and model not in models.feature_models():
        raise ValueError(f"model.name: got {model} for text features, accepted: {', '.join(models.feature_models())}")
    cohort_size = min(settings.cohort_size, data.num_clients)  # larger, it is refused where it is read
    of_kind = settings.labeled_cohort if data.labels_at == "some_clients" else 0
    spec = DataSpec(shape, dataset.num_classes, data.num_clients, cohort_size, labeled_cohort=of_kind)
    return Plan(settings.model_copy(update={"data": data, "method": options}), dataset, views, spec, stored_shape)


def load_dataset(settings: Settings, *, reads: bool = True) -> sources.Dataset:
    """The dataset that the settings name; if `reads` is false and its size is known, random images stand in for it.

    Raises ValueError or FileNotFoundError where the dataset cannot be read.
    """
    data = settings.data
    folder, path, resplit = data.data_dir or None, data.path or None, data.resplit or None
    options: dict[str, Any] = {"resplit": resplit, "renumber_labels": data.renumber_labels, "seed": settings.seed}
    options["validation"] = data.validation == "own"
    options["columns"] = sources.Columns(data.image_column, data.label_column, data.client_column, data.resize)
    with naming("data"):
        found = None if reads or path else stand_in.load(data.name, folder, resplit, validation=options["validation"])
        return found or sources.load(data.name, data_dir=folder, path=path, download=data.download and reads, **options)

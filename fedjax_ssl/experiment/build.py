"""From a config to an experiment: the one place where settings become real arguments."""

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.errors import ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError

from fedjax_ssl import methods, models
from fedjax_ssl.data import presets, profiles, sources, split
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.federated import TABLES, FederatedData, widened
from fedjax_ssl.data.sources import stand_in
from fedjax_ssl.experiment import sizes
from fedjax_ssl.experiment.expansion import Run, replaced, runs_of
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.layout import Layout, resolve
from fedjax_ssl.experiment.settings import ModelSettings, Settings
from fedjax_ssl.experiment.training_settings import (
    ClientSettings,
    OptimizerSettings,
    ServerOptimizerSettings,
    ServerTrainingSettings,
)
from fedjax_ssl.experiment.unread import facts, unread_by
from fedjax_ssl.experiment.warnings import log_warnings
from fedjax_ssl.local.optimizers import clipping, decayed_weights, is_on, lars, torch_sgd
from fedjax_ssl.local.server import Server, StaticNorm
from fedjax_ssl.local.task import Task
from fedjax_ssl.local.training import Training
from fedjax_ssl.method import VIEWS, DataSpec, Method
from fedjax_ssl.options import Options, one_line
from fedjax_ssl.simulation.contract import check_method
from fedjax_ssl.simulation.source import Problem
from fedjax_ssl.simulation.system import System

_log = logging.getLogger(__name__)


def build(
    config: Mapping[str, Any] | Settings,
    dataset: sources.Dataset | None = None,
    *,
    method: Callable[..., Method] | None = None,
    model: Any = None,
    layout: Layout | None = None,
    widths: Mapping[str, int] | None = None,
    reads: bool = True,
) -> Experiment:
    """An experiment from a config: nested mappings with the keys of `Settings`, such as a ConfigDict, or Settings.

    Other arguments take the place of what the config says: `dataset` is data in memory, from `data.sources.from_arrays` or
    `from_features`; `method` a method's factory, with its default options; `model` a network, see `models.register_model`.
    `layout` and the tables' `widths` are those of a run that has begun, as its `run.json` has them. Unless it `reads`, random
    images stand for those of a dataset whose size is known, to count a run's costs.
    The data are read, and nothing is compiled. Raises ValueError or, for missing data, FileNotFoundError, with one line.
    """
    if dataset is not None and not isinstance(dataset, sources.Dataset):
        raise ValueError(f"dataset: got {type(dataset).__name__}, accepted: what sources.from_arrays or from_features returns")
    tree = config.to_dict() if hasattr(config, "to_dict") else config  # Settings, or a ConfigDict, which is no Mapping
    if not isinstance(tree, Mapping):
        raise ValueError(f"config: got {config!r}, accepted: nested dicts, such as digits.get_config('fl2') returns")
    tree = dict(tree)
    if method is not None:
        if not callable(method):
            raise ValueError(f"method: got {method!r}, accepted: a factory, such as METHODS['fedavg']")
        tree["method"] = {"name": methods.name_of(method)}
    if model is not None:
        own = dict(group) if isinstance(group := tree.get("model"), Mapping) else {}
        shared = {key: own[key] for key in ModelSettings.model_fields if key in own}
        tree["model"] = shared | {"name": models.name_of(model)}
    drawn = drawn_runs(Settings.from_dict(tree), dataset, reads=reads)
    for plan, assignment in zip(drawn.plans, drawn.assignments, strict=True):
        split.log_notes(assignment, len(plan.dataset.train_labels))
    experiment = assembled(drawn, layout, widths)
    given, data, shape = drawn.config.data, experiment.settings.data, experiment.problem.spec.image_shape
    views = {view: getattr(data, view) for view in VIEWS}
    if "default" in (given.weak, given.strong) and len(shape) == 3:
        used = [view for view in VIEWS if f"data.{view}" not in experiment.unread]
        _log.info("%s", presets.described(**views, side=min(shape[:2]), used=used))
    log_warnings(experiment)
    return experiment


class Plan(NamedTuple):
    """A run before its data are split: the method's own `options`, the padded dataset, and its sizes without `client_rows`."""

    settings: Settings
    options: Options
    dataset: sources.Dataset
    views: Views
    spec: DataSpec
    stored_shape: tuple[int, ...]  # of one example, before images are padded
    conv: str = "xla"

    def task(self) -> Task:
        """The network and its views."""
        settings, num_classes = self.settings, self.spec.num_classes
        name, at, revealed = settings.model["name"], settings.data.labels_at, settings.data.reveal_labels
        options, norm = dict(settings.model_options()), ("norm", "norm_momentum")
        with naming("model"):
            return Task(
                model=models.build(name, num_classes=num_classes, conv=self.conv, dtype=settings.execution.dtype, **options),
                views=self.views,
                num_classes=num_classes,
                labels_at=("server", "clients") if revealed and at == "server" else (at,),
                **{key: settings.model[key] for key in norm},
            )

    def method(self, task: Task | None = None) -> Method:
        """The method, with the plan's task where it has been made."""
        settings, own = self.settings, self.settings.method
        client = _training(settings, settings.client)._replace(prox_mu=own.get("prox_mu", 0.0))
        factory, given = methods.METHODS[own["name"]], {"task": task or self.task(), "server": _server(settings)}
        return check_method(factory(client=client, options=self.options, **given))

    def with_tiny_network(self) -> Self:
        """The plan with a tiny network and plain views, whose clients take the same steps on the same examples.

        A network of feature vectors is counted as one without batch norm.
        """
        weights = jax.eval_shape(lambda key: self.task().init(key, self.spec.image_shape), jax.random.key(0))
        has_norm = bool(weights.stats) and len(self.spec.image_shape) > 1  # views without gradient cost less without batch norm
        tiny = {"name": "cnn", "width": 1} if has_norm else {"name": "mlp", "hidden": 8}  # with one unit classes may be alike
        model = {key: self.settings.model[key] for key in ModelSettings.model_fields} | tiny
        plain = self.views.plain
        views = Views(plain, *[lambda _, images: plain(images)] * 3)
        return self._replace(settings=self.settings.model_copy(update={"model": model}), views=views, conv="xla")

    def of(self, settings: Settings) -> Self:
        """The plan of another run on the same dataset, whose seed or one of whose numbers differs."""
        alike = ("name", "data_dir", "path", "resplit", "renumber_labels", "weak", "strong", "labeled")
        where = {key: getattr(self.settings.data, key) for key in alike}
        own = settings.model_copy(update={"data": settings.data.model_copy(update=where)})
        plan = self._replace(settings=own, options=settings.method_options().for_rounds(settings.rounds))
        _check_scenario(plan.settings, plan.method())
        return plan

    def resolved(self, run: Run, vary: str) -> Run:
        """The run with the plan's settings; where `vary` is the key of a phase, its number counts rounds."""
        return run._replace(settings=self.settings, number=getattr(self.options, vary.removeprefix("method."), run.number))

    def varied(self, key: str, number: Any) -> Self:
        """The plan with `number`, which may be traced, under a dotted key; None: unchanged."""
        if number is None:
            return self
        path = key.split(".")
        is_option = path[0] == "method" and hasattr(self.options, path[1])
        options = replaced(self.options, path[1:], number) if is_option else self.options
        return self._replace(settings=replaced(self.settings, path, number), options=options)


def plan_of(settings: Settings, dataset: sources.Dataset | None, *, reads: bool = True) -> Plan:
    """Reads the data of one run, unless `dataset` has them; arguments and errors are as in `build`."""
    data, model, options = settings.data, settings.model["name"], settings.method_options().for_rounds(settings.rounds)
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
    spec = DataSpec(shape, dataset.num_classes, data.num_clients, settings.cohort_size)
    return Plan(settings.model_copy(update={"data": data}), options, dataset, views, spec, stored_shape)


class Drawn(NamedTuple):
    """The runs of a config, each with its plan and its split, all of which are checked."""

    config: Settings
    runs: tuple[Run, ...]
    plans: list[Plan]
    assignments: list[split.Assignment]


def drawn_runs(config: Settings, dataset: sources.Dataset | None = None, *, reads: bool = True) -> Drawn:
    """Reads the data of a config, unless `dataset` has them, and draws the splits; the first part of `build`."""
    runs = runs_of(config)
    plan = plan_of(runs[0].settings, dataset, reads=reads)
    plans = [plan.of(run.settings) for run in runs]
    if dataset is None and config.seeds > 1 and (config.data.resplit or config.data.name == "synthetic"):
        what = "data.resplit" if config.data.resplit else "data.name=synthetic"
        raise ValueError(f"seeds: got {config.seeds} with {what}, which the seed draws, accepted: 1, as runs share images")
    runs = tuple(own.resolved(run, config.vary) for run, own in zip(runs, plans, strict=True))
    numbers = [run.number for run in runs if run.settings.seed == config.seed]
    if len(set(numbers)) < len(numbers):
        accepted = (
            f"other values, as {', '.join(map(str, config.values))} are {', '.join(map(str, numbers))} of the run's rounds"
        )
        raise ValueError(f"values: got {config.values} with vary={config.vary}, accepted: {accepted}")
    with naming("data"):
        assignments = [split.draw(split.training_of(own.dataset), own.settings.data, own.settings.seed) for own in plans]
    return Drawn(config, runs, plans, assignments)


def assembled(drawn: Drawn, layout: Layout | None = None, widths: Mapping[str, int] | None = None) -> Experiment:
    """The experiment of runs whose splits are drawn; the last part of `build`, with its errors."""
    config, runs, plans, assignments = drawn
    by_class = config.server.static_norm.order == "class" and config.server.static_norm.data == "all"
    pairs = zip(plans, assignments, strict=True)
    data = [split.tables(own.dataset, assignment, pooled_by_class=by_class) for own, assignment in pairs]
    data = widened(data, widths) if len(data) > 1 or widths else data
    counts = np.concatenate([np.stack([own.labeled.count, own.unlabeled.count], axis=1) for own in data])
    plan = plans[0]
    plan = plan._replace(options=plan.options.for_clients(counts, plan.settings.client.batch_size))
    for own in data:
        sizes.check_trainings(plan.settings, plan.options, own)
    layout = layout or resolve(plan.settings, plan.method().requires, len(runs))
    return _assemble(config, runs, plan._replace(conv=layout.conv), data, layout)


def _assemble(settings: Settings, runs: tuple[Run, ...], plan: Plan, data: list[FederatedData], layout: Layout) -> Experiment:
    """The experiment of runs whose data are split."""
    is_traced = bool(settings.vary) and not settings.vary.startswith("data.")  # programs do not read a split's numbers
    system = _system(settings) if plan.method().requires.clients else None
    tables = [{name: getattr(own, name) for name in TABLES} for own in data]
    if system is not None:
        for own, run in zip(tables, runs, strict=True):
            own["profiles"] = profiles_of(run.settings)
    problem = Problem(
        method=lambda number: plan.varied(settings.vary, number).method(),
        train=data[0].train,
        test=data[0].test,
        tables=tuple(tables),
        seeds=tuple(run.settings.seed for run in runs),
        numbers=tuple(run.number for run in runs if run.number is not None) if is_traced else None,
        spec=plan.spec._replace(client_rows=data[0].unlabeled.index.shape[1]),
        rounds=settings.rounds,
        on_host=settings.execution.data != "device",
        on_disk=settings.execution.data == "disk",
        system=system,
        stop=settings.client.on_nonfinite == "stop",
    )
    task = plan.task()
    with naming("model"):
        weights = jax.eval_shape(lambda key: task.init(key, plan.spec.image_shape), jax.random.key(0))
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights.params))
    sizes.check_states(plan.settings, problem.first_method, problem.spec, num_params, len(runs))
    known = facts(plan.settings, problem.first_method.requires, has_batch_norm=bool(weights.stats))
    unread = unread_by(plan.settings, known)
    if settings.vary in unread:
        raise ValueError(f"vary: got {settings.vary!r}, which this run does not read, accepted: with {unread[settings.vary]}")
    shape = plan.stored_shape
    experiment = Experiment(
        *(runs, problem, layout, num_params, plan.views, shape, plan.dataset.classes, plan.dataset),
        tiny_method=lambda number: plan.varied(settings.vary, number).with_tiny_network().method(),
        unread=unread,
    )
    try:
        if is_traced:  # Python code that reads the number fails now
            experiment.simulator.trace()
    except (ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError):
        got = f"got {settings.vary!r}, by which the program of method.name={settings.method['name']} is chosen"
        accepted = "a number that one program can have many values of; run one after another instead"
        raise ValueError(f"vary: {got}, accepted: {accepted}") from None
    return experiment


@contextlib.contextmanager
def naming(group: str) -> Iterator[None]:
    """Within it, errors name their config key, in one line: `num_labels=3 ...` becomes `data.num_labels=3 ...`."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        line = one_line(error)
        prefix = "" if line.startswith(f"{group}.") else f"{group}." if re.match(r"\w+=", line) else f"{group}: "
        raise kind(prefix + line) from error


def load_dataset(settings: Settings, *, reads: bool = True) -> sources.Dataset:
    """The dataset that the settings name, or, unless it `reads`, one that stands for it, where its size is known.

    Raises ValueError or FileNotFoundError where it cannot be read.
    """
    data = settings.data
    folder, path, resplit = data.data_dir or None, data.path or None, data.resplit or None
    options: dict[str, Any] = {"resplit": resplit, "renumber_labels": data.renumber_labels, "seed": settings.seed}
    with naming("data"):
        found = stand_in.load(data.name, folder, resplit) if not (reads or path) else None
        return found or sources.load(data.name, data_dir=folder, path=path, download=data.download and reads, **options)


def _check_scenario(settings: Settings, method: Method) -> None:
    """Raises ValueError where the labels are not where the method reads them."""
    data, name, requires = settings.data, settings.method["name"], method.requires
    if data.labels_at not in requires.labels_at:
        accepted = " or ".join(requires.labels_at)
        raise ValueError(f"data.labels_at: got {data.labels_at} with method.name={name}, accepted: {accepted}")
    if data.reveal_labels and "clients" not in requires.labels_at:
        raise ValueError(f"data.reveal_labels: got True with method.name={name}, whose clients read no labels, accepted: False")
    if (every := settings.diagnostics.clients_every) and not requires.clients:
        raise ValueError(f"diagnostics.clients_every: got {every} with method.name={name}, which has no clients, accepted: 0")
    when = settings.server.training.when
    if when not in requires.server_training:
        raise ValueError(f"server.training.when: got {when} with method.name={name}, accepted: after")
    if data.labels_at == "clients" and when != "after":
        raise ValueError(f"server.training.when: got {when} with data.labels_at=clients, accepted: after")
    norm_data = settings.server.static_norm.data
    if data.labels_at == "clients" and settings.model["norm"] == "static" and norm_data != "cohort":
        raise ValueError(f"server.static_norm.data: got {norm_data} with data.labels_at=clients, accepted: cohort")


def _system(settings: Settings) -> System | None:
    """The rules of uneven clients; None where nothing makes them uneven."""
    given = settings.system
    if given.participation == "uniform" and not (given.trace or given.dropout or given.is_timed):
        return None
    own = {key: getattr(given, key) for key in ("participation", "round_s", "period_s", "dropout")}
    shortens = given.deadline_s > 0 and given.late == "shortened"
    return System(**own, deadline_s=given.deadline_s or math.inf, is_timed=given.is_timed, shortens=shortens)


def profiles_of(settings: Settings) -> profiles.Profiles:
    """The clients' devices, by the seed or from files; ValueError where these cannot be read."""
    given, seed, num_clients = settings.system, settings.seed, settings.data.num_clients
    medians = given.speed, given.up, given.down
    with naming("system.file"):
        rates = profiles.read_rates(given.file, num_clients) if given.file else None
    rates = rates or profiles.lognormal(seed, num_clients, medians, given.speed_sigma, given.bandwidth_sigma)
    if not given.trace:
        return profiles.Profiles(*rates)
    if given.trace == "diurnal":
        times = {"window": given.window_s, "spread": given.spread_s, "period": given.period_s}
        return profiles.Profiles(*rates, profiles.diurnal(seed, num_clients, **times))
    with naming("system.trace"):
        return profiles.Profiles(*rates, profiles.read_windows(given.trace, num_clients, given.period_s))


def _server(settings: Settings) -> Server:
    server, static_norm = settings.server, StaticNorm(**dict(settings.server.static_norm))
    training = _training(settings, server.training)
    return Server(server_optimizer(server.optimizer), training, server.training.pretrain, static_norm, server.training.when)


def server_optimizer(given: ServerOptimizerSettings) -> optax.GradientTransformation:
    """The optimizer whose gradient is the averaged client update (Reddi et al. 2021, Algorithm 2, with bias correction)."""
    if given.name == "sgd":
        return optax.sgd(given.learning_rate, momentum=given.momentum if is_on(given.momentum) else None)
    if given.name == "adagrad":  # optax adds its eps to the sum of squares, and not to the root of it
        return optax.adagrad(given.learning_rate, initial_accumulator_value=0.0, eps=given.eps**2)
    kind = {"adam": optax.adam, "yogi": optax.yogi}[given.name]
    return kind(given.learning_rate, b1=given.b1, b2=given.b2, eps=given.eps)


def _training(settings: Settings, group: ClientSettings | ServerTrainingSettings) -> Training:
    return Training(
        optimizer=_transformation(group.optimizer),
        learning_rate=_schedule(group.optimizer, settings.rounds),
        batch_size=group.batch_size,
        epochs=group.epochs,
        steps=group.steps,
        persistent=group.optimizer.persistent,
    )


def _transformation(optimizer: OptimizerSettings) -> optax.GradientTransformation:
    clip_norm, weight_decay, decay = optimizer.clip_norm, optimizer.weight_decay, optimizer.decay
    momentum, nesterov = optimizer.momentum, optimizer.nesterov
    if optimizer.name == "lars":
        return optax.chain(clipping(clip_norm), lars(momentum=momentum, nesterov=nesterov, weight_decay=weight_decay))
    if optimizer.name == "adam":
        return optax.chain(clipping(clip_norm), decayed_weights(weight_decay, decay), optax.scale_by_adam())
    return torch_sgd(momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, decay=decay, clip_norm=clip_norm)


def _schedule(optimizer: OptimizerSettings, rounds: int) -> Callable[[jax.Array], jax.Array]:
    """The learning rate at time t in [0, T], T being the number of rounds.

    Cosine: lr/2 (1 + cos(pi t / T)) ((FL)^2, Table 4). Cosine_7_16: lr cos(7/16 pi t / T) (Sohn et al. 2020, Section 2.4).
    """
    rate = optimizer.learning_rate
    if optimizer.schedule == "constant":
        return lambda _: jnp.float32(rate)
    if optimizer.schedule == "cosine_7_16":
        return lambda t: rate * jnp.cos(7 / 16 * jnp.pi * t.astype(jnp.float32) / rounds)
    return lambda t: rate / 2 * (1 + jnp.cos(jnp.pi * t.astype(jnp.float32) / rounds))

"""The settings of an experiment, as frozen dataclasses: every key, its default, its meaning and what it accepts.

`configs/common.py` makes the locked command-line config from these defaults, and `Settings.from_dict` reads it back, so that
each key stands in one place. A wrong value raises ValueError with one line that names the key, before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_origin, get_type_hints

from fedjax_ssl.data.partition import PARTITIONS
from fedjax_ssl.data.presets import LABELED_VIEWS, STRONG_VIEWS, WEAK_VIEWS
from fedjax_ssl.data.split import LABEL_SELECTIONS, LABELS_AT, Split
from fedjax_ssl.local.optimizers import DECAYED
from fedjax_ssl.local.server import SBN_DATA, SBN_WEIGHTING, TRAINING
from fedjax_ssl.local.task import NORM_DEFAULTS, NORMS
from fedjax_ssl.methods import METHODS, PROX_MU, options_class
from fedjax_ssl.models.layers import DTYPES
from fedjax_ssl.simulation.execution import PRECISIONS, STRATEGIES

SCHEDULES = ("constant", "cosine", "cosine_7_16")


def _one_of(key: str, got: Any, accepted: Iterable[Any]) -> None:
    accepted = list(accepted)
    if got not in accepted:
        near = difflib.get_close_matches(str(got), [str(a) for a in accepted], 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{key}: got {got!r}, accepted: {', '.join(map(str, accepted))}{hint}")


def _short(values: tuple[float, ...]) -> str:
    return f"({', '.join(map(str, values[:5]))}{', ...' if len(values) > 5 else ''})"


def _at_least(key: str, got: float, least: float) -> None:
    if not got >= least:
        raise ValueError(f"{key}: got {got}, accepted: a number >= {least}")


def _above(key: str, got: float, bound: float) -> None:
    if not got > bound:
        raise ValueError(f"{key}: got {got}, accepted: a number > {bound}")


def _within_unit(key: str, got: float) -> None:
    if not 0 <= got < 1:
        raise ValueError(f"{key}: got {got}, accepted: a number in [0, 1)")


def _fraction(key: str, got: Any) -> None:
    if not isinstance(got, int | float) or isinstance(got, bool) or not 0 < got <= 1:
        raise ValueError(f"{key}: got {got!r}, accepted: a number in (0, 1]")


def _normalization(mean: tuple[Any, ...], std: tuple[Any, ...]) -> None:
    for key, values, accepted in (("mean", mean, "numbers in [0, 1]"), ("std", std, "numbers > 0")):
        for value in values:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and (0 <= value <= 1 if key == "mean" else value > 0)):
                raise ValueError(f"data.{key}: got {values}, accepted: {accepted}, for images scaled to [0, 1]")
    if len(mean) != len(std):
        raise ValueError(f"data.mean, data.std: got {len(mean)} and {len(std)} values, accepted: as many of both")


@dataclasses.dataclass(frozen=True)
class DataSettings(Split):
    """The dataset, its split (whose keys are `Split`'s) and its views.

    Attributes:
        name: a name that `fedjax_ssl.data.sources.load` takes.
        data_dir: the TFDS folder; empty: TFDS's own.
        path: the file or folder, for datasets that TFDS does not have.
        resplit: shares of train, validation and test, to merge what is stored and split it anew; empty: as stored.
        mean: per channel, or one for all, of images scaled to [0, 1], to normalize with; empty: the dataset's own.
        std: likewise.
        weak: the weak view, a key of `fedjax_ssl.data.presets.WEAK_VIEWS`, or `default`: the dataset's own.
        strong: the strong view's recipe on top of that, one of STRONG_VIEWS there, or `default`.
        labeled: the view of labeled examples in training, one of LABELED_VIEWS there, or `default`: the weak view.
        image_size: side in pixels that smaller images are zero-padded to, all round; 0: as stored, but for networks that are
            made for a size (`fedjax_ssl.models.IMAGE_SIZE`), which get that.
    """

    name: str = "cifar10"
    data_dir: str = ""
    path: str = ""
    resplit: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    weak: str = "default"
    strong: str = "default"
    labeled: str = "default"
    image_size: int = 0

    def __post_init__(self) -> None:
        self._check_split()
        _one_of("data.weak", self.weak, ("default", *WEAK_VIEWS))
        _one_of("data.strong", self.strong, ("default", *STRONG_VIEWS))
        _one_of("data.labeled", self.labeled, ("default", *LABELED_VIEWS))
        _normalization(self.mean, self.std)
        _at_least("data.image_size", self.image_size, 0)

    def _check_split(self) -> None:
        _one_of("data.labels_at", self.labels_at, LABELS_AT)
        _one_of("data.label_selection", self.label_selection, LABEL_SELECTIONS)
        _one_of("data.partition", self.partition, PARTITIONS)
        for name in ("num_clients", "num_labels", "shards_per_client", "classes_per_client"):
            _at_least(f"data.{name}", getattr(self, name), 1)
        _at_least("data.min_size", self.min_size, 0)
        _above("data.alpha", self.alpha, 0)
        apart = {key: got for key in ("labeled_partition", "unlabeled_partition") if (got := getattr(self, key))}
        for key, got in apart.items():
            _one_of(f"data.{key}", got, PARTITIONS)
            if self.labels_at != "clients":
                raise ValueError(
                    f"data.{key}: got {got!r} with data.labels_at={self.labels_at}, accepted: '', or labels_at=clients"
                )
        fractions = self.labeled_fraction
        per_client = self.labels_at == "clients" and not apart
        if fractions and len(fractions) not in (1, self.num_clients if per_client else 1):
            accepted = f"one number, or {self.num_clients}, one per client" if per_client else "one number"
            raise ValueError(f"data.labeled_fraction: got {len(fractions)} numbers, accepted: {accepted}")
        if fractions and not (all(0 <= f <= 1 for f in fractions) and sum(fractions) > 0):
            raise ValueError(f"data.labeled_fraction: got {_short(fractions)}, accepted: numbers in [0, 1], not all 0")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer of local steps.

    Attributes:
        name: `sgd` (PyTorch's form), `adam`, or `lars` (SimCLR's form; it decays and scales kernels alone).
        learning_rate: its value in round 1.
        schedule: in round t of R `constant`, `cosine`: lr/2 (1 + cos(pi (t - 1) / R)), or `cosine_7_16`: lr cos(7/16 pi
            (t - 1) / R), FixMatch's. Constant within a round; but methods on pooled data evaluate it at every step, of which S
            make a round: t - 1 grows by 1/S then.
        momentum: SGD's and LARS' momentum, in Nesterov's form where `nesterov`.
        nesterov: see `momentum`.
        weight_decay: times the parameters, added to the gradient.
        decay: what it covers: `all` parameters, or `kernels` alone: neither biases nor batch norm; LARS decays kernels alone.
        clip_norm: largest global norm of the gradient, before weight decay; 0: no clipping.
        persistent: whether the state (momentum) survives from one training of its holder to the next.
    """

    name: str = "sgd"
    learning_rate: float = 0.03
    schedule: str = "cosine"
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    decay: str = "all"
    clip_norm: float = 0.0
    persistent: bool = True

    def check(self, key: str) -> None:
        """Raises ValueError for a value out of range, naming it under `key`."""
        _one_of(f"{key}.name", self.name, ("sgd", "adam", "lars"))
        _one_of(f"{key}.schedule", self.schedule, SCHEDULES)
        _one_of(f"{key}.decay", self.decay, DECAYED)
        _above(f"{key}.learning_rate", self.learning_rate, 0)
        _within_unit(f"{key}.momentum", self.momentum)
        _at_least(f"{key}.weight_decay", self.weight_decay, 0)
        _at_least(f"{key}.clip_norm", self.clip_norm, 0)


def _epochs_or_steps(key: str, epochs: int, steps: int) -> None:
    _at_least(f"{key}.epochs", epochs, 0)
    _at_least(f"{key}.steps", steps, 0)
    if (epochs > 0) == (steps > 0):
        raise ValueError(f"{key}.epochs, {key}.steps: got {epochs} and {steps}, accepted: one positive, the other 0")


@dataclasses.dataclass(frozen=True)
class ClientSettings:
    """Local training.

    Attributes:
        optimizer: see OptimizerSettings.
        batch_size: B.
        epochs: local epochs, or 0.
        steps: local steps, or 0.
    """

    optimizer: OptimizerSettings = OptimizerSettings()
    batch_size: int = 32
    epochs: int = 5
    steps: int = 0

    def __post_init__(self) -> None:
        self.optimizer.check("client.optimizer")
        _at_least("client.batch_size", self.batch_size, 1)
        _epochs_or_steps("client", self.epochs, self.steps)


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """The server's aggregation step, supervised training (where it has labels) and batch-norm statistics.

    Attributes:
        momentum: of the aggregated update.
        learning_rate: of the aggregated update.
        optimizer: of the supervised training, see OptimizerSettings.
        batch_size: its batch size.
        epochs: its epochs per round, or 0.
        steps: its steps per round, or 0.
        pretrain: how many such trainings before round 1.
        training: `after` the aggregation (fine-tuning), or in `parallel` with the clients, as one half of the average.
        sbn_data: static batch-norm statistics over labeled data and the `cohort` of the round to come, or `all` unlabeled
            data, or `labeled` data alone.
        sbn_weighting: a batch of them counts by its `examples`, or all `batches` alike.
        sbn_labeled_batch_size: their batch size on labeled data.
        sbn_unlabeled_batch_size: their batch size on unlabeled data.
    """

    momentum: float = 0.5
    learning_rate: float = 1.0
    optimizer: OptimizerSettings = OptimizerSettings()
    batch_size: int = 10
    epochs: int = 5
    steps: int = 0
    pretrain: int = 1
    training: str = "after"
    sbn_data: str = "cohort"
    sbn_weighting: str = "examples"
    sbn_labeled_batch_size: int = 250
    sbn_unlabeled_batch_size: int = 250

    def __post_init__(self) -> None:
        self.optimizer.check("server.optimizer")
        _within_unit("server.momentum", self.momentum)
        _above("server.learning_rate", self.learning_rate, 0)
        _at_least("server.pretrain", self.pretrain, 0)
        _one_of("server.training", self.training, TRAINING)
        _one_of("server.sbn_data", self.sbn_data, SBN_DATA)
        _one_of("server.sbn_weighting", self.sbn_weighting, SBN_WEIGHTING)
        for name in ("batch_size", "sbn_labeled_batch_size", "sbn_unlabeled_batch_size"):
            _at_least(f"server.{name}", getattr(self, name), 1)
        _epochs_or_steps("server", self.epochs, self.steps)


@dataclasses.dataclass(frozen=True)
class ExecutionSettings:
    """How the work is laid out on devices.

    Attributes:
        strategy: `vmap`, `scan`, `chunked`, `sharded`, `separate` (a program of its own for each client, on each device), or
            `auto`: `sharded` over several devices, else `scan` on a CPU and `vmap` on an accelerator; a server that trains
            alone has one device unless `devices` asks for more.
        chunk_size: clients that run together, for `chunked` and `sharded`; 0: one on a CPU, else as many as a device has.
        conv: lowering of convolutions, a key of `fedjax_ssl.models.convolution.LOWERINGS`, or `auto` by platform and strategy.
        steps: local steps in a `loop`, or `unrolled`, each written out in the program (see `steps.repeat`); `auto` is a loop.
        compiler: options for XLA on a CPU, `default` or `lean` (see `simulator.compiler_options`); `auto` is the default.
        dtype: of computation, `float32` or `bfloat16`; parameters, statistics and losses are float32.
        precision: in which float32 matrices are multiplied, at least: `default`, the device's own (on recent NVIDIA GPUs
            TensorFloat-32, on TPUs one pass of bfloat16, on CPUs float32), `tensorfloat32` or `float32`.
        tune: whether the fastest of the layouts that are left open is measured before round 1, see `tuning`: `auto`, for runs
            of `launch.run` of 100 minutes or more (shorter ones may take what is kept of the same work); `always`; or `never`,
            for the same layout on all machines of a kind.
        devices: how many devices to shard over; 0: as few as run the cohort in the least number of turns. Results differ in
            rounding with their number. Each holds the training images and does the server's work. `launch.run` makes a device
            of each CPU core. Several runs share the devices; each has its clients on one, or, with `strategy=auto` and twice
            as many devices as runs, on several.
        batch_size: examples per forward-only pass (evaluation, pseudo-labels); 0: 250, and in an evaluation 25 on a CPU if the
            network has convolutions, or as many as `tune` finds to be the fastest (not with `model.norm=batch`, where an
            example is normalized by its batch). Static batch norm has batches of its own, `server.sbn_*_batch_size`, as its
            statistics depend on them.
        rounds_per_dispatch: how many rounds are one program's run, so that short rounds do not wait for the host in between;
            `rounds`, `eval_every` and `checkpoint_every` are multiples of it. Rounding differs from that of single rounds.
        data: where the training images and client states live: on the `device`, or on the `host` and fetched for each cohort.
    """

    strategy: str = "auto"
    chunk_size: int = 0
    conv: str = "auto"
    dtype: str = "float32"
    precision: str = "default"
    devices: int = 0
    batch_size: int = 0
    rounds_per_dispatch: int = 1
    data: str = "device"

    def __post_init__(self) -> None:
        _one_of("execution.strategy", self.strategy, ("auto", *STRATEGIES))
        _one_of("execution.conv", self.conv, ("auto", "xla", "cpu", "gpu"))
        _one_of("execution.dtype", self.dtype, DTYPES)
        _one_of("execution.precision", self.precision, PRECISIONS)
        _one_of("execution.data", self.data, ("device", "host"))
        _at_least("execution.chunk_size", self.chunk_size, 0)
        _at_least("execution.devices", self.devices, 0)
        _at_least("execution.batch_size", self.batch_size, 0)
        _at_least("execution.rounds_per_dispatch", self.rounds_per_dispatch, 1)
        if self.strategy == "chunked" and self.chunk_size == 0:
            raise ValueError("execution.chunk_size: got 0, accepted: a positive number where execution.strategy=chunked")


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of an experiment.

    Attributes:
        method: `name`, a key of METHODS, `prox_mu` (weight of FedProx's term; 0: none; its default for `fedprox` is .01), and
            the method's own options.
        model: `name`, a key of MODELS, `norm` and `norm_momentum` (see Task), and the model's own options.
        data: see DataSettings.
        client: see ClientSettings.
        server: see ServerSettings.
        execution: see ExecutionSettings.
        rounds: R.
        cohort_size: M, clients per round.
        seed: of everything random: the split, the initial weights, cohorts, batches and views.
        seeds: R, how many seeds are run as one program, from `seed` on; see `fedjax_ssl.experiment.runs`.
        vary: in place of several seeds, the dotted key of a number that differs from run to run; empty: none.
        values: its values, one per run.
        eval_every: rounds between evaluations on the test set; the last round is always evaluated.
        checkpoint_every: rounds between checkpoints; one is always saved at the end.
    """

    method: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"name": "fl2", "prox_mu": 0.0})
    model: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"name": "wide_resnet", **NORM_DEFAULTS})
    data: DataSettings = DataSettings()
    client: ClientSettings = ClientSettings()
    server: ServerSettings = ServerSettings()
    execution: ExecutionSettings = ExecutionSettings()
    rounds: int = 800
    cohort_size: int = 10
    seed: int = 0
    seeds: int = 1
    vary: str = ""
    values: tuple[float, ...] = ()
    eval_every: int = 10
    checkpoint_every: int = 10

    def __post_init__(self) -> None:
        _one_of("method.name", self.method.get("name"), METHODS)
        _one_of("model.norm", self.model.get("norm"), NORMS)
        _fraction("model.norm_momentum", self.model.get("norm_momentum"))
        for name in ("rounds", "eval_every", "checkpoint_every"):
            _at_least(name, getattr(self, name), 1)
            together = self.execution.rounds_per_dispatch
            if getattr(self, name) % together:
                got = getattr(self, name)
                raise ValueError(f"{name}: got {got} with execution.rounds_per_dispatch={together}, accepted: a multiple of it")
        _at_least("seed", self.seed, 0)
        _at_least("seeds", self.seeds, 1)
        if self.seeds > 1 and (self.vary or self.values):
            raise ValueError(f"seeds: got {self.seeds} with vary and values, accepted: 1, as all values have the same seed")
        _at_least("method.prox_mu", self.method.get("prox_mu", 0.0), 0)
        if not 1 <= self.cohort_size <= self.data.num_clients:
            raise ValueError(f"cohort_size: got {self.cohort_size}, accepted: 1 to data.num_clients = {self.data.num_clients}")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Settings:
        """Settings from nested mappings; missing keys keep their defaults, those within `method` and `model` too.

        Raises:
            ValueError: for an unknown key, a value of the wrong type or out of range.
        """
        defaults = cls()
        given = config.get("method", {})
        method = {**defaults.method, "prox_mu": PROX_MU.get(given.get("name"), 0.0), **given}
        model = {**defaults.model, **config.get("model", {})}
        return _parse(cls, {**config, "method": method, "model": model}, "")

    @property
    def is_several(self) -> bool:
        """Whether these settings are of several runs."""
        return self.seeds > 1 or bool(self.vary or self.values)

    def method_options(self) -> Any:
        """The method's own options, as its dataclass."""
        name = self.method["name"]
        own = {k: v for k, v in self.method.items() if k not in ("name", "prox_mu")}
        options = options_class(METHODS[name])
        known = [field.name for field in dataclasses.fields(options)]
        if strange := [key for key in own if key not in known and not difflib.get_close_matches(key, known, 1)]:
            raise ValueError(
                f"method.{strange[0]}: not a key of method.name={name}, accepted: {', '.join(known) or 'none'}; "
                f"start from a config of {name}, such as configs/digits.py:{name}"
            )
        return _parse(options, own, "method.")

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of plain values, for a file."""
        return dataclasses.asdict(self)


def _parse(cls: Any, config: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(cls)
    for key in config:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"accepted: {', '.join(hints)}"
            raise ValueError(f"{prefix}{key}: unknown key; {hint}")
    return cls(**{key: _convert(hints[key], value, f"{prefix}{key}") for key, value in config.items()})


def _convert(wanted: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(wanted):
        return _parse(wanted, value, f"{key}.")
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted in (str, int, float, bool):
        if type(value) is not wanted:
            raise ValueError(f"{key}: got {value!r}, accepted: {wanted.__name__}")
        return value
    if get_origin(wanted) is tuple:
        numbers = value if isinstance(value, list | tuple) else (value,)  # one number stands for a tuple of one
        return tuple(_convert(float, number, key) for number in numbers)
    return dict(value)

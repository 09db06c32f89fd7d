"""The settings of an experiment: every key with its default, its meaning and what it accepts.

A wrong key or value raises a ValueError that names the key.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import Field

from fedjax_ssl import models, moved
from fedjax_ssl.data.settings import Clients, DataSettings
from fedjax_ssl.experiment.evaluation import SCORES
from fedjax_ssl.experiment.layers import factors_of
from fedjax_ssl.experiment.system_settings import PrivacySettings, SystemSettings
from fedjax_ssl.experiment.training_settings import (
    BATCH_NORM,
    CLIENTS,
    SOME_CLIENTS,
    ClientSettings,
    ServerSettings,
    ServerTrainingSettings,
)
from fedjax_ssl.files import CHECKSUM
from fedjax_ssl.methods import METHODS, PROX_MU, options_class
from fedjax_ssl.options import (
    MANY,
    SET,
    Count,
    Is,
    Known,
    Model,
    Numbers,
    Options,
    Positive,
    ReadWhere,
    Size,
    Weight,
    fields_of,
    nearest,
    parse,
    plural,
)

Seed = Annotated[int, Field(ge=0, le=MANY)]
TRACKERS = ("wandb", "mlflow")
MOST_RUNS = 1_000  # in one program

CLIENT_DATA = {"run.has_client_data": SET}
VALIDATED = Is("{}=labels, pool or own", lambda word: word != "none")


class ExecutionSettings(Model):
    """How the work is laid out on devices. It changes time and memory; results change only by rounding."""

    strategy: Literal["auto", "vmap", "scan", "chunked", "sharded"] = Field(
        default="auto",
        description="How the clients of a round are computed: all at once (`vmap`), one after another (`scan`), in chunks of "
        "`chunk_size` (`chunked`), or shared by several devices (`sharded`). `auto` is `sharded` over several devices, and "
        "otherwise `scan` on a CPU and `vmap` on an accelerator.",
    )
    chunk_size: Annotated[Count, ReadWhere(CLIENTS, strategy=("auto", "chunked", "sharded"))] = Field(
        default=0,
        description="Number of clients that a device computes at once, where they are computed in chunks. 0 takes as many as "
        "fit into memory, but one on a CPU unless `strategy` is `chunked`.",
    )
    conv: Literal["auto", "xla", "cpu", "gpu", "onednn"] = Field(
        default="auto",
        description="How convolutions are computed: by XLA's own operation, or in the form that is fast on a CPU or on a GPU "
        "when each client has its own kernels; `onednn` is for bfloat16 on a CPU with units that multiply it (AMX). `auto` "
        "chooses by the platform.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Number format in which networks compute activations. Parameters and logits are always float32.",
    )
    precision: Literal["default", "tensorfloat32", "float32"] = Field(
        default="default",
        description="Lowest precision in which float32 matrices are multiplied. `default` is the device's own: TensorFloat-32 "
        "on recent NVIDIA GPUs, one pass of bfloat16 on TPUs, and float32 on CPUs.",
    )
    devices: Annotated[int, Field(ge=0, le=100_000)] = Field(
        default=0,
        description="Number of devices that share the work; `launch.run` makes a device of each CPU core. 0 takes the smallest "
        "number of devices with which a round takes no longer than with all of them.",
    )
    batch_size: Size = Field(
        default=0,
        description="Number of examples in each forward pass without training, as in evaluation. 0 takes 250, or, on a CPU, 25 "
        "for networks with convolutions unless `model.norm` is `batch`.",
    )
    rounds_per_dispatch: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1,
        description="Number of rounds that one call of the compiled program runs. More than 1 saves time where rounds take "
        "only milliseconds.",
    )
    data: Literal["device", "host", "disk"] = Field(
        default="device",
        description="Where the training images and the clients' states are kept: in the memory of the `device`, in that of the "
        "`host`, or, with `disk`, the images on the host and the states in a file in TMPDIR. The last two send a round only "
        "what its clients need.",
    )


class DiagnosticsSettings(Model):
    """What is recorded in addition to the metrics. It changes no result."""

    client_eval_every: Annotated[
        Count, ReadWhere({"data.client_test_fraction": SET}), ReadWhere({"data.client_test": ("own",)})
    ] = Field(
        default=0,
        description="Number of rounds between two evaluations of the global model on each client's own test examples "
        "(`data.client_test`). The metrics are `eval/client_accuracy`, the mean over clients, "
        "`eval/client_accuracy_sd`, their standard deviation, and `eval/client_accuracy_worst`, the mean of the worst tenth. 0 "
        "evaluates none.",
    )

    clients_every: Count = Field(
        default=0,
        description="Number of rounds between two records of what each client of a round did, which are written to the folder "
        "`clients` of the run. 0 records none. A recorded round keeps the updates of all its clients in memory.",
    )


class MethodSettings(Options):
    """What every method has in addition to its own options."""

    name: Annotated[str, Known(METHODS)] = Field(
        default="fl2", description="The federated learning method; `launch.explain methods` lists all of them."
    )
    prox_mu: Annotated[Weight, ReadWhere(CLIENTS)] = Field(
        default_factory=lambda known: PROX_MU.get(known.get("name", ""), 0.0),
        description="Weight mu of FedProx's term mu/2 ||w - w_global||^2, which is added to every client's loss and holds it "
        "near the global model. 0 leaves the term out, and 0.001 to 1 is usual.",
    )


class ModelSettings(Options):
    """What every network has in addition to its own options."""

    name: Annotated[str, Known(models.MODELS)] = Field(
        default="wide_resnet", description="The network that is trained; `launch.explain networks` lists all of them."
    )
    init: str = Field(
        default="",
        description="Path of the weights that the run starts from: a file `.npz` or `.safetensors` that `save_model` wrote, a "
        "`.safetensors` file of a torch network (`resnet` with torchvision's names of layers, `wide_resnet` with those of USB, "
        "the benchmark of semi-supervised learning), or, in commands, a run's folder. The first and the last layer begin at "
        "random where their sizes differ from the file's. Empty begins at random everywhere.",
    )
    trainable: str = Field(
        default="",
        description="A regular expression, such as `Dense` for the classifier or `Dense|BatchNorm`: the run trains the "
        "parameters in whose paths (`Block_3/Conv_0/kernel`) it is found. The others stay as `model.init` has them: they are "
        "in no gradient, message, optimizer or client's state. Empty trains all. To fix parameters at the clients or "
        "the server alone, or random ones, give them the factor 0 in that optimizer's `layers`.",
    )
    norm: Annotated[Literal["static", "running", "batch"], ReadWhere(BATCH_NORM)] = Field(
        default="static",
        description="Which statistics batch normalization evaluates with: `static` ones, which the server collects anew after "
        "each round (sBN), `running` averages, which are updated in training, or those of the `batch` itself. Training always "
        "normalizes by the batch.",
    )
    norm_momentum: Annotated[float, Field(gt=0, le=1), ReadWhere(BATCH_NORM, norm=("running",))] = Field(
        default=0.1, description="Share of each new batch in the running statistics of batch normalization; 0.1 is usual."
    )


GroupT = TypeVar("GroupT", bound=MethodSettings | ModelSettings)


def typed(kind: type[GroupT], values: Mapping[str, Any]) -> GroupT:
    """The group `method` or `model` from its keys, with the options of the method or network that it names.

    It is an instance of `kind` and of the class of these options. ValueError for an unknown name or key, or a wrong value.
    """
    group, table = ("method", METHODS) if kind is MethodSettings else ("model", models.MODELS)
    name = values.get("name", kind.model_fields["name"].default)
    if not isinstance(name, str) or name not in table:
        parse(kind, {"name": name}, f"{group}.")  # which says what is accepted
    own = options_class(METHODS[name]) if group == "method" else models.MODELS[name].options
    if group == "method":
        _check_options(name, [key for key in values if key not in kind.model_fields], [key for key, _ in fields_of(own)])
    return parse(class_of(kind, own), values, f"{group}.")  # type: ignore[arg-type]


def _check_options(method: str, keys: Iterable[object], known: Sequence[str]) -> None:
    """Raises ValueError for a key that is no option of the method, nor like one: it may be that of another method."""
    for key in keys:
        if said := moved.line(f"method.{key}", [f"method.{one}" for one in known]):
            raise ValueError(said)
        if isinstance(key, str) and key not in known and not nearest(key, known):
            accepted = f"{', '.join(known) or 'none'}; start from a config of {method}, such as configs/digits.py:{method}"
            raise ValueError(f"method.{key}: not a key of method.name={method}, accepted: {accepted}")


@functools.cache
def class_of(kind: type[GroupT], own: type[Options]) -> type[GroupT]:
    """The class of a group that also has the options of `own`; fields of `kind` replace options of the same name."""
    shared: dict[str, Any] = {key: (kind.model_fields[key].annotation, kind.model_fields[key]) for key in kind.model_fields}
    bases: Any = (own, kind)
    alike = {key: shared[key] for key in shared if key in own.model_fields}
    return pydantic.create_model(own.__name__, __base__=bases, **alike)


def own_options(group: MethodSettings | ModelSettings) -> dict[str, Any]:
    """The options of a method or a network, without the fields that every method or every network has."""
    kind = MethodSettings if isinstance(group, MethodSettings) else ModelSettings
    return {key: value for key, value in group if key not in kind.model_fields}


class Settings(Model):
    """All settings of an experiment."""

    method: pydantic.SerializeAsAny[MethodSettings] = Field(
        default_factory=lambda: typed(MethodSettings, {}), description="The federated learning method, with its own options."
    )
    model: pydantic.SerializeAsAny[ModelSettings] = Field(
        default_factory=lambda: typed(ModelSettings, {}), description="The network that is trained, with its own options."
    )
    data: DataSettings = Field(
        default=DataSettings(), description="The dataset, how it is split between server and clients, and how it is augmented."
    )
    client: Annotated[ClientSettings, ReadWhere(CLIENTS)] = Field(
        default=ClientSettings(), description="How each client of a round trains on its own data."
    )
    server: ServerSettings = Field(
        default=ServerSettings(), description="What the server does with the clients' updates and with its own labels."
    )
    system: Annotated[SystemSettings, ReadWhere(CLIENTS)] = Field(
        default=SystemSettings(),
        description="Clients that are slow, miss deadlines, cannot be reached, drop out or send wrong updates.",
    )
    privacy: Annotated[PrivacySettings, ReadWhere(CLIENTS)] = Field(
        default=PrivacySettings(), description="User-level differential privacy of the global model."
    )
    execution: ExecutionSettings = Field(
        default=ExecutionSettings(),
        description="How the work is laid out on devices: it changes time and memory; results change only by rounding.",
    )
    diagnostics: DiagnosticsSettings = Field(
        default=DiagnosticsSettings(), description="What is recorded of each client in addition to the metrics."
    )
    rounds: Positive = Field(default=800, description="Number of federated rounds that the run has in all.")
    cohort_size: Annotated[Clients, ReadWhere(CLIENT_DATA)] = Field(
        default=10, description="Number M of clients that are drawn for each round, at most `data.num_clients`."
    )
    labeled_cohort: Annotated[Count, SOME_CLIENTS] = Field(
        default=0,
        description="How many of the clients of each round have labels, with `data.labels_at=some_clients`; the others of "
        "the round have none. Both kinds are drawn uniformly. 0 draws uniformly among all clients.",
    )
    seed: Seed = Field(
        default=0,
        description="Seed of everything random in the run: the split, the initial weights, the clients of each round, batches "
        "and augmentations.",
    )
    seeds: Annotated[int, Field(ge=1, le=MOST_RUNS)] = Field(
        default=1,
        description="Number of runs that are computed together with different seeds: `seed`, `seed` + 1, and so on.",
    )
    vary: str = Field(
        default="",
        description="Dotted key of a number that differs between runs that are computed together, such as `method.prox_mu`; "
        "empty where none does.",
    )
    values: Numbers = Field(
        default=(), description="Values of the number that `vary` names: there is one run for each value and seed."
    )
    eval_every: Positive = Field(
        default=10, description="Number of rounds between two evaluations on the test data. The last round is always evaluated."
    )
    keep_best: Annotated[Literal["", "val_accuracy", "val_loss"], ReadWhere({"data.validation": VALIDATED})] = Field(
        default="",
        description="What decides which evaluation is the best: the accuracy (`val_accuracy`) or the loss (`val_loss`) on the "
        "validation examples, which `data.validation` takes out. The state of the best round is kept in the run's folder, "
        "beside the newest ones. Empty keeps none.",
    )
    patience: Annotated[Count, ReadWhere(keep_best=SET)] = Field(
        default=0,
        description="Number of evaluations in a row without a better value of `keep_best` after which a run ends early. 0 runs "
        "all rounds, and 5 to 20 is usual.",
    )
    eval_metrics: str = Field(
        default="",
        description="What each evaluation computes on the test data in addition to accuracy and loss: some of "
        f"{', '.join(f'`{name}`' for name in SCORES)}, separated by commas. They are logged as `eval/NAME`, except "
        "`top5`, which is logged as `eval/top5_accuracy`. For this the logits of all test examples are sent to the host.",
    )
    log_to: str = Field(
        default="",
        description="Where metrics go in addition to the run's folder, which always has them as JSON lines and for "
        "TensorBoard: `wandb`, `mlflow`, or both, separated by a comma.",
    )
    checkpoint_every: Positive = Field(
        default=10,
        description="Number of rounds between two checkpoints. A run that was stopped continues from its last checkpoint. One "
        "is always saved at the end.",
    )

    @pydantic.field_validator("method", "model", mode="before")
    @classmethod
    def _as_typed(cls, group: object, info: pydantic.ValidationInfo) -> object:
        """The group in the class that its name asks for."""
        if not isinstance(group, Mapping):
            return group
        return typed(MethodSettings, group) if info.field_name == "method" else typed(ModelSettings, group)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        for group, training in self.trainings.items():
            factors = factors_of(f"{group}.optimizer.layers", training.optimizer.layers)
            if group == "client" and self.client.compression != "none" and any(factor == 0 for _, factor in factors):
                got = f"got {self.client.compression} with a factor 0 in client.optimizer.layers"
                raise ValueError(f"client.compression: {got}, accepted: none, or model.trainable for what is not trained")
        if not {*self.scores} <= {*SCORES}:
            accepted = f"{', '.join(SCORES)}, separated by commas"
            raise ValueError(f"eval_metrics: got {self.eval_metrics!r}, accepted: {accepted}")
        names = [name.strip() for name in self.log_to.split(",") if name.strip()]
        if not {*names} <= {*TRACKERS}:
            raise ValueError(f"log_to: got {self.log_to!r}, accepted: {', '.join(TRACKERS)}, separated by commas")
        if (runs := self.seeds * max(1, len(self.values))) > MOST_RUNS:
            raise ValueError(
                f"values: got {len(self.values)} for {plural(self.seeds, 'seed')}, {runs} runs, accepted: {MOST_RUNS} runs"
            )
        if (last := self.seed + self.seeds - 1) > MANY:
            raise ValueError(f"seed: got {self.seed} with seeds={self.seeds}, whose last is {last}, accepted: at most {MANY}")
        if self.keep_best and self.data.validation == "none":
            accepted = "'', or a data.validation, such as pool"
            raise ValueError(f"keep_best: got {self.keep_best} with data.validation=none, accepted: {accepted}")
        if self.labeled_cohort and self.data.labels_at == "some_clients":
            if (how := self.system.participation) != "uniform":
                raise ValueError(f"labeled_cohort: got {self.labeled_cohort} with system.participation={how}, accepted: 0")
            with_labels = int(sum(self.data.fractions))
            least, most = max(0, self.cohort_size - self.data.num_clients + with_labels), min(self.cohort_size, with_labels)
            if not max(1, least) <= self.labeled_cohort <= most:
                got = f"got {self.labeled_cohort} of cohort_size={self.cohort_size}, where {with_labels} clients have labels"
                raise ValueError(f"labeled_cohort: {got}, accepted: 0, or {max(1, least)} to {most}")
        if self.client.unlabeled_epochs and not self.client.epochs:
            raise ValueError(f"client.unlabeled_epochs: got {self.client.unlabeled_epochs} with client.steps, accepted: 0")
        if self.patience and not self.keep_best:
            raise ValueError(f"patience: got {self.patience} with keep_best='', accepted: 0, or keep_best=val_accuracy")
        if self.keep_best and self.execution.data == "disk":
            raise ValueError(f"keep_best: got {self.keep_best} with execution.data=disk, accepted: '', or data=host")
        together = self.execution.rounds_per_dispatch
        counts = {name: getattr(self, name) for name in ("rounds", "eval_every", "checkpoint_every")}
        for name, got in (counts | {"diagnostics.client_eval_every": self.diagnostics.client_eval_every}).items():
            if got % together:
                raise ValueError(f"{name}: got {got} with execution.rounds_per_dispatch={together}, accepted: a multiple of it")
        if self.diagnostics.client_eval_every and not self.data.tests_clients:
            accepted = "0, or a data.client_test_fraction, such as 0.2, or data.client_test=own"
            got = f"got {self.diagnostics.client_eval_every} without examples to test clients on"
            raise ValueError(f"diagnostics.client_eval_every: {got}, accepted: {accepted}")
        if (every := self.diagnostics.clients_every) and together > 1:
            accepted = "0, or execution.rounds_per_dispatch=1"
            shown = f"got {every} with execution.rounds_per_dispatch={together}"
            raise ValueError(f"diagnostics.clients_every: {shown}, accepted: {accepted}")
        return self

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Settings from nested mappings; missing keys have their defaults, unknown keys and wrong values raise ValueError."""
        given = {key: value for key, value in config.items() if key != CHECKSUM}  # a config.json as it lies in a folder, too
        return parse(cls, given)

    @property
    def scores(self) -> tuple[str, ...]:
        """The names in `eval_metrics`, each once."""
        return tuple(dict.fromkeys(self.eval_metrics.replace(",", " ").split()))

    @property
    def trainings(self) -> dict[str, ClientSettings | ServerTrainingSettings]:
        """The groups of settings that train, by their dotted keys: the clients' and the server's."""
        return {"client": self.client, "server.training": self.server.training}

    @property
    def is_registered(self) -> bool:
        """Whether the method and the network have the options of those that are registered under their names now."""
        own = options_class(METHODS[self.method.name]), models.MODELS[self.model.name].options
        return isinstance(self.method, own[0]) and isinstance(self.model, own[1])

    @property
    def is_several(self) -> bool:
        """Whether these are the settings of several runs."""
        return self.seeds > 1 or bool(self.vary or self.values)

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of plain values."""
        return self.model_dump()

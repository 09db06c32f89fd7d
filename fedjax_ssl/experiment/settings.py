"""The settings of an experiment: every key with its default, its meaning and what it accepts; ValueError names a wrong one."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from fedjax_ssl import models
from fedjax_ssl.data.settings import Clients, DataSettings
from fedjax_ssl.experiment.system_settings import SystemSettings
from fedjax_ssl.files import CHECKSUM
from fedjax_ssl.methods import METHODS, PROX_MU, options_class
from fedjax_ssl.options import (
    MANY,
    SET,
    BatchSize,
    Count,
    Decay,
    Epochs,
    Known,
    Model,
    Numbers,
    Options,
    Positive,
    Rate,
    ReadWhere,
    Size,
    Steps,
    Weight,
    fields_of,
    nearest,
    parse,
    plural,
)

Seed = Annotated[int, Field(ge=0, le=MANY)]
TRACKERS = ("wandb", "mlflow")
MOST_RUNS = 1_000  # in one program

LABELS = {"data.labels_at": ("server",)}
CLIENTS, CLIENT_DATA, BATCH_NORM = ({f"run.has_{what}": SET} for what in ("clients", "client_data", "batch_norm"))
STATIC = BATCH_NORM | {"model.norm": ("static",)}


class OptimizerSettings(Model):
    """An optimizer of local steps."""

    name: Literal["sgd", "adam", "lars"] = Field(default="sgd", description="PyTorch's SGD, Adam, or SimCLR's LARS on kernels.")
    learning_rate: Rate = Field(default=0.03, description="Its value in round 1.")
    schedule: Literal["constant", "cosine", "cosine_7_16"] = Field(
        default="cosine",
        description="In round t of R: `constant`, `cosine`: lr/2 (1 + cos(pi (t - 1) / R)), or FixMatch's `cosine_7_16`: lr "
        "cos(7/16 pi (t - 1) / R). On pooled data t grows by 1/S in each of S steps.",
    )
    momentum: Annotated[Decay, ReadWhere(name=("sgd", "lars"))] = Field(default=0.9, description="SGD's and LARS' momentum.")
    nesterov: Annotated[bool, ReadWhere(name=("sgd", "lars"), momentum=SET)] = Field(
        default=True, description="Whether momentum has Nesterov's form."
    )
    weight_decay: Weight = Field(default=5e-4, description="Times the parameters, added to the gradient.")
    decay: Annotated[Literal["all", "kernels"], ReadWhere(name=("sgd", "adam"), weight_decay=SET)] = Field(
        default="all", description="What decays: all parameters, or kernels alone."
    )
    clip_norm: Weight = Field(default=0.0, description="Largest global norm of the gradient, before weight decay; 0: none.")
    persistent: Annotated[bool, ReadWhere(name=("adam",)), ReadWhere(momentum=SET)] = Field(
        default=True, description="Whether its state (momentum) survives from one training to the next."
    )


class ClientSettings(Model):
    """Local training."""

    optimizer: OptimizerSettings = Field(default=OptimizerSettings(), description="Of the local steps.")
    batch_size: BatchSize = Field(
        default=32, description="B, the labeled examples of a step; where a client has no labels, its unlabeled ones."
    )
    epochs: Epochs = Field(default=5, description="Local epochs, or 0.")
    steps: Steps = Field(default=0, description="Local steps, or 0.")
    on_nonfinite: Literal["skip", "stop"] = Field(
        default="skip", description="A client whose results are not finite is left out, or ends the run before its round."
    )


class ServerSettings(Model):
    """The server's aggregation step, supervised training (where it has labels) and batch-norm statistics."""

    momentum: Annotated[Decay, ReadWhere(CLIENTS)] = Field(default=0.5, description="Of the aggregated update.")
    learning_rate: Annotated[Rate, ReadWhere(CLIENTS)] = Field(default=1.0, description="Of the aggregated update.")
    optimizer: Annotated[OptimizerSettings, ReadWhere(LABELS)] = Field(
        default=OptimizerSettings(), description="Of the supervised training."
    )
    batch_size: Annotated[BatchSize, ReadWhere(LABELS)] = Field(default=10, description="Of the supervised training.")
    epochs: Annotated[Epochs, ReadWhere(LABELS)] = Field(default=5, description="Its epochs per round, or 0.")
    steps: Annotated[Steps, ReadWhere(LABELS)] = Field(default=0, description="Its steps per round, or 0.")
    pretrain: Annotated[Epochs, ReadWhere(LABELS)] = Field(
        default=1, description="How many such trainings come before round 1."
    )
    training: Annotated[Literal["after", "parallel"], ReadWhere(LABELS | CLIENTS)] = Field(
        default="after", description="After the aggregation, or in parallel with the clients and then averaged with them."
    )
    sbn_data: Annotated[Literal["cohort", "all", "labeled"], ReadWhere(STATIC)] = Field(
        default="cohort",
        description="Static batch-norm statistics are over labeled data and the next cohort's, all data, or labeled data.",
    )
    sbn_weighting: Annotated[Literal["examples", "batches"], ReadWhere(STATIC)] = Field(
        default="examples", description="A batch's weight: its size, or 1."
    )
    sbn_order: Annotated[Literal["apart", "joined", "class"], ReadWhere(STATIC)] = Field(
        default="apart",
        description="apart: batches of labeled data, then batches of unlabeled data. joined: one sequence of both, "
        "labeled ones by class (SemiFL). class: apart, and each by class, as (FL)^2's released code does with true labels.",
    )
    sbn_labeled_batch_size: Annotated[
        BatchSize, ReadWhere(STATIC | LABELS, sbn_order=("apart", "class")), ReadWhere(STATIC | LABELS, sbn_data=("labeled",))
    ] = Field(default=250, description="Their batch size on labeled data.")
    sbn_unlabeled_batch_size: Annotated[BatchSize, ReadWhere(STATIC, sbn_data=("cohort", "all"))] = Field(
        default=250, description="Their batch size on unlabeled data."
    )

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.sbn_order == "class" and self.sbn_data == "cohort":
            raise ValueError("server.sbn_order: got class with server.sbn_data=cohort, accepted: apart, joined, or other data")
        return self


class ExecutionSettings(Model):
    """How the work is laid out on devices. It changes time and memory, and results by rounding alone."""

    strategy: Literal["auto", "vmap", "scan", "chunked", "sharded"] = Field(
        default="auto",
        description="Clients all at once, one after another, in chunks, or shared by devices. `auto`: `sharded` over several "
        "devices, else `scan` on a CPU and `vmap` on an accelerator.",
    )
    chunk_size: Annotated[Count, ReadWhere(CLIENTS, strategy=("auto", "chunked", "sharded"))] = Field(
        default=0,
        description="Clients at once, if in chunks. 0: for `chunked` as many as fit into memory; else one on a CPU, and on an "
        "accelerator as many of a device's as fit.",
    )
    conv: Literal["auto", "xla", "cpu", "gpu"] = Field(default="auto", description="Form of convolutions; auto: by platform.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Of computation; parameters stay float32.")
    precision: Literal["default", "tensorfloat32", "float32"] = Field(
        default="default",
        description="In which float32 matrices are multiplied, at least. `default`: the device's own (on recent NVIDIA GPUs "
        "TensorFloat-32, on TPUs one pass of bfloat16, on CPUs float32).",
    )
    devices: Annotated[int, Field(ge=0, le=100_000)] = Field(
        default=0, description="Devices that share the work (`launch.run`: a CPU's cores); 0: the fewest as fast as all."
    )
    batch_size: Size = Field(default=0, description="Examples per forward-only pass; 0: 250, or 25 for convolutions on a CPU.")
    rounds_per_dispatch: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="Rounds in one call of the program, for very short rounds."
    )
    data: Literal["device", "host", "disk"] = Field(
        default="device",
        description="Where training images and client states are; `disk`: images on the host, states in a file in TMPDIR.",
    )


class DiagnosticsSettings(Model):
    """What is recorded in addition to the metrics. It changes no result."""

    clients_every: Count = Field(
        default=0,
        description="Rounds between records of what each client of the cohort did, in the folder `clients`; 0: none. A "
        "recorded round has the updates of the whole cohort in memory.",
    )


class MethodSettings(Model):
    """What every method has in addition to its own options."""

    name: Annotated[str, Known(METHODS)] = Field(default="fl2", description="The method.")
    prox_mu: Annotated[Weight, ReadWhere(CLIENTS)] = Field(
        default_factory=lambda known: PROX_MU.get(known.get("name", ""), 0.0),
        description="Weight of FedProx's term in local training; 0: none.",
    )


class ModelSettings(Model):
    """What every network has in addition to its own options."""

    name: Annotated[str, Known(models.MODELS)] = Field(default="wide_resnet", description="The network.")
    norm: Annotated[Literal["static", "running", "batch"], ReadWhere(BATCH_NORM)] = Field(
        default="static", description="Which statistics batch norm evaluates with."
    )
    norm_momentum: Annotated[float, Field(gt=0, le=1), ReadWhere(BATCH_NORM, norm=("running",))] = Field(
        default=0.1, description="Share of a new batch in running statistics."
    )


_SHARED: dict[str, type[Model]] = {"method": MethodSettings, "model": ModelSettings}


class Settings(Model):
    """All settings of an experiment."""

    method: dict[str, Any] = Field(default=MethodSettings().model_dump(), description="`name`, `prox_mu` and its own.")
    model: dict[str, Any] = Field(default=ModelSettings().model_dump(), description="Name, norm and own options.")
    data: DataSettings = Field(default=DataSettings(), description="The dataset, its split and its views.")
    client: Annotated[ClientSettings, ReadWhere(CLIENTS)] = Field(default=ClientSettings(), description="Local training.")
    server: ServerSettings = Field(default=ServerSettings(), description="The server's work.")
    system: Annotated[SystemSettings, ReadWhere(CLIENTS)] = Field(
        default=SystemSettings(), description="Clients that are slow, late, away or drop out."
    )
    execution: ExecutionSettings = Field(default=ExecutionSettings(), description="How the work is laid out on devices.")
    diagnostics: DiagnosticsSettings = Field(default=DiagnosticsSettings(), description="What is recorded of each client.")
    rounds: Positive = Field(default=800, description="How many rounds the run has.")
    cohort_size: Annotated[Clients, ReadWhere(CLIENT_DATA)] = Field(default=10, description="M, clients per round.")
    seed: Seed = Field(default=0, description="Of everything random: split, initial weights, cohorts, batches and views.")
    seeds: Annotated[int, Field(ge=1, le=MOST_RUNS)] = Field(
        default=1, description="How many seeds run together, from `seed` on."
    )
    vary: str = Field(default="", description="The dotted key of a number that differs between runs.")
    values: Numbers = Field(default=(), description="The values of that number, each for all seeds.")
    eval_every: Positive = Field(default=10, description="Rounds between evaluations; the last round is always evaluated.")
    log_to: str = Field(
        default="", description="Further places for metrics, after JSONL and TensorBoard: wandb, mlflow, or both."
    )
    checkpoint_every: Positive = Field(default=10, description="Rounds between checkpoints; one is always saved at the end.")

    @pydantic.field_validator("method", "model", mode="before")
    @classmethod
    def _complete(cls, group: object, info: pydantic.ValidationInfo) -> object:
        """The group with what it lacks of the keys that every method, or network, has."""
        kind = _SHARED[str(info.field_name)]
        if not isinstance(group, Mapping):
            return group
        shared = parse(kind, {key: group[key] for key in kind.model_fields if key in group}, f"{info.field_name}.")
        return {**group, **shared.model_dump()}

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        self.method_options()
        self.model_options()
        names = [name.strip() for name in self.log_to.split(",") if name.strip()]
        if not {*names} <= {*TRACKERS}:
            raise ValueError(f"log_to: got {self.log_to!r}, accepted: {', '.join(TRACKERS)}, separated by commas")
        if (runs := self.seeds * max(1, len(self.values))) > MOST_RUNS:
            raise ValueError(
                f"values: got {len(self.values)} for {plural(self.seeds, 'seed')}, {runs} runs, accepted: {MOST_RUNS} runs"
            )
        if (last := self.seed + self.seeds - 1) > MANY:
            raise ValueError(f"seed: got {self.seed} with seeds={self.seeds}, whose last is {last}, accepted: at most {MANY}")
        for group, got in (("client", self.client), ("server", self.server)):
            if (got.epochs > 0) == (got.steps > 0):
                shown = f"got {got.epochs} and {got.steps}, accepted: one positive, the other 0"
                raise ValueError(f"{group}.epochs, {group}.steps: {shown}")
        together = self.execution.rounds_per_dispatch
        for name in ("rounds", "eval_every", "checkpoint_every"):
            if (got := getattr(self, name)) % together:
                raise ValueError(f"{name}: got {got} with execution.rounds_per_dispatch={together}, accepted: a multiple of it")
        if (every := self.diagnostics.clients_every) and together > 1:
            accepted = "0, or execution.rounds_per_dispatch=1"
            shown = f"got {every} with execution.rounds_per_dispatch={together}"
            raise ValueError(f"diagnostics.clients_every: {shown}, accepted: {accepted}")
        if self.client.on_nonfinite == "stop" and (together > 1 or self.is_several):
            other = f"execution.rounds_per_dispatch={together}" if together > 1 else "several runs"
            raise ValueError(f"client.on_nonfinite: got stop with {other}, accepted: skip")
        if self.cohort_size > self.data.num_clients:
            raise ValueError(f"cohort_size: got {self.cohort_size}, accepted: 1 to data.num_clients = {self.data.num_clients}")
        return self

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Settings from nested mappings; missing keys have their defaults, unknown keys and wrong values raise ValueError."""
        given = {key: value for key, value in config.items() if key != CHECKSUM}  # a config.json as it lies in a folder, too
        return parse(cls, given)

    @property
    def is_several(self) -> bool:
        """Whether these are the settings of several runs."""
        return self.seeds > 1 or bool(self.vary or self.values)

    def method_options(self) -> Options:
        """The method's own options; ValueError for an unknown key or a wrong value."""
        name, own = self.method["name"], self._own("method")
        options = options_class(METHODS[name])
        known = [key for key, _ in fields_of(options)]
        if strange := [key for key in own if key not in known and not nearest(key, known)]:
            accepted = f"{', '.join(known) or 'none'}; start from a config of {name}, such as configs/digits.py:{name}"
            raise ValueError(f"method.{strange[0]}: not a key of method.name={name}, accepted: {accepted}")
        return parse(options, own, "method.")

    def model_options(self) -> Options:
        """The network's own options; ValueError for an unknown key or a wrong value."""
        return parse(models.MODELS[self.model["name"]].options, self._own("model"), "model.")

    def _own(self, group: str) -> dict[str, Any]:
        """The keys of `method` or `model` that not every method or network has."""
        return {key: value for key, value in getattr(self, group).items() if key not in _SHARED[group].model_fields}

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of plain values."""
        return self.model_dump()

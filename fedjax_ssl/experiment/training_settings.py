"""The settings of training, `client.*` and `server.*`: every key with its default, its meaning and what it accepts."""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from fedjax_ssl.options import SET, BatchSize, Count, Decay, Epochs, Model, Positive, Rate, ReadWhere, Steps, Weight

LABELS = {"data.labels_at": ("server",)}
SOME_CLIENTS = ReadWhere({"data.labels_at": ("some_clients",)})
CLIENTS, BATCH_NORM = ({f"run.has_{what}": SET} for what in ("clients", "batch_norm"))
ADAPTIVE, FALLING = ("adam", "adamw", "lion", "rmsprop"), ("step", "exponential")
STATIC = BATCH_NORM | {"model.norm": ("static",)}


class OptimizerSettings(Model):
    """The optimizer of local steps, of a client or of the server's supervised training."""

    name: Literal["sgd", "adam", "adamw", "lion", "rmsprop", "lars"] = Field(
        default="sgd",
        description="The optimizer of each local step: SGD as PyTorch defines it; Adam, AdamW, Lion or RMSProp (without "
        "momentum) as optax defines them; or LARS as SimCLR uses it, which scales the step of each layer's kernel by the norms "
        "of its weights and gradient.",
    )
    learning_rate: Rate = Field(
        default=0.03,
        description="Learning rate lr, before warm-up and schedule change it. Usual are 0.01 to 0.3 for SGD, 0.0001 to 0.003 "
        "for Adam, AdamW and RMSProp, and a third to a tenth of AdamW's for Lion.",
    )
    layers: str = Field(
        default="",
        description="Factors of the learning rate for parameters of some layers, as PATTERN=FACTOR, separated by commas, such "
        "as `Dense_0=0.1,BatchNorm=0`. A pattern is a regular expression that is looked for in a parameter's path, such as "
        "`Block_3/Conv_0/kernel`. The first pattern that is found counts; other parameters have the whole learning rate. "
        "Parameters with the factor 0 stay as they are: no gradient is computed for them and no optimizer state is kept, and "
        "clients do not send them.",
    )
    warmup_rounds: Weight = Field(
        default=0.0,
        description="Number W of rounds in which the learning rate rises linearly, before the schedule begins: it is lr t/W in "
        "round t, from t = 1 on. The schedule then has t - W in place of t and R - W in place of the last round R. Where a "
        "method trains on pooled data, the learning rate begins at lr/(W S) and rises by as much with each of a round's S "
        "steps. 0 is no warm-up, and 5 to 20 is usual.",
    )
    schedule: Literal["constant", "cosine", "cosine_7_16", "step", "exponential"] = Field(
        default="cosine",
        description="How the learning rate lr changes from round t = 1 to the last round R. `constant` keeps it; `cosine` lets "
        "it fall to 0 as lr/2 (1 + cos(pi (t - 1) / R)); `cosine_7_16` lets it fall to about a fifth as lr cos(7/16 pi (t - 1) "
        "/ R), as FixMatch has it; `step` multiplies it by `schedule_factor` after every `schedule_every` rounds; "
        "`exponential` lets it fall at the same pace, but in every round, as lr factor^((t - 1) / every). Where a method "
        "trains on pooled data, t grows with every step, by 1/S in each of a round's S steps.",
    )
    schedule_factor: Annotated[float, Field(gt=0, le=1), ReadWhere(schedule=FALLING)] = Field(
        default=0.1,
        description="Factor that the learning rate is multiplied by in `schedule_every` rounds. 0.1 to 0.5 is usual for steps.",
    )
    schedule_every: Annotated[Positive, ReadWhere(schedule=FALLING)] = Field(
        default=100, description="Number of rounds in which the learning rate is multiplied by `schedule_factor` once."
    )
    momentum: Annotated[Decay, ReadWhere(name=("sgd", "lars"))] = Field(
        default=0.9,
        description="Momentum of SGD or LARS: the share of the last step's velocity that each step keeps. 0 is no momentum, "
        "and 0.9 is usual.",
    )
    nesterov: Annotated[bool, ReadWhere(name=("sgd", "lars"), momentum=SET)] = Field(
        default=True, description="Whether SGD or LARS uses Nesterov's form of momentum instead of the classical one."
    )
    b1: Annotated[Decay, ReadWhere(name=("adam", "adamw", "lion"))] = Field(
        default=0.9,
        description="Decay per step of the average of past gradients, which Adam and AdamW follow. Lion follows the sign of "
        "b1 m + (1 - b1) g, where g is the new gradient and m the average of past ones, whose own decay is 0.99.",
    )
    b2: Annotated[Decay, ReadWhere(name=("adam", "adamw"))] = Field(
        default=0.999,
        description="Decay per step of the average of past squared gradients, by which Adam and AdamW scale steps. 0.95 to "
        "0.999 is usual.",
    )
    eps: Annotated[Rate, ReadWhere(name=("adam", "adamw", "rmsprop"))] = Field(
        default=1e-8,
        description="Number that keeps the divisor of a step away from 0. With v the average of squared gradients, Adam and "
        "AdamW divide by sqrt(v) + eps, and RMSProp, whose average has the decay 0.9, by sqrt(v + eps).",
    )
    weight_decay: Weight = Field(
        default=5e-4,
        description="Factor wd of the weight decay: each step adds wd times the parameters to the gradient before the "
        "optimizer's rule, so that Adam, RMSProp and LARS scale both together. AdamW and Lion are decoupled: they add it "
        "after their rule, so that each step takes lr wd of the parameters away. 0 is none. Usual are 0.0001 to 0.001, for "
        "AdamW 0.01 to 0.1, and for Lion 0.1 to 1.",
    )
    decay: Annotated[Literal["all", "kernels"], ReadWhere(name=("sgd", *ADAPTIVE), weight_decay=SET)] = Field(
        default="all",
        description="Which parameters weight decay acts on: all of them, or only the kernels of convolutions and dense layers, "
        "so that biases and normalization layers do not decay.",
    )
    clip_norm: Weight = Field(
        default=0.0,
        description="Largest norm of a step's whole gradient: a longer gradient is scaled down to it before weight decay is "
        "added and before the optimizer's rule. 0 clips nothing, and 1 to 10 is usual.",
    )
    persistent: Annotated[bool, ReadWhere(name=ADAPTIVE), ReadWhere(momentum=SET)] = Field(
        default=True,
        description="Whether the optimizer's state, such as the momentum, is kept from one training to the next. If false, "
        "each training of a round begins with a new state.",
    )


class ServerOptimizerSettings(Model):
    """The federated server optimizer (FedOpt): a step with the average of the clients' updates as its gradient."""

    name: Literal["sgd", "adam", "yogi", "adagrad"] = Field(
        default="sgd",
        description="The optimizer that applies the averaged client update to the global model: `sgd` is FedAvg, or FedAvgM "
        "with momentum, and `adam`, `yogi` and `adagrad` are FedAdam, FedYogi and FedAdagrad (Reddi et al. 2021).",
    )
    learning_rate: Rate = Field(
        default=1.0,
        description="Learning rate of the server's step with the averaged client update. 1 with `sgd` and without momentum is "
        "plain averaging (FedAvg); `adam`, `yogi` and `adagrad` need a smaller one, such as 0.01.",
    )
    momentum: Annotated[Decay, ReadWhere(name=("sgd",))] = Field(
        default=0.5,
        description="Momentum of the server's step with the averaged client update (FedAvgM). 0 is no momentum, as in FedAvg.",
    )
    b1: Annotated[Decay, ReadWhere(name=("adam", "yogi"))] = Field(
        default=0.9, description="Decay per round of the average of past updates, which Adam and Yogi follow."
    )
    b2: Annotated[Decay, ReadWhere(name=("adam", "yogi"))] = Field(
        default=0.99, description="Decay per round of the average of past squared updates, by which Adam and Yogi scale steps."
    )
    eps: Annotated[Rate, ReadWhere(name=("adam", "yogi", "adagrad"))] = Field(
        default=1e-3,
        description="Number tau that keeps the divisor of a step away from 0: it is sqrt(v) + tau, where v is the average, or "
        "for Adagrad the sum, of squared updates, and begins at tau^2. The larger tau is, the less the steps adapt to each "
        "parameter; Reddi et al. use 0.001.",
    )


class ClientSettings(Model):
    """Local training."""

    optimizer: OptimizerSettings = Field(default=OptimizerSettings(), description="The optimizer of the clients' local steps.")
    batch_size: BatchSize = Field(
        default=32,
        description="Batch size of a local step: the number of labeled examples in it, or, where a client has no labels, of "
        "unlabeled ones. Usual are 10 to 128.",
    )
    epochs: Epochs = Field(
        default=5,
        description="Number of local epochs, passes of a client over its data, in each round. Set it to 0 to give `steps` "
        "instead.",
    )
    steps: Steps = Field(
        default=0, description="Number of local steps of a client in each round. Set it to 0 to give `epochs` instead."
    )
    unlabeled_epochs: Annotated[Count, SOME_CLIENTS] = Field(
        default=0,
        description="Number of local epochs of a client without labels, with `data.labels_at=some_clients`. 0 means as many as "
        "`epochs`.",
    )
    unlabeled_rate: Annotated[Rate, SOME_CLIENTS] = Field(
        default=1.0,
        description="Factor of the learning rate of a client without labels, with `data.labels_at=some_clients`.",
    )
    unlabeled_wait: Annotated[Count, SOME_CLIENTS] = Field(
        default=0,
        description="Number of rounds at the beginning in which clients without labels rest, with "
        "`data.labels_at=some_clients`: a warm-up on labels alone.",
    )
    on_nonfinite: Literal["skip", "stop"] = Field(
        default="skip",
        description="What happens when a client returns NaN or infinity: `skip` leaves the client out of the round's average, "
        "and `stop` ends the run with the state before that round.",
    )
    compression: Literal["none", "int8", "int4", "topk"] = Field(
        default="none",
        description="How a client compresses the parameters that it sends: to whole numbers of 8 or 4 bits, rounded up or down "
        "at random without bias (`int8`, `int4`), or to the largest values alone (`topk`), where it adds what it did not send "
        "to its next update (error feedback). `none` sends them as they are.",
    )
    compression_share: Annotated[float, Field(gt=0, le=1), ReadWhere(compression=("topk",))] = Field(
        default=0.05,
        description="Share of the parameters' values that `topk` sends. Each takes 8 bytes, its position included.",
    )


class ServerTrainingSettings(Model):
    """The server's supervised training on its own labels."""

    optimizer: OptimizerSettings = Field(
        default=OptimizerSettings(), description="The optimizer of the server's steps on its labeled examples."
    )
    batch_size: BatchSize = Field(
        default=10, description="Number of labeled examples in each step of the server's supervised training."
    )
    epochs: Epochs = Field(
        default=5,
        description="Number of epochs, passes of the server over its labeled examples, in each supervised training. Set it to "
        "0 to give `steps` instead.",
    )
    steps: Steps = Field(
        default=0,
        description="Number of steps in each supervised training of the server. Set it to 0 to give `epochs` instead.",
    )
    pretrain: Annotated[Epochs, ReadWhere({"run.prepares": SET})] = Field(
        default=1, description="How many supervised trainings the server does on its labels before round 1."
    )
    when: Annotated[Literal["after", "parallel"], ReadWhere(CLIENTS)] = Field(
        default="after",
        description="When the server trains on its labels in a round: `after` it has averaged the clients' updates "
        "(fine-tuning), or in `parallel` with the clients, starting from the model that the clients receive; the new model "
        "is then the mean of the server's model and the clients' average.",
    )


class StaticNormSettings(Model):
    """How the statistics of static batch normalization (sBN) are collected at the end of each round."""

    data: Literal["cohort", "all", "labeled"] = Field(
        default="cohort",
        description="The data whose statistics batch normalization evaluates with. Each choice includes the server's labeled "
        "data: `labeled` adds nothing to them, `cohort` adds the data of the next round's clients, and `all` adds all "
        "unlabeled data, also examples that no client has. With labels at the clients, `cohort` alone is accepted, and the "
        "data are those of the next round's clients alone.",
    )
    weighting: Literal["examples", "batches"] = Field(
        default="examples",
        description="Weight of a batch in the average of statistics: its number of `examples`, or 1 for all `batches` alike.",
    )
    order: Annotated[Literal["apart", "joined", "class"], ReadWhere(LABELS)] = Field(
        default="apart",
        description="How examples are put into the batches whose statistics are averaged. `apart`: batches of labeled data, "
        "then batches of unlabeled data. `joined`: both form one sequence, which begins with the labeled examples sorted by "
        "class (SemiFL). `class`: as `apart`, but both parts are sorted by class; the unlabeled data by their true labels "
        "((FL)^2's released code).",
    )
    labeled_batch_size: Annotated[
        BatchSize, ReadWhere(LABELS, order=("apart", "class")), ReadWhere(LABELS, data=("labeled",))
    ] = Field(default=250, description="Number of labeled examples in each batch whose statistics are averaged.")
    unlabeled_batch_size: Annotated[BatchSize, ReadWhere(data=("cohort", "all"))] = Field(
        default=250,
        description="Number of unlabeled examples in each batch whose statistics are averaged; where `order` is `joined`, of "
        "labeled and unlabeled ones together.",
    )

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.order == "class" and self.data == "cohort":
            accepted = "apart, joined, or other data"
            raise ValueError(f"server.static_norm.order: got class with server.static_norm.data=cohort, accepted: {accepted}")
        return self


class ServerSettings(Model):
    """The server's step with the clients' updates, its supervised training, and its batch-norm statistics."""

    optimizer: Annotated[ServerOptimizerSettings, ReadWhere(CLIENTS)] = Field(
        default=ServerOptimizerSettings(),
        description="The federated server optimizer, which applies the averaged client update to the global model (FedOpt).",
    )
    aggregation: Annotated[Literal["mean", "median", "trimmed_mean", "krum"], ReadWhere(CLIENTS)] = Field(
        default="mean",
        description="How the server combines the clients' updates: by the method's own weighted `mean`, or robustly against "
        "some wrong updates, without weights: by the `median` of each parameter, by its mean without the smallest and largest "
        "values (`trimmed_mean`), or by taking the one update that is nearest to most others (`krum`).",
    )
    assumed_faulty: Annotated[float, Field(ge=0, lt=0.5), ReadWhere(aggregation=("trimmed_mean", "krum"))] = Field(
        default=0.2,
        description="Share of the updates of a round that the aggregation takes for wrong, rounded down to a number f. "
        "`trimmed_mean` leaves out f values at each end, and of n updates `krum` compares each with its n - f - 2 nearest.",
    )
    training: Annotated[ServerTrainingSettings, ReadWhere(LABELS)] = Field(
        default=ServerTrainingSettings(), description="The server's supervised training on its own labeled examples."
    )
    static_norm: Annotated[StaticNormSettings, ReadWhere(STATIC)] = Field(
        default=StaticNormSettings(),
        description="How the server collects the statistics of batch normalization that the next round and evaluations use.",
    )

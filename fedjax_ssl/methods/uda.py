"""UDA (Xie et al. 2020) with FedAvg or FedProx: a baseline of FedDure and FedLabel, for labels at the clients or at the server.

Loss, temperature and threshold are the released code's for CIFAR-10. Labels at the clients: a step takes a labeled and an
unlabeled batch. Labels at the server: the clients learn from consistency alone, and the server fine-tunes on its labels after
each aggregation.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import Broadcast, Server, Task, Training, semi_supervised
from fedjax_ssl.local.objectives import Selection
from fedjax_ssl.local.semi_supervised import Objective, UnlabeledLoss, UnlabeledOutputs
from fedjax_ssl.local.training import GradientFn
from fedjax_ssl.method import ClientOutput, Method, ServerData, Shard
from fedjax_ssl.metrics import mean
from fedjax_ssl.options import Count, Fraction, Options, Rate, Weight
from fedjax_ssl.ssl import losses, pseudo_labels, thresholds, tsa

PyTree = Any


class UDAOptions(Options):
    """UDA's own settings."""

    temperature: Rate = Field(
        default=0.4, description="T, by which the weak outputs of the target are divided; 1: not sharpened."
    )
    confidence: Fraction = Field(
        default=0.8,
        description="An example counts where the weak output's largest probability, not sharpened, is above this.",
    )
    unlabeled_weight: Weight = Field(default=1.0, description="The weight of the unlabeled loss.")
    unlabeled_batch_size: Count = Field(default=0, description="B_u; 0: as the labeled batch, `client.batch_size`.")
    tsa: Literal["none", "linear", "log", "exp"] = Field(
        default="none",
        description=(
            "Training signal annealing of the labeled loss, of the clients and of the server: `none`, or the schedule "
            "of its threshold over the run's rounds."
        ),
    )


def uda(*, task: Task, client: Training, server: Server, options: UDAOptions = UDAOptions()) -> Method:
    """FedAvg + UDA.

        L_u = 1/B_u sum over max softmax(z_weak) > confidence of KL(softmax(z_weak / T) || softmax(z_strong))

    Both views pass through the step's own weights, the weak one without gradient. B_u counts the batch's real examples.

    Args:
        task: network and views.
        client: local training; TSA's t/T is the round, from 0, over the run's rounds.
        server: aggregation, fine-tuning and statistics.
        options: temperature, threshold, annealing.

    Returns:
        The method. Its client state is the local optimizer's, where `client` is persistent.
    """

    def selection(round: jax.Array, rounds: jax.Array | int) -> Selection | None:
        if options.tsa == "none":
            return None
        return partial(tsa.selected, eta=tsa.threshold(options.tsa, round / rounds, task.num_classes))

    def client_update(shared: Broadcast, _: PyTree, optimizer: PyTree, shard: Shard, key: jax.Array) -> ClientOutput:
        def unlabeled(outputs: UnlabeledOutputs, batch: Batch) -> UnlabeledLoss:
            label, confidence = pseudo_labels.harden(jax.nn.softmax(jax.lax.stop_gradient(outputs.weak)))
            used = batch.mask & thresholds.passes(confidence, options.confidence, strict=True)
            kl = losses.sharpened_kl(outputs.weak, outputs.strong, options.temperature)
            metrics = semi_supervised.step_metrics(label, used, shard, batch)
            return UnlabeledLoss(losses.masked_mean(kl, used, batch.real), mean(kl, used), metrics)

        objective = Objective(
            unlabeled,
            drawn=shard.unlabeled.mask,
            weak=True,
            weight=options.unlabeled_weight,
            batch_size=options.unlabeled_batch_size,
            selection=selection(shared.round, shared.rounds),
        )
        return semi_supervised.client_output(task, client, shared, optimizer, shard, objective, jax.random.split(key))

    def annealed(data: ServerData) -> GradientFn:
        return local.supervised_gradient(task, data.labeled, selection=selection(data.round, data.rounds))

    work = local.server_work(task, server, annealed)
    return local.averaging_method(task, client, server, client_update, labels_at=("server", "clients"), work=work)

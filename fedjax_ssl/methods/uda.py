"""UDA, unsupervised data augmentation (Xie et al. 2020), with FedAvg or FedProx.

With labels at the clients a step takes a labeled and an unlabeled batch. With labels at the server the clients learn from
consistency alone, and the server fine-tunes. Loss, temperature and threshold are those of the released code for CIFAR-10. The
annealing of labeled examples (TSA) is left out.
"""

from functools import partial

import jax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import Broadcast, Server, Setup, Task, Training, semi_supervised
from fedjax_ssl.local.semi_supervised import Objective, UnlabeledLoss
from fedjax_ssl.method import EVERYWHERE, ClientData, ClientOutput, Method
from fedjax_ssl.metrics import mean
from fedjax_ssl.options import UNLABELED_BATCH, UNLABELED_WEIGHT, Fraction, LabeledRepeats, Rate, Size, Weight
from fedjax_ssl.ssl import losses, pseudo_labels


class UDAOptions(LabeledRepeats):
    """UDA's own settings."""

    temperature: Rate = Field(
        default=0.4,
        description="Temperature T that the weak view's logits are divided by in the target; 1 leaves them as they are.",
    )
    confidence: Fraction = Field(default=0.8, description="Threshold on the largest probability of the weak view.")
    unlabeled_weight: Weight = UNLABELED_WEIGHT
    unlabeled_batch_size: Size = UNLABELED_BATCH


def uda(*, task: Task, client: Training, server: Server, options: UDAOptions = UDAOptions()) -> Method:
    """FedAvg + UDA, for labels at the server or at the clients (Xie et al. 2020, Eq. 1 and Section 3.2).

        L_u = 1/B_u sum over max softmax(z_weak) > confidence of KL(softmax(z_weak / T) || softmax(z_strong))

    Both views pass through the weights of the step, the weak one without gradient. B_u counts the batch's real examples.
    """
    update = partial(client_update, Setup(task, client, server, options))
    return local.averaging_method(task, client, server, update, labels_at=EVERYWHERE)


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, optimizer: PyTree, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round of local training on labels and on consistency."""
    task, client, _, options = setup

    def unlabeled(weak: jax.Array, strong: jax.Array, batch: Batch) -> UnlabeledLoss:
        label, confidence = pseudo_labels.harden(jax.nn.softmax(weak))
        used = batch.mask & (confidence > options.confidence)
        kl = losses.sharpened_kl(weak, strong, options.temperature)
        metrics = semi_supervised.step_metrics(label, used, data, batch)
        return UnlabeledLoss(losses.masked_mean(kl, used, batch.real), mean(kl, used), metrics)

    mask, weight, size = data.unlabeled.mask, options.unlabeled_weight, options.unlabeled_batch_size
    objective = Objective(unlabeled, mask, weak=True, weight=weight, batch_size=size, repeats=options)
    return semi_supervised.client_output(task, client, shared, optimizer, data, objective, jax.random.split(key))

"""SAGE (Liu et al., CVPR 2025): pseudo-labels by the local and the global model together, for labels at all clients.

Equations are those of the authors' released code, as the paper's text was not at hand. Its one optimizer for all clients, which
carries a client's momentum into the next one's training, is not reproduced.
"""

from functools import partial

import jax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import Broadcast, Server, Setup, Task, Training, semi_supervised
from fedjax_ssl.local.semi_supervised import Objective, UnlabeledLoss
from fedjax_ssl.method import ClientData, ClientOutput, Method
from fedjax_ssl.metrics import mean
from fedjax_ssl.options import UNLABELED_BATCH, UNLABELED_WEIGHT, Fraction, LabeledRepeats, Size, Weight
from fedjax_ssl.ssl import correction, losses


class SageOptions(LabeledRepeats):
    """SAGE's own settings."""

    confidence: Fraction = Field(
        default=0.95, description="Confidence tau that the local or the global model needs for an example to count."
    )
    kappa: Weight = Field(
        default=correction.KAPPA,
        description="How fast the local label's weight exp(-kappa |c_l - c_g|) falls with the difference of the confidences. "
        "ln 2 / 0.05 = 13.863 halves it at a difference of 0.05; 0 gives the local label the whole weight.",
    )
    unlabeled_weight: Weight = UNLABELED_WEIGHT
    unlabeled_batch_size: Size = UNLABELED_BATCH


def sage(*, task: Task, client: Training, server: Server, options: SageOptions = SageOptions()) -> Method:
    """SAGE: L = CE of labeled examples + w / B_u sum over used examples of KL(y* || p_strong).

    y* mixes the labels of the local and of the broadcast global model, both on the weak view, without gradient
    (`fedjax_ssl.ssl.correction`). B_u counts all of the batch.
    """
    update = partial(client_update, Setup(task, client, server, options))
    return local.averaging_method(task, client, server, update, labels_at=("clients",))


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, optimizer: PyTree, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round of local training on labels and on soft targets."""
    task, client, _, options = setup

    def unlabeled(weak: jax.Array, strong: jax.Array, batch: Batch, of_global: jax.Array) -> UnlabeledLoss:
        both = jax.nn.softmax(weak), jax.nn.softmax(of_global)
        targets, used = correction.soft_targets(*both, batch.mask, options.confidence, options.kappa)
        kl = correction.divergence(targets, strong)
        metrics = semi_supervised.step_metrics(targets.argmax(1), used, data, batch)
        return UnlabeledLoss(losses.masked_mean(kl, used, batch.real), mean(kl, used), metrics)

    objective = Objective(
        *(unlabeled, data.unlabeled.mask, True, options.unlabeled_weight, options.unlabeled_batch_size),
        repeats=options,
        reference=shared.weights,
    )
    return semi_supervised.client_output(task, client, shared, optimizer, data, objective, jax.random.split(key))

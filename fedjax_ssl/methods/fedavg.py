"""FedAvg, FedAvg++ and FedProx: supervised federated baselines, whose clients train on their labeled examples.

With `data.reveal_labels` clients train on all of their examples: the fully supervised references, FedAvg-SL and FedProx-SL.
"""

from functools import partial

import jax
import jax.numpy as jnp

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.local import Broadcast, Server, Setup, Task, Training
from fedjax_ssl.local.objectives import View
from fedjax_ssl.local.optimizers import is_on
from fedjax_ssl.method import EVERYWHERE, ClientData, ClientOutput, Method
from fedjax_ssl.options import LabeledRepeats


class FedAvgOptions(LabeledRepeats):
    """Settings of federated averaging."""


def fedavg(
    *, task: Task, client: Training, server: Server, options: FedAvgOptions = FedAvgOptions(), view: View | None = None
) -> Method:
    """FedAvg (McMahan et al. 2017): clients minimize the cross-entropy of labeled examples, and are averaged by data size.

    They see their examples in a `view`; None: in that of `data.labeled`.
    """
    if "clients" not in task.labels_at:
        accepted = "clients, or server with data.reveal_labels=True"
        raise ValueError(f"data.labels_at: got server for clients that train on labels alone, accepted: {accepted}")

    update = partial(client_update, Setup(task, client, server, options), view)
    views = ("labeled",) if view is None else ("weak",)
    return local.averaging_method(task, client, server, update, labels_at=EVERYWHERE, views=views)


def fedavg_pp(*, task: Task, client: Training, server: Server, options: FedAvgOptions = FedAvgOptions()) -> Method:
    """FedAvg++ (FedSiam, Section 4.1): FedAvg on weakly augmented examples, whatever `data.labeled` is."""
    return fedavg(task=task, client=client, server=server, options=options, view=task.views.weak)


def fedprox(*, task: Task, client: Training, server: Server, options: FedAvgOptions = FedAvgOptions()) -> Method:
    """FedProx (Li et al. 2020, Eq. 2): FedAvg with mu/2 ||w - w_t||^2 in the local objective, for mu = `method.prox_mu` > 0."""
    if not is_on(client.prox_mu):
        raise ValueError(f"method.prox_mu: got {client.prox_mu} with method.name=fedprox, accepted: a number > 0")
    return fedavg(task=task, client=client, server=server, options=options)


def client_update(
    setup: Setup, view: View | None, shared: Broadcast, _: PyTree, optimizer: PyTree, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: it minimizes the cross-entropy of its labeled examples, seen in a `view`."""
    task, client, _, options = setup
    order_key, train_key = jax.random.split(key)
    gradient = local.supervised_gradient(task, data.labeled, view=view)
    schedule = local.repeated(options, data, client, lambda client: client.schedule(order_key, data.labeled.mask))
    # A client without labeled examples does not train, and takes no part in the average.
    weight = jnp.where(data.labeled.count > 0, local.data_weight(task, data), 0.0)
    return local.train_client(task, client, gradient, schedule, shared, optimizer, weight=weight, key=train_key)

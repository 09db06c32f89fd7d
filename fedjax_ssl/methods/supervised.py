"""Supervised training on the server's labels alone: the line that every semi-supervised method has to beat."""

from __future__ import annotations

import dataclasses
from functools import partial

from fedjax_ssl.method import Method
from fedjax_ssl.methods.local import Training
from fedjax_ssl.methods.server import Server, init, method_without_clients, prepare, reads_next_cohort, train_alone
from fedjax_ssl.methods.task import Task


@dataclasses.dataclass(frozen=True)
class SupervisedOptions:
    """Supervised training has no settings of its own."""


def supervised(
    *,
    task: Task,
    client: Training,
    server: Server,
    options: SupervisedOptions = SupervisedOptions(),
) -> Method:
    """The server trains on its labels each round; the clients take no part and nothing is sent.

    Args:
        task: network and views.
        client: not used.
        server: the training, as fine-tuning without an aggregation.
        options: none.

    Returns:
        The method, without client state.
    """
    del client, options
    return method_without_clients(
        init=partial(init, task, server),
        train=partial(train_alone, task, server),
        predict=lambda state, images, mask: task.predict(state.weights, images, mask),
    )._replace(prepare=partial(prepare, task, server), next_cohort=reads_next_cohort(task, server))

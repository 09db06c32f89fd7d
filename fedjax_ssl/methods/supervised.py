"""Supervised training on the server's labels alone: the baseline that every semi-supervised method has to beat."""

from functools import partial

import optax

from fedjax_ssl import local
from fedjax_ssl.local import Server, Task, Training
from fedjax_ssl.local.server import init, method_without_clients, requirements
from fedjax_ssl.method import Method
from fedjax_ssl.options import Options


class SupervisedOptions(Options):
    """Supervised training has no settings of its own."""


def supervised(*, task: Task, client: Training, server: Server, options: SupervisedOptions = SupervisedOptions()) -> Method:
    """The server fine-tunes on its labels each round; clients have no state, take no part, and nothing is sent."""
    del client, options
    work = local.server_work(task, server)
    return method_without_clients(
        init=partial(init, task, server._replace(optimizer=optax.identity())),  # no updates are averaged
        train=work.train_alone,
        predict=lambda state, images, mask: task.predict(state.weights, images, mask),
        requires=requirements(task, server, views=("labeled",)),
    )._replace(prepare=work.prepare)

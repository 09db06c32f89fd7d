"""Whether an experiment fits into memory and into whole numbers of 32 bits, before anything is compiled."""

import math
import shutil
import tempfile

import jax

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.experiment.settings import Settings, own_options
from fedjax_ssl.method import DataSpec, Method
from fedjax_ssl.metrics import num_bytes
from fedjax_ssl.options import MANY, REPEATS
from fedjax_ssl.simulation import memory

MOST_PARAMETERS = 2**27 - 1  # an int32 counts the bytes of a client's messages, which may be four networks


def check_images(dataset: Dataset, size: int) -> None:
    """Raises ValueError where the images of a dataset do not fit into memory once they have `size` x `size` pixels."""
    valid = dataset.validation.images if dataset.validation else ()
    images = sum(map(len, (dataset.train_images, dataset.test_images, valid)))
    _check(
        f"data.image_size: got {size}, {images:,} images",
        images * size**2 * dataset.train_images.shape[-1],
        memory.available(on_host=True),
    )


def check_trainings(settings: Settings, data: FederatedData) -> None:
    """Raises ValueError where a round's training, of a client or of the server, has more examples than an int32 counts."""
    options = settings.method
    repeats = (getattr(options, name) for name, field in type(options).model_fields.items() if REPEATS in field.metadata)
    factor = math.prod(repeats)
    tables = {"client": data.client_data, "server.training": data.server}
    for name, own in settings.trainings.items():
        examples = factor * (own.steps * own.batch_size or own.epochs * int(tables[name].count.max()))
        if examples > MANY:
            key, got = ("steps", own.steps) if own.steps else ("epochs", own.epochs)
            raise ValueError(
                f"{name}.{key}: got {got}, which train on {examples:,} examples a round, accepted: at most {MANY:,}"
            )


def check_states(settings: Settings, method: Method, spec: DataSpec, num_params: int, num_runs: int) -> None:
    """Raises ValueError where the network, or the states of the server and of all clients, are too large."""
    options = " ".join(f"{key}={value}" for key, value in own_options(settings.model).items())
    network = f"{settings.model.name} {options}".rstrip()
    if num_params > MOST_PARAMETERS:
        got = f"got {network}, of {num_params:,} parameters"
        raise ValueError(f"model.name: {got}, accepted: a network of at most {MOST_PARAMETERS:,}")
    states = jax.eval_shape(lambda key: method.init(key, spec), jax.random.key(0))
    server, clients = map(num_bytes, states)
    _check(f"model.name: got {network}, a server's state", num_runs * server, memory.available(on_host=False))
    got = f"data.num_clients: got {spec.num_clients:,}, clients' states"
    if settings.execution.data == "disk":
        where = tempfile.gettempdir()
        _check(got, clients, shutil.disk_usage(where).free, f"on the disk of {where}; TMPDIR names another folder")
    else:
        _check(got, num_runs * clients, memory.available(on_host=settings.execution.data == "host"))


def _check(what: str, needed: int, available: int, place: str = "of memory") -> None:
    if 0 < available < needed:
        raise ValueError(f"{what} of {needed / 1e9:,.3g} GB in all, accepted: what fits into {available / 1e9:.3g} GB {place}")

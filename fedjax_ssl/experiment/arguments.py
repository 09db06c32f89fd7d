"""From settings to the arguments of methods and simulations: optimizers, schedules, static norm and uneven clients."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from functools import partial

import optax

from fedjax_ssl.arrays import Scalar
from fedjax_ssl.data import profiles
from fedjax_ssl.experiment.layers import factors_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.experiment.training_settings import (
    ClientSettings,
    OptimizerSettings,
    ServerOptimizerSettings,
    ServerTrainingSettings,
)
from fedjax_ssl.local.optimizers import adaptive, clipping, fed_opt, is_on, lars, torch_sgd, with_factors
from fedjax_ssl.local.schedules import schedule
from fedjax_ssl.local.server import Server, StaticNorm
from fedjax_ssl.local.training import Training
from fedjax_ssl.options import one_line
from fedjax_ssl.simulation.system import System
from fedjax_ssl.wrappers.robust import Faults


@contextlib.contextmanager
def naming(group: str) -> Iterator[None]:
    """A context in which errors name their config key, in one line: `num_labels=3 ...` becomes `data.num_labels=3 ...`."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        line = one_line(error)
        prefix = "" if line.startswith(f"{group}.") else f"{group}." if re.match(r"\w+=", line) else f"{group}: "
        raise kind(prefix + line) from error


def system_of(settings: Settings) -> System | None:
    """The rules of uneven clients; None where nothing makes them uneven."""
    given = settings.system
    if given.participation == "uniform" and not (given.trace or given.dropout or given.is_timed):
        return None
    own = {key: getattr(given, key) for key in ("participation", "round_s", "period_s", "dropout")}
    shortens = given.deadline_s > 0 and given.late == "shortened"
    own |= {"concurrency": given.concurrency or 2 * settings.cohort_size, "staleness": given.staleness}
    return System(**own, deadline_s=given.deadline_s or math.inf, is_timed=given.is_timed, shortens=shortens)


def faults_of(settings: Settings) -> Faults:
    """Which clients are faulty, and how."""
    return Faults(settings.system.faulty, settings.system.fault, settings.system.fault_scale)


def profiles_of(settings: Settings) -> profiles.Profiles:
    """The clients' devices, by the seed or from files; ValueError where these cannot be read."""
    given, seed, num_clients = settings.system, settings.seed, settings.data.num_clients
    medians = given.speed, given.up, given.down
    with naming("system.file"):
        rates = profiles.read_rates(given.file, num_clients) if given.file else None
    rates = rates or profiles.lognormal(seed, num_clients, medians, given.speed_sigma, given.bandwidth_sigma)
    if not given.trace:
        return profiles.Profiles(*rates)
    if given.trace == "diurnal":
        times = {"window": given.window_s, "spread": given.spread_s, "period": given.period_s}
        return profiles.Profiles(*rates, profiles.diurnal(seed, num_clients, **times))
    with naming("system.trace"):
        return profiles.Profiles(*rates, profiles.read_windows(given.trace, num_clients, given.period_s))


def server_of(settings: Settings) -> Server:
    """The server's optimizer, training and static norm."""
    server, static_norm = settings.server, StaticNorm(**dict(settings.server.static_norm))
    training = training_of(settings, server.training)
    return Server(server_optimizer(server.optimizer), training, server.training.pretrain, static_norm, server.training.when)


def server_optimizer(given: ServerOptimizerSettings) -> optax.GradientTransformation:
    """The optimizer whose gradient is the averaged client update."""
    if given.name == "sgd":
        return optax.sgd(given.learning_rate, momentum=given.momentum if is_on(given.momentum) else None)
    return fed_opt(given.name, given.learning_rate, b1=given.b1, b2=given.b2, tau=given.eps)


def training_of(settings: Settings, group: ClientSettings | ServerTrainingSettings) -> Training:
    """The training of clients, or the supervised one of the server, whose group of settings is `group`."""
    has_kinds = settings.data.labels_at == "some_clients"
    return Training(
        optimizer=_transformation(group.optimizer),
        learning_rate=_schedule(group.optimizer, settings.rounds),
        batch_size=group.batch_size,
        epochs=group.epochs,
        steps=group.steps,
        persistent=group.optimizer.persistent,
        unlabeled_epochs=group.unlabeled_epochs if isinstance(group, ClientSettings) and has_kinds else 0,
    )


def _transformation(optimizer: OptimizerSettings) -> optax.GradientTransformation:
    clip_norm, weight_decay, decay = optimizer.clip_norm, optimizer.weight_decay, optimizer.decay
    momentum, nesterov = optimizer.momentum, optimizer.nesterov
    if optimizer.name == "lars":
        found = optax.chain(clipping(clip_norm), lars(momentum=momentum, nesterov=nesterov, weight_decay=weight_decay))
    elif optimizer.name == "sgd":
        found = torch_sgd(momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, decay=decay, clip_norm=clip_norm)
    else:
        b1, b2, eps = optimizer.b1, optimizer.b2, optimizer.eps
        rule = partial(adaptive, optimizer.name, b1=b1, b2=b2, eps=eps)
        found = rule(weight_decay=weight_decay, decay=decay, clip_norm=clip_norm)
    factors = factors_of("layers", optimizer.layers)
    return with_factors(found, factors) if factors else found


def _schedule(optimizer: OptimizerSettings, rounds: int) -> Callable[..., Scalar]:
    return schedule(
        optimizer.schedule,
        optimizer.learning_rate,
        rounds,
        factor=optimizer.schedule_factor,
        every=optimizer.schedule_every,
        warmup=optimizer.warmup_rounds,
    )

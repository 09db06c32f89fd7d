"""Settings that are legal and hardly ever meant: one line each on the log, before the run."""

import fnmatch
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.data.partition import PARTITIONS
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.runs import flattened
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.experiment.system_settings import SystemSettings

_log = logging.getLogger(__name__)


class Facts(NamedTuple):
    """What a value is compared with."""

    settings: Settings
    num_classes: int
    largest: int  # examples of the client with the most; 0: there are no clients
    at_server: int  # labeled examples of the server that trains beside clients
    is_reached: bool = True  # whether any client is ever there
    fastest_s: float = 0.0  # a client that takes part takes longer


def _reads_alpha(facts: Facts) -> bool:
    data = facts.settings.data
    schemes = {data.partition, data.labeled_partition, data.unlabeled_partition} - {""}
    return any("alpha" in PARTITIONS[scheme].parameters for scheme in schemes)


def _pi_rounds(facts: Facts) -> int:
    options = facts.settings.method_options().for_rounds(facts.settings.rounds)
    return int(getattr(options, "pi_rounds", 0))  # a method of one's own may have none


Doubtful = Callable[[Any, Facts], bool]


def _unread(key: str, is_read: Callable[[str], bool]) -> Doubtful:
    """Whether a key of `system` is set, and a trace is given that does not read it."""
    default = SystemSettings.model_fields[key].default
    return lambda value, facts: value != default and not is_read(facts.settings.system.trace)


DOUBTS: tuple[tuple[str, Doubtful, str], ...] = (
    ("*.learning_rate", lambda rate, _: rate > 10, "networks hardly ever learn by steps of this size"),
    ("*.momentum", lambda share, _: share > 0.999, "updates are averaged over more than 1,000 steps"),
    ("*.weight_decay", lambda weight, _: weight > 1, "the weights are drawn to 0"),
    ("*.clip_norm", lambda norm, _: 0 < norm < 1e-4, "the steps almost vanish"),
    ("method.prox_mu", lambda weight, _: weight > 100, "clients hardly leave the global model"),
    ("method.confidence", lambda least, _: least == 0, "every pseudo-label is accepted"),
    ("method.confidence", lambda least, _: least == 1, "hardly any pseudo-label is accepted"),
    ("method.*weight", lambda weight, _: weight > 1e4, "other terms of the loss hardly count"),
    ("method.target_delay", lambda delay, facts: delay >= max(facts.settings.rounds - _pi_rounds(facts), 1),
     "with method.pi_rounds that is no less than all rounds, so no second network ever starts"),
    ("model.norm_momentum", lambda share, _: share < 1e-4, "running statistics are averages over more than 10,000 batches"),
    ("data.alpha", lambda alpha, facts: alpha < 1e-3 and _reads_alpha(facts), "a class goes to one client"),
    ("data.alpha", lambda alpha, facts: alpha > 1e5 and _reads_alpha(facts), "the split is as `iid`"),
    ("data.num_labels", lambda number, facts: number < facts.num_classes and not facts.settings.data.labeled_fraction,
     "a class has no labeled example"),
    ("client.batch_size", lambda size, facts: 0 < facts.largest < size, "no client has so many examples"),
    ("server.batch_size", lambda size, facts: 0 < facts.at_server < size, "the server has fewer labeled examples"),
    ("*.epochs", lambda epochs, _: epochs > 500, "a round has more epochs than most runs have in all"),
    ("system.dropout", lambda share, _: share == 1, "no client's update ever arrives"),
    ("system.speed_sigma", lambda sigma, facts: sigma > 0 and not facts.settings.system.speed,
     "without system.speed it has no effect"),
    ("system.bandwidth_sigma", lambda sigma, facts: sigma > 0 and not (facts.settings.system.up or facts.settings.system.down),
     "without system.up or system.down it has no effect"),
    ("system.late", lambda late, facts: late == "shortened" and not facts.settings.system.deadline_s,
     "without system.deadline_s it has no effect"),
    ("system.trace", lambda _, facts: not facts.is_reached, "no client can ever be reached"),
    ("system.round_s", _unread("round_s", bool), "without system.trace it has no effect"),
    ("system.period_s", _unread("period_s", bool), "without system.trace it has no effect"),
    ("system.window_s", _unread("window_s", "diurnal".__eq__), "without system.trace=diurnal it has no effect"),
    ("system.spread_s", _unread("spread_s", "diurnal".__eq__), "without system.trace=diurnal it has no effect"),
    ("system.deadline_s", lambda deadline, facts: 0 < deadline < facts.fastest_s,
     "even the fastest client takes longer, to receive and send the network and to pass its examples through it"),
    ("eval_every", lambda every, facts: every > facts.settings.rounds, "only the last round is evaluated"),
)  # fmt: skip
"""Keys, as a shell's pattern; when a value under one is doubtful; what it does."""


def log_doubts(experiment: Experiment) -> None:
    """Logs what is doubtful in the settings of an experiment."""
    for line in doubts(facts(experiment)):
        _log.warning("%s", line)


def facts(experiment: Experiment) -> Facts:
    """What the settings of an experiment's first run are compared with."""
    settings, data, requires = experiment.settings, experiment.problem.data, experiment.method.requires
    largest, at_server = (int(table.count.max()) if requires.clients else 0 for table in (data.client_data, data.server))
    found = Facts(settings, experiment.problem.spec.num_classes, largest, at_server)
    if (profiles := data.profiles) is None:
        return found
    is_reached = profiles.windows is None or bool(np.any(profiles.windows[..., 0] < profiles.windows[..., 1]))
    network = 4 * experiment.num_params
    seconds = network / profiles.down + network / profiles.up
    if settings.system.late == "dropped":  # else a client may take no step
        own = np.where(data.labeled.count > 0, data.labeled.count, data.unlabeled.count)  # all methods read these
        steps = settings.client.steps * settings.client.batch_size or np.inf
        seconds += np.minimum(own, steps) / profiles.speed
    return found._replace(is_reached=is_reached, fastest_s=float(np.min(seconds)))


def doubts(facts: Facts) -> Iterator[str]:
    """A line for each setting that is doubtful."""
    settings = facts.settings
    values = flattened(settings.to_dict() | {"method": settings.method | dict(settings.method_options())})
    for pattern, is_doubtful, why in DOUBTS:
        for key in fnmatch.filter(values, pattern):
            is_comparable = isinstance(values[key], int | float) or not key.startswith("method.")  # one's own may have any type
            if is_comparable and is_doubtful(values[key], facts):
                yield f"{key}={values[key]}: {why}"

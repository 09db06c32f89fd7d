"""Settings that are legal and hardly ever meant: one line each on the log, before the run."""

import fnmatch
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.data import presets
from fedjax_ssl.experiment.expansion import flattened
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.experiment.unread import ignored
from fedjax_ssl.models.convolution import multiplies_bfloat16
from fedjax_ssl.wrappers.robust import number_assumed, number_faulty

FASTER_IN_BFLOAT16 = ("wide_resnet", "resnet9")
"""Networks whose steps were measured in both dtypes on a CPU with matrix units."""
_log = logging.getLogger(__name__)


class Compared(NamedTuple):
    """What a value is compared with."""

    settings: Settings
    num_classes: int
    largest: int  # examples of the client with the most; 0: there are no clients
    at_server: int  # labeled examples of the server that trains beside clients
    is_reached: bool = True  # whether any client can ever be reached
    fastest_s: float = 0.0  # a lower bound of the seconds that a client takes for a round
    unread: Mapping[str, str] = {}  # keys that the run does not read, and what would read them


def _pi_rounds(facts: Compared) -> int:
    options = facts.settings.method.for_rounds(facts.settings.rounds)
    return int(getattr(options, "pi_rounds", 0))  # a method of one's own may have none


Unusual = Callable[[Any, Compared], bool]


WARNINGS: tuple[tuple[str, Unusual, str], ...] = (
    ("*.learning_rate", lambda rate, _: rate > 10, "networks hardly ever learn by steps of this size"),
    ("server.optimizer.learning_rate", lambda rate, facts: rate < 0.5 and facts.settings.server.optimizer.name == "sgd",
     "the global model takes less than half of each averaged client update; the server's training on its labels has "
     "server.training.optimizer.learning_rate"),
    ("server.optimizer.name", lambda name, facts: name != "sgd" and facts.at_server > 0,
     "it steps with the average of the clients' updates; the server's training on its labels has server.training.optimizer"),
    ("*.warmup_rounds", lambda number, facts: number >= facts.settings.rounds, "the warm-up lasts until the end of the run"),
    ("client.unlabeled_wait", lambda number, facts: number >= facts.settings.rounds, "clients without labels never take part"),
    ("*.momentum", lambda share, _: share > 0.999, "updates are averaged over more than 1,000 steps"),
    ("*.weight_decay", lambda weight, _: weight > 1, "the weights are drawn to 0"),
    ("*.clip_norm", lambda norm, _: 0 < norm < 1e-4, "the steps almost vanish"),
    ("method.prox_mu", lambda weight, _: weight > 100, "clients hardly leave the global model"),
    ("method.confidence", lambda least, _: least == 0, "every pseudo-label is accepted"),
    ("method.confidence", lambda least, _: least == 1, "hardly any pseudo-label is accepted"),
    ("method.*weight", lambda weight, _: weight > 1e4, "other terms of the loss hardly count"),
    ("method.helpers", lambda number, facts: number >= facts.settings.data.num_clients, "there are fewer other clients"),
    ("method.target_delay", lambda delay, facts: delay >= max(facts.settings.rounds - _pi_rounds(facts), 1),
     "with method.pi_rounds that is no less than all rounds, so no second network ever starts"),
    ("model.norm_momentum", lambda share, _: share < 1e-4, "running statistics are averages over more than 10,000 batches"),
    ("data.alpha", lambda alpha, _: alpha < 1e-3, "a class goes to one client"),
    ("data.alpha", lambda alpha, _: alpha > 1e5, "the split is as `iid`"),
    ("data.num_labels", lambda number, facts: number < facts.num_classes, "a class has no labeled example"),
    ("client.batch_size", lambda size, facts: 0 < facts.largest < size, "no client has so many examples"),
    ("server.training.batch_size", lambda size, facts: 0 < facts.at_server < size, "the server has fewer labeled examples"),
    ("*.epochs", lambda epochs, _: epochs > 500, "a round has more epochs than most runs have in all"),
    ("system.dropout", lambda share, _: share == 1, "no client's update ever arrives"),
    ("system.faulty", lambda share, facts: share > 0 and not int(number_faulty(share, facts.settings.data.num_clients)),
     "of so few clients none is faulty"),
    ("server.assumed_faulty", lambda share, facts: share > 0 and not int(number_assumed(share, facts.settings.cohort_size)),
     "of so few clients a round none is assumed faulty"),
    ("server.assumed_faulty", lambda share, facts: facts.settings.server.aggregation == "krum"
     and 2 * int(number_assumed(share, facts.settings.cohort_size)) + 2 >= facts.settings.cohort_size,
     "Krum needs more than 2 f + 2 clients a round to bear f faulty ones"),
    ("system.trace", lambda _, facts: not facts.is_reached, "no client can ever be reached"),
    ("system.deadline_s", lambda deadline, facts: 0 < deadline < facts.fastest_s,
     "even the fastest client takes longer, to receive and send the network and to pass its examples through it"),
    ("diagnostics.clients_every", lambda every, facts: every > facts.settings.rounds, "no round's clients are recorded"),
    ("eval_every", lambda every, facts: every > facts.settings.rounds, "only the last round is evaluated"),
)  # fmt: skip
"""Keys, as a shell's pattern; when a value of such a key is doubtful; and what such a value does."""


def log_warnings(experiment: Experiment) -> None:
    """Logs what is doubtful in the settings of an experiment's runs, each line once."""
    data, shape = experiment.settings.data, experiment.problem.spec.image_shape
    if len(shape) == 3:
        for line in presets.far_shifts(data.name, data.weak, data.labeled, min(shape[:2])):
            _log.warning("%s", line)
    if experiment.layout.conv == "cpu" and experiment.settings.model.name in FASTER_IN_BFLOAT16 and multiplies_bfloat16():
        _log.info("this processor has units for bfloat16: with execution.dtype=bfloat16 steps take about half of the time")
    numbers = [run.number for run in experiment.runs]
    firsts = [numbers.index(number) for number in dict.fromkeys(numbers)]  # other seeds have the same settings
    for line in dict.fromkeys(line for i in firsts for line in warnings_of(compared(experiment.only([i])))):
        _log.warning("%s", line)


def compared(experiment: Experiment) -> Compared:
    """What the settings of an experiment's first run are compared with."""
    settings, data, requires = experiment.settings, experiment.problem.data, experiment.method.requires
    largest, at_server = (int(table.count.max()) if requires.clients else 0 for table in (data.client_data, data.server))
    found = Compared(settings, experiment.problem.spec.num_classes, largest, at_server, unread=experiment.unread)
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


def warnings_of(facts: Compared) -> Iterator[str]:
    """A line for each doubtful setting, and one line that names all settings that were set and are not read."""
    settings = facts.settings
    values = flattened(settings.to_dict())
    for pattern, is_doubtful, why in WARNINGS:
        for key in fnmatch.filter(values.keys() - facts.unread.keys(), pattern):
            is_comparable = isinstance(values[key], int | float) or not key.startswith("method.")  # one's own may have any type
            if is_comparable and is_doubtful(values[key], facts):
                yield f"{key}={values[key]}: {why}"
    if lacking := ignored(settings, facts.unread):
        named = ", ".join(f"{key}={values[key]} (used only with {needs})" for key, needs in lacking.items())
        yield f"settings that this run does not read: {named}"

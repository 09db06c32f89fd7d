"""When a run ends before its last round, and what to do: its weights are not finite, or a client's results are not."""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_ssl.experiment.settings import Settings, own_options
from fedjax_ssl.local.optimizers import DECOUPLED
from fedjax_ssl.options import MANY
from fedjax_ssl.simulation.round import FAULT, FAULTS, RunState, reason

REASON = "diverged"
"""In the metrics row of a diverged run, the key that holds the reason; the row's only other key is `round`."""
LARGE_RATE = {"sgd": 1.0, "adam": 0.1, "adamw": 0.1, "lion": 0.03, "rmsprop": 0.1, "lars": 10.0}
"""Learning rates above which an optimizer seldom works."""
LARGE = 10  # a method's own number is large above so many times its default, unless it is at most 1


class DivergedError(RuntimeError):
    """The global model, or what every client of a round returns, has NaN or infinity."""


class StoppedError(RuntimeError):
    """A client's results are not finite, and `client.on_nonfinite` is `stop`; `state` is the state before that round."""

    def __init__(self, message: str, state: RunState) -> None:
        super().__init__(message)
        self.state = state


def divergence(number: int, metrics: Mapping[str, Any], settings: Settings) -> str:
    """Why a run has diverged in round `number`, by the simulator's metrics, and what to do; empty: it has not."""
    at_server = ["server.training"] if settings.data.labels_at == "server" else []
    if metrics["server/non_finite"]:
        groups = ["client", *at_server] if "client/participants" in metrics else ["server.training"]
        return f"round {number}: the global model holds NaN or infinity; {remedy(settings, groups)}"
    heard_of = settings.cohort_size - metrics.get("sim/dropped", 0) - metrics.get("sim/absent", 0)
    if metrics["client/non_finite"] == heard_of >= min(2, settings.cohort_size):  # one bad client alone ends no run
        faults = functools.reduce(operator.or_, metrics[FAULT].values())
        of_weights = faults & ~sum(1 << FAULTS.index(name) for name in ("the weight", "a negative weight")) == 0
        todo = f"look at the weights of method.name={settings.method.name}" if of_weights else remedy(settings, ["client"])
        return (
            f"round {number}: {'the client' if heard_of == 1 else f'all {heard_of} clients'} returned {reason(faults)}; {todo}"
        )
    return ""


def check_clients(number: int, metrics: Mapping[str, Any], state: RunState) -> None:
    """Raises StoppedError where a client of round `number` was left out."""
    if faults := metrics.get(FAULT):
        client, fault = next(iter(faults.items()))
        others = f" ({len(faults) - 1} more {'is' if len(faults) == 2 else 'are'} bad, too)" if len(faults) > 1 else ""
        todo = "to go on without such clients, set client.on_nonfinite=skip"
        raise StoppedError(f"round {number}: client {client} returned {reason(fault)}{others}; {todo}", state)


def remedy(settings: Settings, groups: Sequence[str]) -> str:
    """What to change in the settings of `client`, `server.training` or both, so that weights stay finite."""
    if large := dict(_large(settings, groups)):
        cause, what = ("cause", "it") if len(large) == 1 else ("causes", "them")
        return f"likely {cause}: {', '.join(f'{key}={value:g}' for key, value in large.items())}; lower {what}"
    rates = " or ".join(f"{group}.optimizer.learning_rate" for group in groups)
    unclipped = [f"{group}.optimizer.clip_norm" for group in groups if not settings.trainings[group].optimizer.clip_norm]
    return f"lower {rates}{', or set ' * bool(unclipped)}{' and '.join(unclipped)}"


def _large(settings: Settings, groups: Sequence[str]) -> Iterator[tuple[str, float]]:
    """The numbers that are so large that they may drive weights to infinity, with their keys."""
    for group in groups:
        optimizer = settings.trainings[group].optimizer
        kind = optimizer.name
        if optimizer.learning_rate > LARGE_RATE[kind]:
            yield f"{group}.optimizer.learning_rate", optimizer.learning_rate
        pulls = {f"{group}.optimizer.weight_decay": optimizer.weight_decay}
        if group == "client":
            pulls["method.prox_mu"] = settings.method.prox_mu
        for key, pull in pulls.items():
            # Steps w <- w - rate pull (w - anchor) overshoot from rate pull = 1 on, and alone diverge from 2 on. Adaptive steps
            # hide the size of what is in the gradient.
            acts = kind in ("sgd", "lars") or (kind in DECOUPLED and key.endswith("weight_decay"))
            if acts and min(optimizer.learning_rate, LARGE_RATE[kind]) * pull >= 1:
                yield key, pull
    if (rate := settings.server.optimizer.learning_rate) >= 2 and "client" in groups:
        yield "server.optimizer.learning_rate", rate
    for name, value in own_options(settings.method).items():
        field = type(settings.method).model_fields[name]
        counts = any(getattr(mark, "le", None) == MANY for mark in field.metadata)
        if {type(value), type(field.default)} == {float} and not counts and value > LARGE * max(field.default, 1 / LARGE):
            yield f"method.{name}", value

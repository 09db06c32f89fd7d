"""Checks that a method keeps the contract, in its fields when it is made, and in what its functions return when traced.

So a mistake is a ValueError of one line before anything is compiled, not a wrong number.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.arrays import Key, PyTree, check_alike, check_update, shown
from fedjax_ssl.method import EVERYWHERE, VIEWS, ClientData, ClientOutput, Cohort, DataSpec, Method
from fedjax_ssl.metrics import ClientMetrics, Mean, Metrics, PerClient, Sum
from fedjax_ssl.options import one_line

WORDS: dict[str, tuple[str, ...]] = {
    "aggregator": ("sum", "stack"),
    "labels_at": EVERYWHERE,
    "server_training": ("after", "parallel"),
    "views": VIEWS,
}
"""The words that fields of a Method and of its Requires may have; `views` may have none."""

OWNED_GROUPS = ("time/", "cost/", "eval/", "best/", "sim/", "internal/")
OWNED = (
    "round", "checksum", "clients", "diverged", "ended_early", "perf/client_images_per_s", "server/non_finite", "client/id",
    "client/non_finite", "client/participants", "client/weight", "client/update_norm", "client/cosine", "client/seconds",
)  # fmt: skip
"""Metrics of a round that are the simulation's own: no method may give another number under such a name."""


def check_method(method: Any) -> Method:
    """Returns the method; raises ValueError where it is not a Method, or a field has a value that is not known."""
    if not isinstance(method, Method):
        raise ValueError(f"method: got {type(method).__name__}, accepted: a factory that returns a Method")
    given = method._asdict() | method.requires._asdict()
    for field, accepted in WORDS.items():
        words = (given[field],) if field == "aggregator" else given[field]
        if not isinstance(words, tuple | list) or not (words or field == "views") or not set(words) <= set(accepted):
            several = "" if field == "aggregator" else ", in a tuple"
            raise ValueError(f"{field}: got {given[field]!r}, accepted: {' or '.join(map(repr, accepted))}{several}")
    if not method.predict:
        raise ValueError("predict: got no function, accepted: names and functions, the first of which is evaluated")
    return method


def checked(method: Method, spec: DataSpec) -> Method:
    """The method with functions that check what they return: ValueError says in one line what breaks the contract.

    Its `broadcast` gets None in place of the clients' states unless `Requires.all_states`, wherever the states are kept.
    """
    check_method(method)

    @wraps(method.init)
    def init(key: Key, data_spec: DataSpec) -> tuple[PyTree, PyTree]:
        server, clients = _pair("init", method.init(key, data_spec), "(server, clients)")
        _check_axis("init: the client states", clients, data_spec.num_clients, "all clients")
        return server, clients

    @wraps(method.broadcast)
    def broadcast(server: PyTree, clients: PyTree, cohort: Cohort) -> tuple[PyTree, PyTree]:
        seen = clients if method.requires.all_states else None
        message = _returned(method, "broadcast", server, seen, cohort)
        shared, per_client = _pair("broadcast", message, "(shared, per_client)")
        _check_axis("broadcast: per_client", per_client, len(cohort.ids), "the cohort")
        return shared, per_client

    @wraps(method.client_update)
    def client_update(shared: PyTree, per_client: PyTree, state: PyTree, data: ClientData, key: Key) -> ClientOutput:
        output = method.client_update(shared, per_client, state, data, key)
        if not isinstance(output, ClientOutput):
            raise ValueError(f"client_update: got {type(output).__name__}, accepted: ClientOutput")
        if method.aggregator == "sum":  # by `stack` the server gets what was sent as it is, compressed perhaps
            check_update(output.update, (shared, per_client))
        if jnp.shape(output.weight) != ():
            raise ValueError(f"client_update: weight: got {shown(output.weight)}, accepted: a scalar")
        check_alike("client_update: client_state", output.client_state, state, "the method's init gives it")
        _check_metrics("client_update", output.metrics, (Mean, Sum, PerClient), ())
        return output

    def of_server(name: str) -> Callable[..., tuple[PyTree, Metrics]]:
        """The checked `server_update` or `prepare`."""

        @wraps(getattr(method, name))
        def work(server: PyTree, *arguments: Any) -> tuple[PyTree, Metrics]:
            new, metrics = _pair(name, _returned(method, name, server, *arguments), "(server, metrics)")
            check_alike(f"{name}: server", new, server, "the method's init gives it")
            _check_metrics(name, metrics, (Mean, Sum), (spec.cohort_size,))
            return new, metrics

        return work

    return method._replace(
        init=init,
        broadcast=broadcast,
        client_update=client_update,
        server_update=of_server("server_update"),
        predict={name: _checked_predict(name, predict, spec.num_classes) for name, predict in method.predict.items()},
        predict_client={name: _checked_predict(name, own, spec.num_classes) for name, own in method.predict_client.items()},
        prepare=of_server("prepare"),
    )


def is_breach(error: Exception) -> bool:
    """Whether an error's line says what breaks the contract; otherwise a method's own code failed, and its traceback helps."""
    return isinstance(error, ValueError) and ": got " in str(error) and ", accepted: " in str(error)


def _returned(method: Method, name: str, *arguments: Any) -> Any:
    """Calls one of a method's functions, with None in place of data that it did not ask for, and returns its result."""
    try:
        return getattr(method, name)(*arguments)
    except (TypeError, AttributeError, ValueError) as error:
        asked = {"all_states": "the states of all clients"} if name == "broadcast" else {}
        asked |= {"rounds": "how many rounds the run has"}
        lacking = [f"{key}=True where it reads {what}" for key, what in asked.items() if not getattr(method.requires, key)]
        if not lacking or "None" not in str(error) or is_breach(error):
            raise
        raise ValueError(f"{name}: got None ({one_line(error)}), accepted: Requires with {', '.join(lacking)}") from error


def _checked_predict(name: str, predict: Callable[..., jax.Array], num_classes: int) -> Callable[..., jax.Array]:
    @wraps(predict)
    def logits_of(*arguments: Any) -> jax.Array:
        *_, images, _ = arguments
        logits, shape = predict(*arguments), (len(images), num_classes)
        if jnp.shape(logits) != shape or not jnp.issubdtype(logits.dtype, jnp.floating):
            accepted = f"logits float32{list(shape)}, of so many examples and classes"
            raise ValueError(f"predict: {name!r}: got {shown(logits)}, accepted: {accepted}")
        return logits

    return logits_of


def check_names(metrics: Iterable[str], others: Iterable[str], what: str, whose: str) -> None:
    """Raises ValueError where two functions give metrics of the same name, of which one would be lost."""
    for name in sorted({*metrics} & {*others}):
        raise ValueError(f"{what}: metric {name!r}: got a name that {whose} has, too, accepted: another one")


def _pair(what: str, result: Any, names: str) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{what}: got {type(result).__name__}, accepted: a pair {names}")
    return result


def _check_axis(what: str, tree: PyTree, size: int, of: str) -> None:
    """Raises ValueError where an array has no leading axis of this size; JAX would repeat the last row."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if np.shape(x)[:1] != (size,):
            at = jax.tree_util.keystr(path)
            raise ValueError(f"{what}: got {shown(x)}{at and f' at {at}'}, accepted: a leading axis of {size}, {of}")


def _check_metrics(what: str, metrics: ClientMetrics, kinds: tuple[type, ...], axis: tuple[int, ...]) -> None:
    """Raises ValueError where a metric has a name of the simulation's own, or another type or shape than a scalar or `axis`."""
    if not isinstance(metrics, Mapping):
        raise ValueError(f"{what}: metrics: got {type(metrics).__name__}, accepted: a mapping of names to metrics")
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise ValueError(f"{what}: metric {name!r}: got {type(name).__name__}, accepted: a text as its name")
        if name in OWNED or name.startswith(OWNED_GROUPS):
            raise ValueError(f"{what}: metric {name!r}: got a name of the simulation's own, accepted: another one")
        if not isinstance(metric, kinds):
            accepted = f"metrics.mean(values, mask), or {', '.join(kind.__name__ for kind in kinds)}"
            raise ValueError(f"{what}: metric {name!r}: got {type(metric).__name__}, accepted: {accepted}")
        if not isinstance(metric, PerClient) and any(jnp.shape(part) not in ((), axis) for part in metric):
            several = f", or arrays {list(axis)} of the cohort's clients" if axis else ""
            raise ValueError(f"{what}: metric {name!r}: got {', '.join(map(shown, metric))}, accepted: scalars{several}")

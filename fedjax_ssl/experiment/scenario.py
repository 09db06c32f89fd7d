"""Whether a method and the settings of a run go together."""

from fedjax_ssl.experiment import evaluation
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import DataSpec, Method


def check_stop(config: Settings, method: Method) -> None:
    """Raises ValueError where a client would have to end one of several rounds or runs of one program."""
    together = config.execution.rounds_per_dispatch
    if method.requires.clients and config.client.on_nonfinite == "stop" and (together > 1 or config.is_several):
        other = f"execution.rounds_per_dispatch={together}" if together > 1 else "several runs"
        raise ValueError(f"client.on_nonfinite: got stop with {other}, accepted: skip")


def _check_async(settings: Settings, method: Method) -> None:
    """Raises ValueError where asynchronous rounds cannot be."""
    size, number, got = settings.cohort_size, settings.system.concurrency or 2 * settings.cohort_size, "got async"
    if not method.requires.clients:
        raise ValueError(f"system.participation: {got} with method.name={settings.method.name}, which has no clients")
    if method.aggregator != "sum":
        accepted = "with a method whose server gets the mean of the clients' updates, and server.aggregation=mean"
        raise ValueError(f"system.participation: {got} where the server reads every client's update, accepted: {accepted}")
    if number % size:
        raise ValueError(f"system.concurrency: got {number}, accepted: a multiple of cohort_size = {size}")
    if settings.rounds <= number // size:
        what = "as the first rounds only let clients begin"
        raise ValueError(f"rounds: got {settings.rounds}, accepted: more than system.concurrency / cohort_size, {what}")


def _check_privacy(settings: Settings, method: Method) -> None:
    """Raises ValueError where a round would tell more of its clients than the noisy mean of their clipped updates."""
    others: dict[str, tuple[object, object]] = {
        "server.aggregation": (settings.server.aggregation, "mean"),
        "client.compression": (settings.client.compression, "none"),
        "system.participation": (settings.system.participation, "uniform"),
        "labeled_cohort": (settings.labeled_cohort, 0),
        "method.aggregation": (getattr(settings.method, "aggregation", "") == "lsaa" and "lsaa", False),
    }
    for key, (got, accepted) in others.items():
        if got != accepted:
            raise ValueError(f"{key}: got {got} with privacy.clip={settings.privacy.clip:g}, accepted: {accepted or 'uniform'}")
    if method.requires.next_cohort or method.requires.pool:
        accepted = "a method that does not, with server.static_norm.data=labeled, model.norm=batch or without batch norm"
        raise ValueError(
            f"privacy.clip: got {settings.privacy.clip:g} where the server reads clients' data, accepted: {accepted}"
        )


def check_scenario(settings: Settings, method: Method, spec: DataSpec, *, has_batch_norm: bool) -> None:
    """Raises ValueError where the labels are not where the method reads them, or settings that it reads do not go together."""
    requires, data, name = method.requires, settings.data, settings.method.name
    if (requires.clients or requires.next_cohort) and settings.cohort_size > data.num_clients:
        raise ValueError(f"cohort_size: got {settings.cohort_size}, accepted: 1 to data.num_clients = {data.num_clients}")
    trains = {"client": requires.clients, "server.training": data.labels_at == "server"}
    evaluation.check_scores(settings.scores, spec.num_classes)
    for group, got in settings.trainings.items():
        if trains[group] and (got.epochs > 0) == (got.steps > 0):
            shown = f"got {got.epochs} and {got.steps}, accepted: one positive, the other 0"
            raise ValueError(f"{group}.epochs, {group}.steps: {shown}")
    if data.labels_at not in requires.labels_at:
        accepted = " or ".join(requires.labels_at)
        raise ValueError(f"data.labels_at: got {data.labels_at} with method.name={name}, accepted: {accepted}")
    if data.reveal_labels and {*requires.labels_at} == {"server"}:
        raise ValueError(f"data.reveal_labels: got True with method.name={name}, whose clients read no labels, accepted: False")
    if (system := settings.system).faulty and system.fault == "labels" and requires.clients and data.labels_at == "server":
        accepted = "sign_flip or noise, as clients have no labels"
        raise ValueError(f"system.fault: got labels with data.labels_at=server, accepted: {accepted}")
    if system.participation == "async":
        _check_async(settings, method)
    if settings.privacy.clip and requires.clients:
        _check_privacy(settings, method)
    if (every := settings.diagnostics.clients_every) and not requires.clients:
        raise ValueError(f"diagnostics.clients_every: got {every} with method.name={name}, which has no clients, accepted: 0")
    when = settings.server.training.when
    if when not in requires.server_training:
        raise ValueError(f"server.training.when: got {when} with method.name={name}, accepted: after")
    if data.labels_at != "server" and when != "after":
        raise ValueError(f"server.training.when: got {when} with data.labels_at={data.labels_at}, accepted: after")
    norm_data = settings.server.static_norm.data
    if data.labels_at != "server" and settings.model.norm == "static" and has_batch_norm and norm_data != "cohort":
        raise ValueError(f"server.static_norm.data: got {norm_data} with data.labels_at={data.labels_at}, accepted: cohort")

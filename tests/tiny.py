"""Small real experiments for tests: synthetic 8x8 images, a small network, few clients; seconds to compile."""

from collections.abc import Sequence
from typing import Any

import pytest

from configs import common
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.methods import METHODS

LABELS_AT = {
    "fixmatch": ("server", "clients"),
    "fedmatch": ("server", "clients"),
    "uda": ("clients", "server"),
    **dict.fromkeys(("fedsiam_pi", "fedsiam_mt", "fedsiam_d"), ("server", "clients")),
    "fedavg": ("clients", "server"),
    "freematch": ("server", "clients"),
    **dict.fromkeys(("rscfed", "cbafed", "twinsight"), ("some_clients",)),
    **dict.fromkeys(("feddure", "fedlabel", "fedtrinet", "fedsem", "fedavg_pp", "fedprox", "sage", "feddb"), ("clients",)),
}
"""Where methods are tested to read labels, first where `config` has them; not listed: at the server."""
WITHOUT_CLIENTS = ("supervised", "fixmatch_central", "freematch_central")
ALIKE = ("fedavg_pp", "fedprox", "fedsiam_mt", "fedsiam_pi", "fixmatch_central", "freematch_central", "uda")
"""Methods that share the code of others, and are left out where every method takes long."""
CASES = [(method, place) for method in METHODS for place in LABELS_AT.get(method, ("server",))]
WITH_CLIENTS = [case for case in CASES if case[0] not in WITHOUT_CLIENTS]
ONE_OF_EACH = [(method, LABELS_AT.get(method, ("server",))[0]) for method in METHODS]
UNLIKE = [case for case in ONE_OF_EACH if case[0] not in ALIKE]
FEW = [case for case in ONE_OF_EACH if case[0] in ("fl2", "fedlabel", "fedavg", "cbafed", "supervised")]
"""One of each kind, where every method takes longer than a test may that runs each time."""
SOME = [case for case in UNLIKE if case[0] in ("feddure", "rscfed")]
"""More of them, each with something that no other has; with FEW the ones that `.ci/run` takes."""
NETWORKS = {"mlp": {"hidden": 32}, "linear": {}, "cnn": {"width": 4}}  # the last has batch norm


def params(
    cases: Sequence[tuple[str, str]] = CASES, *, fast: Sequence[tuple[str, str]] = CASES, ci: Sequence[tuple[str, str]] = ()
) -> list:
    """Cases as a test's parameters; those that are not `fast` are marked `ci`, or, if not there either, `slow`."""
    assert {*fast, *ci} <= set(CASES)

    def marks(case: tuple[str, str]) -> Any:
        return () if case in fast else pytest.mark.ci if case in ci else pytest.mark.slow

    return [pytest.param(case, id="-".join(case), marks=marks(case)) for case in cases]


def config(method: str, *, network: str = "mlp", labels_at: str = "", **overrides: Any) -> dict[str, Any]:
    """A small config of any method on `synthetic` data; overrides are dotted keys with `__` for the dots."""
    tree = common.base(method, network, **NETWORKS[network])
    tree.data.name, tree.data.num_clients, tree.data.num_labels = "synthetic", 8, 20
    tree.data.weak, tree.data.strong = "crop1", "none"
    tree.client.epochs, tree.client.batch_size, tree.server.training.epochs = 1, 64, 10
    tree.server.training.optimizer.schedule = tree.client.optimizer.schedule = "constant"
    tree.server.training.optimizer.learning_rate = tree.client.optimizer.learning_rate = 0.03
    tree.data.labels_at = labels_at or LABELS_AT.get(method, ("server",))[0]
    tree.data.reveal_labels = method == "fedavg" and labels_at == "server"  # with server fine-tuning
    if tree.data.labels_at == "some_clients":
        tree.client.batch_size = 8
    if tree.data.labels_at == "clients":
        tree.data.labeled_fraction, tree.client.batch_size, tree.client.epochs = (0.3,), 8, 3
        if method.startswith("fedsiam"):
            tree.client.optimizer.learning_rate = 0.01  # the paper's: its sum of two losses is easily driven too far
    if "confidence" in tree.method:
        tree.method.confidence = 0.5  # so that some pass in the first rounds
    if "helper_period" in tree.method:  # FedMatch's weights are for learning rates thirty times smaller
        tree.method.update(helper_period=2, lambda_s=1.0, lambda_a=1.0, lambda_l2=0.01)
    for decay in ("ema_decay", "threshold_decay"):
        if decay in tree.method:
            tree.method[decay] = 0.9  # an average over the few steps that there are
    if "smallest_threshold" in tree.method:  # in a few steps FreeMatch's thresholds do not leave 1 / C
        tree.method.smallest_threshold = 0.5
    if "labeled_rounds" in tree.method:
        tree.method.labeled_rounds = 1  # so that pseudo-labels are there from round 2 on
    if "pi_rounds" in tree.method:
        tree.method.pi_rounds = 0  # so that layers are chosen from round 1 on
    tree.execution.strategy = "scan"  # whatever devices there are
    tree.rounds, tree.cohort_size, tree.eval_every, tree.checkpoint_every = 4, 5, 2, 2
    for key, value in overrides.items():
        tree.update_from_flattened_dict({key.replace("__", "."): value})
    return tree.to_dict()


def confident(method: str, threshold: float = 0.12) -> dict[str, float]:
    """An override of a method's threshold, such that some pass from round 1 on, and clients train."""
    own = {"cbafed": {"method__largest_threshold": threshold}}.get(method, {})
    return {"method__confidence": threshold} if "confidence" in config(method)["method"] else own


def experiment(method: str, **options: Any) -> Experiment:
    return build(config(method, **options))

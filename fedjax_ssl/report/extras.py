"""What a run's folder may hold in addition to its log: `evaluation.json`, and clients' records in `clients/round_*.npz`."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from pydantic import Field

from fedjax_ssl.experiment.evaluation import SCORES
from fedjax_ssl.options import Count, Fraction, Model, parse
from fedjax_ssl.runs.clients import ClientsLog
from fedjax_ssl.runs.folder import EVALUATION
from fedjax_ssl.runs.reading import Run, read_object


class PersonalizedFile(Model, extra="ignore"):
    """What is read of the clients' own models in `evaluation.json`."""

    accuracy: list[Fraction | None] = Field(default=[])
    epochs: Count = 0


class ClientsFile(Model, extra="ignore"):
    """What is read of the clients in `evaluation.json`."""

    accuracy: list[Fraction | None] = Field(default=[])
    of: str = "training"
    personalized: PersonalizedFile = PersonalizedFile()


class EvaluationFile(Model, extra="ignore"):
    """What is read of a run in `evaluation.json`, which `launch.evaluate --save` writes; a part that is missing is empty."""

    round: Count = 0
    classes: list[str] = Field(default=[])
    class_accuracy: list[Fraction | None] = Field(default=[])
    confusion: list[list[Count]] = Field(default=[])
    balanced_accuracy: Fraction | None = None
    macro_f1: Fraction | None = None
    auc: Fraction | None = None
    top5_accuracy: Fraction | None = None
    ece: Fraction | None = None
    clients: ClientsFile = ClientsFile()


class Evaluation(NamedTuple):
    """A model's results as fractions.

    A part that is missing is empty, and a score that is missing is NaN, as is the accuracy of a class or client without
    examples. Rows of `confusion` are true classes; `scores` have the keys of `evaluation.SCORES`; `classes` are the names of
    all, if they have some.
    """

    per_class: Float[np.ndarray, " C"]
    confusion: Float[np.ndarray, "C C"]
    per_client: Float[np.ndarray, " K"]
    scores: dict[str, float]
    classes: tuple[str, ...] = ()
    of_clients: str = "training"  # which of their own examples clients are evaluated on: `training` or `test`
    personalized: Float[np.ndarray, " _"] = np.zeros(0)  # accuracies of clients' own models, after training for `epochs`
    epochs: int = 0

    @property
    def known(self) -> Float[np.ndarray, " _"]:
        """The accuracies of clients that have one."""
        return self.per_client[np.isfinite(self.per_client)]


class Records(NamedTuple):
    """Clients' records in long form: round and client id of each, and its values, one or one per class."""

    round: Int[np.ndarray, " n"]
    id: Int[np.ndarray, " n"]
    values: dict[str, Float[np.ndarray, " n *_"]]


def evaluation(run: Run) -> tuple[Evaluation | None, list[str]]:
    """What `launch.evaluate --save` says of a run, or None, and why its file is not used, if it is not."""
    if not (run.path / EVALUATION).is_file():
        return None, []
    try:
        found = parse(EvaluationFile, read_object(run.path / EVALUATION))
        if found.round != run.rounds_done:
            raise ValueError(f"it is of round {found.round}, and the log has {run.rounds_done}: evaluate --save it at its end")
        confusion = np.array(found.confusion, float).reshape(len(found.confusion), len(found.confusion))
    except ValueError as error:
        return None, [f"{EVALUATION}: not used: {' '.join(str(error).split())}"]
    per_class, per_client = (np.array(values, float) for values in (found.class_accuracy, found.clients.accuracy))
    known = {score.key: getattr(found, score.key) for score in SCORES.values()}
    scores = {key: float("nan") if value is None else value for key, value in known.items()}
    own = found.clients.personalized
    after = np.array(own.accuracy, float)
    of_clients = found.clients.of, after[np.isfinite(after)], own.epochs
    return Evaluation(per_class, confusion, per_client, scores, tuple(found.classes), *of_clients), []


def records(run: Run) -> tuple[Records | None, list[str]]:
    """A run's clients' records (`diagnostics.clients_every`), or None, and why they are not used, if they are not."""
    try:
        found = ClientsLog(run.path).read()
        if not found:
            return None, []
        rounds = np.repeat(found.pop("round"), found["client/id"].shape[1])
        values = {key: array.reshape(len(rounds), *array.shape[2:]).astype(float) for key, array in found.items()}
    except (ValueError, KeyError, IndexError) as error:
        return None, [f"clients' records: not used: {error}"]
    return Records(rounds, values.pop("client/id").astype(int), values), []

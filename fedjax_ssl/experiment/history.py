"""Runs from Python without files: their metrics as arrays, tables and curves."""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float

from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.divergence import REASON
from fedjax_ssl.experiment.experiment import Experiment, Row
from fedjax_ssl.options import did_you_mean
from fedjax_ssl.programs import keep_programs
from fedjax_ssl.simulation.round import RunState

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCURACY = "eval/accuracy"


@dataclasses.dataclass(frozen=True, repr=False)
class History:
    """The metrics of one run, or of several runs that were computed together, and their last state.

    Where `patience` ends one of several runs, its state is still trained along with the others.
    Only runs in folders keep their best states.

    `rows[t][r]` are the metrics of round t + 1 of run r. `history["eval/accuracy"]` has a metric's values: [T] of one run, or
    [T, R] of several, NaN in rounds without one.
    """

    experiment: Experiment
    state: RunState
    rows: tuple[tuple[Row, ...], ...]

    def __repr__(self) -> str:
        return f"<History of {self.experiment!r}: {', '.join(self.metrics)}>"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics that are numbers, in the order in which they appear."""
        found = (name for rows in self.rows for row in rows for name, value in row.items() if isinstance(value, int | float))
        return tuple(dict.fromkeys(found))

    def __getitem__(self, metric: str) -> Float[np.ndarray, "T ..."]:
        if metric not in (known := self.metrics):
            raise KeyError(f"metric: got {metric!r}, accepted: {', '.join(known)}{did_you_mean(metric, known)}")
        values = np.array([[row.get(metric, np.nan) for row in rows] for rows in self.rows], float)
        return values[:, 0] if values.shape[1] == 1 else values

    def last(self, metric: str = ACCURACY) -> Float[np.ndarray, " R"]:
        """Each run's last value of a metric; NaN where it has none, or the run has diverged."""
        values = self[metric].reshape(len(self.rows), -1)
        found = [own[np.isfinite(own)][-1] if np.isfinite(own).any() else np.nan for own in values.T]
        return np.array([np.nan if REASON in row else value for row, value in zip(self.rows[-1], found, strict=True)])

    def table(self) -> Any:
        """A row for each round and run: a `pandas.DataFrame` if pandas is installed, or a dict of arrays [T R]."""
        runs, key = self.experiment.runs, _varied(self.experiment)
        columns = {"seed": np.tile([run.settings.seed for run in runs], len(self.rows))}
        if key:
            columns[key] = np.tile([run.number for run in runs], len(self.rows))
        columns |= {name: np.ravel(self[name]) for name in self.metrics}
        return _table(columns | {"round": columns["round"].astype(int)})

    def plot(self, metric: str = ACCURACY, axes: "Axes | None" = None, label: str = "") -> "Axes":
        """Draws a metric against rounds: the mean over seeds and, as a band, their standard deviation.

        A number that varies has a line for each of its values. Returns the axes, which are made if none are given.
        """
        axes = _axes(metric) if axes is None else axes
        values, numbers = self[metric].reshape(len(self.rows), -1), [run.number for run in self.experiment.runs]
        for number in dict.fromkeys(numbers):
            own = values[:, [one == number for one in numbers]]
            rounds = np.flatnonzero(np.isfinite(own).all(axis=1))
            value = "" if number is None else f"{_varied(self.experiment)}={number:g}"
            mean = own[rounds].mean(axis=1)
            (line,) = axes.plot(rounds + 1, mean, label=" ".join(filter(None, [label, value])) or None)
            if own.shape[1] > 1:
                sd = own[rounds].std(axis=1, ddof=1)
                axes.fill_between(rounds + 1, mean - sd, mean + sd, color=line.get_color(), alpha=0.2, linewidth=0)
        if label or numbers[0] is not None:
            axes.legend()
        return axes


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The histories of several experiments, by their names."""

    histories: dict[str, History]

    def __getitem__(self, name: str) -> History:
        return self.histories[name]

    def table(self, metric: str = ACCURACY) -> Any:
        """A row for each experiment: the mean and sample standard deviation over its runs of a metric's last value.

        A `pandas.DataFrame` if pandas is installed, or a dict of arrays. The deviation of one run is NaN.
        """
        last = [history.last(metric) for history in self.histories.values()]
        return _table({
            "name": np.array(list(self.histories)), "runs": np.array([len(own) for own in last]),
            metric: np.array([own.mean() for own in last]),
            "sd": np.array([own.std(ddof=1) if len(own) > 1 else np.nan for own in last]),
        })  # fmt: skip

    def plot(self, metric: str = ACCURACY, axes: "Axes | None" = None) -> "Axes":
        """Draws a metric of all experiments against rounds, as `History.plot` does; returns the axes."""
        axes = _axes(metric) if axes is None else axes
        for name, history in self.histories.items():
            history.plot(metric, axes, name)
        return axes


def run(
    config: Any, dataset: Dataset | None = None, *, method: Callable | None = None, model: Any = None,
    start: tuple[Experiment, RunState] | None = None, live: str = "",
) -> History:  # fmt: skip
    """Runs all rounds of a config in this process, without a folder: the history of its metrics, with the last state.

    Compiled programs are kept for later processes, in `~/.cache/fedjax_ssl` unless JAX already has a folder for them.

    Arguments are those of `build`. `live` is the name of a metric, such as `eval/accuracy`, whose curve a notebook shows while
    the rounds run. Raises what `build` raises, DivergedError where a single run diverges, and ValueError for a `live` curve
    outside of a notebook.
    """
    if not jax.config.jax_compilation_cache_dir:
        keep_programs()
    experiment = build(config, dataset, method=method, model=model, start=start)
    show = _live(live) if live else None
    rows: list[tuple[Row, ...]] = []
    state = None
    for state, found in experiment.rounds():
        rows.append(tuple(found) if isinstance(found, list) else (found,))
        if show is not None and any(ACCURACY in row for row in rows[-1]):
            so_far = History(experiment, state, tuple(rows))
            if live not in so_far.metrics:
                known = so_far.metrics
                raise ValueError(f"live: got {live!r}, accepted: {', '.join(known)}{did_you_mean(live, known)}")
            show(so_far)
    assert state is not None  # there is at least one round
    return History(experiment, state, tuple(rows))


def compare(configs: Mapping[str, Any] | Sequence[Any], dataset: Dataset | None = None, *, live: str = "") -> Comparison:
    """Runs several configs, one after another, and compares their metrics; `live` is as in `run`.

    `configs` are a dict from names to configs, or a list, in which each config is named by its method. ValueError where two
    have the same name; an error's line begins with the name of its config.
    """
    if not isinstance(configs, Mapping):
        names = [config["method"]["name"] if isinstance(config, Mapping) else config.method.name for config in configs]
        if len({*names}) < len(names):
            raise ValueError(f"configs: got {', '.join(names)}, accepted: a dict from names, each once, to configs")
        configs = dict(zip(names, configs, strict=True))
    found = {}
    for name, config in configs.items():
        try:
            found[name] = run(config, dataset, live=live)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return Comparison(found)


def _varied(experiment: Experiment) -> str:
    """The name of the number that differs between runs, which their own settings do not say; empty: none does."""
    run = experiment.runs[0]
    return "" if run.number is None else run.name.partition("-")[2].rpartition("=")[0]


def _table(columns: Mapping[str, np.ndarray]) -> Any:
    if importlib.util.find_spec("pandas") is None:
        return dict(columns)
    import pandas

    return pandas.DataFrame(columns)


def _axes(metric: str) -> "Axes":
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axes.set(xlabel="round", ylabel=metric)
    axes.grid(alpha=0.3)
    return axes


def _live(metric: str) -> Callable[[History], None]:
    """A function that shows the curve so far, in the place of the one before."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = None
    if get_ipython is None or get_ipython() is None:
        raise ValueError(f"live: got {metric!r} outside of a notebook, accepted: ''")
    from matplotlib import pyplot

    axes = _axes(metric)
    figure = axes.get_figure(root=True)
    pyplot.close(figure)  # it is shown, and updated, by the handle alone
    handle = display(figure, display_id=True)

    def show(history: History) -> None:
        for line in [*axes.lines, *axes.collections]:
            line.remove()
        axes.set_prop_cycle(None)
        history.plot(metric, axes)
        handle.update(figure)

    return show

"""What a run's results depend on beyond its config: machine, versions, layout and data, as `run.json` has them."""

import functools
import hashlib
import json
import logging
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from fedjax_ssl.arrays import PyTree, digest
from fedjax_ssl.data.federated import Table
from fedjax_ssl.data.sources import SYNTHETIC, Dataset, unpadded
from fedjax_ssl.experiment.expansion import CLIENT_FILES, flattened, identity
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.layout import Layout
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.files import REMEDY, plain, read_json

PACKAGES = ("jax", "jaxlib", "flax", "optax")
OF_DRAWS = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset")
"""Options that change every random draw, so that a run cannot go on with others."""
OPTIONS = (*OF_DRAWS, "jax_default_matmul_precision")
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
HARMLESS = ("--xla_cpu_collective_", "--xla_force_host_platform_device_count", "--xla_dump_")
"""How flags begin that change no result: how long devices wait for each other, how many there are, what is printed."""
MOST_CHANGES = 2**20  # bytes that a run keeps of what has changed in the user's repository
_log = logging.getLogger(__name__)


def began(settings: Settings) -> dict[str, Any]:
    """What makes a run another one, and stays as it is however often it goes on: its config without the number of rounds."""
    return {key: value for key, value in identity(flattened(plain(settings.to_dict()))).items() if key != "rounds"}


def begins(path: pathlib.Path) -> bytes:
    """The bytes with which the digest of a run's log begins: the run's config and data from its `run.json`.

    They are empty for a run of an older version, and if there is no `run.json`.
    """
    noted = read_json(path) if path.exists() else {}
    return json.dumps([noted["began"], noted["data"]], sort_keys=True).encode() if "began" in noted else b""


def check_began(path: pathlib.Path, settings: Settings) -> None:
    """Raises ValueError if there is a `run.json` and it belongs to a run with another config."""
    there, here = read_json(path).get("began", {}) if path.exists() else {}, began(settings)
    if differing := [key for key in there if key in here and there[key] != here[key]]:  # a version may have other keys
        shown = ", ".join(f"{key} is {there[key]!r} there and {here[key]!r} in config.json" for key in differing)
        raise ValueError(f"{path} is another run's: {shown}; {REMEDY}")


def widths(experiment: Experiment) -> dict[str, int]:
    """The number of columns of each index table, which several runs pad to the largest of them."""
    tables = experiment.problem.tables[0]
    return {name: int(table.index.shape[1]) for name, table in tables.items() if isinstance(table, Table)}


def layout(path: pathlib.Path) -> Layout | None:
    """The layout in a `run.json`; None where this machine or version cannot have it."""
    noted, available = read_json(path), len(jax.devices())
    try:
        found = Layout(**noted["layout"])
    except (KeyError, TypeError):  # fields of another version
        return None
    needed = found.devices * found.runs_at_once
    fits = needed == available if jax.process_count() > 1 else needed <= available
    return found if fits and noted.get("machine", {}).get("platform") == jax.default_backend() else None


def check_data(paths: Sequence[pathlib.Path], experiment: Experiment) -> None:
    """Raises ValueError if a run that has a `run.json` began with other data."""
    if not any(path.exists() for path in paths):
        return
    for path, data in zip(paths, data_digests(experiment), strict=True):
        if path.exists() and read_json(path).get("data") != data:
            raise ValueError(f"{path.parent}: its run began with other data than these; put them back, or use --overwrite")
        if path.exists() and read_json(path).get("start", "") != experiment.start_digest:
            raise ValueError(f"{path.parent}: its run started from other weights than model.init has; use --overwrite")


def check_widths(paths: Sequence[pathlib.Path], experiment: Experiment) -> None:
    """Raises ValueError if a run's index tables had another width when it began, because other runs were computed with it.

    Its random draws depend on that width.
    """
    here = widths(experiment)
    for path in filter(pathlib.Path.exists, paths):
        if read_json(path).get("widths", here) != here:
            got = "whose clients' tables are not as wide as those of the runs that it began with"
            raise ValueError(f"{path.parent}: got it beside runs {got}, accepted: alone, with its seed and this --workdir")


def warn_of_changes(paths: Sequence[pathlib.Path], layout: Layout) -> None:
    """Warns if runs that have a `run.json` began on another machine or in another layout, once for each such difference.

    ValueError if they would go on with other random draws.
    """
    here, differing = machine() | layout._asdict(), dict[str, pathlib.Path]()
    del here["fedjax_ssl"]  # `changes.changed` says it
    for path in filter(pathlib.Path.exists, paths):
        noted = read_json(path)
        there = {**noted.get("machine", {}), **noted.get("layout", {})}
        for key in OF_DRAWS:
            if there.get(key, here[key]) != here[key]:
                why = "which changes all random draws: set it as it was, or start anew with --overwrite"
                raise ValueError(f"{path.parent}: its run began with {key}={there[key]} and not {here[key]}, {why}")
        if found := [f"{key} was {there.get(key)!r}" for key, value in here.items() if there.get(key) != value]:
            differing.setdefault(", ".join(found), path.parent)
    for what, folder in differing.items():
        _log.warning("%s: going on with other rounding: %s", folder, what)


def machine() -> dict[str, str | int | bool | None]:
    """What the rounding of results depends on: platform, processor, cores, processes, versions, options and flags."""
    platform, device = jax.default_backend(), jax.devices()[0]
    on_cpu = {"processor": processor()}
    of_device = {"processor": device.device_kind, "driver": " ".join(device.client.platform_version.split())}
    of_platform = {"platform": platform, **(on_cpu if platform == "cpu" else of_device)}
    return {**of_platform, "cores": cores(), "processes": jax.process_count(), **software()}


def software() -> dict[str, str | int | bool | None]:
    """Versions, a digest of the package's own files, options and flags; no device is asked."""
    words = {name: sorted(os.environ.get(name, "").split()) for name in VARIABLES}
    return {
        **{name: metadata.version(name) for name in PACKAGES},
        "fedjax_ssl": sources(),
        **{name: getattr(jax.config, name) for name in OPTIONS},
        **{name: " ".join(word for word in given if not word.startswith(HARMLESS)) for name, given in words.items()},
    }


def data_digests(experiment: Experiment, *, devices: bool = True) -> list[str]:
    """For each run a digest of its examples, of their split, and, unless not asked for, of uneven clients' devices."""
    problem = experiment.problem
    of_all = digest((problem.train, problem.test))

    def own(table: PyTree) -> PyTree:
        """A table without the columns that it has for the runs beside it."""
        return table._replace(index=table.index[:, : max(1, int(np.max(table.count)))]) if isinstance(table, Table) else table

    parts = [[own(table) for table in tables.values() if devices or isinstance(table, Table)] for tables in problem.tables]
    return [digest(own, of_all.copy()).hexdigest() for own in parts]


def dataset_digest(dataset: Dataset, stored_shape: tuple[int, ...]) -> str:
    """A digest of a dataset's examples, the same for every seed and split; empty for `synthetic` ones, which the seed draws.

    `stored_shape` is that of an example before images were padded.
    """
    if dataset.name == SYNTHETIC:
        return ""
    if dataset.whole:
        return dataset.whole
    train, test = (unpadded(images, stored_shape) for images in (dataset.train_images, dataset.test_images))
    return digest((train, dataset.train_labels, test, dataset.test_labels)).hexdigest()


def file_digests(experiment: Experiment) -> dict[str, str]:
    """A digest of each file beside the dataset that changes the run, by its key: clients' devices and start weights."""
    values = flattened(experiment.settings.to_dict())
    paths = {key: pathlib.Path(str(values[key])).expanduser() for key in CLIENT_FILES if values[key] not in ("", "diurnal")}
    found = {key: hashlib.sha256(path.read_bytes()).hexdigest() for key, path in paths.items()}
    return found | ({"model.init": experiment.start_digest} if experiment.start_digest else {})


def processor() -> str:
    """The processor's name and generation; its architecture where the system does not tell."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    first: dict[str, str] = {}
    for key, _, value in (line.partition(":") for line in lines):
        first.setdefault(key.strip(), value.strip())
    if "model name" not in first:
        return platform.machine()
    return f"{first['model name']} (family {first.get('cpu family')}, model {first.get('model')})"


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def sources() -> str:
    """A digest of this package's source code."""
    files = sorted(pathlib.Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:20]


def git_state(folder: pathlib.Path) -> bytes:
    """The commit of a user's repository and, as `git diff` has it, what has changed since in the files that it tracks.

    Empty where the folder is in no repository. The first line is `commit HASH`. Text after MOST_CHANGES bytes is left out,
    which the last line says.
    """
    git = ["git", "-C", str(folder)]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], stderr=subprocess.DEVNULL).strip()
        diff = [*git, "diff", "--no-color", "--no-ext-diff", "HEAD"]
        with subprocess.Popen(diff, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            changes = process.stdout.read(MOST_CHANGES + 1)
            process.kill()  # the rest of a long text is not waited for
    except (OSError, subprocess.CalledProcessError):
        return b""
    if len(changes) > MOST_CHANGES:
        changes = changes[:MOST_CHANGES] + f"\nmore than {MOST_CHANGES:,} bytes: the rest is left out\n".encode()
    return b"commit " + commit + b"\n" + changes


def git_commit(file: pathlib.Path = pathlib.Path(__file__)) -> str | None:
    """The commit of the checkout that a file is part of, with `+` where files have changed since.

    None for a file that no repository tracks, such as an installed one in an environment inside of a user's repository.
    """
    git = ["git", "-C", str(file.parent)]
    tracked = [*git, "ls-files", "--error-unmatch", file.name]
    describe = [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]  # no tags: the name is the commit's
    try:
        subprocess.check_output(tracked, stderr=subprocess.DEVNULL)
        return subprocess.check_output(describe, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None

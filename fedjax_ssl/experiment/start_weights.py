"""Weights that a run starts from, in place of random ones: those of a file, or of another run's state."""

import logging
import pathlib
import re
import zipfile
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.arrays import Key, PyTree
from fedjax_ssl.experiment.export import METADATA, named
from fedjax_ssl.local.task import Weights
from fedjax_ssl.models import ModelFns
from fedjax_ssl.models.network import Apply
from fedjax_ssl.models.torch_names import from_torch
from fedjax_ssl.options import one_line

Arrays: TypeAlias = Mapping[str, np.ndarray]
ACCEPTED = "accepted: a file .npz or .safetensors of save_model, or a .safetensors file of a torch network"

_log = logging.getLogger(__name__)


def read(path: str, network: str, options: Mapping[str, Any]) -> Arrays:
    """The arrays of a file by our names; a torch network's are told by the dots in theirs. ValueError with one line."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        what = "a folder" if file.is_dir() else "no file"
        raise ValueError(f"got {path}, which is {what}, {ACCEPTED}")
    if file.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"got {path}, {ACCEPTED}")
    try:
        arrays = _of_npz(file) if file.suffix == ".npz" else _of_safetensors(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"got {path}, which cannot be read ({one_line(error)}), {ACCEPTED}") from None
    if any("/" in name for name in arrays):  # as in our paths
        return arrays
    try:
        return from_torch(arrays, network, options)
    except KeyError as error:
        raise ValueError(f"got {path}, which lacks {error.args[0]}, {ACCEPTED}") from None


def _of_npz(file: pathlib.Path) -> Arrays:
    with np.load(file, allow_pickle=False) as found:
        return {name: found[name] for name in found.files if name != METADATA}


def _of_safetensors(file: pathlib.Path) -> Arrays:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ModuleNotFoundError:
        raise ValueError('the package safetensors is missing: python -m pip install "fedjax-ssl[safetensors]"') from None
    try:
        return load(file.read_bytes())
    except (SafetensorError, KeyError, TypeError) as error:  # the last two for a dtype that NumPy does not have
        raise ValueError(one_line(error)) from None


def matched(arrays: Arrays, weights: Weights, what: str) -> dict[str, np.ndarray]:
    """Those of the arrays that take the place of random weights, float32, by names; `weights` are the network's, or its shapes.

    The first and the last layer may have another size: then they are left out, which one line says. ValueError, with one line,
    for arrays that the network lacks, or that are missing, or of another shape elsewhere; `what` says whose they are.
    """
    wanted = named(weights)
    if lacking := [name for name in wanted if name not in arrays]:
        raise ValueError(f"{what}: got no {lacking[0]} ({len(lacking)} of {len(wanted)} arrays are missing)")
    if unknown := [name for name in arrays if name not in wanted]:
        raise ValueError(f"{what}: got {unknown[0]}, which the network does not have ({len(unknown)} such arrays)")
    differing = {name: (arrays[name].shape, x.shape) for name, x in wanted.items() if arrays[name].shape != x.shape}
    parameters = [name for name in wanted if "/" in name and not name.startswith("batch_stats/")]
    ends = {layer_of(name) for name in _ends(parameters)}
    left_out = {layer_of(name) for name in differing}
    for name, (got, accepted) in differing.items():
        if layer_of(name) not in ends:
            raise ValueError(f"{what}: got {name} of shape {got}, accepted: {accepted}, as the network has it")
    if left_out:
        sizes = ", ".join(f"{name} is {got} there and {accepted} here" for name, (got, accepted) in differing.items())
        begin = "begins at random, as its size differs" if len(left_out) == 1 else "begin at random, as their sizes differ"
        _log.warning("%s: %s %s: %s", what, " and ".join(sorted(left_out)), begin, sizes)
    return {name: np.asarray(x, np.float32) for name, x in arrays.items() if layer_of(name) not in left_out}


def _ends(parameters: list[str]) -> list[str]:
    """The first layer's name and the last one's among a network's parameters, each at the network's top."""
    top = [name for name in parameters if name.count("/") == 1]
    first = [name for name in top if name.startswith("Conv_0/")]
    return [*first[:1], *[name for name in top if name.startswith("Dense_")][-1:]]


def layer_of(name: str) -> str:
    """The layer of a parameter: `Conv_0` of `Conv_0/kernel`."""
    return name.rpartition("/")[0]


def fixed(trainable: str, arrays: Arrays, weights: Weights) -> Arrays:
    """The parameters among the arrays that are not trained: those in whose path the pattern is not found.

    ValueError for a pattern that no parameter has, or that leaves out a parameter which begins at random.
    """
    names = list(named(weights._replace(stats=())))
    try:
        trained = {name for name in names if re.search(trainable, name)}
    except (re.error, RecursionError):
        trained = set()
    if not trained:
        layers = ", ".join(dict.fromkeys(name.partition("/")[0] for name in names))
        accepted = f"a regular expression in the path of a parameter, such as {names[0]}, of the layers {layers}"
        raise ValueError(one_line(f"model.trainable: got {trainable}, which no parameter has, accepted: {accepted}"))
    if random := [name for name in names if name not in trained and name not in arrays]:
        accepted = "a pattern that trains it, as it begins at random"
        raise ValueError(f"model.trainable: got {trainable}, which leaves out {random[0]}, accepted: {accepted}")
    return {name: arrays[name] for name in names if name not in trained}


def started(model: ModelFns, arrays: Arrays, fixed: Arrays = MappingProxyType({})) -> ModelFns:
    """The network whose fresh weights are the arrays where there are some, and random elsewhere.

    Its parameters are without the `fixed` ones, which it has for itself.
    """

    def init(key: Key, image_shape: tuple[int, ...]) -> tuple[PyTree, PyTree]:
        weights = Weights(*model.init(key, image_shape))
        given = [jnp.asarray(arrays[name]) if name in arrays else x for name, x in named(weights).items()]
        params, stats = jax.tree.unflatten(jax.tree.structure(weights), given)
        return _without(params, fixed), stats

    def whole(function: Apply) -> Apply:
        def apply(params: PyTree, *rest: Any, **options: Any) -> tuple[Any, PyTree]:
            return function(_with(params, fixed), *rest, **options)

        return apply

    if not fixed:
        return model._replace(init=init)
    return model._replace(init=init, apply=whole(model.apply), features=whole(model.features))


def _without(params: PyTree, names: Iterable[str], prefix: str = "") -> PyTree:
    """Nested dicts without the leaves of these paths, and without dicts that are left empty."""
    if not isinstance(params, Mapping):
        return params
    rest = {key: _without(own, names, f"{prefix}{key}/") for key, own in params.items() if f"{prefix}{key}" not in names}
    return {key: own for key, own in rest.items() if not isinstance(own, Mapping) or own}


def _with(params: PyTree, arrays: Arrays) -> PyTree:
    """Nested dicts with arrays at their paths."""
    found = dict(params)
    for name, array in arrays.items():
        first, _, rest = name.partition("/")
        found[first] = _with(found.get(first, {}), {rest: array}) if rest else jnp.asarray(array)
    return found

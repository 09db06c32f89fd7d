"""A model in a file that plain NumPy, or safetensors, reads: parameters and batch-norm statistics under readable names."""

import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.files import replacing
from fedjax_ssl.local.task import Weights, evaluated_weights
from fedjax_ssl.simulation.round import RunState
from fedjax_ssl.simulation.simulator import check_alive

METADATA = "metadata"


def save(path: str | os.PathLike[str], experiment: Experiment, state: RunState) -> None:
    """Writes the model that `Experiment.predict` evaluates, the whole file or none; see `Experiment.save_model`."""
    path = pathlib.Path(path).expanduser()
    if path.suffix not in (".npz", ".safetensors") or not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise ValueError(f"path: got {path}, accepted: NAME.npz or NAME.safetensors in a folder that exists")
    if path.suffix == ".safetensors":
        try:
            from safetensors.numpy import save as to_bytes
        except ModuleNotFoundError:
            accepted = 'python -m pip install "fedjax-ssl[safetensors]", or NAME.npz'
            raise ValueError(f"path: got {path} without the package safetensors, accepted: {accepted}") from None
    arrays, text = named_arrays(experiment, state), json.dumps(metadata(experiment))
    with replacing(path) as file:
        if path.suffix == ".npz":
            np.savez(file, **arrays, **{METADATA: np.array(text)})  # type: ignore[arg-type]
        else:
            file.write(to_bytes(arrays, metadata={METADATA: text}))


def named_arrays(experiment: Experiment, state: RunState) -> dict[str, np.ndarray]:
    """The parameters, such as `Dense_0/kernel`, and the batch-norm statistics, such as `batch_stats/BatchNorm_0/mean`."""
    check_alive(state)
    predict, pool = next(iter(experiment.method.predict.values())), experiment.problem.train.images
    with evaluated_weights() as found:
        predict(state.server, jnp.zeros((1, *pool.shape[1:]), pool.dtype), jnp.ones(1, bool))
    if len(found) != 1:
        got = f"got method.name={experiment.settings.method.name}, whose predict evaluates {len(found)} networks"
        raise ValueError(f"save_model: {got} by its task, accepted: methods that evaluate one")
    return {name: np.ascontiguousarray(x) for name, x in sorted({**experiment.fixed, **named(found[0])}.items())}


def metadata(experiment: Experiment) -> dict[str, Any]:
    """What is needed to use the arrays: the network, its options and classes, and how examples become its inputs.

    An image is zero-padded on all sides to `height` x `width`, then its inputs are (pixels / 255 - mean) / std.
    """
    settings, pool = experiment.settings, experiment.problem.train.images
    found: dict[str, Any] = {"model": settings.model.model_dump(), "num_classes": experiment.problem.spec.num_classes}
    found |= {"classes": list(experiment.classes)} if experiment.classes else {}
    found["input_shape"] = list(experiment.problem.spec.image_shape)
    if pool.dtype == np.uint8:
        ends = jnp.stack([jnp.full(pool.shape[1:], value, jnp.uint8) for value in (0, 255)])
        black, white = np.asarray(experiment.views.plain(ends), np.float64)[:, 0, 0]
        found |= {"mean": (-black / (white - black)).tolist(), "std": (1 / (white - black)).tolist()}
    return found


def named(weights: Weights) -> dict[str, Any]:
    """The leaves of a network's weights by their paths, statistics below `batch_stats`, in the order of the tree."""
    parts = (("", weights.params), ("batch_stats/", weights.stats))
    found = [(prefix, *leaf) for prefix, tree in parts for leaf in jax.tree_util.tree_leaves_with_path(tree)]
    return {prefix + jax.tree_util.keystr(path, simple=True, separator="/"): x for prefix, path, x in found}

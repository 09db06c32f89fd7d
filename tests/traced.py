"""What a run computes, as a digest: a setting that it reads changes this."""

import copy
import hashlib
import re
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.settings import Settings, own_options
from fedjax_ssl.options import choices, fields_of


def digest(tree: dict[str, Any]) -> str:
    """What a run computes: its programs without dead code, and the data that these read."""
    simulator = build(tree).simulator
    state, _ = simulator._initialize.eval_shape(simulator._inputs, simulator._key, simulator._pools)
    found = hashlib.sha256()
    for program, *args in (
        (simulator._initialize, simulator._inputs, simulator._key, simulator._pools),
        (simulator._round, state, simulator._inputs, simulator._pools),
        (simulator._evaluate, state.server, simulator._inputs, simulator._pools),
    ):
        with program._tracing():
            traced = jax.make_jaxpr(program._jitted)(*args)
        lean, used = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
        found.update(re.sub(r"0x[0-9a-f]+", "", str(lean)).encode())
        read = [leaf for leaf, is_read in zip(jax.tree.leaves(args), used, strict=True) if is_read]
        for leaf in [*traced.consts, *read]:
            if not isinstance(leaf, jax.ShapeDtypeStruct) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def fields(settings: Settings) -> dict[str, Any]:
    """The fields of all keys but the network's own."""
    own = {f"model.{key}" for key in own_options(settings.model)}
    return {key: field for key, field in fields_of(settings) if key not in own}


def others(field: Any, value: object) -> list[Any]:
    """Other values of a setting."""
    if words := choices(field):
        return [word for word in words if word not in (value, "", "natural")]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):  # a path, or the name of another key
        return []
    factors = (value + 1, 2 * value + 3) if isinstance(value, int) else (0.5 * value + 0.01, 2 * value + 1, 0.123)
    return list(factors)


def with_value(tree: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    *groups, name = key.split(".")
    group = tree
    for one in groups:
        group = group[one]
    group[name] = value
    return tree

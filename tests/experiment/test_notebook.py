"""What a notebook does: an experiment from a ConfigDict, states that are used again, and one line for what is wrong."""

import inspect
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from pydantic import Field

import fedjax_ssl
from configs import digits
from fedjax_ssl.models import from_nnx, registry
from tests import average, engine


def config(**changed):
    found = digits.get_config("supervised")
    found.update_from_flattened_dict({"rounds": 2, "model.name": "linear", "data.strong": "none", **changed})
    del found.model.width
    return found


def test_a_config_dict_is_taken_and_a_copied_state_can_be_used_twice():
    experiment = fedjax_ssl.build(config())
    assert repr(experiment) == "<Experiment: supervised on digits, 2 rounds>"
    state, row = next(experiment.rounds())
    kept = fedjax_ssl.copied(state)
    first, again = (next(experiment.rounds(kept, row))[0] for _ in range(2))
    assert engine.same_bits(first, again)


class Silent(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1))


class Tiny(nnx.Module):
    def __init__(self, num_classes, *, rngs, width: Annotated[int, Field(le=8, description="Its width.")] = 4):
        self.out = nnx.Linear(64, num_classes, rngs=rngs)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda: fedjax_ssl.build("digits:fl2"), "config: got 'digits:fl2', accepted: nested dicts, such as"),
        (
            lambda: fedjax_ssl.build(config(), (np.zeros(3), np.zeros(3))),
            "dataset: got tuple, accepted: what sources.from_arrays",
        ),
        (lambda: fedjax_ssl.build(config(), method="fedavg"), "method: got 'fedavg', accepted: a factory, such as METHODS"),
        (lambda: fedjax_ssl.build(config(), model=Silent), "Silent.__call__: got (x, deterministic), accepted: (x, train)"),
        (lambda: registry.build(from_nnx(Tiny), num_classes=10, width=9), "width: got 9, accepted: a whole number <= 8"),
        (lambda: from_nnx(Tiny(10, rngs=nnx.Rngs(0))), "from_nnx: got Tiny, an instance, accepted: its class, or a function"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(wrong, line):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        wrong()
    assert str(error.value).startswith(line)


def test_a_metric_that_is_a_bare_number_is_named(monkeypatch):
    def bare(**parts):
        method = average.average(**parts)

        def client_update(*args):
            output = method.client_update(*args)
            return output._replace(metrics={**output.metrics, "client/mine": jnp.float32(1)})

        return method._replace(client_update=client_update)

    bare.__signature__ = inspect.signature(average.average)
    experiment = fedjax_ssl.build(config(), method=bare)
    with pytest.raises(
        ValueError, match=r"^client_update: metric 'client/mine': got \w+, accepted: metrics.mean\(values, mask\)"
    ):
        next(experiment.rounds())

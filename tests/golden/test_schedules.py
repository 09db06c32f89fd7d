"""Learning rates over the rounds and, on pooled data, within them, as they are built from a config, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.experiment.arguments import training_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import ServerData
from fedjax_ssl.methods.central import step_inputs
from tests.golden import linear_clients as lc

RATE, ROUNDS, STEPS, FACTOR, EVERY = 0.3, 12, 4, 0.5, 3
FORMULAS = {
    "constant": lambda t, rounds: 1.0,
    "cosine": lambda t, rounds: (1 + np.cos(np.pi * t / rounds)) / 2,
    "cosine_7_16": lambda t, rounds: np.cos(7 / 16 * np.pi * t / rounds),
    "step": lambda t, rounds: FACTOR ** (t // EVERY),
    "exponential": lambda t, rounds: FACTOR ** (t / EVERY),
}


def training(schedule: str, warmup: float, **keys):
    given = {"learning_rate": RATE, "schedule": schedule, "warmup_rounds": warmup}
    given |= {"schedule_factor": FACTOR, "schedule_every": EVERY, **keys}
    group = {"optimizer": given, "epochs": 0, "steps": STEPS, "batch_size": 2}
    settings = Settings.from_dict({"rounds": ROUNDS, "server": {"training": group}})
    return training_of(settings, settings.server.training)


def expected(schedule: str, warmup: float, t: float, length: float) -> float:
    """The rate of what lasts from t to t + length, in rounds from 0: first linear, then the schedule over the rest."""
    if t + length <= warmup:
        return RATE * (t + length) / warmup
    return RATE * FORMULAS[schedule](max(t - warmup, 0), ROUNDS - warmup)


@pytest.mark.parametrize("warmup", [0.0, 1.0, 2.5, 4.0, 12.0, 20.0])
@pytest.mark.parametrize("schedule", FORMULAS)
def test_the_rate_of_each_round_is_the_formula(schedule, warmup):
    rates = [training(schedule, warmup).learning_rate(jnp.int32(t)) for t in range(ROUNDS)]
    wanted = [expected(schedule, warmup, t, 1) for t in range(ROUNDS)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-5, atol=1e-7)
    assert min(wanted) > 0


@pytest.mark.parametrize("warmup", [0.0, 0.5, 2.5, 12.0])
@pytest.mark.parametrize("schedule", FORMULAS)
def test_the_rate_of_each_step_on_pooled_data_is_the_formula(schedule, warmup):
    pool = lc.examples(np.zeros((5, 3, 3, 1), np.uint8), np.arange(5), 5, np.zeros(5, np.int32))
    for number in (0, 1, 2, 3, 11):
        data = ServerData(pool, pool, jnp.zeros(5, jnp.int32), pool, jnp.int32(number))
        inputs = step_inputs(training(schedule, warmup), 1, data, jax.random.split(jax.random.key(0)))
        wanted = [expected(schedule, warmup, number + s / STEPS, 1 / STEPS) for s in range(STEPS)]
        np.testing.assert_allclose(inputs.learning_rate, wanted, rtol=1e-5, atol=1e-7)


def test_warm_up_and_schedules_take_traced_numbers():
    def rates(warmup, factor):
        settings = Settings.from_dict({"client": {"optimizer": {"schedule": "step", "schedule_every": EVERY}}})
        optimizer = settings.client.optimizer.model_copy(update={"warmup_rounds": warmup, "schedule_factor": factor})
        group = settings.client.model_copy(update={"optimizer": optimizer})
        return jax.vmap(training_of(settings, group).learning_rate)(jnp.arange(ROUNDS))

    many = jax.vmap(rates)(jnp.float32([2.0, 4.5]), jnp.float32([0.5, 0.2]))
    for got, given in zip(many, ((2.0, 0.5), (4.5, 0.2)), strict=True):
        np.testing.assert_allclose(got, rates(*given), rtol=1e-6)

"""Moving averages and ramps, against numbers worked out by hand."""

import jax.numpy as jnp
import numpy as np

from fedjax_ssl.ssl import ema


def test_the_average_is_a_true_mean_until_the_largest_decay():
    values = np.float32([5.0, 1.0, 3.0, 7.0])
    mean = {"a": values[0]}
    for step, value in enumerate(values[1:], start=1):
        mean = ema.update(mean, {"a": value}, ema.warm_decay(jnp.int32(step), 0.999))
        np.testing.assert_allclose(mean["a"], np.mean(values[: step + 1]), rtol=1e-6)
    np.testing.assert_allclose([ema.warm_decay(jnp.int32(step), 0.999) for step in (0, 5000)], [0, 0.999], rtol=1e-6)
    np.testing.assert_allclose(ema.update(np.float32(1.0), np.float32(3.0), 0.75), 1.5, rtol=1e-6)


def test_the_annealed_decay_and_the_ramp_grow_to_one():
    # 1 - .4 (cos(pi step/20) + 1)/2: at a quarter the cosine is .7071, half way 0, at the end -1; exp(-5 (1 - t/10)^2).
    annealed = [ema.annealed_decay(jnp.int32(step), jnp.int32(20), 0.4) for step in (0, 5, 10, 20)]
    np.testing.assert_allclose(annealed, [0.6, 0.658579, 0.8, 1.0], rtol=1e-5)
    ramp = [ema.ramp_up(jnp.int32(time), 10.0) for time in (0, 5, 9, 10, 300)]
    np.testing.assert_allclose(ramp, [0.006738, 0.286505, 0.951229, 1.0, 1.0], rtol=1e-4)

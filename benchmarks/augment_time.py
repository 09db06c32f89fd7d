"""Time of the weak view and of every variant's strong view, in microseconds per 32 x 32 x 3 image.

    python -m benchmarks.augment_time [--json=benchmarks/results/augment_time.json]

Each view runs on a batch of 320, once as a program of its own and once as the body of a loop, which is where training runs it
(there with a sum, so that nothing is left out). On two CPU cores a strong view is to stay under 600 microseconds, a fortieth of
(FL)^2's step on WRN-28-2 (`benchmarks/results/round_time_cpu.json`). Medians, in the file with quartiles.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.provenance import provenance
from benchmarks.spread import quartiles
from fedjax_ssl.data.augment import Augmentation, compose, crop, flip, make_views
from fedjax_ssl.data.randaugment import VARIANTS, strong_view

BATCH = 320
STEPS = 5  # batches in the loop
REPEATS = 20


def microseconds(function: Callable[[jax.Array], jax.Array], images: int) -> list[float]:
    """Quartiles of the time of `function(key)` over REPEATS calls after a warm-up, per image, of `images` in a call."""
    compiled = jax.jit(function)
    compiled(jax.random.key(0)).block_until_ready()
    seconds = []
    for seed in range(REPEATS):
        key = jax.random.key(seed)
        start = time.perf_counter()
        compiled(key).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return [1e6 * s / images for s in quartiles(seconds)]


def main() -> None:
    """Prints the table, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    arguments, results = parser.parse_args(), []
    images = jax.device_put(np.random.default_rng(0).integers(0, 256, (BATCH, 32, 32, 3), np.uint8))
    base = compose(flip(), crop(4))
    print(f"microseconds per image, {jax.devices()[0].device_kind}, batch {BATCH}, median of {REPEATS}")
    print(f"{'view':26}{'one call':>10}{'in a loop':>11}")
    for name, augmentation in {"weak": base, **{name: strong_view(name, base) for name in VARIANTS}}.items():
        view = _view(augmentation, images)
        alone, in_a_loop = microseconds(view, BATCH), microseconds(_looped(view), STEPS * BATCH)
        print(f"{name:26}{alone[1]:10.1f}{in_a_loop[1]:11.1f}", flush=True)
        results.append({"view": name, "one_call_us": alone, "in_a_loop_us": in_a_loop})
    if arguments.json:
        about = {**provenance(), "batch": BATCH, "warm_up_calls": 1, "timed_calls": REPEATS, "quartiles_of": "us per image"}
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


def _view(augmentation: Augmentation, images: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The augmented and normalized batch, as a function of the key."""
    views = make_views(weak=augmentation, strong=augmentation, labeled=augmentation, mean=[0.5] * 3, std=[0.25] * 3)
    return lambda key: views.weak(key, images)


def _looped(view: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """The view of STEPS batches, one after the other, as a training loop draws them."""

    def run(key: jax.Array) -> jax.Array:
        return jax.lax.map(lambda step: jnp.sum(view(jax.random.fold_in(key, step))), jnp.arange(STEPS))

    return run


if __name__ == "__main__":
    main()

"""Mini-batches of fixed shape over a varying number of examples: shuffled epochs, pairs of them, draws, streams, sweeps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Schedule(NamedTuple):
    """Which examples each local step sees.

    Attributes:
        positions: int32 [E, L], one shuffled epoch per row, L a multiple of the batch size; the first `size` are real.
        size: int32 scalar, examples per epoch.
        steps: int32 scalar, number of local steps; 0 where there is no example.
        batch_size: B.
    """

    positions: jax.Array
    size: jax.Array
    steps: jax.Array
    batch_size: int

    def take(self, step: jax.Array, entries: jax.Array | None = None) -> Batch:
        """The batch of local step `step` (int32 scalar, 0-based), of which the first `entries` are used (None: all)."""
        size = self.batch_size
        used = size if entries is None else entries
        per_epoch = _steps_per_epoch(self, used)
        epoch, start = step // per_epoch, (step % per_epoch) * used
        positions = jax.lax.dynamic_slice(self.positions, (epoch, start), (1, size))[0]
        place = jnp.arange(size)
        mask = start + place < self.size
        return Batch(positions, mask if entries is None else mask & (place < entries), step, epoch)


class Batch(NamedTuple):
    """One mini-batch.

    Attributes:
        positions: int32 [B], positions among the holder's examples.
        mask: bool [B], which entries are real; the last batch of an epoch may be partial.
        step: int32 scalar, batches of its schedule before this one; None where it is of none.
        epoch: int32 scalar, whole epochs of its schedule before this batch; None where it is of none.
    """

    positions: jax.Array
    mask: jax.Array
    step: Any = None
    epoch: Any = None

    @property
    def real(self) -> jax.Array:
        """Int32 scalar: how many entries are real."""
        return jnp.sum(self.mask, dtype=jnp.int32)


class PairedSchedule(NamedTuple):
    """Which labeled and which unlabeled examples each local step sees, made by `paired`.

    Attributes:
        labeled: epochs over the labeled examples.
        unlabeled: epochs over the unlabeled ones, as many as the steps take.
        steps: int32 scalar, number of local steps.
        entries: int32 scalar in [1, B_u], how many entries of an unlabeled batch the client uses; None: all.
    """

    labeled: Schedule
    unlabeled: Schedule
    steps: jax.Array
    entries: Any = None

    def take(self, step: jax.Array) -> Pair:
        """The two batches of local step `step` (int32 scalar, 0-based)."""
        return Pair(self.labeled.take(step), self.unlabeled.take(step, self.entries))


class Pair(NamedTuple):
    """The two mini-batches of one step; either may be without a real entry."""

    labeled: Batch
    unlabeled: Batch

    @property
    def real(self) -> jax.Array:
        """Int32 scalar: how many entries of both are real."""
        return self.labeled.real + self.unlabeled.real


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _orders(key: jax.Array, mask: jax.Array, rows: int) -> jax.Array:
    """Positions int32 [rows, n], each row in a random order of its own, those in `mask` bool [n] first.

    The order of a holder's examples does not depend on the width n of the table, which is that of the largest holder.
    """
    order = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(key, row), mask.shape))(jnp.arange(rows))
    return jnp.argsort(jnp.where(mask, order, 2.0), axis=1).astype(jnp.int32)


def shuffled(key: jax.Array, mask: jax.Array, batch_size: int, *, epochs: int = 0, steps: int = 0) -> Schedule:
    """Epochs over the examples in `mask`, each shuffled anew without replacement, the last partial batch kept.

    Exactly one of `epochs` and `steps` is positive: E epochs of ceil(count / B) steps, or a fixed number of steps that
    goes through as many epochs as it needs.

    Args:
        key: PRNG key.
        mask: bool [n], the examples to use, in any position.
        batch_size: B.
        epochs: number of epochs.
        steps: number of steps.
    """
    if (epochs > 0) == (steps > 0):
        raise ValueError(f"got epochs={epochs} and steps={steps}, accepted: exactly one of them positive")
    (n,) = mask.shape
    rows = epochs or steps  # an epoch has at least one step, so `steps` epochs are enough
    positions = jnp.pad(_orders(key, mask, rows), ((0, 0), (0, _round_up(n, batch_size) - n)))
    count = jnp.sum(mask, dtype=jnp.int32)
    total = jnp.where(count > 0, steps, 0) if steps else epochs * -(-count // batch_size)
    return Schedule(positions, count, total, batch_size)


def draws(key: jax.Array, mask: jax.Array, batch_size: int, steps: int) -> Schedule:
    """A number of batches, each drawn anew from all examples in `mask`, without replacement within it.

    Where there are fewer than B examples every batch has all of them.

    Args:
        key: PRNG key.
        mask: bool [n], the examples to use, in any position.
        batch_size: B.
        steps: number of batches; none where there is no example.
    """
    full = shuffled(key, mask, batch_size, steps=steps)  # the first batches of epochs that end after them
    return full._replace(positions=full.positions[:, :batch_size], size=jnp.minimum(full.size, batch_size))


def paired(
    key: jax.Array,
    masks: tuple[jax.Array, jax.Array],
    batch_sizes: tuple[int, int],
    *,
    epochs: int = 0,
    steps: int = 0,
    larger_counts: bool = False,
    entries: jax.Array | None = None,
) -> PairedSchedule:
    """One labeled and one unlabeled batch per step, each from shuffled epochs of its own.

    The labeled examples count the epochs: E of ceil(count / B) steps, through as many epochs of the unlabeled examples as these
    take. Without labeled examples the unlabeled ones count them.

    Args:
        key: PRNG key.
        masks: bool [n] and bool [m], the labeled and the unlabeled examples to use.
        batch_sizes: (B, B_u).
        epochs: number of epochs, or 0.
        steps: number of steps, or 0.
        larger_counts: whether an epoch is one through the set that has more batches, in place of the labeled examples.
        entries: int32 scalar in [1, B_u], the holder's own size of an unlabeled batch, the rest of which is masked; None: B_u.
    """
    labeled_key, unlabeled_key = jax.random.split(key)
    if larger_counts and epochs:
        # Each goes through as many epochs as the other has batches in all, at most.
        batches = [epochs * -(-mask.shape[0] // size) for mask, size in zip(masks, batch_sizes, strict=True)]
        both = [
            shuffled(*inputs, steps=most)
            for *inputs, most in zip((labeled_key, unlabeled_key), masks, batch_sizes, batches[::-1], strict=True)
        ]
        total = epochs * jnp.maximum(*(-(-order.size // size) for order, size in zip(both, batch_sizes, strict=True)))
        return PairedSchedule(both[0], both[1], total)
    labeled = shuffled(labeled_key, masks[0], batch_sizes[0], epochs=epochs, steps=steps)
    rows, length = labeled.positions.shape
    most = steps or rows * (length // batch_sizes[0])  # the steps of a client whose labeled examples fill the table
    unlabeled = shuffled(unlabeled_key, masks[1], batch_sizes[1], steps=most)
    if entries is not None:  # batches then begin anywhere: one that begins at the last example stays within the row
        unlabeled = unlabeled._replace(positions=jnp.pad(unlabeled.positions, ((0, 0), (0, batch_sizes[1]))))
    alone = unlabeled.steps if steps else epochs * -(-unlabeled.size // (batch_sizes[1] if entries is None else entries))
    total = jnp.where(labeled.size > 0, labeled.steps, alone)
    return PairedSchedule(labeled, unlabeled, total, entries)


def num_epochs(schedule: Schedule) -> jax.Array:
    """The number of epochs, int32 scalar, that the schedule's batches are of; one that is cut short counts."""
    return -(-schedule.steps // _steps_per_epoch(schedule, schedule.batch_size))


def _steps_per_epoch(schedule: Schedule, batch_size: int | jax.Array) -> jax.Array:
    return jnp.maximum(-(-schedule.size // batch_size), 1)


def stream(key: jax.Array, mask: jax.Array, batch_size: int, steps: int) -> Batch:
    """Full batches that go through one shuffled epoch after the other, without regard to where an epoch ends.

    Every example in `mask` comes once per epoch; a batch that ends one epoch and begins the next may hold an example twice,
    and one that is larger than the data holds all of them several times. Shuffling costs one permutation of n for every n
    examples drawn, S B + n integers in all: for a large pool, where `shuffled` would draw a permutation of n for each step.

    Args:
        key: PRNG key.
        mask: bool [n], the examples to use, in any position. Where they are fewer than n, orders may come a second time.
        batch_size: B.
        steps: S.

    Returns:
        Batch with leading axis S, its mask False where there is no example.
    """
    (n,) = mask.shape
    rows = -(-steps * batch_size // n)
    orders = _orders(key, mask, rows)
    count = jnp.sum(mask, dtype=jnp.int32)
    epoch, place = jnp.divmod(jnp.arange(steps * batch_size), jnp.maximum(count, 1))
    positions = orders[epoch % rows, place].reshape(steps, batch_size)
    return Batch(positions, jnp.broadcast_to(count > 0, positions.shape))


def in_order(step: jax.Array, count: jax.Array, n: int, batch_size: int) -> Batch:
    """Batch `step` of a sweep over positions 0 .. count-1 in order; padded entries repeat the last position, n - 1."""
    positions = step * batch_size + jnp.arange(batch_size)
    return Batch(jnp.minimum(positions, n - 1), positions < count)

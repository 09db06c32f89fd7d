"""Mini-batches of fixed shape over a varying number of examples, with masks for the entries that are not real."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int32

from fedjax_ssl.arrays import Array, Count, Key, Stored


class Batch(NamedTuple):
    """One mini-batch: positions among the client's (or the server's) examples, and a mask of those that are real."""

    positions: Int32[Array, "... B"]
    mask: Bool[Array, "... B"]
    step: Int32[Stored, ""] = None  # how many batches of its schedule came before; None outside of a schedule
    epoch: Int32[Stored, ""] = None  # how many epochs, likewise

    @property
    def real(self) -> Count:
        """How many entries are real."""
        return jnp.sum(self.mask, dtype=jnp.int32)


class Schedule(NamedTuple):
    """Which examples each local step sees."""

    positions: Int32[Array, "E L"]  # one shuffled epoch per row; L is a multiple of B
    size: Count  # how many of a row are real
    steps: Count  # 0 without examples
    batch_size: int

    def take(self, step: Count, entries: Count | None = None) -> Batch:
        """The batch of local step `step` (from 0), of which the first `entries` are used; None: all."""
        size = self.batch_size
        used = size if entries is None else entries
        per_epoch = _steps_per_epoch(self, used)
        epoch, start = step // per_epoch, (step % per_epoch) * used
        positions = jax.lax.dynamic_slice(self.positions, (epoch, start), (1, size))[0]
        place = jnp.arange(size)
        mask = start + place < self.size
        return Batch(positions, mask if entries is None else mask & (place < entries), step, epoch)


class Pair(NamedTuple):
    """The two mini-batches of one step; either may have no real entry."""

    labeled: Batch
    unlabeled: Batch

    @property
    def real(self) -> Count:
        """How many entries of both are real."""
        return self.labeled.real + self.unlabeled.real


class PairedSchedule(NamedTuple):
    """Which labeled and which unlabeled examples each local step sees; `entries` as in `paired`."""

    labeled: Schedule
    unlabeled: Schedule
    steps: Count
    entries: Count | None = None

    def take(self, step: Count) -> Pair:
        """The two batches of local step `step` (from 0)."""
        return Pair(self.labeled.take(step), self.unlabeled.take(step, self.entries))


def _orders(key: Key, mask: Bool[Array, " n"], rows: int) -> Int32[Array, "rows n"]:
    """Rows of positions, those in `mask` first, each row in a random order of its own that does not depend on the width n."""
    order = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(key, row), mask.shape))(jnp.arange(rows))
    return jnp.argsort(jnp.where(mask, order, 2.0), axis=1).astype(jnp.int32)


def shuffled(key: Key, mask: Bool[Array, " n"], batch_size: int, *, epochs: int = 0, steps: int = 0) -> Schedule:
    """Epochs over the examples in `mask`, each shuffled anew; the last batch of an epoch may be partial.

    Exactly one of `epochs` and `steps` is positive: E epochs of ceil(count / B) steps, or that many steps.
    """
    if (epochs > 0) == (steps > 0):
        raise ValueError(f"got epochs={epochs} and steps={steps}, accepted: exactly one of them positive")
    (n,) = mask.shape
    rows = epochs or steps  # an epoch has at least one step, so `steps` epochs are enough
    positions = jnp.pad(_orders(key, mask, rows), ((0, 0), (0, -n % batch_size)))
    count = jnp.sum(mask, dtype=jnp.int32)
    total = jnp.where(count > 0, steps, 0) if steps else epochs * -(-count // batch_size)
    return Schedule(positions, count, total, batch_size)


def draws(key: Key, mask: Bool[Array, " n"], batch_size: int, steps: int) -> Schedule:
    """Batches that are each drawn anew, without replacement, from the examples in `mask`: all of them if fewer than B."""
    full = shuffled(key, mask, batch_size, steps=steps)  # the first batch of each epoch
    return full._replace(positions=full.positions[:, :batch_size], size=jnp.minimum(full.size, batch_size))


def paired(
    key: Key,
    masks: tuple[Bool[Array, " n"], Bool[Array, " m"]],
    batch_sizes: tuple[int, int],
    *,
    epochs: int = 0,
    steps: int = 0,
    larger_counts: bool = False,
    entries: Count | None = None,
) -> PairedSchedule:
    """One labeled and one unlabeled batch per step, each from shuffled epochs of its own.

    Exactly one of `epochs` and `steps` is positive. An epoch goes once through the labeled examples, or through the unlabeled
    ones of a client without labels; with `larger_counts` it goes through the set that has more batches. `entries` is the number
    of real examples in an unlabeled batch of this client, in [1, B_u]; None: B_u.
    """
    labeled_key, unlabeled_key = jax.random.split(key)
    if larger_counts and epochs:
        # Each goes through at most as many epochs as the other has batches in all.
        batches = [epochs * -(-mask.shape[0] // size) for mask, size in zip(masks, batch_sizes, strict=True)]
        both = (
            shuffled(labeled_key, masks[0], batch_sizes[0], steps=batches[1]),
            shuffled(unlabeled_key, masks[1], batch_sizes[1], steps=batches[0]),
        )
        total = epochs * jnp.maximum(*(-(-order.size // size) for order, size in zip(both, batch_sizes, strict=True)))
        return PairedSchedule(both[0], both[1], total)
    labeled = shuffled(labeled_key, masks[0], batch_sizes[0], epochs=epochs, steps=steps)
    rows, length = labeled.positions.shape
    max_steps = steps or rows * (length // batch_sizes[0])  # the steps of a client whose labeled examples fill the table
    unlabeled = shuffled(unlabeled_key, masks[1], batch_sizes[1], steps=max_steps)
    if entries is not None:  # batches then begin anywhere: one that begins at the last example stays within the row
        unlabeled = unlabeled._replace(positions=jnp.pad(unlabeled.positions, ((0, 0), (0, batch_sizes[1]))))
    alone = unlabeled.steps if steps else epochs * -(-unlabeled.size // (batch_sizes[1] if entries is None else entries))
    total = jnp.where(labeled.size > 0, labeled.steps, alone)
    return PairedSchedule(labeled, unlabeled, total, entries)


def num_epochs(schedule: Schedule) -> Count:
    """The number of epochs that a schedule begins."""
    return -(-schedule.steps // _steps_per_epoch(schedule, schedule.batch_size))


def _steps_per_epoch(schedule: Schedule, batch_size: int | Count) -> Count:
    return jnp.maximum(-(-schedule.size // batch_size), 1)


def stream(key: Key, mask: Bool[Array, " n"], batch_size: int, steps: int) -> Batch:
    """Full batches [S, B] from a large pool that go through one shuffled epoch after the other.

    A batch may span two epochs, and then it may have an example twice. Shuffling takes memory for S B + n integers, where
    `shuffled` takes n for each step. If fewer than n examples are in `mask`, a later epoch may reuse the order of an earlier
    one; if none is, all entries are masked.
    """
    (n,) = mask.shape
    rows = -(-steps * batch_size // n)
    orders = _orders(key, mask, rows)
    count = jnp.sum(mask, dtype=jnp.int32)
    epoch, place = jnp.divmod(jnp.arange(steps * batch_size), jnp.maximum(count, 1))
    positions = orders[epoch % rows, place].reshape(steps, batch_size)
    return Batch(positions, jnp.broadcast_to(count > 0, positions.shape))


def in_order(step: Count, count: Count | int, n: int, batch_size: int) -> Batch:
    """Batch `step` of a sweep in order over the first `count` of n positions; padding repeats the last position."""
    positions = step * batch_size + jnp.arange(batch_size)
    return Batch(jnp.minimum(positions, n - 1), positions < count)

"""The strategies compute the same rounds: one round at 1e-5, three rounds of all methods (slow) at 1e-4.

By the third round clients have come back to their states, FedMatch's have had helpers, and methods of two phases are in the
second. Thresholds and argmax turn rounding into different decisions sooner or later: for these seeds they are alike, as the
diagnostics show.
"""

import functools

import jax
import numpy as np
import pytest

from fedjax_ssl.simulation import source
from tests import engine, tiny

EQUAL = (
    *("comm/bytes_up", "comm/bytes_down", "cost/forward_passes", "cost/backward_passes", "perf/client_images"),
    *("client/participants", "client/upload_fraction", "diagnostics/label_ratio", "diagnostics/pseudo_label_accuracy"),
)
"""What is counted, and what is decided."""
STRATEGIES = ("vmap", "chunked", "sharded", "sharded_chunked")


@functools.cache
def reference(method: str, labels_at: str, rounds: int):
    """The experiment, and what clients one after another make of it."""
    quick = (
        {}
        if rounds > 1
        else {"client__epochs": 0, "client__steps": 2, "server__training__epochs": 0, "server__training__steps": 2}
    )
    experiment = tiny.experiment(method, labels_at=labels_at, **tiny.confident(method) | quick)
    return experiment, *engine.simulate(experiment, "scan", rounds=rounds, evaluated=False)[1:]


def assert_agree(expected, got, tolerance):
    """The server with all that it keeps, and what clients keep."""
    for tree, other in ((expected.server, got.server), (expected.clients, got.clients)):
        assert engine.distance(jax.device_get(tree), jax.device_get(other)) < tolerance


def assert_same_rounds(experiment, strategy, states, rows, start=None):
    """The states, what was counted, and what was decided."""
    _, got_states, got_rows = engine.simulate(experiment, strategy, rounds=len(rows), start=start, evaluated=False)
    assert [row.keys() for row in got_rows] == [row.keys() for row in rows]
    counted = [[{key: row[key] for key in EQUAL & row.keys()} for row in all_] for all_ in (rows, got_rows)]
    assert counted[0] == counted[1]
    assert_agree(states[1], got_states[1], 1e-5)
    assert_agree(states[-1], got_states[-1], 1e-5 if len(rows) == 1 else 1e-4)


# Chunks on several devices have all that is in either. Other strategies, and methods that share others' code, are slow tests.
METHODS = [case for case in tiny.UNLIKE if case in tiny.WITH_CLIENTS]
FEW = [case for case in METHODS if case[0] in ("fl2", "twinsight")]


@pytest.mark.ci
@pytest.mark.parametrize("case", tiny.params(fast=FEW))
def test_one_round_agrees_in_chunks_on_several_devices(case):
    experiment, states, rows = reference(*case, rounds=1)
    assert not experiment.method.requires.clients or rows[0]["client/participants"] > 0
    assert_same_rounds(experiment, "sharded_chunked", states, rows, start=engine.copied(states[0]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", tiny.CASES, ids="-".join)
def test_three_rounds_of_every_method_agree(case, strategy):
    experiment, states, rows = reference(*case, rounds=3)
    assert_same_rounds(experiment, strategy, states, rows)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["vmap", "chunked"])
def test_a_permuted_cohort_gives_the_same_rounds(monkeypatch, strategy):
    # In chunks of 2 of 5 clients, others then share a chunk, and another one is repeated as padding.
    experiment, states, _ = reference("fl2", "server", rounds=3)
    draw = source.draw

    def permuted(*args):
        cohort = draw(*args)
        return cohort._replace(ids=cohort.ids[::-1])

    monkeypatch.setattr(source, "draw", permuted)
    assert_agree(states[3], engine.simulate(experiment, strategy, rounds=3)[1][3], 1e-4)


# A network with static batch norm, on RandAugment's views. FixMatch alone, to compile in seconds: SACR's passes are compared
# above. Every pseudo-label is accepted; they and the rounding down in RandAugment turn out alike for this seed.
CNN = {
    "method__confidence": 0.0, "data__strong": "usb", "execution__conv": "cpu", "client__epochs": 0, "client__steps": 2,
    "client__batch_size": 16, "server__training__epochs": 2,
}  # fmt: skip


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES])
def test_batch_norm_and_randaugment_agree_over_one_and_three_rounds(strategy):
    experiment = tiny.experiment("fixmatch", network="cnn", **CNN)
    _, states, rows = engine.simulate(experiment, "scan", rounds=3)
    assert states[0].server.weights.stats
    _, got_states, got_rows = engine.simulate(experiment, strategy, rounds=3, start=engine.copied(states[0]))
    for key in ("diagnostics/label_ratio", "diagnostics/pseudo_label_accuracy"):
        assert [row[key] for row in got_rows] == [row[key] for row in rows]
    for number, tolerance in ((1, 1e-5), (3, 1e-4)):
        expected, got = (jax.device_get(each[number].server.weights) for each in (states, got_states))
        assert engine.distance(expected.params, got.params) < tolerance
        assert engine.distance(expected.stats, got.stats) < tolerance
        assert engine.distance(*(jax.device_get(each[number].clients) for each in (states, got_states))) < tolerance


@pytest.mark.parametrize(
    ("method", "labels_at"),
    [
        pytest.param("fl2", "server", marks=pytest.mark.ci),
        pytest.param("uda", "clients", marks=pytest.mark.slow),
        pytest.param("fedcon", "server", marks=pytest.mark.slow),
    ],
)
def test_data_on_the_host_give_the_same_bits(usual_emitters, method, labels_at):
    experiment, states, rows = reference.__wrapped__(method, labels_at, 3)  # compiled anew
    for on_disk in (False, True):
        _, got_states, got_rows = engine.simulate(experiment, "scan", rounds=3, on_host=True, on_disk=on_disk, evaluated=False)
        assert got_rows == rows
        assert all(engine.same_bits(a, b) for a, b in zip(states, got_states, strict=True))
    assert not np.array_equal(jax.tree.leaves(states[0].server)[0], jax.tree.leaves(states[3].server)[0])

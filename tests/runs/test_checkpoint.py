"""Checkpoints give back what was saved, bit for bit and in its place; damage and kills are in test_checkpoint_damage."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import resource
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedjax_ssl.runs.checkpoint import Checkpoints
from tests.commands import ROOT


class Server(NamedTuple):
    params: Any
    momentum: Any
    nothing: None
    empty: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Clients:
    heads: jax.Array
    rounds: jax.Array


def awkward_state() -> tuple:
    """Everything that a state may hold, the bit patterns that a float comparison overlooks among them."""
    floats = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0xFF800000, 1], np.uint32).view(np.float32)
    halves = np.array([0x7FC1, 0xFFA0, 0x8000, 0x0001], np.uint16)
    params = {
        "conv/kernel": jnp.asarray(floats),
        "bfloat16": jax.lax.bitcast_convert_type(jnp.asarray(halves), jnp.bfloat16),
        "int8": jnp.array([[-128, 127], [0, -1]], jnp.int8),
        "uint32": jnp.array([2**32 - 1, 0], jnp.uint32),
        "bool": jnp.array([True, False]),
        "zero size": jnp.zeros((0, 3)),
        "scalar": jnp.float32(-0.0),
        "weak": jnp.asarray(2.5),
        "host": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    }
    clients = Clients(heads=jax.random.split(jax.random.key(3), 4), rounds=jnp.arange(4, dtype=jnp.int32))
    return Server(params, {}, None, ()), clients, 3, 2.5, True, np.float32(0.1), jax.random.key(5, impl="rbg")


def bits(leaf: Any) -> tuple:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
    array = np.asarray(leaf)
    return type(leaf), array.dtype, array.shape, array.tobytes(), getattr(leaf, "weak_type", False)


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert bits(one) == bits(other)


def state_of(round: int, size: int = 1000) -> dict[str, Any]:
    """A state whose content is a function of its round; hard to compress, so that writing takes a while."""
    values = np.random.default_rng(round).standard_normal(size).astype(np.float32)
    return {"params": {"w": jnp.asarray(values), "b": jnp.float32(round)}, "key": jax.random.key(round)}


def save_all(workdir: pathlib.Path, *rounds: int) -> None:
    with Checkpoints(workdir) as checkpoints:
        for round in rounds:
            checkpoints.save(round, state_of(round))


def restore(workdir: pathlib.Path, template: Any = None) -> tuple[int, Any] | None:
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.restore(state_of(0) if template is None else template)


def folders(workdir: pathlib.Path) -> list[str]:
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def test_round_trip_is_bit_for_bit(tmp_path):
    state = awkward_state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, state)
    round, restored = restore(tmp_path, awkward_state())
    assert round == 4
    assert_same(restored, state)
    assert restored[0].params["host"].flags.owndata, "a view would keep the whole checkpoint in memory"


def test_manifest_is_plain_and_its_checksum_covers_every_byte(tmp_path):
    save_all(tmp_path, 1)
    manifest = json.loads((tmp_path / "checkpoints" / "1" / "manifest.json").read_text())
    state = state_of(1)
    leaves = [jax.random.key_data(state["key"]), state["params"]["b"], state["params"]["w"]]
    content = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
    whole = json.dumps({key: value for key, value in manifest.items() if key != "checksum"}).encode()
    assert manifest == {
        "round": 1,
        "log": "",
        "leaves": [
            {"path": "['key']", "kind": "key<fry>[]", "dtype": "uint32", "shape": [2], "key": "threefry2x32"},
            {"path": "['params']['b']", "kind": "float32[]", "dtype": "float32", "shape": [], "weak": False},
            {"path": "['params']['w']", "kind": "float32[1000]", "dtype": "float32", "shape": [1000], "weak": False},
        ],
        "blake2b": hashlib.blake2b(content, digest_size=16).hexdigest(),
        "checksum": hashlib.blake2b(whole, digest_size=8).hexdigest(),
    }


def test_the_newest_two_stay(tmp_path):
    assert restore(tmp_path) is None
    save_all(tmp_path, 1, 2, 5, 9)
    assert folders(tmp_path) == ["5", "9"]
    round, state = restore(tmp_path)
    assert round == 9
    assert_same(state, state_of(9))


def test_same_round_is_left_and_an_older_one_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state_of(3))
        checkpoints.save(3, state_of(4))
        assert_same(checkpoints.restore(state_of(0))[1], state_of(3))
        with pytest.raises(ValueError, match=r"cannot save round 2: .*3 is newer"):
            checkpoints.save(2, state_of(2))


def test_only_arrays_and_numbers(tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=r"state\['name'\] is a str"):
        checkpoints.save(1, {"name": "fl2"})


def test_buffers_may_be_donated_and_host_arrays_changed_after_save(tmp_path):
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0 - 1, state), donate_argnums=0)
    values = np.random.default_rng(0).standard_normal(2_000_000).astype(np.float32)
    on_device, on_host = {"w": jnp.array(values)}, values.copy()
    jax.block_until_ready(on_device)
    address = on_device["w"].unsafe_buffer_pointer()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, (on_device, on_host))
        after = step(on_device)
        on_host[:] = -1
        assert after["w"].unsafe_buffer_pointer() == address, "the buffer was not reused: the save still holds it"
        assert on_device["w"].is_deleted()
        round, (restored, restored_on_host) = checkpoints.restore((after, on_host))
    assert round == 1
    np.testing.assert_array_equal(np.asarray(restored["w"]), values)
    np.testing.assert_array_equal(restored_on_host, values)


@pytest.mark.parametrize("template", ["uncommitted", "committed", "shapes alone"])
def test_restored_state_compiles_nothing(tmp_path, template):
    state = {"w": jnp.arange(4.0), "weak": jnp.asarray(1.0), "key": jax.random.key(1)}
    state = state if template == "uncommitted" else jax.device_put(state, jax.devices()[0])
    step = jax.jit(lambda s: {"w": s["w"] + s["weak"], "weak": s["weak"] + 1, "key": jax.random.fold_in(s["key"], 1)})
    expected, like = step(state), state
    if template == "shapes alone":
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        _, restored = checkpoints.restore(like)
    assert_same(step(restored), expected)
    assert step._cache_size() == 1


def test_sharded_state_keeps_its_mesh(tmp_path):
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(AxisType.Auto,))

    def place(seed):
        clients = jnp.arange(24.0).reshape(8, 3) * seed
        keys = jax.random.split(jax.random.key(seed), 8)
        return (
            jax.device_put({"momentum": clients, "keys": keys}, NamedSharding(mesh, PartitionSpec("clients"))),
            jax.device_put({"params": clients, "key": jax.random.key(seed)}, NamedSharding(mesh, PartitionSpec())),
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda leaf: leaf + 1 if leaf.dtype == jnp.float32 else leaf, state)

    template = place(1)
    step(place(1))
    with Checkpoints(tmp_path) as checkpoints:
        state = place(2)
        checkpoints.save(1, state)
        step(state)
        _, restored = checkpoints.restore(template)
    assert_same(restored, place(2))
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(place(2)), strict=True):
        assert one.sharding == other.sharding
        assert len(one.addressable_shards) == 4
    step(restored)
    assert step._cache_size() == 1


QUIET = """
import logging, sys
logging.basicConfig(level=logging.INFO)
import jax.numpy as jnp
from fedjax_ssl.runs.checkpoint import Checkpoints
with Checkpoints(sys.argv[1]) as checkpoints:
    for round in range(4):
        checkpoints.save(round, {"w": jnp.arange(3.0)})
    assert checkpoints.restore({"w": jnp.zeros(3)})[0] == 3
"""


def test_terminal_stays_quiet(tmp_path):
    words = [sys.executable, "-W", "default::DeprecationWarning", "-c", QUIET, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def with_params(state, **params):
    return state | {"params": state["params"] | params}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"extra": jnp.zeros(2)}, r"state\['extra'\] is absent there and float32\[2\] here"),
        (lambda s: {"params": s["params"]}, r"state\['key'\] is key<fry>\[\] there and absent here"),
        (lambda s: s | {"key": jax.random.key(0, impl="rbg")}, r"key<fry>\[\] there and key<rbg>\[\] here"),
        (lambda s: with_params(s, w=jnp.zeros((10, 100))), r"float32\[1000\] there and float32\[10,100\] here"),
        (lambda s: with_params(s, b=jnp.int32(0)), r"float32\[\] there and int32\[\] here"),
    ],
)
def test_other_experiment_is_refused_not_skipped(tmp_path, change, message):
    save_all(tmp_path, 1, 2)
    with pytest.raises(ValueError, match=message) as error:
        restore(tmp_path, change(state_of(0)))
    assert "is another experiment's or version's checkpoint" in str(error.value)
    assert "\n" not in str(error.value)
    assert folders(tmp_path) == ["1", "2"]


def test_a_failed_save_is_raised_and_can_be_tried_again(tmp_path):
    """No file may grow beyond 1 MiB for a while: to the writing thread that is a full disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1, size=3_000_000))
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, unlimited[1]))
        try:
            checkpoints.save(2, state_of(2, size=3_000_000))
            with pytest.raises(Exception, match=r"File too large"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert checkpoints.restore(state_of(0, size=3_000_000))[0] == 1
        checkpoints.save(2, state_of(2, size=3_000_000))
        assert_same(checkpoints.restore(state_of(0, size=3_000_000))[1], state_of(2, size=3_000_000))

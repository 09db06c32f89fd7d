"""Checkpoints survive kills and damage, and give back what was saved, bit for bit."""

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fedjax_ssl.experiment.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]


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
        7: np.arange(6, dtype=np.float64).reshape(2, 3).T,
    }
    params = {str(name): leaf for name, leaf in params.items()}
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


def restore(workdir: pathlib.Path) -> tuple[int, Any] | None:
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.restore(state_of(0))


def folders(workdir: pathlib.Path) -> list[str]:
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def test_round_trip_is_bit_for_bit(tmp_path):
    state = awkward_state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, state)
    with Checkpoints(tmp_path) as checkpoints:
        round, restored = checkpoints.restore(awkward_state())
    assert round == 4
    assert_same(restored, state)


def test_manifest_names_every_leaf(tmp_path):
    """The manifest is plain JSON that a person can read; its checksums are those of the bytes."""
    save_all(tmp_path, 1)
    manifest = json.loads((tmp_path / "checkpoints" / "1" / "manifest" / "metadata").read_text())
    expected = hashlib.blake2b(np.asarray(state_of(1)["params"]["w"]).tobytes(), digest_size=16).hexdigest()
    (leaf,) = (leaf for leaf in manifest["leaves"] if leaf["path"] == "['params']['w']")
    assert leaf == {
        "path": "['params']['w']",
        "kind": "float32[1000]",
        "dtype": "float32",
        "shape": [1000],
        "blake2b": expected,
    }
    assert manifest["round"] == 1


def test_no_checkpoint_is_none(tmp_path):
    assert restore(tmp_path) is None


def test_the_newest_two_stay(tmp_path):
    save_all(tmp_path, 1, 2, 5, 9)
    assert folders(tmp_path) == ["5", "9"]
    round, state = restore(tmp_path)
    assert round == 9
    assert_same(state, state_of(9))


def test_keep_is_checked(tmp_path):
    with pytest.raises(ValueError, match="keep is 0; at least 1"):
        Checkpoints(tmp_path, keep=0)


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


@pytest.mark.parametrize("placed", [False, True], ids=["uncommitted", "committed"])
def test_restored_state_compiles_nothing(tmp_path, placed):
    state = {"w": jnp.arange(4.0), "weak": jnp.asarray(1.0), "key": jax.random.key(1)}
    state = jax.device_put(state, jax.devices()[0]) if placed else state
    step = jax.jit(lambda s: {"w": s["w"] + s["weak"], "weak": s["weak"] + 1, "key": jax.random.fold_in(s["key"], 1)})
    expected = step(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        _, restored = checkpoints.restore(state)
    assert_same(step(restored), expected)
    assert step._cache_size() == 1


SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from fedjax_ssl.experiment.checkpoint import Checkpoints

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("clients",), axis_types=(AxisType.Auto,))
def place(seed):
    clients = jnp.arange(24.0).reshape(8, 3) * seed
    return (
        jax.device_put({"momentum": clients, "keys": jax.random.split(jax.random.key(seed), 8)}, NamedSharding(mesh, P("clients"))),
        jax.device_put({"params": clients, "key": jax.random.key(seed)}, NamedSharding(mesh, P())),
    )
step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf if leaf.dtype != jnp.float32 else leaf + 1, state), donate_argnums=0)
template = place(1)
step(place(1))
with Checkpoints(sys.argv[1]) as checkpoints:
    state = place(2)
    checkpoints.save(1, state)
    step(state)
    _, restored = checkpoints.restore(template)
for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(place(2)), strict=True):
    assert one.sharding == other.sharding and one.dtype == other.dtype, (one.sharding, other.sharding)
    raw = [jax.random.key_data(x) if one.dtype != jnp.float32 else x for x in (one, other)]
    np.testing.assert_array_equal(*map(np.asarray, raw))
    assert len(one.addressable_shards) == 4
step(restored)
assert step._cache_size() == 1, "the restored state compiled a second program"
print("sharded round trip done")
"""


def test_sharded_state_keeps_its_mesh(tmp_path):
    done = run_python("-c", SHARDED, str(tmp_path))
    assert done.stdout == "sharded round trip done\n", done.stderr


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def run_python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], env=environment(), capture_output=True, text=True, timeout=120)


QUIET = """
import logging, sys
logging.basicConfig(level=logging.INFO)
import jax.numpy as jnp
from fedjax_ssl.experiment.checkpoint import Checkpoints
with Checkpoints(sys.argv[1]) as checkpoints:
    for round in range(4):
        checkpoints.save(round, {"w": jnp.arange(3.0)})
    assert checkpoints.restore({"w": jnp.zeros(3)})[0] == 3
"""


def test_terminal_stays_quiet(tmp_path):
    done = run_python("-W", "default::DeprecationWarning", "-c", QUIET, str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Damage. Each of these spoils the newest of two checkpoints.


def data_files(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoint's files, the largest first."""
    return sorted((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)


def flip(path: pathlib.Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def truncate_data(checkpoint):
    os.truncate(data_files(checkpoint)[0], data_files(checkpoint)[0].stat().st_size // 2)


def delete_data(checkpoint):
    data_files(checkpoint)[0].unlink()


def flip_data(checkpoint):
    flip(data_files(checkpoint)[0], data_files(checkpoint)[0].stat().st_size // 2)


def empty_folder(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def delete_manifest(checkpoint):
    shutil.rmtree(checkpoint / "manifest")


def edit_manifest(checkpoint):
    path = checkpoint / "manifest" / "metadata"
    manifest = json.loads(path.read_text())
    manifest["leaves"][0]["kind"] = "float32[7]"
    path.write_text(json.dumps(manifest))


def manifest_of_no_json(checkpoint):
    path = checkpoint / "manifest" / "metadata"
    path.write_bytes(b"\0" * path.stat().st_size)


def other_round(checkpoint):
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("1"), checkpoint)


def silently_other_values(checkpoint):
    """A well-formed Orbax item of the right structure whose weights differ in the last bit of one number."""
    state = {"['key']": np.asarray(jax.random.key_data(jax.random.key(2))), "['params']['b']": np.array(2, np.float32)}
    weights = np.asarray(state_of(2)["params"]["w"]).copy()
    weights.view(np.uint32)[500] ^= 1
    replace_arrays(checkpoint, state | {"['params']['w']": weights})


def other_structure(checkpoint):
    replace_arrays(checkpoint, {"['params']['w']": np.zeros(1000, np.float32)})


def replace_arrays(checkpoint, arrays):
    shutil.rmtree(checkpoint / "state")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(checkpoint / "state", arrays)


DAMAGES = [
    truncate_data,
    delete_data,
    flip_data,
    empty_folder,
    delete_manifest,
    edit_manifest,
    manifest_of_no_json,
    other_round,
    silently_other_values,
    other_structure,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_corrupt_newest_falls_back_and_is_moved_aside(tmp_path, caplog, damage):
    save_all(tmp_path, 1, 2)
    damage(tmp_path / "checkpoints" / "2")
    with Checkpoints(tmp_path) as checkpoints, caplog.at_level(logging.WARNING):
        caplog.clear()
        round, state = checkpoints.restore(state_of(0))
        (line,) = (record.getMessage() for record in caplog.records)
        assert str(tmp_path / "checkpoints" / "2") in line
        assert line.startswith("skipped corrupt checkpoint")
        assert "\n" not in line
        assert round == 1
        assert_same(state, state_of(1))
        assert folders(tmp_path) == ["1", "2.corrupt"]
        checkpoints.save(2, state_of(2))
    assert folders(tmp_path) == ["1", "2", "2.corrupt"]
    assert_same(restore(tmp_path)[1], state_of(2))
    damage(tmp_path / "checkpoints" / "2")
    assert restore(tmp_path)[0] == 1
    assert folders(tmp_path) == ["1", "2.corrupt", "2.corrupt-2"]


def test_each_file_damaged_in_turn_never_gives_a_wrong_state(tmp_path):
    """A byte flipped, the file cut, the file gone: the newest whole, or the one before; nothing else, and no crash."""
    save_all(tmp_path / "whole", 1, 2)
    outcomes = []
    for path in data_files(tmp_path / "whole" / "checkpoints" / "2"):
        size = path.stat().st_size
        for action in ["flip first", "flip middle", "cut", "delete"]:
            if size == 0 and action != "delete":
                continue
            shutil.copytree(tmp_path / "whole", tmp_path / "copy")
            victim = tmp_path / "copy" / path.relative_to(tmp_path / "whole")
            if action == "cut":
                os.truncate(victim, size // 2)
            elif action == "delete":
                victim.unlink()
            else:
                flip(victim, 0 if action == "flip first" else size // 2)
            round, state = restore(tmp_path / "copy")
            assert_same(state, state_of(round))
            outcomes.append(round)
            shutil.rmtree(tmp_path / "copy")
    assert set(outcomes) == {1, 2}  # some files (a commit marker) carry nothing that a restore needs


def test_half_written_temporary_folder_is_no_checkpoint(tmp_path):
    save_all(tmp_path, 1)
    for name in ("2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-1700000000"):
        shutil.copytree(tmp_path / "checkpoints" / "1", tmp_path / "checkpoints" / name)
    assert restore(tmp_path)[0] == 1
    save_all(tmp_path, 2)
    assert restore(tmp_path)[0] == 2
    assert "2.orbax-checkpoint-tmp" not in folders(tmp_path)


def test_all_corrupt_is_an_error_and_nothing_is_touched(tmp_path):
    save_all(tmp_path, 1, 2)
    for name in ("1", "2"):
        flip_data(tmp_path / "checkpoints" / name)
    before = data_files(tmp_path)
    with pytest.raises(ValueError, match=r"every checkpoint in .* is corrupt \(2, 1\); move that folder away") as error:
        restore(tmp_path)
    assert "\n" not in str(error.value)
    assert data_files(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"extra": jnp.zeros(2)}, r"state\['extra'\] is absent there and float32\[2\] here"),
        (lambda s: {"params": s["params"]}, r"state\['key'\] is key<fry>\[\] there and absent here"),
        (lambda s: s | {"key": jax.random.key(0, impl="rbg")}, r"key<fry>\[\] there and key<rbg>\[\] here"),
        (
            lambda s: s | {"params": s["params"] | {"w": jnp.zeros((10, 100))}},
            r"float32\[1000\] there and float32\[10,100\] here",
        ),
        (lambda s: s | {"params": s["params"] | {"b": jnp.int32(0)}}, r"float32\[\] there and int32\[\] here"),
    ],
    ids=["leaf missing", "leaf too many", "key", "shape", "dtype"],
)
def test_other_experiment_is_refused_not_skipped(tmp_path, change, message):
    save_all(tmp_path, 1, 2)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=message) as error:
        checkpoints.restore(change(state_of(0)))
    assert "is another experiment's checkpoint" in str(error.value)
    assert "\n" not in str(error.value)
    assert folders(tmp_path) == ["1", "2"]


def test_a_failed_background_save_is_raised(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_of(1, size=3_000_000))
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file where the folder was")
    with pytest.raises(Exception, match=r".+"):
        checkpoints.wait()


# Kills. A child saves as fast as it can; each trial goes on from where the one before was killed, as a real run does.

SAVING = """
import itertools, sys
from fedjax_ssl.experiment.checkpoint import Checkpoints
from tests.experiment.test_checkpoint import KILL_SIZE, state_of
with Checkpoints(sys.argv[1]) as checkpoints:
    restored = checkpoints.restore(state_of(0, KILL_SIZE))
    start = 0 if restored is None else restored[0]
    for round in itertools.count(start + 1):
        checkpoints.save(round, state_of(round, KILL_SIZE))
        print(round - 1, flush=True)  # a save returns once the one before it is on disk
"""
KILL_SIZE = 300_000


def kill_repeatedly(workdir: pathlib.Path, trials: int, seed: int) -> list[int]:
    """Newest rounds after each kill, all checked; half of the kills fall within milliseconds of a save's start or end."""
    moments = random.Random(seed)
    newest, rounds = 0, []
    for _ in range(trials):
        with subprocess.Popen(
            [sys.executable, "-c", SAVING, str(workdir)], env=environment(), cwd=ROOT, stdout=subprocess.PIPE
        ) as child:
            for _ in range(moments.randint(2, 4)):
                assert child.stdout.readline()
            time.sleep(moments.choice([moments.uniform(0, 0.01), moments.uniform(0, 0.3)]))
            child.kill()
            printed = [int(line) for line in child.stdout.read().split()]
        with Checkpoints(workdir) as checkpoints:
            round, state = checkpoints.restore(state_of(0, KILL_SIZE))
        assert_same(state, state_of(round, KILL_SIZE))
        assert round >= max([newest, *printed]), "a checkpoint that was reported as saved is lost"
        assert not [name for name in folders(workdir) if "corrupt" in name], "a kill left a broken checkpoint behind"
        newest = round
        rounds.append(round)
    return rounds


def run_kills(tmp_path: pathlib.Path, trials: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        chains = list(pool.map(lambda seed: kill_repeatedly(tmp_path / str(seed), trials // 2, seed), range(2)))
    for rounds in chains:
        assert rounds == sorted(set(rounds)), "a trial that saved nothing tests nothing"


def test_killed_at_random_moments(tmp_path):
    run_kills(tmp_path, 10)


@pytest.mark.slow
def test_killed_a_hundred_times(tmp_path):
    run_kills(tmp_path, 100)

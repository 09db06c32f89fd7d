"""What a command line may say: configs by name or path, overrides, and one line for everything else."""

import re

import pytest

from configs import digits
from fedjax_ssl.experiment.build import build
from launch import command, explain
from tests import tiny


def line(function, *args) -> str:
    """The one line of a refusal."""
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        function(*args)
    text = str(refused.value)
    assert "\n" not in text, text
    assert len(text) < 1000
    return text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("method.confidenc=1", ["config.method.confidenc", "did you mean config.method.confidence?"]),
        ("nonsense=1", ["config.nonsense", "unknown key"]),
        ("clinet.epochs=1", ["config.client.epochs or config.server.epochs"]),
        ("client.optimizer.lr=1", ["did you mean config.client.optimizer.learning_rate?"]),
        ("learning_rate=1", ["config.client.optimizer.learning_rate or config.server.learning_rate or config.server.optim"]),
        ("rounds.x=1", ["config.rounds.x: unknown key; did you mean config.rounds?"]),
        ("data.labeled_fraction[0]=1", ["config.data.labeled_fraction[0]: unknown key"]),
        ("data.labeled_fraction=.1,x", ["config.data.labeled_fraction: got '.1,x', accepted: numbers"]),
        ("client=1", ["config.client: got '1'", "batch_size, epochs, on_nonfinite, optimizer, steps"]),
        ("rounds=many", ["config.rounds: got 'many', accepted: a whole number"]),
        ("rounds=((((((((", ["config.rounds: got '(((((((('"]),
    ],
)
def test_a_wrong_override_names_its_key(override, words):
    key, _, value = override.partition("=")
    assert all(word in line(command.read, "digits:fl2", {key: value}) for word in words)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rounds": 0}, ["rounds: got 0, accepted: a whole number >= 1"]),
        ({"rounds": 10**20}, ["rounds: got 100000000000000000000", "at most 2147483647"]),
        ({"data__name": "cifar11"}, ["cifar11", "did you mean 'cifar10'"]),
        ({"data__name": "cifar10", "data__data_dir": "/nowhere"}, ["/nowhere"]),
        ({"data__name": "npz", "data__path": "/nowhere.npz"}, ["data.path=/nowhere.npz"]),
        ({"data__num_clients": 0}, ["data.num_clients: got 0"]),
        ({"data__num_labels": 100000}, ["data.num_labels=100000"]),
        ({"data__num_labels": 15}, ["data.num_labels=15", "multiple of 10"]),
        ({"cohort_size": 9}, ["cohort_size: got 9, accepted: 1 to data.num_clients = 8"]),
        ({"data__partition": "dirichlet", "data__min_size": 1000}, ["data: ", "min_size=1000"]),
        ({"method__batches": "some"}, ["method.batches: got 'some', accepted: all, accepted"]),
        ({"method__name": "supervised"}, ["method.name=supervised", "configs/digits.py:supervised"]),
        ({"model__name": "vgg"}, ["model.name", "vgg"]),
        (
            {"vary": "client.optimizer.learning_rate", "values": tuple(range(1, 202)), "seeds": 5},
            ["values: got 201", "1005 runs"],
        ),
    ],
)
def test_a_wrong_value_names_its_key(overrides, words):
    text = line(build, tiny.config("fl2", **overrides))
    assert all(word in text for word in words), text


def test_configs_are_found_by_name_and_by_path_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = command.read("digits:fl2,labels=20", {"rounds": "3", "data.labeled_fraction": "(.1, .2)", "data.weak": "none"})
    assert by_name.name == "digits-fl2-labels=20"
    data = by_name.tree["data"]
    assert (by_name.tree["rounds"], data["num_labels"], data["labeled_fraction"], data["weak"]) == (3, 20, (0.1, 0.2), "none")
    by_path = command.read(f"{command.CONFIGS}/digits.py:fl2,labels=20")
    assert by_path.tree | {"rounds": 3, "data": data} == by_name.tree
    (tmp_path / "beside.py").write_text("ROUNDS = 7\n")
    own = "from beside import ROUNDS\nfrom configs import digits\ndef get_config():\n    config = digits.get_config('uda')\n"
    (tmp_path / "own.py").write_text(f"{own}    config.rounds = ROUNDS\n    return config\n")
    assert command.read("own.py").tree["rounds"] == 7
    assert command.read("own.py").name == "own"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("README.md", "# hello", ["got README.md", "a config file"]),
        ("a.py", "x = 1", ["got a.py", "which defines get_config"]),
        ("a.py", "def get_config(:", ["a.py, line 1: SyntaxError"]),
        ("a.py", "import nothing_of_that_name\n", ["a.py, line 1: ModuleNotFoundError"]),
        ("a.py", "def get_config():\n    return 1 / 0", ["a.py, line 2: ZeroDivisionError"]),
        ("a.py", "def get_config():\n    return 7", ["a get_config that returns int"]),
        ("a.py:argument", "def get_config():\n    return {}", ["TypeError"]),
        ("a.py", "def get_config():\n    return {1: 2}", ["got the key 1, accepted: text"]),
        ("a.py", "class A: ...\ndef get_config():\n    return {'rounds': A()}", ["config.rounds: got '3', accepted: a value"]),
        ("a.py", "def get_config():\n    raise SystemExit(3)", ["a.py, line 2: SystemExit"]),
    ],
)
def test_a_config_file_that_is_none_is_one_line(tmp_path, monkeypatch, name, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name.partition(":")[0]).write_text(text)
    said = line(command.read, name, {"rounds": "3"})
    assert all(word in said for word in words), said


def test_a_folder_of_a_configs_name_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert command.read("digits:fl2").name == "digits-fl2"


def test_a_mistyped_config_names_the_nearest():
    assert "did you mean digits?" in line(command.read, "digts:fl2", {"rounds": "3"})
    assert "accepted: fl2, " in line(command.read, "digits:fl3", {"rounds": "3"})


def _paths(tree, prefix=()):
    for key, value in tree.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, key))


def test_explain_prints_each_key_with_its_value_meaning_and_what_it_accepts(capsys):
    assert explain.main(["explain", "--config=digits:fl2", "--config.client.epochs=3", "client", "method.rho"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^client\.epochs = 3\n    Local epochs, or 0\.\n    accepts: a whole number >= 0 and", printed, re.M)
    assert re.search(r"^method\.rho = 0\.1\n    .*radius.*\n    accepts: a number >= 0$", printed, re.M)
    assert re.search(r"^client\.optimizer\.schedule = constant$", printed, re.M)
    assert "server." not in printed


def test_explain_knows_the_options_of_a_network_of_ones_own(capsys, tmp_path, own_methods):
    text = """
from typing import Annotated
import fedjax_ssl, pydantic
from configs import common
from flax import linen as nn

class Own(nn.Module):
    num_classes: int
    width: Annotated[int, pydantic.Field(ge=1, le=64, description="Channels.")] = 16
    sizes: tuple[int, ...] = (3, 5)
    plain: int = 2

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1))

fedjax_ssl.register_model("own", Own)

def get_config():
    return common.base("fedavg", "own")
"""
    (tmp_path / "own.py").write_text(text)
    words = ["explain", f"--config={tmp_path}/own.py", "--config.model.sizes=7", "model.width", "model.sizes", "model.plain"]
    assert explain.main(words) == 0
    printed = capsys.readouterr().out
    assert "model.width = 16\n    Channels.\n    accepts: a whole number >= 1 and <= 64\n" in printed
    assert "model.sizes = 7\n    An option of the network.\n    accepts: numbers, separated by commas\n" in printed
    assert "model.plain = 2\n    An option of the network.\n    accepts: a whole number >= 1\n" in printed
    for word in ("width=65", "plain=0", "widht=3", "sizes=.5"):
        assert explain.main([*words, f"--config.model.{word}"]) == 2
        assert f"model.{word.split('=')[0]}: " in capsys.readouterr().err


def test_explain_knows_every_key_of_every_method(capsys):
    for method in tiny.METHODS:
        assert explain.main(["explain", f"--config=digits:{method}"]) == 0
        printed = capsys.readouterr().out
        keys = set(re.findall(r"^([\w.]+) = ", printed, re.M))
        leaves = {".".join(p) for p in _paths(digits.get_config(method).to_dict())}
        assert keys == {one for one in leaves if not any(other.startswith(f"{one}.") for other in leaves)}
        assert not re.search(r"^    (accepts: )?$", printed, re.M)


@pytest.mark.parametrize("what", explain.LISTS)
def test_explain_lists_what_there_is(capsys, what):
    assert explain.main(["explain", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 9
    assert all(re.fullmatch(r"\S+ {2,}\S.*", line) for line in lines), lines


def test_explain_takes_a_config_and_a_key_in_any_order(capsys):
    for words in (["--config", "digits:fl2", "client.batch_size"], ["client.batch_size", "--config=digits:fl2"]):
        assert explain.main(["explain", *words]) == 0
        assert capsys.readouterr().out.startswith("client.batch_size = ")


@pytest.mark.parametrize("words", [["client.optimzer", "--config=digits:fl2"], ["nonsense"], [], ["--config=digits:fl3"]])
def test_explain_refuses_in_one_line(capsys, words):
    assert explain.main(["explain", *words]) == 2
    assert re.fullmatch(r"error: .*\n", capsys.readouterr().err)

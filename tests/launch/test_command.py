"""What a command line may say: configs by name or path, overrides, and one line for everything else."""

import errno
import os
import re
import subprocess
import sys

import pytest

from configs import digits
from fedjax_ssl.files import FAILURES
from launch import command, config_file, evaluate, explain, main, run
from tests import disk, tiny
from tests.commands import CONFIG, ROOT, launch, refused


def test_configs_are_found_by_name_and_by_path_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = config_file.read(
        "digits:fl2,labels=20", {"rounds": "3", "data.labeled_fraction": "(.1, .2)", "data.weak": "none"}
    )
    assert by_name.name == "digits-fl2-labels=20"
    data = by_name.tree["data"]
    assert (by_name.tree["rounds"], data["num_labels"], data["labeled_fraction"], data["weak"]) == (3, 20, (0.1, 0.2), "none")
    by_path = config_file.read(f"{config_file.CONFIGS}/digits.py:fl2,labels=20")
    assert by_path.tree | {"rounds": 3, "data": data} == by_name.tree
    (tmp_path / "beside.py").write_text("ROUNDS = 7\n")
    own = "from beside import ROUNDS\nfrom configs import digits\ndef get_config():\n    config = digits.get_config('uda')\n"
    (tmp_path / "own.py").write_text(f"{own}    config.rounds = ROUNDS\n    return config\n")
    assert config_file.read("own.py").tree["rounds"] == 7
    assert config_file.read("own.py").name == "own"


def _paths(tree, prefix=()):
    for key, value in tree.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, key))


@pytest.mark.parametrize("config", ["--config=digits:fl2 client", "--config digits:fl2 client", "client --config=digits:fl2"])
def test_explain_prints_each_key_with_its_value_meaning_and_what_it_accepts(capsys, config):
    assert explain.main(["explain", *config.split(), "--config.client.epochs=3", "method.rho"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^client\.epochs = 3\n    Number of local epochs(.*\n)+?    accepts: a whole number", printed, re.M)
    assert re.search(r"^method\.rho = 0\.1\n    .*[Rr]adius.*\n    accepts: a number >= 0$", printed, re.M)
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


@pytest.mark.parametrize(("error", "reason"), [(AssertionError(), ""), (RuntimeError("no plugin\nmore"), " (no plugin)")])
def test_a_platform_without_devices_is_one_line(tmp_path, monkeypatch, error, reason):
    def none():
        raise error

    monkeypatch.setattr("jax.devices", none)
    asked = f"JAX_PLATFORMS: got cpu, of which JAX finds no device{reason}"
    for words, program in ((["--config=digits:fl2"], run), (["absent"], evaluate)):
        assert refused(*words, cwd=tmp_path, program=program) == f"error: {asked}, accepted: cpu, or unset\n"


def test_the_packages_themselves_list_the_commands():
    for package, typed in (("launch", "python -m launch.run"), ("fedjax_ssl", "fedjax-ssl run")):
        done = subprocess.run([sys.executable, "-m", package], capture_output=True, text=True, check=True, cwd=ROOT)
        assert f"\n{typed} --config=digits:fl2\n" in done.stdout
        listed = re.findall(r"^  (\w+) +[A-Z].*\.$", done.stdout, re.MULTILINE)
        assert tuple(listed) == main.COMMANDS


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        *[("JAX_NUM_CPU_DEVICES", value, value) for value in ("0", "-3", "1.5", "two", "")],
        ("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=0", "--xla_force_host_platform_device_count=0"),
    ],
)
def test_a_number_of_devices_that_cannot_be_is_one_line(monkeypatch, capsys, name, value, got):
    monkeypatch.setenv(name, value)
    assert command.ended(lambda _: 0, []) == 2
    assert capsys.readouterr().err == f"error: {name}: got {got}, accepted: a whole number of devices >= 1\n"


def caught(function):
    try:
        function()
    except (ValueError, OSError) as error:
        return error


def test_an_error_without_text_is_named_by_its_type_and_place(capsys):
    def raises():
        raise ValueError

    assert command.refuse(caught(raises)) == 2
    assert re.fullmatch(r"error: ValueError without a text raised in .*test_command\.py, line \d+\n", capsys.readouterr().err)


@pytest.mark.parametrize("number", [*FAILURES, errno.ENOENT, errno.EACCES, errno.ENAMETOOLONG, None])
def test_an_error_of_the_system_has_status_1_also_where_another_one_hides_it(capsys, number):
    error = OSError(number, os.strerror(number), "there") if number else OSError("no image")

    def hides():
        try:
            raise error
        except OSError:
            raise ValueError("data.path: got there, accepted: an .npz file") from None

    assert command.refuse(error) == command.refuse(caught(hides)) == (1 if number in FAILURES else 2)
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["error"] * 2


@pytest.mark.slow
@pytest.mark.reliability
def test_an_io_error_before_round_1_has_status_1(tmp_path, config, own_methods):
    with disk.failing(tmp_path / "all", 10**9) as calls:
        launch(config, f"--workdir={tmp_path / 'all'}", "--config.rounds=1", "--config.eval_every=1")
    first = 60  # some of the calls before round 1
    assert len(calls) > first
    failed = 0
    for number in range(0, first, 7):
        with disk.failing(tmp_path / f"{number}", number, errno.EIO):
            done = launch(config, f"--workdir={tmp_path / str(number)}", "--config.rounds=1", "--config.eval_every=1")
        assert done.returncode in (0, 1), done.stderr  # the owner's name may be missing
        assert "Traceback" not in done.stderr
        failed += done.returncode
        assert done.stderr.count("Input/output error") == done.returncode
    assert failed >= 5


BREACHES = {
    '"client/loss"': "server_update: metric 'client/loss': got a name that client_update has, too, accepted: another one",
    '"checksum"': "server_update: metric 'checksum': got a name of the simulation's own, accepted: another one",
    "3": "server_update: metric 3: got int, accepted: a text as its name",
}


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("name", BREACHES)
@pytest.mark.parametrize("is_dry", [False, True])
def test_a_method_that_breaks_the_contract_is_one_line_of_the_command_too(tmp_path, name, is_dry):
    made = f"""
def average_with_a_metric(*, task, client, server, options=average.AverageOptions()):
    made = average.average(task=task, client=client, server=server, options=options)

    def server_update(*arguments):
        return made.server_update(*arguments)[0], {{{name}: Sum(0)}}

    return made._replace(server_update=server_update)
"""
    head = "from tests import average\nfrom fedjax_ssl.methods import METHODS\nfrom fedjax_ssl.metrics import Sum\n"
    config = CONFIG.replace("from tests import average\n", head + made)
    config = config.replace("average.register()", 'METHODS["average"] = average_with_a_metric')
    (tmp_path / "own.py").write_text(config)
    done = launch(f"--config={tmp_path / 'own.py'}", f"--workdir={tmp_path / 'run'}", *["--dry_run"] * is_dry)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {BREACHES[name]}"
    assert "Traceback" not in done.stderr

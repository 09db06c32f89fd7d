"""A method or a network of one's own that changes between the calls of a command: one line, and never old numbers as new."""

import functools
import importlib.util
import re
import subprocess

import pytest
from flax import linen as nn
from flax import nnx

import fedjax_ssl
from fedjax_ssl.files import read_json, write_json
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import MODELS
from fedjax_ssl.origins import origin
from fedjax_ssl.runs import changes, provenance
from launch import evaluate, report, sweep
from tests import average, commands
from tests.commands import refused, succeeded

pytestmark = pytest.mark.usefixtures("own_methods")
OWN = """
import functools, pathlib
import fedjax_ssl, jax
from flax import linen as nn
from tests import average

class Net(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1))

@functools.wraps(average.average)
def own(**given):
    scale = float(pathlib.Path(__file__).with_name("scale.txt").read_text())
    method = average.average(**given)
    after = lambda server, *rest: method.server_update(jax.tree.map(lambda x: x * scale, server), *rest)
    return method._replace(server_update=after)

fedjax_ssl.register_method("own", own)
fedjax_ssl.register_model("net", Net)
"""
CONFIG = OWN + commands.CONFIG


@pytest.fixture
def file(tmp_path):
    """A config that registers its method and network, and reads a number from another file."""
    path = tmp_path / "mine.py"
    path.write_text(CONFIG.replace('base("average", "linear")', 'base("own", "net")'))
    (tmp_path / "scale.txt").write_text("1.0")
    return path


def said(done):
    """The lines that are no progress."""
    lines = [line for line in done.stderr.splitlines() if not re.match("round |all 6|going on after|stopped after", line)]
    return "\n".join(lines)


@pytest.mark.ci
def test_a_changed_file_or_program_is_one_line_at_resume_evaluate_load_and_for_a_finished_run(tmp_path, file, caplog):
    folder = tmp_path / "run"
    words = (f"--config={file}", f"--workdir={folder}")
    assert said(succeeded(*words, "--stop_after=2")) == ""
    first = file.read_bytes()
    assert (folder / "registered" / "method-1" / "mine.py").read_bytes() == first
    assert (folder / "registered" / "model-1" / "mine.py").read_bytes() == first

    assert said(succeeded(*words, "--stop_after=3")) == ""
    (tmp_path / "scale.txt").write_text("0.5")  # no file that registers anything, but what one of them reads
    with caplog.at_level("WARNING"):
        fedjax_ssl.load(folder)
    (loaded,) = caplog.messages
    assert loaded.endswith(f"though its files are the same: see what they import or read; {changes.LOADED}")
    caplog.clear()
    assert said(succeeded(*words, "--stop_after=4")) == (
        f"{folder}: the code of method.name=own (mine.py, average.py) and model.name=net (mine.py) computes something else "
        f"than before, though its files are the same: see what they import or read; {changes.GOES_ON}"
    )
    file.write_text(f"{file.read_text()}# another one\n")
    line = said(succeeded(*words))
    assert line.count("\n") == 0
    assert "method.name=own is registered by other files than before (mine.py, average.py)" in line
    assert "model.name=net is registered by other files than before (mine.py)" in line
    assert (folder / "registered" / "method-2" / "mine.py").read_bytes() == file.read_bytes()

    line = said(succeeded(*words))
    assert line.startswith(f"{folder}: 2 versions of the files that register method.name=own (mine.py, average.py) have run it")
    assert line.endswith(changes.ENDED)
    with caplog.at_level("WARNING"):
        fedjax_ssl.load(folder)
    (loaded,) = caplog.messages
    assert loaded.startswith(f"{folder}: 2 versions of the files that register method.name=own")
    assert loaded.endswith(changes.LOADED)
    assert "2 versions of" in said(succeeded(str(folder), f"--config={file}", program=evaluate))
    assert said(succeeded(*words, "--overwrite")) == ""
    assert said(succeeded(*words)) == ""


@pytest.mark.slow
def test_a_run_keeps_the_state_of_the_repository_of_a_method_and_reports_name_it(tmp_path, file, monkeypatch):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", "mine.py", "scale.txt")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD").strip()
    words = (f"--config={file}", f"--workdir={tmp_path / 'run'}", "--config.rounds=2")
    succeeded(*words, "--stop_after=1")
    kept = tmp_path / "run" / "registered" / "method-1" / changes.REPOSITORY
    assert kept.read_text() == f"commit {commit}\n"
    file.write_text(f"{file.read_text()}# another one\n")
    (tmp_path / "scale.txt").write_text("0.5" + " " * 600)
    monkeypatch.setattr(provenance, "MOST_CHANGES", 400)
    succeeded(*words)
    first, text = (kept.parents[1] / "method-2" / changes.REPOSITORY).read_text().split("\n", 1)
    assert first == f"commit {commit}"
    assert text == git("diff", "HEAD")[:400] + "\nmore than 400 bytes: the rest is left out\n"
    succeeded(str(tmp_path / "run"), f"--out={tmp_path / 'report.html'}", program=report)
    page = (tmp_path / "report.html").read_text()
    assert f"registered/method-1: average.py, mine.py, at commit {commit[:10]}<" in page
    assert f"registered/model-2: mine.py, at commit {commit[:10]} with changes<" in page


@pytest.mark.ci
def test_a_sweep_says_once_that_its_numbers_are_of_earlier_files_and_how_to_run_anew(tmp_path, file, monkeypatch):
    for seed in "01":
        succeeded(f"--config={file}", f"--config.seed={seed}", f"--workdir={tmp_path / 'out' / 'run' / seed}")
    words = (f"--config={file}", "--seeds=2", f"--workdir={tmp_path / 'out'}")
    assert "note: " not in succeeded(*words, program=sweep).stderr
    file.write_text(f"{file.read_text()}# another one\n")
    notes = [line for line in succeeded(*words, program=sweep).stderr.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert notes[0].startswith(
        f"note: {tmp_path / 'out' / 'run' / '0'} and 1 more: method.name=own is registered by other files"
    )
    assert notes[0].endswith(changes.ENDED)
    evaluated = succeeded(str(tmp_path / "out"), f"--config={file}", program=evaluate)
    assert evaluated.stderr.count("method.name=own is registered by other files than before") == 1

    started, popen = [], subprocess.Popen

    def starts(line, **given):
        started.append(line)
        return popen(["true"] if "launch.run" in line else line, **given)

    monkeypatch.setattr(subprocess, "Popen", starts)
    assert "note: " not in succeeded(*words, "--overwrite", program=sweep).stderr
    assert ["--overwrite" in line for line in started if "launch.run" in line] == [True]


@pytest.mark.ci
def test_several_runs_and_a_single_one_do_not_share_a_folder(tmp_path, config):
    single, several = tmp_path / "single", tmp_path / "several"
    several.mkdir()
    (several / "config.json").write_text("{}")  # somebody else's
    values = ("--config.vary=client.optimizer.learning_rate", "--config.values=.1,.2")
    succeeded(config, f"--workdir={single}", "--stop_after=1")
    succeeded(config, f"--workdir={several}", "--stop_after=1", *values)
    name = "0-learning_rate=0.1"
    for words in ((), ("--overwrite",), ("--dry_run",)):
        line = refused(config, f"--workdir={single}", *values, *words)
        assert f"got {single} for several runs, which is the folder of a single run, accepted: another one" in line
        line = refused(config, f"--workdir={several}", *words)
        assert f"got {several} for a single run, which holds the run {name}, accepted: another one" in line
    assert "which is the folder of a single run" in refused(config, f"--workdir={single}", program=sweep)
    assert refused(config, f"--workdir={several / name}").startswith(f"error: {several / name} holds another experiment")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_of_what_is_registered_are_found_however_it_is_made(tmp_path):
    (tmp_path / "there.py").write_text(
        "import functools\nfrom flax import linen as nn, nnx\nfrom tests.average import average\n"
        "class Net(nn.Module):\n    num_classes: int\n    @nn.compact\n    def __call__(self, x):\n        return x\n"
        "class Plain(nnx.Module):\n    def __init__(self, num_classes, *, rngs):\n        pass\n"
        "def of(function):\n    @functools.wraps(function)\n    def own(**given):\n"
        "        return function(**given)\n    return own\n"
    )
    there = load(tmp_path / "there.py")

    class Below(there.Net):
        pass

    fedjax_ssl.register_method("partly", functools.partial(there.of(average.average)))
    fedjax_ssl.register_model("below", Below)
    for group, name, thing, files in (
        ("method", "average", average.average, "average.py"),
        ("method", "wrapped", there.of(average.average), "there.py, average.py"),
        ("method", "partly", METHODS["partly"], "there.py, average.py, test_changes.py"),
        ("model", "net", there.Net, "there.py"),
        ("model", "below", Below, "there.py, test_changes.py"),
        ("model", "nnx", fedjax_ssl.models.from_nnx(there.Plain), "there.py"),
    ):
        found = origin(group, name, thing)
        assert (str(found), len(found.digest)) == (files, 32), name
    before = origin("model", "net", there.Net)
    (tmp_path / "there.py").write_text("# another one")
    assert origin("model", "net", there.Net).digest != before.digest


def test_what_the_package_brings_has_its_version_alone():
    assert {name for name, factory in METHODS.items() if origin("method", name, factory)} <= {"average", "own", "partly"}
    assert {name for name, model in MODELS.items() if origin("model", name, model.module)} <= {"net", "below"}


def test_what_no_file_has_counts_as_changed_only_where_it_was_a_file():
    names: dict = {}
    exec("def typed(*, task, client, server, options=None):\n    pass", names)
    found = origin("method", "typed", names["typed"])
    assert (found.files, found.digest, str(found)) == ((), "", "typed in")
    assert isinstance(nn.Dense, type)
    assert isinstance(nnx.Linear, type)


def test_other_files_of_the_package_are_said(tmp_path, finished):
    noted = read_json(finished / "run.json")
    settings = fedjax_ssl.load(finished)[0].settings
    assert changes.changed(finished / "run.json", settings) == changes.changed(tmp_path / "run.json", settings) == ""
    write_json(tmp_path / "run.json", noted | {"machine": noted["machine"] | {"fedjax_ssl": "another digest"}})
    assert changes.changed(tmp_path / "run.json", settings) == "the files of the package have changed since"

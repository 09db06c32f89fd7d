"""The README's method and network of one's own: its very text, run as a command and in process."""

import ast
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from types import ModuleType

import jax
import pytest

import fedjax_ssl
from fedjax_ssl.methods import METHODS
from fedjax_ssl.metrics import num_bytes
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny, toy
from tests.commands import ROOT, succeeded
from tests.engine import distance, with_outputs


def blocks(language: str, title: str = "A method and a network of your own") -> list[str]:
    """The code blocks of the section."""
    text = (ROOT / "fedjax_ssl" / "README.md").read_text()
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "my_method.py").write_text("\n\n".join(blocks("python")))
    return folder


def loaded(path: pathlib.Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plugin(folder, own_methods):
    return loaded(folder / "my_method.py")


def run(plugin: ModuleType, method: str = "prox_entropy", **options: float):
    """(parameters, metrics) after two rounds of full batches without augmentation, in which no order matters."""
    config = plugin.get_config()
    config.rounds, config.cohort_size, config.execution.strategy = 2, 3, "scan"
    config.data.labeled = "none"
    config.client.update(batch_size=64, epochs=0, steps=3)
    tree = config.to_dict()
    tree["method"], tree["model"] = {"name": method, **options}, {"name": "mlp", "hidden": 16}
    ((_, _), (params, row)) = [
        (jax.device_get(state.server.weights.params), row) for state, row in fedjax_ssl.build(tree).rounds()
    ]
    return params, row


def test_the_method_has_at_most_40_lines_and_the_network_10():
    source = "\n\n".join(blocks("python"))
    lines = source.splitlines()
    sizes = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            written = set(range(node.lineno, node.end_lineno + 1))
            if ast.get_docstring(node):
                written -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
            sizes[node.name] = sum(bool(lines[number - 1].strip()) for number in written)
    assert sizes["ProxEntropyOptions"] + sizes["prox_entropy"] <= 40
    assert sizes["SmallCNN"] <= 10


@pytest.mark.slow
def test_the_command_runs_in_the_folder_of_the_file(folder, own_methods):
    (command,) = blocks("bash")
    python, _, program, *arguments = shlex.split(command)
    assert (python, program) == ("python", "launch.run")
    succeeded(*arguments, "--config.rounds=2", "--workdir=run", cwd=folder)
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["method"] == {"name": "prox_entropy", "prox_mu": 0.0, "mu": 0.01, "entropy_weight": 0.1}
    assert (config["model"]["name"], config["model"]["width"]) == ("small_cnn", 16)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    assert [row["client/participants"] for row in rows] == [5, 5]
    assert all(0 < row["client/entropy"] < 2.31 for row in rows)  # log 10: the entropy of a guess


ON_DIGITS = "import my_method\nfrom fedjax_ssl.configs.digits import get_config\n"
PROGRAM = "import my_method, sys\nfrom launch import run\nsys.exit(run.main(sys.argv))\n"


@pytest.mark.parametrize(
    ("words", "config"),
    [
        pytest.param(("-m", "launch.run"), "on_digits.py:prox_entropy,labels_at=clients", marks=pytest.mark.slow),
        pytest.param(("program.py",), "digits:prox_entropy,labels_at=clients", marks=pytest.mark.slow),
    ],
)
def test_a_registered_method_runs_on_the_digits_by_its_name_in_a_process_of_its_own(folder, tmp_path, words, config):
    (folder / "on_digits.py").write_text(ON_DIGITS)
    (folder / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        *words,
        f"--config={config}",
        "--config.rounds=2",
        "--config.method.mu=0.5",
        "--config.model.name=linear",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command.append(f"--workdir={tmp_path}")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["method"], summary["dataset"], summary["rounds"]) == ("prox_entropy", "digits", 2)
    assert json.loads((tmp_path / "config.json").read_text())["method"]["mu"] == 0.5


@pytest.mark.slow
def test_its_terms_are_fedprox_and_the_entropy(plugin):
    fedavg, fedprox = (run(plugin, "fedavg", prox_mu=mu)[0] for mu in (0.0, 2.0))
    assert distance(fedavg, fedprox) > 1e-3
    assert distance(run(plugin, mu=2.0, entropy_weight=0.0)[0], fedprox) < 1e-6
    without, row = run(plugin, mu=0.0, entropy_weight=0.0)
    assert distance(without, fedavg) < 1e-6
    with_entropy, low = run(plugin, mu=0.0, entropy_weight=1.0)
    assert distance(without, with_entropy) > 1e-3
    assert 0 < low["client/entropy"] < row["client/entropy"] - 0.01


def test_what_is_no_method_is_refused_and_ones_own_gives_way_to_another_of_its_name(plugin):
    def without_options(*, task, client, server):
        """Lacks an argument."""

    def other(*, task, client, server, options=NoOptions()):
        """Has all."""

    def with_plain_options(*, task, client, server, options=None):
        """Has options of the wrong kind."""

    for name, factory, message in [
        ("fl2", other, "got the name 'fl2', accepted: a new name"),
        ("my-method", other, "got the name 'my-method', accepted: a new name"),
        ("mine", without_options, "got 'mine', a factory without the arguments options"),
        ("mine", with_plain_options, "got 'mine', whose `options` have no default that is a fedjax_ssl.Options"),
    ]:
        with pytest.raises(ValueError, match=f"register_method: {message}"):
            fedjax_ssl.register_method(name, factory)
    fedjax_ssl.register_method("prox_entropy", other)
    assert METHODS["prox_entropy"] is other
    fedjax_ssl.register_method("prox_entropy", plugin.prox_entropy)


@pytest.mark.slow
def test_the_readmes_teacher_learns_on_the_digits_and_has_statistics_of_its_own(folder, own_methods):
    title = "A teacher in the client's state"
    (code,), (command,) = (blocks(language, title) for language in ("python", "bash"))
    (folder / "my_teacher.py").write_text(code)
    *_, program, config, norm = shlex.split(command)
    assert (program, config, norm) == ("launch.run", "--config=my_teacher.py:mean_teacher", "--config.model.norm=running")
    tree = loaded(folder / "my_teacher.py").get_config("mean_teacher")
    tree.model.update(norm="running", width=8)
    tree.rounds, tree.eval_every, tree.method.confidence = 8, 8, 0.4
    *_, (state, row) = fedjax_ssl.build(tree).rounds()
    assert row["eval/accuracy"] > 0.6  # chance is 0.1
    assert row["client/mask_rate"] > 0.1
    teacher, seen, _ = state.clients
    assert seen.sum() > 10
    for stored, own in zip(jax.tree.leaves(teacher.stats), jax.tree.leaves(state.server.weights.stats), strict=True):
        assert not jax.numpy.any(jax.numpy.all(stored[seen] == own, axis=-1))  # of the server
        assert len({tuple(row.tolist()) for row in stored[seen]}) == seen.sum()  # of other clients


@pytest.mark.ci
def test_the_readmes_server_teacher_has_statistics_of_its_own_and_counts_what_it_sends(folder, own_methods):
    (first,), (second,) = (blocks("python", f"A teacher in the {whose} state") for whose in ("client's", "server's"))
    (folder / "teachers.py").write_text(f"{first}\n\n{second}")
    tree = loaded(folder / "teachers.py").get_config("server_teacher")
    tree.model.width, tree.rounds, tree.eval_every, tree.method.confidence = 8, 8, 8, 0.4
    *_, (state, row) = fedjax_ssl.build(tree).rounds()
    assert min(row["eval/accuracy"], row["eval/accuracy_teacher"]) > 0.6  # chance is 0.1
    assert row["comm/bytes_down"] == 2 * num_bytes(state.server.weights) * 8 * 5
    teacher, model = state.server.extra.stats, state.server.weights.stats
    for stored, own in zip(jax.tree.leaves(teacher), jax.tree.leaves(model), strict=True):
        assert distance(stored, own) > 0.001


class NoOptions(fedjax_ssl.Options):
    """A method's options, of which there are none."""


def test_images_that_are_no_view_are_one_line():
    def method(*, task, client, server, options=NoOptions()):
        made = METHODS["fedavg"](task=task, client=client, server=server)
        return made._replace(predict={"raw": lambda state, images, mask: task.eval_logits(state.weights, images, mask)})

    experiment = fedjax_ssl.build(tiny.config("fedavg"), method=method)
    with pytest.raises(ValueError, match=r"^eval_logits: got uint8 images, accepted: views of them, "):
        next(experiment.rounds())


WRONG_UPDATES = {
    "params alone": (
        lambda update: update.params,
        "got dict, accepted: Weights of parameters and statistics, such as task.update",
    ),
    "a missing layer": (
        lambda update: update._replace(params={}),
        "got nothing at .params['Dense_0']['bias'], accepted: float32[32], as the global model's weights",
    ),
    "another shape": (
        lambda update: update._replace(params=jax.tree.map(lambda x: x[:1], update.params)),
        "got float32[1] at .params['Dense_0']['bias'], accepted: float32[32], as it was broadcast",
    ),
    "statistics that the network lacks": (
        lambda update: update._replace(stats={"mean": jax.numpy.zeros(3)}),
        "got float32[3] at .stats['mean'], accepted: nothing, as the global model's weights",
    ),
}


@pytest.mark.parametrize("case", WRONG_UPDATES)
def test_an_update_that_is_not_like_the_networks_weights_is_one_line(case):
    change, message = WRONG_UPDATES[case]
    problem = tiny.experiment("fedavg").problem
    method = with_outputs(problem.method(None), lambda output: output._replace(update=change(output.update)))
    simulator = Simulator(problem._replace(method=lambda _: method), toy.EXECUTIONS["scan"])
    with pytest.raises(ValueError, match=f"client_update: update: {re.escape(message)}"):
        simulator.trace()

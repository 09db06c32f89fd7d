"""Imports run one way, from data to `launch`, so that each part can be read without those after it."""

import ast
import pathlib

import pytest

from tests.engine import run_python

ROOT = pathlib.Path(__file__).parents[1]
ORDER = (
    *(
        "data",
        "models",
        "ssl",
        "method",
        "local",
        "methods",
        "wrappers",
        "simulation",
        "experiment",
        "runs",
        "report",
        "launch",
    ),
)
TOGETHER = {"data": 0, "models": 0, "ssl": 0}  # none of these imports another one's followers
RANK = {name: TOGETHER.get(name, number) for number, name in enumerate(ORDER)}
FILES = [path for part in ORDER[:-1] for path in sorted((ROOT / "fedjax_ssl").glob(f"{part}/**/*.py"))]


def imported(path: pathlib.Path) -> set[str]:
    """The parts of the package that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [f"{node.module}.{one.name}" for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names]
    names += [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
    return {parts[1] for name in names if (parts := name.split("."))[0] == "fedjax_ssl" and len(parts) > 1}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "fedjax_ssl")))
def test_a_file_imports_only_what_comes_before_it(path):
    own = RANK[path.relative_to(ROOT / "fedjax_ssl").parts[0]]
    assert [part for part in imported(path) if RANK.get(part, -1) > own] == []


def test_an_experiment_in_a_notebook_imports_nothing_of_runs_and_reports():
    code = """
import sys, fedjax_ssl
from fedjax_ssl.configs import digits
experiment = fedjax_ssl.build(digits.get_config("supervised"))
print(sorted(name for name in sys.modules if name.startswith(("fedjax_ssl.runs", "fedjax_ssl.report", "fedjax_ssl.launch"))))
"""
    assert run_python("-c", code).splitlines()[-1] == "[]"


def test_no_import_starts_a_backend():
    """JAX takes the number of its devices only before it has any."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES]
    program = f"import jax, {', '.join(names)}; jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices('cpu')))"
    assert run_python("-c", program).split()[-1] == "3"

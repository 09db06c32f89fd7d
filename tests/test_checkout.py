"""In a checkout `configs` and `launch` stand beside the package: each file is loaded once, whatever it is called."""

import importlib
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def run(code, folder):
    """What a Python in a folder prints that finds the checkout, if it is another folder, after it."""
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


ORDERS = [
    ("launch.command", "fedjax_ssl.launch.arguments"),
    ("fedjax_ssl.launch.command", "launch.arguments", "fedjax_ssl.configs"),
    ("fedjax_ssl.launch", "launch.command"),
]


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_a_module_is_the_same_under_both_names_whichever_is_imported_first(order):
    code = f"""
import importlib, sys
for name in {order}:
    importlib.import_module(name)
import configs, fedjax_ssl.configs, fedjax_ssl.launch.command, launch.command
from launch import arguments
print(configs is fedjax_ssl.configs, launch is fedjax_ssl.launch, launch.command is fedjax_ssl.launch.command)
print(fedjax_ssl.launch.arguments.command is arguments.command is launch.command)
print(len({{id(module) for name, module in sys.modules.items() if name.endswith("launch.command")}}))
print(launch.command.__spec__.name == launch.command.__name__, launch.command.__package__ == launch.__name__)
"""
    assert run(code, ROOT) == ["True"] * 4 + ["1"] + ["True"] * 2


def test_there_is_one_table_of_methods_and_one_of_each_config():
    from configs import digits as under_one_name

    assert importlib.import_module("fedjax_ssl.configs.digits") is under_one_name


def test_the_package_is_not_in_itself_and_has_no_neighbors():
    code = """
import importlib, fedjax_ssl
for name in ("fedjax_ssl", "tests", "benchmarks", "launch.nothing"):
    try:
        print(importlib.import_module(f"fedjax_ssl.{name}"))
    except ModuleNotFoundError as error:
        print(error.name)
"""
    names = ["fedjax_ssl", "tests", "benchmarks", "launch.nothing"]
    assert run(code, ROOT) == [f"fedjax_ssl.{name}" for name in names]


@pytest.mark.parametrize("first", ["configs, launch", "fedjax_ssl.configs, fedjax_ssl.launch"])
def test_a_users_own_folders_of_these_names_are_theirs(first, tmp_path):
    for own in ("configs", "launch"):
        (tmp_path / own).mkdir()
        (tmp_path / own / "__init__.py").write_text("whose = 'mine'")
        (tmp_path / own / "digits.py").write_text("whose = 'my-digits'")
    code = f"""
import {first}
import configs.digits, launch, fedjax_ssl.configs, fedjax_ssl.launch.command
print(configs.whose, launch.whose, configs.digits.whose, hasattr(fedjax_ssl.configs, "whose"), fedjax_ssl.launch.STOPPED)
"""
    assert run(code, tmp_path) == ["mine", "mine", "my-digits", "False", "stopped"]

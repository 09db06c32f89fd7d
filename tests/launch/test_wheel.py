"""The wheel, in a folder that has `configs` and `launch` of its own."""

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def test_every_folder_of_modules_is_a_package_of_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inside = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("fedjax_ssl/**/*.py")}
    assert set(listed) == inside | {"fedjax_ssl.configs", "fedjax_ssl.launch"}


@pytest.mark.slow
def test_its_commands_work_beside_a_users_own_packages(tmp_path):
    source = tmp_path / "source"  # building leaves files behind
    others = shutil.ignore_patterns(".git", "build", "tests", "runs", "env", ".venv", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=lambda folder, names: others(folder, names) if folder == str(ROOT) else ())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={tmp_path}", str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site, folder = tmp_path / "site packages", tmp_path / "Übung 1"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for beside in ("configs/sweeps/fl2_ablation.toml", "launch/tour.ipynb"):
        assert (site / "fedjax_ssl" / beside).exists()
    for own in ("configs", "launch"):
        (folder / own).mkdir(parents=True)
        (folder / own / "__init__.py").write_text("raise RuntimeError('not this one')")
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def command(*words):
        line = [sys.executable, "-c", "from fedjax_ssl.launch.main import main; main()", *words]
        return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    done = command("run", "--config=digits:supervised", "--config.rounds=2", "--config.model.name=linear", "--workdir=ein Lauf")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "17 of 1437 training examples are given to no client"  # without a logger's prefix
    assert done.stderr.splitlines()[-1] == "all 2 rounds are done, results in ein Lauf"
    assert '"git_commit": null' in (folder / "ein Lauf" / "summary.json").read_text()
    assert command("explain", "configs").stdout.startswith("central_cifar10 ")
    assert command("evaluate", "ein Lauf").stdout.count("accuracy") >= 1
    where = 'import fedjax_ssl.launch as launch; print(launch.__path__[0] + "/tour.ipynb")'  # as launch/README.md has it
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == f"{site}/fedjax_ssl/launch/tour.ipynb\n"
    assert command("nonsense").stderr.startswith("error: got nonsense, accepted: run, ")

"""The notebook `launch/tour.ipynb`."""

import json
import pathlib
import re

import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "launch" / "tour.ipynb"


def listed() -> set[pathlib.Path]:
    """What stands in the repository's folder and beside the notebook, but caches."""
    paths = {*NOTEBOOK.parents[1].iterdir(), *NOTEBOOK.parent.rglob("*")}
    return {path for path in paths if not any("cache" in part for part in path.parts)}


def test_it_is_kept_without_outputs():
    code = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 9
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_a_badge_opens_the_notebook_itself():
    text = "".join(line for cell in json.loads(NOTEBOOK.read_text())["cells"] for line in cell["source"])
    badges = re.findall(r"\[!\[[^]]*\]\([^)]*\)\]\(([^)]*)\)", text)
    assert badges or "colab.research.google.com/github" not in text
    assert all(re.fullmatch(r"https://colab\.research\.google\.com/github/.+/launch/tour\.ipynb", link) for link in badges)


@pytest.mark.slow
def test_it_runs_and_draws(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    before = listed()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs) >= 4
    assert listed() == before  # it leaves nothing in the repository

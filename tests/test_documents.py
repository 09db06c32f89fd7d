"""What the READMEs name is there: modules of commands, and files that are linked."""

import doctest
import importlib
import importlib.util
import pathlib
import re
import shlex
import tomllib

import pytest

from fedjax_ssl import methods
from launch import evaluate, explain, prepare, preview, report, run, sweep

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/**/*.md"), *ROOT.glob(".github/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_links_are_there(document):
    text = document.read_text()
    modules = set(re.findall(r"python -m ((?:launch|benchmarks|tests)\.\w+)", text))
    links = {link.partition("#")[0] for link in re.findall(r"\]\(((?!http)[^)\s#]+[^)\s]*)\)", text)}
    missing = [name for name in modules if name != "launch.NAME" and importlib.util.find_spec(name) is None]
    assert missing + [link for link in links if not (document.parent / link).exists()] == []


WITH_EXAMPLES = [path for path in sorted(ROOT.glob("fedjax_ssl/**/*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_in_docstrings_do_what_they_show(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


def test_each_method_has_a_page_of_the_site():
    pages = "\n".join(path.read_text() for path in ROOT.glob("docs/methods/*.md"))
    shown = re.findall(r"^```\{options\} (.*)$", pages, re.MULTILINE)
    assert sorted(" ".join(shown).split()) == sorted(methods.BUILT_IN)


def test_a_citation_names_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{version}}}" in (ROOT / "README.md").read_text()


def test_no_change_is_in_two_versions_of_the_changelog():
    entries = re.findall(r"^- .*(?:\n  .*)*", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert [entry for number, entry in enumerate(entries) if entry in entries[:number]] == []


COMMANDS = (evaluate, explain, prepare, preview, report, run, sweep)
PARSED = {command.__name__.rpartition(".")[2]: command for command in COMMANDS}


WITH_COMMANDS = [path for path in DOCUMENTS if "python -m launch." in path.read_text()]


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_have_the_arguments_that_documents_give_them(document):
    text = document.read_text().replace("\\\n", " ").replace("[", "").replace("]", "")
    lines = re.findall(r"^(?:    )?python -m launch\.(\w+) ([^#\n|&]*)", text, re.MULTILINE)
    refused = []
    for name, words in lines:
        if name in PARSED and "..." not in words:
            try:
                PARSED[name]._parser().parse_args([word for word in shlex.split(words) if not word.startswith("--config.")])
            except (ValueError, SystemExit) as error:
                refused.append((name, words, str(error)))
    assert refused == []

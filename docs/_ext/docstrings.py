"""Docstrings and signatures for autodoc: the package's docstrings are plain text, in which equations are indented."""

import dataclasses
import inspect
import re
from typing import Any

import pydantic
from docutils import nodes
from flax import linen as nn
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import fedjax_ssl

PLACE = r"~?(?:[\w.]+\.)?"  # of a type, as autodoc writes it
TYPE = re.compile(rf"{PLACE}(\w+)\[{PLACE}Array, ('[^']*')\] \| {PLACE}\1\[{PLACE}ndarray, \2\](?: \| {PLACE}generic)?")
UNION = re.compile(rf"{PLACE}Array \| {PLACE}ndarray \| {PLACE}generic")
BROUGHT = ("model_config", "model_fields", "parent", "scope", "name", "conv")  # by pydantic, flax and the registry of networks


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers what is done to each docstring, signature and member."""
    app.connect("autodoc-process-docstring", lambda app, what, name, obj, options, lines: as_rst(lines))
    app.connect("autodoc-process-signature", shorter)
    app.connect("autodoc-skip-member", skipped)
    app.connect("missing-reference", public)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def as_rst(lines: list[str]) -> None:
    """Makes reStructuredText of a docstring: indented blocks are literal, as are words between backticks; all else is text."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines).expandtabs().strip("\n"))
    done = []
    for block in blocks:
        if block.lstrip().startswith(">>>"):
            done.append(block)
        elif re.match(r"[A-Z]\w+:\n +", block):  # a section, such as `Attributes:`
            heading, _, entries = block.partition("\n")
            found = re.sub(r"\n\s{4,}", " ", _dedented(entries)).splitlines()
            done += [f"**{heading}**", *("* " + _escaped(re.sub(r"^(\w+):", r"`\1`:", entry)) for entry in found)]
        elif block.startswith(" ") or _is_equations(block):
            done.append("::\n\n" + "\n".join(f"    {line}" for line in _dedented(block).splitlines()))
        else:
            done.append(_escaped(block))
    lines[:] = [*"\n\n".join(done).splitlines(), ""]


def _is_equations(block: str) -> bool:
    lines = block.splitlines()
    return len(lines) > 1 and all(re.search(r"\S += ", line) for line in lines)


def _dedented(block: str) -> str:
    indent = min(len(line) - len(line.lstrip()) for line in block.splitlines() if line.strip())
    return "\n".join(line[indent:] for line in block.splitlines())


def _escaped(block: str) -> str:
    """Text whose `code` is literal and in which nothing else is markup, but for the dashes of a list."""
    parts = re.split(r"(`[^`]+`)", block)
    return "".join(f"``{part[1:-1]}``" if part.startswith("`") else re.sub(r"([*_|\\`])", r"\\\1", part) for part in parts)


def shorter(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None) -> Any:
    """Signatures without what flax and pydantic add, whose fields have pages of their own, and with short types of arrays."""
    if inspect.isclass(obj) and issubclass(obj, pydantic.BaseModel):
        return "", None
    if "<factory>" in (signature or ""):  # a dataclass that other functions make
        return "", None
    if inspect.isclass(obj) and issubclass(obj, nn.Module):
        own = [field for field in dataclasses.fields(obj) if field.name not in BROUGHT]
        shown = (field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default!r}" for field in own)
        return f"({', '.join(shown)})", None
    short = [UNION.sub("Array", TYPE.sub(r"\1[Array, \2]", text)) if text else text for text in (signature, result)]
    return tuple(short)


def skipped(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of a NamedTuple, which its signature shows, and what flax and pydantic bring."""
    is_field = type(obj).__name__ == "_tuplegetter"
    return True if is_field or name in BROUGHT else None


def public(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Node) -> nodes.Node | None:
    """A link to a public name of the package, wherever it is defined."""
    home, _, name = node.get("reftarget", "").rpartition(".")
    if node.get("refdomain") != "py" or not home.startswith("fedjax_ssl.") or name not in fedjax_ssl.__all__:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"fedjax_ssl.{name}", node, text)

"""Writes the pages of the API: one for each package, with every public module of it."""

import importlib
import pkgutil

import readmes
from sphinx.application import Sphinx

PACKAGES = (
    *("method", "metrics", "options", "ssl", "local", "methods", "wrappers", "models", "data", "data.sources", "simulation"),
)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the writing of the pages."""
    app.connect("config-inited", lambda app, config: write_pages())
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages() -> None:
    """Writes `api/<package>.md` for each of PACKAGES."""
    for name in PACKAGES:
        module = importlib.import_module(f"fedjax_ssl.{name}")
        text = f"# `fedjax_ssl.{name}`\n\n{automodule(module.__name__, own=True)}"
        for part in pkgutil.iter_modules(getattr(module, "__path__", [])):
            if not part.ispkg:
                text += f"\n## `{part.name}`\n\n{automodule(f'{module.__name__}.{part.name}')}"
        readmes.write(readmes.DOCS / "api" / f"{name.replace('.', '_')}.md", text)


def automodule(name: str, *, own: bool = False) -> str:
    """The directive for a module; of `own`, what it defines itself, whatever else it exports."""
    options = "\n   :ignore-module-all:" if own else ""
    return f"```{{eval-rst}}\n.. automodule:: {name}\n   :members:{options}\n```\n"

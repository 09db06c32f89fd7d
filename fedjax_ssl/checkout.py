"""In a checkout `configs` and `launch` stand beside the package: `fedjax_ssl.launch` is found there, and is `launch`, too.

Each of their files is loaded once, under the name that is imported first; the other name is then another word for the same
module. A wheel has both folders inside of the package, and needs none of this.
"""

import importlib.util
import pathlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ROOT = pathlib.Path(__file__).resolve().parents[1]
BESIDE = ("configs", "launch")
TWINS = {f"fedjax_ssl.{name}": name for name in BESIDE} | {name: f"fedjax_ssl.{name}" for name in BESIDE}


class Alias(Loader):
    """Gives a module that has another name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """A module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """What is imported is what stands in `sys.modules` afterwards."""
        sys.modules[module.__name__] = importlib.import_module(self._name)


class Finder(MetaPathFinder):
    """Finds the folders beside the package, and modules that have been loaded under their other name."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module in these folders; None for any other one, such as a user's own `launch`."""
        parent, _, last = name.rpartition(".")
        if name in TWINS:
            folder = ROOT / last
            found: ModuleSpec | None
            if parent:
                where = folder / "__init__.py"
                found = importlib.util.spec_from_file_location(name, where, submodule_search_locations=[str(folder)])
            else:
                found = PathFinder.find_spec(name, path, target)
            twin = sys.modules.get(TWINS[name])
            if is_ours(found, "origin", folder) and is_ours(twin, "__file__", folder):
                return ModuleSpec(name, Alias(TWINS[name]), is_package=True)
            return found if parent else None
        other = f"{sys.modules[parent].__name__}.{last}" if parent in TWINS else name
        return ModuleSpec(name, Alias(other)) if other != name and importlib.util.find_spec(other) else None


def is_ours(package: object, attribute: str, folder: pathlib.Path) -> bool:
    """Whether a module or a spec is that of the package in `folder`; `attribute` names its field that holds the file."""
    file = getattr(package, attribute, None)
    return file is not None and pathlib.Path(file).resolve() == folder / "__init__.py"

"""`fedjax-ssl COMMAND` and `python -m fedjax_ssl COMMAND` run what `python -m launch.COMMAND` runs in a checkout."""

import ast
import importlib
import pathlib
from typing import NoReturn

from . import command

COMMANDS = ("run", "evaluate", "preview", "prepare", "explain", "sweep", "report", "text_features", "completion")


def main() -> NoReturn:
    """Runs the process's command line, and ends the process."""
    command.exit_with(_run)


def _run(argv: list[str]) -> int:
    name, *rest = argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        head, run, any_one = f"{__doc__}".partition("\n")[0], command.program("run"), command.program("COMMAND")
        examples = f"{head}\n\n{run} --config=digits:fl2\n{any_one} --help\n\nCommands:"
        print(examples, *(f"  {one:<{width}}  {about(one)}" for one in COMMANDS), sep="\n")
        return 0
    if name not in COMMANDS:
        return command.refuse(f"got {name}, accepted: {', '.join(COMMANDS)}, or --help{command.hint(name, COMMANDS)}")
    return importlib.import_module(f".{name}", __package__).main([f"fedjax-ssl {name}", *rest])


def about(name: str) -> str:
    """What a command does: the first line of its module's docstring, which is not imported for it."""
    source = pathlib.Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


if __name__ == "__main__":
    main()

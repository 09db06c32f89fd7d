"""All commands as one: `fedjax-ssl COMMAND` is what `python -m launch.COMMAND` is in a checkout.

fedjax-ssl run --config=digits:fl2
fedjax-ssl COMMAND --help
"""

import importlib
import sys

from . import command

COMMANDS = ("run", "evaluate", "preview", "prepare", "explain", "sweep", "report", "text_features", "completion")


def main(argv: list[str] | None = None) -> int:
    """Runs a command line, by default the process's; returns the exit status."""
    return command.ended(_run, sys.argv if argv is None else argv)


def _run(argv: list[str]) -> int:
    name, *rest = argv[1:] or ["nothing"]
    if name in ("--help", "-h"):
        print(f"{__doc__}\nCommands: {', '.join(COMMANDS)}")
        return 0
    if name not in COMMANDS:
        return command.refuse(f"got {name}, accepted: {', '.join(COMMANDS)}, or --help{command.hint(name, COMMANDS)}")
    return importlib.import_module(f".{name}", __package__).main([f"fedjax-ssl {name}", *rest])


if __name__ == "__main__":
    sys.exit(main())

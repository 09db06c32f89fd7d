"""Prints a script with which a shell completes the commands: their names, arguments, configs and keys.

    fedjax-ssl completion bash > ~/.fedjax-ssl.bash   (and `source ~/.fedjax-ssl.bash` in ~/.bashrc)
    fedjax-ssl completion zsh > ~/.zfunc/_fedjax-ssl  (and `fpath=(~/.zfunc $fpath)` in ~/.zshrc, before compinit)
    fedjax-ssl completion fish > ~/.config/fish/completions/fedjax-ssl.fish

The script, which shtab writes, has all words in it, so that completing starts no Python; print it again after an update of
the package. Exit status: 0 done; 2 wrong arguments.
"""

import argparse
import importlib
from typing import Any

import shtab

from fedjax_ssl import methods, models
from fedjax_ssl.data.catalog import DATASETS, ORIGINALS
from fedjax_ssl.data.sources import GENERIC
from fedjax_ssl.experiment.settings import MethodSettings, ModelSettings, Settings
from fedjax_ssl.options import choices, fields_of, is_group

from . import arguments, command, config_file, explain
from .main import COMMANDS, about

SHELLS = ("bash", "zsh", "fish")
BASH = "COMP_WORDBREAKS=${COMP_WORDBREAKS//:/}  # else a config such as digits:fl2 is three words"


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        shell = _parser().parse_args(argv[1:]).shell
        if shell not in SHELLS:
            raise ValueError(f"shell: got {shell}, accepted: {', '.join(SHELLS)}")
    except ValueError as error:
        return command.refuse(error)
    print(shtab.complete(_commands(shell), shell, preamble={"bash": BASH}))  # type: ignore[arg-type]
    return 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("completion", __doc__)
    parser.add_argument("shell", nargs="?", default="nothing", help=", ".join(SHELLS))
    return parser


def _commands(shell: str) -> argparse.ArgumentParser:
    """A parser of all commands, with the words that each argument takes; files, where these are not known."""
    root = argparse.ArgumentParser("fedjax-ssl", description="The commands of fedjax_ssl")
    commands = root.add_subparsers()
    names = {"completion": SHELLS, "explain": explain.LISTS, "prepare": ORIGINALS, "sweep": config_file.sweep_names()}
    configs = sorted({*config_file.names(), *(f"digits:{name}" for name in methods.METHODS)} - {"digits"})
    for name in COMMANDS:
        own = importlib.import_module(f".{name}", __package__)._parser()
        words = {"--config": configs, "": names.get(name, ())}
        if "--config.KEY" in own._option_string_actions:
            own._option_string_actions["--config.KEY"].help = argparse.SUPPRESS
            for key, values in sorted(keys().items()):
                words[option := f"--config.{key}"] = values
                own.add_argument(option, metavar="VALUE")
        for action in (action for action in own._actions if action.nargs != 0):
            accepted = [*(action.choices or words.get("".join(action.option_strings[-1:]), ()))]
            if not accepted:
                action.complete = shtab.FILE
            elif action.option_strings:
                action.nargs = "?"  # so that Bash, to which `--config=` are two words, offers them behind the second one, too
            action.choices = accepted
            if shell == "zsh":  # it takes what is behind a colon for something else, and needs to be told of `=`
                action.choices = [word.replace(":", r"\:") for word in accepted]
                action.option_strings = [f"{option}=" for option in action.option_strings]
        commands.add_parser(name, parents=[own], add_help=False, help=about(name), description=about(name))
    return root


def keys() -> dict[str, list[str]]:
    """The keys of all configs, with the few words that each accepts, if it does."""
    kinds: list[tuple[Any, str]] = [(Settings, ""), (MethodSettings, "method."), (ModelSettings, "model.")]
    kinds += [(methods.options_class(made), "method.") for made in methods.METHODS.values()]
    kinds += [(model.options, "model.") for model in models.MODELS.values()]
    found = {"data.name": dict.fromkeys([*DATASETS, *GENERIC, "synthetic"])}
    for kind, prefix in kinds:
        for key, field in fields_of(kind):
            if not is_group(field) and key not in ("method", "model"):
                values = ["true", "false"] if field.annotation is bool else filter(None, choices(field))
                found.setdefault(prefix + key, {}).update(dict.fromkeys(values))
    return {key: list(values) for key, values in found.items()}


if __name__ == "__main__":
    command.exit_with(main)

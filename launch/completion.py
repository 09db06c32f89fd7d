"""Prints a script with which a shell completes the commands: their names, arguments, configs and keys.

    python -m launch.completion bash > ~/.fedjax-ssl.bash   (and `source ~/.fedjax-ssl.bash` in ~/.bashrc)
    python -m launch.completion zsh > ~/.fedjax-ssl.zsh     (and `source ~/.fedjax-ssl.zsh` in ~/.zshrc, after compinit)
    python -m launch.completion fish > ~/.config/fish/conf.d/fedjax-ssl.fish

The script has all words in it, so that completing starts no Python; print it again after an update of the package. It is for
`fedjax-ssl COMMAND`, and, where it is printed by `python -m launch.completion`, for `python -m launch.COMMAND`, too.
Exit status: 0 done; 2 wrong arguments.
"""

import importlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from . import arguments, command

PATHS = ("evaluate", "report")
"""The commands whose first arguments are paths: their options are offered after a hyphen."""
WITH_CONFIG = ("run", "preview", "explain", "sweep", "evaluate")
WITH_KEYS = WITH_CONFIG[:-1]  # those that take --config.KEY=VALUE

WORDS = """line=$1 cur=${1##* } name= words= keys=
case "$line" in
*"-m launch."*" "*) name=${line#*-m launch.} name=${name%% *} ;;
*"-m "*" "*) ;;
*"-m "*) if [ -e launch/main.py ]; then words="@MODULES@"; fi ;;
*"fedjax-ssl "*" "*) name=${line#*fedjax-ssl } name=${name%% *} ;;
*"fedjax-ssl "*) words="@COMMANDS@" ;;
esac
case "$name" in
@OF_COMMANDS@
esac
case "$name:$cur" in
@PATH_ARGUMENTS@) words= ;;
@DIGITS@) words="@METHODS@" ;;
@CONFIG_ARGUMENTS@) words="@CONFIGS@" ;;
@KEY_ARGUMENTS@)
  case "$cur" in
@CHOICES@
  *) words= keys="@KEYS@" ;;
  esac
  case "$line" in
@OF_METHODS@
  *) keys="$keys @ALL_METHOD_KEYS@" ;;
  esac ;;
esac
for word in $words; do echo "$word"; done
last= group=${cur%.*}.
case "$cur" in *=*) keys= ;; esac
for key in $keys; do
  case "--config.$key" in
  "$group"*) rest=${key#"${group#--config.}"}
    case "$rest" in
    *.*) word=$group${rest%%.*}. ;;
    *) word=$group$rest= ;;
    esac
    if [ "$word" != "$last" ]; then echo "$word"; fi
    last=$word ;;
  esac
done"""
"""What to offer, one word in a line, for a command line up to the cursor. No quote and no backslash: all shells hold it so."""

BASH = """_fedjax_ssl_words='{words}'
_fedjax_ssl() {{
  local line=${{COMP_LINE:0:COMP_POINT}} word
  local cur=${{line##*[[:space:]]}}
  local before=${{cur%"${{cur##*[$COMP_WORDBREAKS]}}"}}  # Bash takes it to be words of their own, such as `--config=`
  COMPREPLY=()
  while read -r word; do
    if [[ $word == "$cur"* ]]; then COMPREPLY+=("${{word#"$before"}}"); fi
  done < <(sh -fc "$_fedjax_ssl_words" _ "$line")
  if [[ ${{COMPREPLY[0]}} == *[=.:] ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o bashdefault -o default -F _fedjax_ssl {programs}
"""
ZSH = """_fedjax_ssl_words='{words}'
_fedjax_ssl() {{
  local -a found
  found=(${{(f)"$(sh -fc "$_fedjax_ssl_words" _ "${{(j: :)words[1,CURRENT-1]}} $PREFIX")"}})
  found=(${{(M)found:#${{(b)PREFIX}}*}})
  if (( $#found )); then
    compadd -S '' -- ${{(M)found:#*[=.:]}}
    compadd -- ${{found:#*[=.:]}}
  else
    compset -P '*='
    _files
  fi
}}
compdef _fedjax_ssl {programs}
"""
FISH = """set -g _fedjax_ssl_words '{words}'
function _fedjax_ssl
    sh -fc $_fedjax_ssl_words _ (commandline -cp)
end
for program in {programs}
    complete -c $program -a '(_fedjax_ssl)'
end
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = arguments.Parser("completion", __doc__)
    parser.add_argument("shell", nargs="?", default="nothing", help=", ".join(SHELLS))
    try:
        shell = parser.parse_args(argv[1:]).shell
        if shell not in SHELLS:
            raise ValueError(f"shell: got {shell}, accepted: {', '.join(SHELLS)}")
    except ValueError as error:
        return command.refuse(error)
    print(script(shell), end="")
    return 0


def script(shell: str) -> str:
    """The script for a shell of SHELLS."""
    programs = "fedjax-ssl python python3" if __package__ == "launch" else "fedjax-ssl"
    return SHELLS[shell].format(words=words(), programs=programs)


def words() -> str:
    """WORDS with the package's words in it."""
    from fedjax_ssl.methods import METHODS

    from .main import COMMANDS

    general, of_methods, choices = keys()
    filled = {
        "ALL_METHOD_KEYS": " ".join(_sorted(key for own in of_methods.values() for key in own)),
        "OF_METHODS": "\n".join(
            f'  *[:=]{name}" "* | *[:=]{name},*) keys="$keys {" ".join(own)}" ;;' for name, own in of_methods.items()
        ),
        "OF_COMMANDS": "\n".join(f'{name}) words="{" ".join(_arguments(name))}" ;;' for name in COMMANDS),
        "PATH_ARGUMENTS": " | ".join(f"{name}:[!-]* | {name}:" for name in PATHS),
        "CONFIG_ARGUMENTS": " | ".join(f"{name}:--config=*" for name in WITH_CONFIG),
        "KEY_ARGUMENTS": " | ".join(f"{name}:--config.*" for name in WITH_KEYS),
        "DIGITS": " | ".join(f"{name}:--config=digits:*" for name in WITH_CONFIG),
        "METHODS": " ".join(f"--config=digits:{name}" for name in METHODS),
        "CONFIGS": " ".join(f"--config={name}" for name in command.config_names()),
        "CHOICES": "\n".join(
            f'  --config.{key}=*) words="{" ".join(f"--config.{key}={one}" for one in values)}" ;;'
            for key, values in choices.items()
        ),
        "KEYS": " ".join(general),
        "MODULES": " ".join(f"launch.{name}" for name in COMMANDS),
        "COMMANDS": " ".join(COMMANDS),
    }
    return re.sub("@([A-Z_]+)@", lambda mark: filled[mark[1]], WORDS)


def _arguments(name: str) -> Iterator[str]:
    """A command's arguments: names that it takes, and its options, with `=` where they need a value."""
    module: Any = importlib.import_module(f".{name}", __package__)
    yield from _names(name)
    if name in WITH_KEYS:
        yield "--config."
    if hasattr(module, "_parser"):
        for action in module._parser()._actions:
            for option in action.option_strings[-1:]:
                yield f"{option}{'' if action.nargs == 0 else '='}"


def _names(name: str) -> Iterable[str]:
    """The names that a command takes as its first arguments."""
    if name == "completion":
        return SHELLS
    if name == "explain":
        from .explain import LISTS

        return LISTS
    if name == "prepare":
        from fedjax_ssl.data.catalog import ORIGINALS

        return ORIGINALS
    if name == "sweep":
        from . import sweep

        return sweep.names()
    return ()


def keys() -> tuple[list[str], dict[str, list[str]], dict[str, list[str]]]:
    """The keys of all configs, those of each method, and the values of those that accept a few words."""
    from fedjax_ssl import methods, models
    from fedjax_ssl.data.catalog import DATASETS
    from fedjax_ssl.data.sources import GENERIC
    from fedjax_ssl.experiment.settings import MethodSettings, ModelSettings, Settings

    kinds = [(Settings, ""), (ModelSettings, "model."), *((models.options_class(name), "model.") for name in models.MODELS)]
    general = [leaf for kind, prefix in (*kinds, (MethodSettings, "method.")) for leaf in _leaves(kind, prefix)]
    of_methods = {name: list(_leaves(methods.options_class(made), "method.")) for name, made in methods.METHODS.items()}
    choices: dict[str, list[str]] = {"data.name": [*DATASETS, *GENERIC, "synthetic"]}
    for key, words in itertools.chain(general, *of_methods.values()):
        if words:
            choices[key] = list(dict.fromkeys([*choices.get(key, []), *words]))
    last = [key for key, _ in general if key.startswith("method.")]  # beside those of the methods
    keys = _sorted({key for key, _ in general} - {"method", "model", *last})
    return [*keys, *last], {name: [key for key, _ in own] for name, own in of_methods.items()}, choices


def _leaves(model: Any, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """The keys of a model's fields, without groups, and the few words that each accepts."""
    from fedjax_ssl.options import choices, fields_of, is_group

    for key, field in fields_of(model):
        if not is_group(field):
            yield prefix + key, ["true", "false"] if field.annotation is bool else [word for word in choices(field) if word]


def _sorted(keys: Iterable[str]) -> list[str]:
    return sorted(set(keys))


if __name__ == "__main__":
    sys.exit(command.ended(main, sys.argv))

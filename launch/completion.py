"""Prints a script with which a shell completes the commands: their names, arguments, configs and keys.

    python -m launch.completion bash > ~/.fedjax-ssl.bash   (and `source ~/.fedjax-ssl.bash` in ~/.bashrc)
    python -m launch.completion zsh > ~/.fedjax-ssl.zsh     (and `source ~/.fedjax-ssl.zsh` in ~/.zshrc, after compinit)
    python -m launch.completion fish > ~/.config/fish/conf.d/fedjax-ssl.fish

The script has all words in it, so that completing starts no Python; print it again after an update of the package. It is for
`fedjax-ssl COMMAND`, and, where it is printed by `python -m launch.completion`, for `python -m launch.COMMAND`, too.
Exit status: 0 done; 2 wrong arguments.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from fedjax_ssl import methods, models
from fedjax_ssl.data.catalog import DATASETS, ORIGINALS
from fedjax_ssl.data.sources import GENERIC
from fedjax_ssl.experiment.settings import MethodSettings, ModelSettings, Settings
from fedjax_ssl.options import choices, fields_of, is_group

from . import arguments, command, config_file, explain, sweep
from .main import COMMANDS

PATHS = ("evaluate", "report")
"""The commands whose first arguments are paths: their options are offered after a hyphen."""

WORDS = """line=$1 cur=${1##* } name= words= last=
configs="@CONFIGS@"
keys="@KEYS@"
case "$line" in
*"-m launch."*" "*) name=${line#*-m launch.} name=${name%% *} ;;
*"-m "*" "*) ;;
*"-m "*) if [ -e launch/main.py ]; then words="@MODULES@"; fi ;;
*"fedjax-ssl "*" "*) name=${line#*fedjax-ssl } name=${name%% *} ;;
*"fedjax-ssl "*) words="@COMMANDS@" ;;
esac
case "$name" in
@ARGUMENTS@
esac
case "$name:$cur" in
@PATHS@) words= ;;
esac
for word in $words; do
  case "$word" in "$cur"*) ;; *) continue ;; esac
  rest=${word#"$cur"}
  part=${rest%%[=.:]*}
  rest=${rest#"$part"}
  word=$cur$part${rest%"${rest#?}"}
  if [ "$word" != "$last" ]; then echo "$word"; fi
  last=$word
done"""
"""What to offer, one word in a line, for a command line up to the cursor: words up to their next point, colon or `=`.

It has no single quote and no backslash, so that every shell can hold it in single quotes.
"""

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
    try:
        shell = _parser().parse_args(argv[1:]).shell
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


def _parser() -> arguments.Parser:
    parser = arguments.Parser("completion", __doc__)
    parser.add_argument("shell", nargs="?", default="nothing", help=", ".join(SHELLS))
    return parser


def words() -> str:
    """WORDS with the package's words in it."""
    names = {"completion": SHELLS, "explain": explain.LISTS, "prepare": ORIGINALS, "sweep": sweep.names()}
    configs = sorted({*config_file.names(), *(f"digits:{name}" for name in methods.METHODS)} - {"digits"})
    filled = {
        "CONFIGS": " ".join(f"--config={name}" for name in configs),
        "KEYS": " ".join(f"--config.{key}={value}" for key, values in sorted(keys().items()) for value in values or [""]),
        "MODULES": " ".join(f"launch.{name}" for name in COMMANDS),
        "COMMANDS": " ".join(COMMANDS),
        "ARGUMENTS": "\n".join(f'{name}) words="{" ".join([*names.get(name, ()), *_options(name)])}" ;;' for name in COMMANDS),
        "PATHS": " | ".join(f"{name}:[!-]* | {name}:" for name in PATHS),
    }
    return re.sub("@([A-Z]+)@", lambda mark: filled[mark[1]], WORDS)


def _options(name: str) -> Iterator[str]:
    """A command's options, with `=` where they need a value."""
    for action in importlib.import_module(f".{name}", __package__)._parser()._actions:
        for option in action.option_strings[-1:]:
            several = {"--config": "$configs", "--config.KEY": "$keys"}
            yield several.get(option, option if action.nargs == 0 else f"{option}=")


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
    sys.exit(command.ended(main, sys.argv))

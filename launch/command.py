"""What the commands share: `--config` and its overrides, and one line for whatever is wrong with the input."""

import contextlib
import difflib
import errno
import functools
import io
import logging
import operator
import os
import pathlib
import re
import runpy
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging.handlers import MemoryHandler
from typing import Any, NamedTuple

from fedjax_ssl.runs import streams

from . import stopped

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
CONFIGS_PACKAGE = f"{__package__}".rpartition("launch")[0] + "configs"  # `fedjax_ssl.configs`, or `configs` in a checkout
FOR_EXAMPLE = "for example --config=digits:fl2"
WRONG_INPUT = (ValueError, OSError)
CLOSED = 128 + 13
"""The exit status where the reader of the output has gone: that of SIGPIPE, as other programs have it."""
MAY_WAIT = ("xla_cpu_collective_call_warn_stuck_timeout_seconds", "xla_cpu_collective_call_terminate_timeout_seconds")
"""XLA's flags for how long a CPU device waits for the others before it says so, and before it ends the process."""
MAY_WAIT_BELOW = (0, 13)
"""The first JAX on which they were not tried, and are not set: XLA ends a process for a flag that it does not know."""
_log = logging.getLogger("fedjax_ssl")


def program(name: str) -> str:
    """What a user types for a command: `python -m launch.NAME` in a checkout, else `fedjax-ssl NAME`."""
    return f"python -m launch.{name}" if __package__ == "launch" else f"fedjax-ssl {name}"


def use_all_cores() -> None:
    """Makes a JAX device of each CPU core, unless XLA_FLAGS or JAX_NUM_CPU_DEVICES says how many; before JAX is used."""
    import jax

    from fedjax_ssl.runs.provenance import cores

    flags = os.environ.get("XLA_FLAGS", "")
    # Devices add up what their clients return. One that waits there for longer than a minute, as clients have more or less to
    # train, would end the process: XLA takes it to be stuck.
    waiting = [f for f in MAY_WAIT if f not in flags] if jax.__version_info__ < MAY_WAIT_BELOW else []
    os.environ["XLA_FLAGS"] = " ".join([flags, *(f"--{flag}={24 * 3600}" for flag in waiting)]).strip()

    if "JAX_NUM_CPU_DEVICES" not in os.environ and "xla_force_host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", cores())


def check_flags() -> None:
    """Raises ValueError for a number of devices that cannot be; XLA itself names a flag that it does not know."""
    flags = os.environ.get("XLA_FLAGS", "")
    counts = [
        ("XLA_FLAGS", found[0], found[1]) for found in re.finditer(r"--xla_force_host_platform_device_count=(\S*)", flags)
    ]
    if (text := os.environ.get(name := "JAX_NUM_CPU_DEVICES")) is not None:
        counts.append((name, text, text))
    for name, got, number in counts:
        if not re.fullmatch("0*[1-9][0-9]*", number):
            raise ValueError(f"{name}: got {got}, accepted: a whole number of devices >= 1")


def keep_programs() -> None:
    """Keeps compiled programs in JAX_COMPILATION_CACHE_DIR, or `~/.cache/fedjax_ssl` where it can be made; empty: nowhere."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fedjax_ssl")
        if not folder.is_absolute():  # a user without a home folder
            return
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            _log.warning("compiled programs are not cached: %s cannot be written to", folder)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    _say_once("persistent compilation cache", f"compiled programs are not cached in {jax.config.jax_compilation_cache_dir}")
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _say_once(about: str, consequence: str) -> None:
    """From now on only the first of Python's warnings that have `about` in them is shown, in one line."""
    show, said = warnings.showwarning, set[str]()

    def showing(message: Warning | str, *where: Any, **more: Any) -> None:
        if about not in str(message):
            show(message, *where, **more)
        elif not said:
            said.add(about)
            _log.warning("%s: %s", consequence, message)

    warnings.showwarning = showing


def find_devices() -> None:
    """Raises ValueError where JAX finds none of the devices that it is told to use."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion where the platform's plugin is not installed
        found = f" ({first})" if (first := str(error).partition("\n")[0]) else ""
        asked = jax.config.jax_platforms or "any"
        raise ValueError(f"JAX_PLATFORMS: got {asked}, of which JAX finds no device{found}, accepted: cpu, or unset") from None


def ended(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit status of a command, which ends with a line on Ctrl-C, and quietly where nobody reads its output (`| head`)."""
    streams.open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may have no ±, dashes or bars
    if callable(signal.getsignal(signal.SIGINT)):  # that of `launch`; a program in the background ignores it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        try:
            try:
                check_flags()
            except ValueError as error:
                return refuse(error)
            status = main(argv)
        except KeyboardInterrupt:
            status = stopped()
        finally:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:  # while a slow reader takes what is left
        streams.drop_unwritten(sys.stdout)
        return status or stopped()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        for stream in (sys.stdout, sys.stderr):
            streams.write_or_drop(stream)
        if error.errno == errno.EPIPE:
            return status or CLOSED
        return status or refuse(f"standard output: {error.strerror}", 1)


def logging_that_waits() -> MemoryHandler:
    """Sets logging up; what is said before the input is accepted waits in this handler, as a refusal is one line."""
    waiting = MemoryHandler(1000, flushLevel=logging.CRITICAL)
    # Importing the package, as `fedjax-ssl` does first, has given the root logger a handler of Orbax's: it goes.
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[waiting], force=True)
    _log.setLevel(logging.INFO)
    return waiting


def hint(got: str, names: Iterable[str]) -> str:
    """What ends an error: the name that a mistyped one may have meant, or nothing."""
    near = difflib.get_close_matches(got, list(names), 1)
    return f"; did you mean {near[0]}?" if near else ""


def status_of(error: Exception | str) -> int:
    """The exit status for an error that a command found: 1 where a disk, or the system, has failed, else 2."""
    from fedjax_ssl.files import failing

    return 1 if isinstance(error, Exception) and failing(error) else 2


def refuse(error: Exception | str, status: int | None = None) -> int:
    """Prints what is wrong in one line on standard error; returns the exit status, by default `status_of` the error."""
    if isinstance(error, BrokenPipeError):  # nothing is wrong: see `ended`
        raise error
    status = status_of(error) if status is None else status
    line = " ".join(str(error).split()) or _without_text(error)
    if len(line) > 500:
        from fedjax_ssl.options import one_line  # takes a second, which a mistyped flag need not wait for

        line = one_line(line)
    print(f"error: {line}", file=sys.stderr)
    return status


def _without_text(error: Exception | str) -> str:
    """What there is to say of an exception without text: its type, and where it was raised."""
    frames = traceback.extract_tb(getattr(error, "__traceback__", None))
    where = f" raised in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} without a text{where}"


class Config(NamedTuple):
    """What `--config` and its overrides, `words`, say as nested dicts, and its name with its argument, such as `digits-fl2`."""

    tree: dict[str, Any]
    name: str
    words: list[str]


def parse(parser: Any, words: Sequence[str], *, computes: bool = False) -> tuple[Config, Any]:
    """The config of a command's words, and its other arguments; ValueError has one line for a mistake.

    A command that `computes` uses all cores.
    """
    file, overrides, others = split_words(words)
    options = parser.parse_args(others, meant=functools.partial(meant, file))
    if not file:
        raise ValueError(f"--config: missing; {FOR_EXAMPLE}")
    if computes:
        use_all_cores()  # before the config, which may use JAX
    return read(file, overrides), options


def read(file: str, overrides: Mapping[str, str] | None = None) -> Config:
    """The config that a file makes, with overrides: dotted keys -> values as text. ValueError: it fails, or one does not fit.

    `file` is a name in `configs` or a path, with its argument after a colon; it is executed, and may register methods.
    """
    path, colon, argument = file.partition(":")
    tree = _made(path, argument if colon else None)
    from fedjax_ssl.options import from_text, unknown_key

    other, model = (overrides or {}).get("model.name", ""), tree.get("model")
    if other and isinstance(model, dict) and other != model.get("name", other):  # another network has other options
        from fedjax_ssl.experiment.settings import ModelSettings
        from fedjax_ssl.models import MODELS

        common = {key: value for key, value in model.items() if key in ModelSettings.model_fields}
        tree["model"] = common | (dict(MODELS[other].options()) if other in MODELS else {})
    known = _keys(tree)
    for key, text in (overrides or {}).items():
        if key not in known:
            raise ValueError(unknown_key(f"config.{key}", [f"config.{one}" for one in known]))
        *groups, name = key.split(".")
        group = functools.reduce(operator.getitem, groups, tree)
        if isinstance(group[name], dict):
            raise ValueError(f"config.{key}: got {text!r}, accepted: a value for a key of this group: {', '.join(group[name])}")
        group[name] = from_text(f"config.{key}", text, group[name])
    words = [f"--config={file}", *(f"--config.{key}={text}" for key, text in (overrides or {}).items())]
    return Config(tree, re.sub(r"[^\w.=]+", "-", "-".join(filter(None, [pathlib.Path(path).stem, argument]))), words)


def meant(file: str, strange: Sequence[str]) -> str:
    """What to type in place of words that are no arguments: `--config=...`, or a key of the config `file`; "": nobody knows."""
    word, *after = strange
    key, equals, value = word.lstrip("-").partition("=")
    if not word.startswith("-") and not file and is_config(word):
        return f"--config={word}"
    if not equals:
        value = after[0] if after and not after[0].startswith("-") else "VALUE"
    try:
        keys = _keys(read(file or "digits").tree)
    except ValueError:  # which is said once the words are right
        return ""
    found = [one for one in keys if key == one] or [one for one in keys if one.rpartition(".")[2] == key]
    if found and (equals or word.startswith("-")):
        return " or ".join(f"--config.{one}={shlex.quote(value)}" for one in found)
    if equals and file:  # a config's argument, after its colon
        with contextlib.suppress(ValueError):
            read(longer := f"{file}{',' if ':' in file else ':'}{key}={value}")
            return f"--config={shlex.quote(longer)}"
    return ""


def is_config(word: str) -> bool:
    """Whether a word names a config, or a config file, with its argument."""
    path = word.partition(":")[0]
    return path in config_names() or (path.endswith(".py") and os.path.isfile(os.path.expanduser(path)))


def split_words(words: Sequence[str]) -> tuple[str, dict[str, str], list[str]]:
    """The config file, the overrides, and all other words of a command line; ValueError where one is given twice."""
    overrides: dict[str, str] = {}
    others: list[str] = []
    file, words = "", list(words)
    while words:
        word = words.pop(0)
        match = re.fullmatch(r"--?(no)?config(?:\.([^=]*))?(?:=(.*))?", word, re.DOTALL)
        if match is None:
            others.append(word)
            continue
        negated, key, value = match.groups()
        is_switch = value is None and (negated or not words or words[0].startswith("--"))  # without a value
        if value is None:
            value = words.pop(0) if not is_switch else "false" if negated else "true"
        if file if key is None else key in overrides:
            shown, before = ("--config", file) if key is None else (f"config.{key}", overrides[key])
            raise ValueError(f"{shown}: got it twice, {before!r} and {value!r}, accepted: once")
        if key is None:
            file = "" if is_switch else value
        else:
            overrides[key] = value
    return file, overrides, others


@streams.lasting()  # a config may print
def _made(path: str, argument: str | None) -> dict[str, Any]:
    """The nested dicts that a config file's `get_config` returns."""
    file = pathlib.Path(os.path.expanduser(path))  # unlike pathlib's, these functions take any text
    if not file.suffix:  # something else of the same name, such as a folder of results, is no config
        file = CONFIGS / f"{path}.py"
    if file.suffix != ".py" or not os.path.isfile(file):
        meant = hint(file.stem, config_names()) or f"; {FOR_EXAMPLE}"
        raise ValueError(f"--config: got {path}, accepted: the name of a config, or the path of a config file{meant}")
    is_ours = file.resolve().parent == CONFIGS.resolve()
    if not is_ours:
        sys.path.insert(0, str(file.resolve().parent))  # what lies beside it can be imported, as beside a script
    try:
        names = runpy.run_path(str(file.absolute()), run_name=f"{CONFIGS_PACKAGE}.{file.stem}" if is_ours else file.stem)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--config: {_where(error, file)}") from None
    if not callable(get_config := names.get("get_config")):
        raise ValueError(f"--config: got {path}, accepted: a config file, which defines get_config; {FOR_EXAMPLE}")
    try:
        config = get_config() if argument is None else get_config(argument)
    except (Exception, SystemExit) as error:
        has_line = isinstance(error, WRONG_INPUT) and str(error)
        raise ValueError(f"--config: {error if has_line else _where(error, file)}") from None
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        raise ValueError(f"--config: got a get_config that returns {type(config).__name__}, accepted: a ConfigDict, or a dict")
    try:
        return _plain(config)
    except RecursionError:
        raise ValueError(f"--config: got a config that contains itself from {path}, accepted: nested dicts that end") from None


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    if strange := [key for key in config if not isinstance(key, str)]:
        raise ValueError(f"--config: got the key {strange[0]!r}, accepted: text")
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in config.items()}


def _where(error: BaseException, file: pathlib.Path) -> str:
    """An error inside a config file, with its line and its text, if it has one."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if pathlib.Path(frame.filename) == file.absolute()]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{file}{f', line {line}' if line else ''}: {type(error).__name__}{f': {error}' if str(error) else ''}"


def _keys(config: dict[str, Any], prefix: str = "") -> list[str]:
    nested = [[prefix + k, *(_keys(v, f"{prefix}{k}.") if isinstance(v, dict) else [])] for k, v in config.items()]
    return [key for keys in nested for key in keys]


def config_names() -> list[str]:
    """The configs that `--config` knows by name."""
    return [file.stem for file in sorted(CONFIGS.glob("*.py")) if "def get_config" in file.read_text()]

"""What the commands share: `--config` and its overrides, and one line for whatever is wrong with the input."""

import difflib
import os
import pathlib
import re
import sys
from typing import Any

from absl import flags
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file("config", None, "The config file, with its argument after a colon.")

WRONG_INPUT = (ValueError, OSError)
MAY_WAIT = ("xla_cpu_collective_call_warn_stuck_timeout_seconds", "xla_cpu_collective_call_terminate_timeout_seconds")
"""XLA's flags for how long a CPU device waits for the others before it says so, and before it ends the process."""
MAY_WAIT_BELOW = (0, 13)
"""The first JAX on which they were not tried, and are not set: XLA ends a process for a flag that it does not know."""


def use_all_cores() -> None:
    """Makes a JAX device of each CPU core, for clients to run beside each other; XLA_FLAGS and JAX_NUM_CPU_DEVICES go first.

    The small operations of one client leave most of a machine idle: see the devices in `benchmarks/results/scaling.json`. To be
    called before JAX is used.
    """
    import jax

    from fedjax_ssl.experiment.provenance import cores

    flags = os.environ.get("XLA_FLAGS", "")
    # Devices add up what their clients return. One that waits there for longer than a minute, as clients have more or less to
    # train, would end the process: XLA takes it to be stuck.
    waiting = [f for f in MAY_WAIT if f not in flags] if jax.__version_info__ < MAY_WAIT_BELOW else []
    os.environ["XLA_FLAGS"] = " ".join([flags, *(f"--{flag}={24 * 3600}" for flag in waiting)]).strip()

    if "JAX_NUM_CPU_DEVICES" not in os.environ and "xla_force_host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", cores())


def keep_programs() -> None:
    """Keeps compiled programs in `~/.cache/fedjax_ssl`, so that a run starts faster the second time; JAX_COMPILATION_CACHE_DIR
    goes first, and empty keeps none. What is in that folder can be removed at any time. Where it cannot be made, none is kept.
    """
    import jax

    from fedjax_ssl.experiment.provenance import cache_folder

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = cache_folder()
        if folder is None:
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def refuse(error: Exception) -> int:
    """Prints what is wrong in one line on standard error; returns exit status 2."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def parse(argv: list[str]) -> None:
    """Parses the flags; raises ValueError with one clear line for whatever is wrong with them.

    `--help` prints what the command is and its flags, and exits with status 0.
    """
    if {"--help", "-h"} & set(argv):
        print(f"{sys.modules['__main__'].__doc__}\n{flags.FLAGS.module_help(__name__)}\n{flags.FLAGS.main_module_help()}")
        sys.exit(0)
    try:
        rest = flags.FLAGS(argv)[1:]
    except AttributeError:  # what ml_collections raises for an unknown key, and for a file without get_config
        raise ValueError(_unknown_key(argv)) from None
    except flags.Error as error:
        raise ValueError(_innermost(error)) from None
    if rest:
        raise ValueError(f"{rest[0]}: not a flag; a value is given as --config.key=value")
    if not CONFIG.present:
        raise ValueError("--config: missing; for example --config=configs/digits.py:fl2")
    try:
        CONFIG.value.lock()
    except OSError:
        raise ValueError(
            f"--config: got {_config_file()}, accepted: the path of a config file, such as configs/digits.py:fl2"
        ) from None


def _innermost(error: flags.Error) -> str:
    """What went wrong, without the traceback that ml_collections puts around an error inside a config file."""
    if "Error whilst parsing config file" not in str(error):
        return str(error)
    cause: BaseException = error
    while cause.__context__ is not None:
        cause = cause.__context__
    return f"--config: {cause}"


def _unknown_key(argv: list[str]) -> str:
    """A line about the first override of a key that the config has not, and the nearest that it has."""
    given = zip(argv, [*argv[1:], ""], strict=True)
    file = next(word.partition("=")[2] or after for word, after in given if re.fullmatch("--?config(=.*)?", word))
    alone = [argv[0], f"--config={file}"]
    values = flags.FlagValues()
    config = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=alone)
    try:
        values(alone)
        known = _keys(config.value.to_dict())
    except AttributeError:
        return f"--config: got {file}, accepted: a config file, which defines get_config, such as configs/digits.py:fl2"
    keys = [match[1] for word in argv if (match := re.match(r"--?config\.([\w.]+)", word))]
    key = next(key for key in keys if key not in known)
    if near := difflib.get_close_matches(key, known, 1):
        return f"config.{key}: unknown key; did you mean config.{near[0]}?"
    group = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == group] or [k for k in known if "." not in k]
    return f"config.{key}: unknown key; accepted: {', '.join(siblings)}"


def _keys(config: dict[str, Any], prefix: str = "") -> list[str]:
    nested = [[prefix + k, *(_keys(v, f"{prefix}{k}.") if isinstance(v, dict) else [])] for k, v in config.items()]
    return [key for keys in nested for key in keys]


def _config_file() -> str:
    return config_flags.get_config_filename(flags.FLAGS["config"])


def config_name() -> str:
    """The config file's name with its argument, fit for a folder: `configs/digits.py:fl2` is `digits-fl2`."""
    path, _, argument = _config_file().partition(":")
    return re.sub(r"[^\w.=]+", "-", "-".join(filter(None, [pathlib.Path(path).stem, argument])))

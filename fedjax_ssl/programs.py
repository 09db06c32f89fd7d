"""Where compiled programs are kept from one process to the next."""

import contextlib
import logging
import os
import pathlib
import warnings
from typing import Any

_log = logging.getLogger("fedjax_ssl")


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

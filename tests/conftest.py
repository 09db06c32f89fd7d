"""Fixtures and settings shared by all tests."""

import contextlib
import os
import pathlib
import signal
import tempfile

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # read when jax is imported; workers and subprocesses inherit it
    _cache = tempfile.TemporaryDirectory()  # what one test compiles serves the others, until the session ends
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax
import jaxtyping
import numpy as np
import pytest

import tests.checks  # noqa: F401 - the hook finds it by its name

# Calls in these packages are checked against their annotations, shapes and dtypes included.
CHECKED = [f"fedjax_ssl.{name}" for name in ("data", "local", "method", "metrics", "models", "ssl")]
jaxtyping.install_import_hook(CHECKED, "tests.checks.check_calls")


def pytest_configure(config) -> None:
    """Tests run on a CPU, whatever else there is, but those that are asked for by `-m gpu` or `-m "gpu and ..."`."""
    if config.getoption("markexpr").startswith("gpu"):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # workers and subprocesses share its memory
        return
    os.environ["JAX_PLATFORMS"] = "cpu"  # of subprocesses
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)  # for the tests of sharding
    # Tests compile many programs and run each for a moment. XLA's older emitters of fused loops compile them three times
    # faster; its later versions do not have them any more, and end the process at a flag that they do not know.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    if jax.__version_info__ < (0, 11):
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = flags


@pytest.fixture
def usual_emitters(monkeypatch) -> None:
    """The loop emitters that users have: two programs that compute the same give the same bits; the others fuse them apart."""
    options = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
    monkeypatch.setattr("fedjax_ssl.simulation.program.compiler_options", lambda platform, conv="xla": options)


@pytest.fixture
def usual_signals():
    """Processes that a test starts get signals, also where `nohup`, or a script's `&`, has pytest ignore some of them."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def without_cpu(monkeypatch) -> None:
    """A JAX that was told to leave the CPU out, as on a GPU with JAX_PLATFORMS=cuda: the devices are there without a name."""
    devices = jax.devices

    def unnamed(platform: str | None = None) -> list[jax.Device]:
        if platform == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return devices(platform)

    monkeypatch.setattr(jax, "devices", unnamed)


@pytest.fixture(scope="session")
def tfds_dir() -> str:
    """Folder of real datasets in TFDS form; the test is skipped where there is none."""
    beside = pathlib.Path(__file__).parents[2] / "shared" / "tfds"  # a folder beside the checkout
    from fedjax_ssl.data import download

    for folder in (download.folder(), *(() if "FEDJAX_SSL_DATA" in os.environ else (beside,))):
        if (folder / "cifar10").is_dir():
            return str(folder)
    pytest.skip("no TFDS datasets: set FEDJAX_SSL_DATA to a folder that holds cifar10 and mnist in TFDS form")


@pytest.fixture(scope="session")
def cifar10_labels(tfds_dir) -> np.ndarray:
    import tensorflow_datasets as tfds

    source = tfds.builder("cifar10", data_dir=tfds_dir).as_data_source("train", decoders={"image": tfds.decode.SkipDecoding()})
    return np.array([example["label"] for example in source.__getitems__(range(len(source)))])


@contextlib.contextmanager
def _registries_put_back():
    """Within it methods and networks may be registered."""
    from fedjax_ssl.methods import METHODS
    from fedjax_ssl.models import MODELS

    before = dict(METHODS), dict(MODELS)
    yield
    for registry, names in zip((METHODS, MODELS), before, strict=True):
        registry.clear()
        registry.update(names)


@pytest.fixture(scope="module", autouse=True)
def _registries():
    """A module's tests may register methods and networks; those of other modules do not have them."""
    with _registries_put_back():
        yield


@pytest.fixture(scope="module")
def own_methods(_registries):
    """The method `average` is there, until the module's tests have run."""
    from tests import average

    average.register()


def _file(tmp_path_factory, name: str, text: str) -> str:
    path = tmp_path_factory.mktemp("config") / name
    path.write_text(text)
    return f"--config={path}"


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> str:
    """The argument that names small.py, a config of the method `average`."""
    from tests.commands import CONFIG

    return _file(tmp_path_factory, "small.py", CONFIG)


@pytest.fixture(scope="session")
def fixmatch(tmp_path_factory) -> str:
    """The same of a method whose clients and server train a network."""
    from tests.commands import FIXMATCH

    return _file(tmp_path_factory, "fixmatch.py", FIXMATCH)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, config) -> pathlib.Path:
    """The folder of a run of small.py, for all who only read it."""
    from tests.commands import succeeded

    folder = tmp_path_factory.mktemp("finished")
    with _registries_put_back():
        succeeded(config, f"--workdir={folder}")
    return folder

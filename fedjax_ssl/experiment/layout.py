"""From `execution.*` to a layout of an experiment's work on this machine's devices."""

from typing import NamedTuple, Self

import jax

from fedjax_ssl import models
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import Requires
from fedjax_ssl.simulation.execution import Execution

BATCH_SIZE, BATCH_SIZE_ON_CPU = 250, 25
"""Examples of a forward pass without training. Convolutions on a CPU are mostly faster with few."""


class Layout(NamedTuple):
    """How the work is laid out on devices, see `Execution`; a resumed run has the layout that it began with."""

    strategy: str
    chunk_size: int
    devices: int
    runs_at_once: int
    vmap_runs: bool
    conv: str
    batch_size: int

    def execution(self, settings: Settings) -> Execution:
        """The same layout for the simulator, which may halve chunks whose size the settings leave open."""
        given = settings.execution
        own = {key: value for key, value in self._asdict().items() if key in Execution._fields}
        # Processes would have to agree on it, round by round.
        auto_chunk = given.strategy in ("auto", "chunked", "sharded") and given.chunk_size == 0 and jax.process_count() == 1
        return Execution(**own, precision=given.precision, rounds=given.rounds_per_dispatch, auto_chunk=auto_chunk)

    def after(self, execution: Execution) -> Self:
        """The layout with the chunks of `execution`, which a simulator may have made smaller."""
        strategy = "chunked" if self.strategy == "vmap" and execution.chunk_size else self.strategy
        return self._replace(strategy=strategy, chunk_size=execution.chunk_size, vmap_runs=execution.vmap_runs)


def resolve(settings: Settings, requires: Requires, num_runs: int = 1) -> Layout:
    """The layout of R runs; raises ValueError where keys exclude each other, or ask for more devices than there are.

    `strategy=auto` is `sharded` where a run has several devices; else `scan` on a CPU, where convolutions with a kernel per
    client are slow, and `vmap` on an accelerator, which one client does not fill.
    """
    given, cohort, available = settings.execution, settings.cohort_size, jax.devices()
    if jax.process_count() > 1:
        _check_processes(settings, num_runs)
        given = given.model_copy(update={"strategy": "sharded", "devices": len(available)})
    if given.devices > len(available):
        raise ValueError(f"execution.devices: got {given.devices}, accepted: at most {len(available)}, the devices there are")
    on_cpu = available[0].platform == "cpu"
    shares_clients = given.strategy == "sharded" or (given.strategy == "auto" and requires.clients)
    max_devices = given.devices or len(available)
    devices = _fewest(cohort, max(1, max_devices // num_runs)) if shares_clients else 1
    devices = given.devices if num_runs == 1 and given.devices else devices
    auto = "sharded" if devices > 1 else "scan" if on_cpu else "vmap"
    strategy = auto if given.strategy == "auto" else given.strategy
    if strategy != "sharded" and devices > 1:
        raise ValueError(f"execution.devices: got {devices} with strategy={strategy}, accepted: 1, or strategy=sharded")
    if strategy not in ("sharded", "chunked") and given.chunk_size:
        raise ValueError(f"execution.chunk_size: got {given.chunk_size} with strategy={strategy}, accepted: 0, or chunked")
    if given.data != "device":
        _check_host(settings, requires, num_runs)
    chunk_size = {"vmap": 0, "scan": 1}.get(strategy, given.chunk_size or int(on_cpu and strategy != "chunked"))
    runs_at_once = _fewest(num_runs, max(1, max_devices // devices))
    vmap_runs = num_runs > runs_at_once and not on_cpu and chunk_size == 0
    per_device = -(-cohort // devices)
    vmapped = vmap_runs or (requires.clients and min(chunk_size or per_device, per_device) > 1)
    conv = models.resolve_conv(given.conv, available[0].platform, kernels_vmapped=vmapped, dtype=given.dtype)
    small_batches = on_cpu and settings.model.name not in models.feature_models() and settings.model.norm != "batch"
    batch_size = given.batch_size or (BATCH_SIZE_ON_CPU if small_batches else BATCH_SIZE)
    return Layout(strategy, chunk_size, devices, runs_at_once, vmap_runs, conv, batch_size)


def _check_host(settings: Settings, requires: Requires, num_runs: int) -> None:
    """Raises ValueError where data cannot stay on the host."""
    where = settings.execution.data
    if num_runs > 1:
        raise ValueError(f"execution.data: got {where} with {num_runs} runs, accepted: device")
    if (together := settings.execution.rounds_per_dispatch) > 1:
        raise ValueError(f"execution.rounds_per_dispatch: got {together} with execution.data={where}, accepted: 1")
    if requires.all_states or requires.pool:
        reads_all = f" and server.static_norm.data={settings.server.static_norm.data}, whose server reads all images"
        got = f"got {where} with method.name={settings.method.name}{'' if requires.all_states else reads_all}"
        raise ValueError(f"execution.data: {got}, accepted: device")


def _check_processes(settings: Settings, num_runs: int) -> None:
    """Raises ValueError for what several processes cannot do: all of their devices share the clients of one run."""
    given, here = settings.execution, f"in {jax.process_count()} processes"
    if num_runs > 1:
        raise ValueError(f"seeds, vary: got {num_runs} runs {here}, accepted: one run")
    if given.data != "device":
        raise ValueError(f"execution.data: got {given.data} {here}, accepted: device")
    if given.strategy not in ("auto", "sharded"):
        raise ValueError(f"execution.strategy: got {given.strategy} {here}, accepted: auto, sharded")
    if given.devices not in (0, len(jax.devices())):
        raise ValueError(f"execution.devices: got {given.devices} {here}, accepted: 0 or {len(jax.devices())}, all of them")


def _fewest(items: int, devices: int) -> int:
    """The fewest devices that finish no later than all would; for ten items and eight devices that is five, with two each."""
    per_device = -(-items // devices)
    return -(-items // per_device)

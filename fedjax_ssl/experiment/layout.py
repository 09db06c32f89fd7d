"""How an experiment's work is laid out on devices: what `execution.*` stands for on this machine."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from fedjax_ssl import models
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import Requires
from fedjax_ssl.simulation.execution import Execution

BATCH_SIZE, BATCH_SIZE_ON_CPU = 250, 25
"""Examples per forward-only pass. Convolutions on a CPU are 1.2 to 1.5 times as fast with 25 as with 250 on four of five
networks, and .97 times on the fifth (two cores of an AMD EPYC, family 26, model 2)."""


class Layout(NamedTuple):
    """A layout, nothing of it `auto`. A resumed run has the layout that it began with.

    Attributes:
        strategy: `vmap`, `scan`, `chunked` or `sharded`.
        chunk_size: clients that are vmapped together; 0: all that a device has.
        devices: D, which share the clients of a run.
        runs_at_once: runs that have devices of their own at the same time.
        vmap_runs: whether the runs of a device are vmapped.
        conv: the lowering of convolutions, `xla`, `cpu` or `gpu`.
        batch_size: examples per forward-only pass.
    """

    strategy: str
    chunk_size: int
    devices: int
    runs_at_once: int
    vmap_runs: bool
    conv: str
    batch_size: int

    def execution(self, settings: Settings) -> Execution:
        """The same for the simulator. Chunks that no key of the settings asks for may shrink where memory is short."""
        given = settings.execution
        return Execution(
            chunk_size=self.chunk_size,
            devices=self.devices,
            runs_at_once=self.runs_at_once,
            vmap_runs=self.vmap_runs,
            batch_size=self.batch_size,
            precision=given.precision,
            rounds=given.rounds_per_dispatch,
            auto_chunk=given.strategy in ("auto", "sharded") and given.chunk_size == 0,
        )

    def after(self, execution: Execution) -> Layout:
        """The layout with the chunks that a simulator has come to."""
        strategy = "chunked" if self.strategy == "vmap" and execution.chunk_size else self.strategy
        return self._replace(strategy=strategy, chunk_size=execution.chunk_size, vmap_runs=execution.vmap_runs)


def resolve(settings: Settings, requires: Requires, num_runs: int = 1) -> Layout:
    """The layout of R runs with these settings.

    `strategy=auto` is `sharded` where a run has several devices; else `scan` on a CPU, where convolutions with a kernel per
    client are slower than one client after another (WRN-28-2), and `vmap` on an accelerator, which one client does not fill.

    Raises:
        ValueError: keys exclude each other, or ask for more devices than there are.
    """
    given, cohort, available = settings.execution, settings.cohort_size, jax.devices()
    if given.devices > len(available):
        raise ValueError(f"execution.devices: got {given.devices}, accepted: at most {len(available)}, the devices there are")
    on_cpu = available[0].platform == "cpu"
    shares_clients = given.strategy == "sharded" or (given.strategy == "auto" and requires.clients)
    most = given.devices or len(available)
    devices = fewest(cohort, max(1, most // num_runs)) if shares_clients else 1
    if num_runs == 1 and given.devices:
        devices = given.devices
    strategy = given.strategy
    if strategy == "auto":
        strategy = "sharded" if devices > 1 else "scan" if on_cpu else "vmap"
    if strategy != "sharded" and devices > 1:
        raise ValueError(f"execution.devices: got {devices} with strategy={strategy}, accepted: 1, or strategy=sharded")
    if strategy not in ("sharded", "chunked") and given.chunk_size:
        raise ValueError(f"execution.chunk_size: got {given.chunk_size} with strategy={strategy}, accepted: 0, or chunked")
    if given.data == "host":
        _check_host(settings, requires, num_runs)
    chunk_size = {"vmap": 0, "scan": 1}.get(strategy, given.chunk_size or int(on_cpu))
    runs_at_once = fewest(num_runs, max(1, most // devices))
    vmap_runs = num_runs > runs_at_once and not on_cpu and chunk_size == 0
    of_device = -(-cohort // devices)
    vmapped = vmap_runs or (requires.clients and min(chunk_size or of_device, of_device) > 1)
    conv = models.resolve_conv(given.conv, available[0].platform, kernels_vmapped=vmapped)
    small = on_cpu and settings.model["name"] not in models.feature_models() and settings.model["norm"] != "batch"
    batch_size = given.batch_size or (BATCH_SIZE_ON_CPU if small else BATCH_SIZE)
    return Layout(strategy, chunk_size, devices, runs_at_once, vmap_runs, conv, batch_size)


def _check_host(settings: Settings, requires: Requires, num_runs: int) -> None:
    """Raises ValueError where data cannot stay on the host."""
    if num_runs > 1:
        raise ValueError(f"execution.data: got host with {num_runs} runs, accepted: device")
    if (together := settings.execution.rounds_per_dispatch) > 1:
        raise ValueError(f"execution.rounds_per_dispatch: got {together} with execution.data=host, accepted: 1")
    if requires.all_states:
        raise ValueError(f"execution.data: got host with method.name={settings.method['name']}, accepted: device")
    if requires.pool:
        name, sbn_data = settings.method["name"], settings.server.sbn_data
        raise ValueError(
            f"execution.data: got host with method.name={name} and server.sbn_data={sbn_data}, whose server reads all images, "
            "accepted: device"
        )


def fewest(items: int, devices: int) -> int:
    """As few devices as take items no longer: ten clients take eight devices two turns, as they do five."""
    turns = -(-items // devices)
    return -(-items // turns)


def read(noted: Any) -> Layout | None:
    """A layout from what `_asdict` made of one; None where this version does not know its fields."""
    try:
        return Layout(**noted)
    except TypeError:
        return None

"""How an experiment's work is laid out on devices: what `execution.*` stands for, where it says `auto` and on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fedjax_ssl import models
from fedjax_ssl.experiment.settings import STEPS, Settings
from fedjax_ssl.methods import SERVER_ALONE
from fedjax_ssl.models.convolution import LOWERINGS
from fedjax_ssl.simulation.execution import COMPILERS, STRATEGIES, Execution, client_mesh

FORWARD_BATCH_SIZE = 250
"""Examples per forward-only pass over a client's images, or the test set, where nothing else is said."""
FORWARD_BATCH_SIZE_ON_A_CPU = 25
"""The same over the test set by convolutions on a CPU: on four of five networks 1.2 to 1.5 times as fast, on
the fifth .97 times (`benchmarks.evaluation`)."""


class Layout(NamedTuple):
    """A layout, nothing of it `auto`.

    Attributes:
        strategy: one of STRATEGIES.
        chunk_size: clients that are vmapped together; 0: all that a device has.
        devices: D, over which clients are split.
        conv: a key of `fedjax_ssl.models.convolution.LOWERINGS`.
        steps: `loop` or `unrolled`.
        compiler: one of COMPILERS.
        forward_batch_size: examples per forward pass of an evaluation.
    """

    strategy: str
    chunk_size: int
    devices: int
    conv: str
    steps: str
    compiler: str
    forward_batch_size: int = FORWARD_BATCH_SIZE

    @classmethod
    def checked(cls, fields: Mapping[str, Any]) -> Layout:
        """A layout from what `_asdict` made of one; ValueError or TypeError where this version does not know its values."""
        layout = cls(**fields)
        known = (STRATEGIES, LOWERINGS, STEPS, COMPILERS)
        words = (layout.strategy, layout.conv, layout.steps, layout.compiler)
        if any(word not in accepted for word, accepted in zip(words, known, strict=True)):
            raise ValueError(f"got {words}, accepted: one each of {'; '.join(', '.join(each) for each in known)}")
        numbers = (layout.chunk_size, layout.devices - 1, layout.forward_batch_size - 1)
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError(f"got {dict(fields)}, accepted: numbers of clients, devices and examples")
        return layout

    def execution(self, settings: Settings) -> Execution:
        """The same for the simulator; chunks that no key of the settings, as they were given, asks for may shrink."""
        given = settings.execution
        mesh = client_mesh(self.devices) if self.strategy == "sharded" or self.devices > 1 else None
        shrinks = given.strategy in ("auto", "sharded") and given.chunk_size == 0 and self.chunk_size != 1
        return Execution(self.chunk_size, mesh, given.precision, self.compiler, shrinks, given.rounds_per_dispatch)

    def shrunk(self, execution: Execution) -> Layout:
        """The layout with the chunks that a run has come to."""
        if execution.chunk_size == self.chunk_size:
            return self
        strategy = "chunked" if self.strategy == "vmap" else self.strategy
        return self._replace(strategy=strategy, chunk_size=execution.chunk_size)

    def pinned(self, settings: Settings) -> Settings:
        """`settings` with this layout in place of what they leave open."""
        chunk_size = self.chunk_size if self.strategy in ("sharded", "chunked") else 0
        fields: dict[str, Any] = self._asdict() | {"chunk_size": chunk_size}
        fields["batch_size"] = fields.pop("forward_batch_size")
        return dataclasses.replace(settings, execution=dataclasses.replace(settings.execution, **fields))


def available_devices(settings: Settings) -> list[jax.Device]:
    """The devices there are; raises ValueError where the settings ask for more."""
    asked, available = settings.execution.devices, jax.devices()
    if asked > len(available):
        raise ValueError(f"execution.devices: got {asked}, accepted: at most {len(available)}, the devices there are")
    return available


def fewest(cohort_size: int, devices: int) -> int:
    """As few devices as take a cohort no longer: ten clients take eight two turns, the second for two clients, as five do."""
    turns = -(-cohort_size // devices)
    return -(-cohort_size // turns)


def resolve(settings: Settings) -> Layout:
    """The layout of settings; what they leave open is what is right as a rule, see `tuning` for what is measured.

    `strategy=auto`: over several devices `sharded`, unless the server alone trains; else `scan` on a CPU, where (measured on
    WRN-28-2) convolutions with a kernel per client are slower than one client after another, and `vmap` on an accelerator,
    which one client does not fill: on an H200 ten clients of WRN-28-2, `tiled`, took a third of the time of one after another.

    Raises:
        ValueError: for keys that exclude each other, or more devices than there are.
    """
    given, available = settings.execution, available_devices(settings)
    strategy, alone = given.strategy, settings.method["name"] in SERVER_ALONE
    on_cpu = available[0].platform == "cpu"
    if strategy == "auto":
        several = min(given.devices or len(available), settings.cohort_size) > 1 and not alone
        strategy = "sharded" if several or given.devices > 1 else "scan" if on_cpu else "vmap"
    if strategy not in ("sharded", "separate") and given.devices > 1:
        raise ValueError(
            f"execution.devices: got {given.devices} with strategy={strategy}, accepted: 1, or strategy=sharded or separate"
        )
    if strategy not in ("sharded", "chunked") and given.chunk_size:
        raise ValueError(f"execution.chunk_size: got {given.chunk_size} with strategy={strategy}, accepted: 0, or chunked")
    if given.rounds_per_dispatch > 1 and (strategy == "separate" or given.data == "host"):
        why = "strategy=separate" if strategy == "separate" else "data=host"
        raise ValueError(f"execution.rounds_per_dispatch: got {given.rounds_per_dispatch} with execution.{why}, accepted: 1")
    if strategy == "separate" and (alone or given.data == "host"):
        why = f"method.name={settings.method['name']}" if alone else "execution.data=host"
        raise ValueError(f"execution.strategy: got separate with {why}, accepted: scan")
    devices = 1
    if strategy in ("sharded", "separate"):
        devices = given.devices or fewest(settings.cohort_size, len(available))
    chunk_size = {"vmap": 0, "scan": 1, "separate": 1}.get(strategy, given.chunk_size or int(on_cpu))
    of_device = -(-settings.cohort_size // devices)
    vmapped = min(chunk_size or of_device, of_device) > 1 and not alone
    conv = models.resolve_conv(given.conv, available[0].platform, kernels_vmapped=vmapped)
    steps = "loop" if given.steps == "auto" else given.steps
    compiler = "default" if given.compiler == "auto" else given.compiler
    evaluated = given.batch_size or evaluation_batch_size(available[0].platform, settings)
    return Layout(strategy, chunk_size, devices, conv, steps, compiler, evaluated)


def evaluation_batch_size(platform: str, settings: Settings) -> int:
    """Examples per forward pass of an evaluation where nothing is said: few for convolutions on a CPU, which are then faster.

    With batch norm, whose statistics may depend on how many, as many as elsewhere.
    """
    few = platform == "cpu" and convolves(settings) and settings.model["norm"] != "batch"
    return FORWARD_BATCH_SIZE_ON_A_CPU if few else FORWARD_BATCH_SIZE


def convolves(settings: Settings) -> bool:
    """Whether the network has convolutions."""
    return settings.model["name"] not in models.FEATURE_MODELS

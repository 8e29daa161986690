"""Seconds of a training step: the pipeline's loop, then the reduction of gradients and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from multimesh.hardware import kernels
from multimesh.hardware.devices import Device, device
from multimesh.hardware.stacks import Stack, stack
from multimesh.planner import footprint, layer, loop, stage_layers
from multimesh.planner.configuration import Configuration
from multimesh.planner.transformer import Transformer

_GRADIENT, _PARAMETER = 4.0, 2.0  # bytes that data parallelism reduces and gathers for a parameter
OPTIMIZER = 30.0
"""Bytes of a parameter in Adam: it reads four numbers of float32, and writes three and one of bfloat16."""


@dataclass(frozen=True)
class Step:
    """Forecast of a training step.

    Attributes
    ----------
    model, how, device
        What was forecast.
    seconds
        Of the step.
    loop
        Seconds of the microbatches.
    gradients, optimizer
        Seconds after them that nothing hides.
    bubble
        Share of the loop in which a submesh waits, on average.
    memory
        Bytes of a device at the peak, for each submesh.
    shares
        What the seconds of the fullest submesh consist of, by name.
    """

    model: Transformer
    how: Configuration
    device: Device
    seconds: float
    loop: float
    gradients: float
    optimizer: float
    bubble: float
    memory: tuple[footprint.Footprint, ...]
    shares: tuple[tuple[str, float], ...]

    @property
    def tokens_per_second(self) -> float:
        """On each device."""
        return self.how.batch * self.how.sequence / self.seconds / self.how.devices

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization: operations without recomputation, causal attention counted half, of the peak."""
        operations = self.model.operations(self.how.sequence) * self.tokens_per_second
        return operations / self.device.peak(self.how.precision)

    @property
    def bytes(self) -> float:
        """Of the fullest device."""
        return max(held.total for held in self.memory)

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.shares, key=lambda share: share[1])[0]


def forecast(model: Transformer, how: Configuration, on: str | Device, software: str | Stack = "modern") -> Step:
    """Forecast a training step.

    Parameters
    ----------
    model
        Sizes of a transformer.
    how
        How it is spread over devices.
    on
        A device, or its name in ``devices.toml``.
    software
        A stack, or its name in ``stacks.toml``.

    Raises
    ------
    UsageError
        For a device or stack that no table has, and a schedule that has no table for these stages.
    """
    on, software = device(on), stack(software)
    parts = layer.parts(model, how, on, software)
    of = stage_layers.times(model, how, parts)
    span = busy = how.microbatches * sum(s.total for s in of) / how.pp
    if how.pp > 1:
        span = loop.seconds(how.schedule, how.pp, how.microbatches, of, parts.hop, parts.blocked)
    gradients, optimizer, host = after(model, how, on, software)
    total = span + gradients + optimizer + host
    scale = busy / max(1e-30, sum(s for _, s in parts.shares))
    shares = {name: s * scale for name, s in parts.shares}
    shares |= {"bubble": span - busy, "gradients": gradients, "optimizer": optimizer, "host": host}
    held = footprint.held(model, how, software)
    found = tuple((name, s) for name, s in shares.items() if s > 0)
    return Step(model, how, on, total, span, gradients, optimizer, 1 - busy / span, held, found)


def after(model: Transformer, how: Configuration, on: Device, software: Stack) -> tuple[float, float, float]:
    """Seconds of a step beside its loop: for gradients that nothing hides, for the optimizer, and on the host."""
    optimizer = kernels.moved(on, _owned(model, how) * OPTIMIZER / how.state_shards)
    return _gradients(model, how, on, software), optimizer, software.step


def _owned(model: Transformer, how: Configuration) -> float:
    """Parameters of a device, as if FSDP did not shard them."""
    layers = model.layers / how.pp * model.held_parameters(how.ep)
    return (layers + model.embedding_parameters) / how.tp


def _gradients(model: Transformer, how: Configuration, on: Device, software: Stack) -> float:
    """Seconds of the reduction of gradients, and of the gather of parameters where the optimizer is sharded."""
    own, inner = _owned(model, how), how.tp
    if layer.shards(how) == 1:
        size = own * (_GRADIENT + _PARAMETER)
        ranks = how.replicas
    elif how.sharded != "parameters" and how.dp > 1:
        size, ranks = own / how.fsdp * 2 * _GRADIENT, how.dp
        inner *= how.fsdp * how.cp
    else:
        return 0.0
    return software.exposed_gradients * kernels.gathered(on, size, ranks, inner)

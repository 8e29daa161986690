"""Seconds of a training step: the pipeline's loop, then the reduction of gradients and the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from multimesh.hardware import kernels
from multimesh.hardware.devices import Device, device
from multimesh.hardware.software import Stack, stack
from multimesh.planner import footprint, layer, loop, stage_layers, traffic
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
        The configuration of the forecast.
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
        Parts of the seconds of the fullest submesh, by name.
    software
        Name of the stack that runs it.
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
    software: str = "modern"

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second on each device."""
        return self.how.batch * self.how.sequence / self.seconds / self.how.devices

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization: operations without recomputation, causal attention counted half, of the peak."""
        operations = self.model.operations(self.how.sequence) * self.tokens_per_second
        return operations / self.device.peak(self.how.precision)

    @property
    def bytes(self) -> float:
        """Bytes of the fullest device."""
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
    used = on.with_software(software.year)
    parts = layer.parts(model, how, used, software)
    of = stage_layers.times(model, how, parts)
    span = busy = how.microbatches * sum(s.total for s in of) / how.pp
    if how.pp > 1:
        span = loop.seconds(how.schedule, how.pp, how.microbatches, of, parts.hop, parts.blocked)
    gradients, optimizer, rest = after(model, how, used, software, parts)
    waits = stragglers(how, used, software) * span
    total = span + gradients + optimizer + rest + waits
    scale = busy / max(1e-30, sum(s for _, s in parts.shares))
    shares = {name: s * scale for name, s in parts.shares}
    shares |= {"bubble": span - busy, "gradients": gradients, "optimizer": optimizer, "host": rest, "stragglers": waits}
    held = footprint.peak_bytes(model, how, software)
    found = tuple((name, s) for name, s in shares.items() if s > 0)
    return Step(model, how, on, total, span, gradients, optimizer, 1 - busy / span, held, found, software.name)


def stragglers(how: Configuration, on: Device, software: Stack) -> float:
    """Return the share of the loop by which the slowest of many devices makes it longer."""
    return software.jitter * max(0.0, math.log2(how.devices / on.domain))


def after(
    model: Transformer, how: Configuration, on: Device, software: Stack, parts: layer.LayerParts
) -> tuple[float, float, float]:
    """Return the seconds of a step beside its loop: gradients that nothing hides, the optimizer, and the host."""
    always, routed = _parameters(model, how)
    held = always / how.state_shards
    held += routed / (how.expert_replicas if how.sharded != "none" else max(1.0, how.fsdp / how.ep))
    optimizer = kernels.move(on, held * OPTIMIZER)
    return _gradients(model, how, on, software, parts), optimizer, software.step


def _parameters(model: Transformer, how: Configuration) -> tuple[float, float]:
    """Return the parameters of a device as if FSDP did not shard them: those of routed experts apart."""
    sparse = (model.layers - model.dense_layers + model.predicted) / how.pp if model.experts else 0.0
    dense = model.layers / how.pp - (model.layers - model.dense_layers) / how.pp * bool(model.experts)
    always = dense * model.dense_layer_parameters + sparse * model.always_parameters + model.embedding_parameters
    return always / how.tp, sparse * model.expert_parameters / (how.ep * how.expert_tp)


def _gradients(model: Transformer, how: Configuration, on: Device, software: Stack, parts: layer.LayerParts) -> float:
    """Return the seconds of the reduction of gradients, and of the gather of parameters where the optimizer is sharded.

    Computation hides them only while the last microbatches go back and the first go forward. It hides no broadcasts of
    whole tensors, which wait for the optimizer.
    """
    always, routed = _parameters(model, how)
    inner = how.tp
    if traffic.shards(how) == 1:
        reduced, gathered, ranks = _GRADIENT, _PARAMETER, how.replicas
    elif how.sharded != "parameters" and how.dp > 1:
        reduced, gathered, ranks = _GRADIENT / how.fsdp, _GRADIENT / how.fsdp, how.dp
        inner *= how.fsdp * how.cp
    else:
        return 0.0
    buckets = model.layers / how.pp
    near = min(ranks, how.within or ranks)  # that share the state of the optimizer

    def joined(size: float, among: int) -> float:
        waits = buckets * kernels.latency(on, among, inner) if among > 1 else 0.0
        found = kernels.gather(on, always * size, among, inner) + waits
        if routed:
            found += kernels.gather(on, routed * size, min(among, how.expert_replicas), inner * how.ep)
        return found

    whole, last = joined(reduced, ranks), 0.0
    if software.broadcasts and how.sharded == "optimizer" and near > 1:
        last = kernels.gather(on, always * gathered, near, inner)
        last += min(near, software.broadcasts * buckets) * kernels.pass_on(on, near, inner)
    else:
        whole += joined(gathered, near)
    rounds = min(how.microbatches, how.pp) if how.interleave > 1 else 1  # one stage ends while others go on
    hides = rounds * model.layers / how.pp * parts.layer.total
    return max(software.exposed_gradients * whole, whole - hides) + last

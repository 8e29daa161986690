"""Seconds of a training step: the pipeline's loop, then the reduction of gradients and the optimizer."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from multimesh_planner import footprint, pipeline_seconds, stage_layers
from multimesh_planner.configuration import Configuration
from multimesh_planner.hardware import kernels
from multimesh_planner.hardware.devices import Device, device
from multimesh_planner.hardware.software import Software
from multimesh_planner.hardware.software import software as software_named
from multimesh_planner.transformer import Transformer

_GRADIENT, _PARAMETER = 4.0, 2.0  # bytes that data parallelism reduces and gathers for a parameter
_COPY = 10.0  # bytes of a parameter that an update reads, of the float32 copy, and writes, of that and of bfloat16
_ITERATIONS = 5  # of Newton and Schulz in Muon (Jordan 2024)


@dataclass(frozen=True)
class Step:
    """Forecast of a training step."""

    # model, how, device: the configuration of the forecast
    model: Transformer
    how: Configuration
    device: Device
    # seconds of the step; of its microbatches; of gradients and optimizer after them that nothing hides
    seconds: float
    loop: float
    gradients: float
    optimizer: float
    bubble: float  # share of the loop in which a submesh waits, on average
    memory: tuple[footprint.Footprint, ...]  # bytes of a device at the peak, for each submesh
    shares: tuple[tuple[str, float], ...]  # parts of the seconds of the fullest submesh, by name
    software: Software = dataclasses.field(default_factory=lambda: software_named("nvidia"))

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
        return max(part.total for part in self.memory)

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.shares, key=lambda share: share[1])[0]


def step_time(model: Transformer, how: Configuration, on: str | Device, software: str | Software = "nvidia") -> Step:
    """Forecast a training step of a model, on a device and with a class of software, or those of their names.

    Raises ``UsageError`` for a device or software that no table has, and a schedule that has no table for these stages.
    """
    on, software = device(on), software_named(software)
    parts = stage_layers.parts(model, how, on, software)
    stages = stage_layers.times(model, how, parts)
    span = busy = how.microbatches * sum(s.total for s in stages) / how.pp
    if how.pp > 1:
        span = pipeline_seconds.seconds(how.schedule, how.pp, how.microbatches, stages, parts.hop, parts.blocked)
    gradients, optimizer, between = after(model, how, on, software, parts)
    waits = stragglers(how, on, software) * span
    total = span + gradients + optimizer + between + waits
    scale = busy / max(1e-30, sum(s for _, s in parts.shares))
    shares = {name: seconds * scale for name, seconds in parts.shares}
    shares["host"] = shares.get("host", 0.0) + between
    shares |= {"bubble": span - busy, "gradients": gradients, "optimizer": optimizer, "stragglers": waits}
    shown = tuple((name, seconds) for name, seconds in shares.items() if seconds > 0)
    memory = footprint.peak_bytes(model, how, software)
    return Step(model, how, on, total, span, gradients, optimizer, 1 - busy / span, memory, shown, software)


def stragglers(how: Configuration, on: Device, software: Software) -> float:
    """Return the share of the loop by which the slowest of many devices makes it longer."""
    return software.jitter * max(0.0, math.log2(how.devices / on.domain))


def after(
    model: Transformer, how: Configuration, on: Device, software: Software, parts: stage_layers.LayerParts
) -> tuple[float, float, float]:
    """Return the seconds of a step beside its loop: gradients that nothing hides, the optimizer, and the host."""
    always, routed = _parameters(model, how)
    split = how.expert_replicas if how.sharded != "none" else max(1.0, how.fsdp / how.ep)
    optimizer = _update(model, how, on, software, always / how.state_shards, routed / split)
    return _gradients(model, how, on, software, parts), optimizer, software.step


def _update(
    model: Transformer, how: Configuration, device: Device, software: Software, always: float, routed: float
) -> float:
    """Return the seconds of an update of a device's share of the parameters, those of routed experts apart.

    The state in the host's memory comes and goes over its link while the kernels run.
    """
    number = always + routed
    seconds = kernels.move(device, number * (_GRADIENT + _COPY + 2 * how.moment_bytes))
    if how.optimizer == "muon":
        work = always * _orthogonalize(model.hidden, model.hidden) + routed * _orthogonalize(model.expert, model.hidden)
        seconds += work / device.matmul_rate("bf16")
    state = number * (software.master_bytes + how.moment_bytes)
    return max(seconds, state / device.host) if how.offload_optimizer else seconds


def _orthogonalize(rows: float, columns: float) -> float:
    """Return the operations of a parameter of a matrix that Muon makes orthogonal."""
    small, large = sorted((rows, columns))
    return _ITERATIONS * (4.0 * small + 2.0 * small * small / large)


def _parameters(model: Transformer, how: Configuration) -> tuple[float, float]:
    """Return the parameters of a device as if FSDP did not shard them: those of routed experts apart."""
    sparse = model.layers - model.dense_layers + model.predicted * bool(model.experts)
    sizes = {"dense": model.dense_layers / how.pp, "sparse": sparse / how.pp}
    always, routed = model.split_parameters(how.tp, how.ep * how.expert_tp, **sizes)
    return always + model.embedding_parameters / how.tp, routed


def _gradients(
    model: Transformer, how: Configuration, on: Device, software: Software, parts: stage_layers.LayerParts
) -> float:
    """Return the seconds of the reduction of gradients, and of the gather of parameters where the optimizer is sharded.

    Computation hides them only while the last microbatches go back and the first go forward.
    """
    always, routed = _parameters(model, how)
    inner = how.tp
    if how.shards == 1:
        reduced, gathered, ranks = _GRADIENT, _PARAMETER, how.replicas
    elif how.sharded != "parameters" and how.dp > 1:
        reduced, gathered, ranks = _GRADIENT / how.fsdp, _GRADIENT / how.fsdp, how.dp
        inner *= how.fsdp * how.cp
    else:
        return 0.0

    def pass_round(size: float, among: int) -> float:
        waits = model.layers / how.pp * kernels.latency(on, among, inner) if among > 1 else 0.0
        seconds = kernels.gather(on, always * size, among, inner) + waits
        if routed:
            seconds += kernels.gather(on, routed * size, min(among, how.expert_replicas), inner * how.ep)
        return seconds

    total = pass_round(reduced, ranks) + pass_round(gathered, min(ranks, how.within or ranks))
    rounds = min(how.microbatches, how.pp) if how.interleave > 1 else 1  # one stage ends while others go on
    layers = model.layers - model.dense_layers
    hides = rounds / how.pp * (layers * parts.layer.total + model.dense_layers * parts.first.total)
    return max(software.exposed_gradients * total, total - hides)

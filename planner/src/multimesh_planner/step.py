"""Seconds of a training step: the pipeline's loop, then the reduction of gradients and the optimizer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multimesh.schedules.costs import map_covers
from multimesh.schedules.scheduler import run

from multimesh import schedules
from multimesh_planner import footprint, layer_seconds
from multimesh_planner.configuration import Configuration
from multimesh_planner.hardware import kernels
from multimesh_planner.hardware.devices import Device, device
from multimesh_planner.hardware.software import Software
from multimesh_planner.hardware.software import software as software_named
from multimesh_planner.layer_seconds import LayerParts, Times
from multimesh_planner.transformer import Transformer

Cells = Mapping[schedules.Cell, Sequence[schedules.Cell]]

_ROUNDS = 3  # of microbatches, after which a table repeats itself
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
    parts = layer_seconds.parts(model, how, on, software)
    stages = layer_seconds.times(model, how, parts)
    span = busy = how.microbatches * sum(s.total for s in stages) / how.pp
    if how.pp > 1:
        span = loop_seconds(how.schedule, how.pp, how.microbatches, stages, parts.hop, parts.blocked)
    gradients, optimizer, between = after(model, how, on, software, parts)
    waits = stragglers(how, on, software) * span
    total = span + gradients + optimizer + between + waits
    scale = busy / max(1e-30, sum(s for _, s in parts.shares))
    shares = {name: seconds * scale for name, seconds in parts.shares}
    shares["host"] = shares.get("host", 0.0) + between
    shares |= {"bubble": span - busy, "gradients": gradients, "optimizer": optimizer, "stragglers": waits}
    part_seconds = tuple((name, seconds) for name, seconds in shares.items() if seconds > 0)
    memory = footprint.peak_bytes(model, how, software)
    return Step(model, how, on, total, span, gradients, optimizer, 1 - busy / span, memory, part_seconds, software)


def stragglers(how: Configuration, on: Device, software: Software) -> float:
    """Return the share of the loop by which the slowest of many devices makes it longer."""
    return software.jitter * max(0.0, math.log2(how.devices / on.domain))


def after(
    model: Transformer, how: Configuration, on: Device, software: Software, parts: LayerParts
) -> tuple[float, float, float]:
    """Return the seconds of a step beside its loop: gradients that nothing hides, the optimizer, and the host.

    Computation hides a reduction only while the last microbatches go back and the first go forward.
    """
    # parameters of a device as if FSDP did not shard them, those of routed experts apart
    sparse = model.layers - model.dense_layers + model.predicted * bool(model.experts)
    sizes = {"dense": model.dense_layers / how.pp, "sparse": sparse / how.pp}
    always, routed = model.split_parameters(how.tp, how.ep * how.expert_tp, **sizes)
    always += model.embedding_parameters / how.tp
    split = how.expert_replicas if how.sharded != "none" else max(1.0, how.fsdp / how.ep)
    optimizer = _update(model, how, on, software, always / how.state_shards, routed / split)
    total = _reduce(model, how, on, always, routed)
    rounds = min(how.microbatches, how.pp) if how.interleave > 1 else 1  # one stage ends while others go on
    layers = model.layers - model.dense_layers
    hides = rounds / how.pp * (layers * parts.layer.total + model.dense_layers * parts.first.total)
    return max(software.exposed_gradients * total, total - hides), optimizer, software.step


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


def _reduce(model: Transformer, how: Configuration, on: Device, always: float, routed: float) -> float:
    """Return the seconds that gradients take to be reduced, and parameters to be gathered after a sharded update."""
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

    return pass_round(reduced, ranks) + pass_round(gathered, min(ranks, how.within or ranks))


def loop_seconds(
    schedule: str, pp: int, microbatches: int, stages: Sequence[Times], hop: float = 0.0, blocked: float = 0.0
) -> float:
    """Return the seconds from the first cell to the end of the last.

    A table of many microbatches repeats itself, so two short ones tell how much each further round takes. A round takes
    no less than the work of the busiest submesh: a slow one may lag behind the others for longer than a short table is.
    """
    costs = [
        {
            covered: sum({"F": s.forward, "B": s.backward, "W": s.weights}[p] for p in covered)
            + blocked * len({*covered} & {"F", "B"})
            for covered in ("F", "B", "W", "BW", "FB", "FBW", "")
        }
        for s in stages
    ]

    def simulate(number: int) -> float:
        table, sources, phases = _cells(schedule, pp, len(stages) // pp, number)
        ends = run(table, sources.__getitem__, lambda cell: costs[cell.stage][phases[cell]], lambda source, cell: hop)
        return max(end for _, end in ends.values())

    first = _ROUNDS * pp + microbatches % pp
    if microbatches <= first + pp:
        return simulate(microbatches)
    one, two = simulate(first), simulate(first + pp)
    busiest = pp * max(row_seconds(schedules.get(schedule).placement(pp), stages, blocked))
    end = two + (microbatches - first - pp) / pp * max(two - one, busiest)
    return max(end, least_seconds(schedule, pp, microbatches, stages, hop, blocked))


def row_seconds(route: Sequence[int], stages: Sequence[Times], blocked: float = 0.0) -> list[float]:
    """Return the seconds in which each submesh is busy with a microbatch."""
    work = [0.0] * len(set(route))
    for stage, row in zip(stages, itertools.cycle(route), strict=False):
        work[row] += stage.total + 2 * blocked
    return work


def least_seconds(
    schedule: str, pp: int, microbatches: int, stages: Sequence[Times], hop: float = 0.0, blocked: float = 0.0
) -> float:
    """Return the seconds that no table of these stages can beat.

    A submesh waits for its first microbatch and runs all of them; then the last goes back to the first stage. Where the
    schedule splits the backward pass, weight gradients may be all that is left at the end.
    """
    route, splits = schedules.get(schedule).placement(pp), schedules.get(schedule).splits
    work = row_seconds(route, stages, blocked)
    longest = ahead = behind = 0.0
    entered: set[int] = set()
    for stage, row in zip(stages, itertools.cycle(route), strict=False):
        if row not in entered:
            entered.add(row)
            longest = max(longest, microbatches * work[row] + ahead + (0.0 if splits else behind))
        ahead += stage.forward + blocked + hop
        behind += stage.backward + stage.weights + blocked + hop
    return longest


@functools.lru_cache(maxsize=64)
def _cells(schedule: str, pp: int, chunks: int, microbatches: int) -> tuple[schedules.Table, Cells, Mapping[Any, str]]:
    """Return the table of a schedule, the cells that each cell needs, and the phases that it covers."""
    table = schedules.get(schedule).table(pp, chunks, microbatches, True)
    cells = {cell for row in table for cell in row}
    covers = map_covers((cell.stage, cell.phase) for cell in cells)
    sources = {cell: [s for s in schedules.needs(cell, pp * chunks) if s in cells] for cell in cells}
    return table, sources, {cell: covers[cell.stage, cell.phase] for cell in cells}

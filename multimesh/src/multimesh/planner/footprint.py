"""Bytes that a device holds at the peak of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multimesh import schedules
from multimesh.hardware.software import Stack
from multimesh.planner import activations, loop, stage_layers, traffic
from multimesh.planner.configuration import Configuration
from multimesh.planner.transformer import Transformer


@dataclass(frozen=True)
class Footprint:
    """Bytes of a device of a submesh."""

    # parameters, gradients, optimizer: held all the time
    parameters: float
    gradients: float
    optimizer: float
    activations: float  # of the microbatches in flight
    workspace: float  # of a layer that runs again, and the logits
    rest: float  # of the driver, libraries and buffers of collectives

    @property
    def total(self) -> float:
        """All bytes together."""
        return sum(vars(self).values())


def peak_bytes(model: Transformer, how: Configuration, software: Stack) -> tuple[Footprint, ...]:
    """Return the bytes of a device of each submesh at the peak."""
    if how.pp == 1:
        in_flight: tuple[int, ...] = (how.stages,)
    else:
        in_flight = loop.in_flight(how.schedule, how.pp, how.interleave, _few(how))
    return of_rows(model, how, software, dict(enumerate(in_flight)))


def of_rows(
    model: Transformer, how: Configuration, software: Stack, in_flight: Mapping[int, int]
) -> tuple[Footprint, ...]:
    """Return the bytes of a device of some submeshes, each with so many activations of stages in flight."""
    sizes = stage_layers.layers(model, how)
    route = schedules.get(how.schedule).placement(how.pp) if how.pp > 1 else (0,)
    own: dict[int, list[int]] = {row: [] for row in range(how.pp)}
    for stage, row in enumerate(stage_layers.placement(how, route)):
        own[row].append(stage)
    keeps = activations.residual_bytes(model, how, software)
    runs = activations.running(model, how, software)
    return tuple(_row(model, how, software, sizes, own[row], number * keeps, runs) for row, number in in_flight.items())


def _row(
    model: Transformer,
    how: Configuration,
    software: Stack,
    sizes: Sequence[int],
    own: Sequence[int],
    keeps: float,
    runs: float,
) -> Footprint:
    """Return the bytes of a device whose submesh has these stages, and keeps so many bytes of a layer."""
    last = how.stages - 1 in own
    layers = sum(sizes[stage] for stage in own)
    ends = (0 in own) + (last and not (model.tied and 0 in own))
    spread = traffic.shards(how)
    always, routed = _parameters(model, how, layers, 0 in own, last)
    always += ends * model.embedding_parameters / how.tp
    split = max(1.0, spread / how.ep) if how.ep > 1 else spread
    parameters = always / spread + routed / split
    state = always / how.state_shards
    state += routed / (how.expert_replicas if how.sharded != "none" else split)
    once = always + routed - parameters if how.gather_once else 0.0
    held, gathered = _ends(model, how, software, ends)
    head = gathered
    if last:
        head += software.logit_bytes * how.tokens * model.vocabulary / how.tp
        head += 2.0 * how.tokens * model.hidden if how.sequence_parallel and how.tp > 1 else 0.0  # its gathered input
    return Footprint(
        parameters * software.parameter_bytes + 2.0 * once,
        parameters * software.gradient_bytes + software.summed_bytes * once,
        state * software.optimizer_bytes,
        layers / len(own) * keeps,
        held + max(head, runs),
        software.reserved,
    )


def _ends(model: Transformer, how: Configuration, software: Stack, ends: int) -> tuple[float, float]:
    """Return the bytes of an embedding and a head that sharding gathers: all the time, and where the logits are."""
    one = 2.0 * model.embedding_parameters / how.tp
    if traffic.shards(how) == 1:
        return 0.0, 0.0
    if software.held_ends:
        return (1.0 if how.gather_once else 2.0) * ends * one, 0.0
    return 0.0, one


def _parameters(model: Transformer, how: Configuration, layers: int, first: bool, last: bool) -> tuple[float, float]:
    """Return the parameters of a device's layers that are not of routed experts, and those that are, without FSDP."""
    if not model.experts:
        return layers * model.dense_layer_parameters / how.tp, 0.0
    dense = min(layers, model.dense_layers) if first else 0
    sparse = layers - dense + (model.predicted if last else 0)
    always = dense * model.dense_layer_parameters + sparse * model.always_parameters
    return always / how.tp, sparse * model.expert_parameters / (how.ep * how.expert_tp)


def _few(how: Configuration) -> int:
    """Return the microbatches of a table that holds as much as that of all."""
    return min(how.microbatches, 4 * how.pp + how.microbatches % how.pp)

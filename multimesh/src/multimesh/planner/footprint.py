"""Bytes that a device holds at the peak of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multimesh import schedules
from multimesh.hardware.stacks import Stack
from multimesh.planner import loop, stage_layers
from multimesh.planner.configuration import Configuration
from multimesh.planner.transformer import Transformer

_SCORES = 5.0  # bytes that unfused attention keeps for a score: of softmax, of its dropout, and the mask


@dataclass(frozen=True)
class Footprint:
    """Bytes of a device of a submesh.

    Attributes
    ----------
    parameters, gradients, optimizer
        Held all the time.
    activations
        Of the microbatches in flight.
    workspace
        Of a layer that runs again, and the logits.
    rest
        Of the driver, libraries and buffers of collectives.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    rest: float

    @property
    def total(self) -> float:
        """Of all."""
        return sum(vars(self).values())


def held(model: Transformer, how: Configuration, software: Stack) -> tuple[Footprint, ...]:
    """Bytes of a device of each submesh at the peak."""
    if how.pp == 1:
        in_flight: tuple[int, ...] = (how.stages,)
    else:
        in_flight = loop.in_flight(how.schedule, how.pp, how.interleave, _few(how))
    return of_rows(model, how, software, dict(enumerate(in_flight)))


def of_rows(
    model: Transformer, how: Configuration, software: Stack, in_flight: Mapping[int, int]
) -> tuple[Footprint, ...]:
    """Bytes of a device of some submeshes, each with so many activations of stages in flight."""
    sizes = stage_layers.layers(model, how)
    route = schedules.get(how.schedule).placement(how.pp) if how.pp > 1 else (0,)
    own: dict[int, list[int]] = {row: [] for row in range(how.pp)}
    for stage, row in enumerate(stage_layers.placement(how, route)):
        own[row].append(stage)
    keeps = kept(model, how, software)
    whole = kept(model, how.changed(recompute="none"), software) if how.recompute in ("minimal", "full") else 0.0
    return tuple(
        _row(model, how, software, sizes, own[row], number * keeps, whole) for row, number in in_flight.items()
    )


def _row(
    model: Transformer,
    how: Configuration,
    software: Stack,
    sizes: Sequence[int],
    own: Sequence[int],
    keeps: float,
    whole: float,
) -> Footprint:
    """Bytes of a device whose submesh has these stages, and keeps so many bytes of microbatches of a layer."""
    layers = sum(sizes[stage] for stage in own)
    ends = (0 in own) + ((how.stages - 1 in own) and not (model.tied and 0 in own))
    parameters = (layers * model.held_parameters(how.ep) + ends * model.embedding_parameters) / how.tp / how.fsdp
    spread = parameters / (how.dp if how.sharded == "parameters" else 1)
    state = parameters * how.fsdp / how.state_shards
    logits = software.logit_bytes * how.tokens * model.vocabulary / how.tp if how.stages - 1 in own else 0.0
    return Footprint(
        spread * software.parameter_bytes,
        spread * software.gradient_bytes,
        state * software.optimizer_bytes,
        layers / len(own) * keeps,
        max(logits, whole),
        software.reserved,
    )


def _few(how: Configuration) -> int:
    """Microbatches of a table that holds as much as that of all."""
    return min(how.microbatches, 4 * how.pp + how.microbatches % how.pp)


def kept(model: Transformer, how: Configuration, software: Stack) -> float:
    """Bytes that a layer keeps of a microbatch for its backward pass."""
    spread = how.tp if how.sequence_parallel else 1
    if how.recompute == "full":
        return 2.0 * how.tokens * model.hidden / spread
    if how.recompute == "minimal":
        products = model.queries + 2 * model.keys + model.up * max(1, model.active)
        return 2.0 * how.tokens * (2 * model.hidden + products) / how.tp
    inner = 2 * model.queries + 2 * model.keys + (model.up + model.ffn) * max(1, model.active)
    found = 2.0 * how.tokens * (4 * model.hidden / spread + inner / how.tp) * software.kept
    if not software.fused_attention and how.recompute != "selective":
        found += _SCORES * how.tokens * how.sequence * model.heads / how.tp
    return found

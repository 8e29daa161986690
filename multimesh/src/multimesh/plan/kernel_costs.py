"""What the programs and transfers of a plan cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multimesh.core import checks
from multimesh.errors import UsageError
from multimesh.ir.flops import of_ops
from multimesh.plan.instructions import Instruction, PlanData
from multimesh.schedules.costs import PHASES, Key, StageCosts, cost

NOTE = "estimated: operations on each device, from shapes; transfers take no time"


@dataclass(frozen=True)
class Costs:
    """Time of every program of a plan, and of its transfers.

    Attributes
    ----------
    programs
        For each of the plan's kernels.
    transfers
        (from submesh, to submesh, bytes) to the time of such a transfer; others take ``transfer``.
    transfer
        Time of a transfer that ``transfers`` does not name.
    unit
        ``s``, or empty for relative times.
    note
        Where they are from.
    """

    programs: tuple[float, ...]
    transfers: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    transfer: float = 0.0
    unit: str = ""
    note: str = ""


def estimate(plan: PlanData) -> Costs:
    """Operations of every program of a plan on each of its devices."""
    return Costs(tuple(of_ops(k.ops) / plan.submeshes[k.submesh].size for k in plan.kernels), note=f"costs {NOTE}")


def costs_of(plan: PlanData, given: Mapping[Any, float]) -> Costs:
    """Costs of a plan's programs from a mapping.

    The first key that fits counts: (stage, phase), (task, phase), task, phase. A program that covers several phases
    costs their sum: B makes the weight gradients too unless the plan has programs for W, and the last stage's B runs
    its forward where `jit` joined the two. ``transfer`` is the time of each transfer, by default 0. Programs outside
    of microbatch loops are free unless their task is named.

    Raises
    ------
    UsageError
        For a key that nothing in the plan has, a phase without a cost, and what is no cost.
    """
    given = dict(checks.pairs("costs", given, "a mapping of a phase, task or stage to a time"))
    runs = {step.kernel: step for step in plan.instructions if step.kind == "RUN" and step.kernel is not None}
    covers = plan.covers
    known: dict[Key, None] = {"transfer": None}
    for step in runs.values():
        phases = covers.get((step.stage or 0, step.phase or ""), "") if step.phase else ""
        known |= dict.fromkeys([key for p in phases for key in _keys(step, p)])
        known[step.task] = None
    for key in given:
        if key not in known and key not in PHASES:
            names = ", ".join(sorted({repr(k) for k in known if isinstance(k, str) and k}))
            raise UsageError(f"costs: {key!r} is no phase, task or stage of this plan; it has {names}")
    times = {key: cost(value, repr(key)) for key, value in given.items()}

    def time(step: Instruction) -> float:
        if step.phase is None:
            return times.get(step.task, 0.0)
        phases = covers[step.stage or 0, step.phase]
        if step.task in times and not any(key in times for phase in phases for key in _keys(step, phase)[:2]):
            return times[step.task]
        total = 0.0
        for phase in phases:
            key = next((k for k in _keys(step, phase) if k in times), None)
            if key is None and phase == step.phase:
                raise UsageError(f"costs: none for {phase} of stage {step.stage} (task {step.task!r})")
            total += times[key] if key is not None else 0.0
        return total

    shown = ", ".join(f"{'.'.join(map(str, k)) if isinstance(k, tuple) else k} {v:g}" for k, v in times.items())
    programs = tuple(time(runs[k]) if k in runs else 0.0 for k in range(len(plan.kernels)))
    return Costs(programs, {}, times.get("transfer", 0.0), "", f"costs given: {shown}")


def _keys(step: Instruction, phase: str) -> tuple[Key, ...]:
    return ((step.stage or 0, phase), (step.task, phase), phase)


def stage_costs_of(plan: PlanData, costs: Costs, estimated: StageCosts) -> StageCosts:
    """Measured costs of the stages of a plan with one loop.

    The time of a program that covers several phases is shared out as they are estimated. A transfer between two stages
    is the longest of those in either direction; memory is as estimated.
    """
    times = [[0.0] * len(PHASES) for _ in estimated.times]
    hops = [0.0] * (len(times) - 1)
    made_by: dict[int, int] = {}  # slot to the stage that makes it
    sent: dict[int, tuple[int, float]] = {}  # slot to where what it holds was made, and what the transfer took
    for step in plan.instructions:
        transfer = plan.transfers[step.transfer] if step.kind == "SEND" and step.transfer is not None else None
        if transfer is not None:
            lasts = costs.transfers.get((transfer.source, transfer.target, plan.bytes_of(transfer)), costs.transfer)
            origin = next((made_by[slot] for slot in transfer.ins if slot in made_by), None)
            sent.update(dict.fromkeys(transfer.outs, (origin, lasts)) if origin is not None else {})
        if step.kind != "RUN" or step.stage is None or step.phase is None:
            continue
        made_by.update(dict.fromkeys(step.outs, step.stage))
        for origin, lasts in (sent[slot] for slot in step.ins if slot in sent):
            if abs(origin - step.stage) == 1:
                boundary = min(origin, step.stage)
                hops[boundary] = max(hops[boundary], lasts)
        covers = plan.covers[step.stage, step.phase]
        total = estimated.of(step.stage, covers)
        for phase in covers:
            share = estimated.of(step.stage, phase) / total if total else 1 / len(covers)
            times[step.stage][PHASES.index(phase)] = costs.programs[step.kernel or 0] * share
    measured = tuple((f, b, w) for f, b, w in times)
    note = costs.note.removeprefix("costs ")
    return StageCosts(measured, tuple(hops), estimated.activations, costs.unit, estimated.sizes, note, estimated.kept)

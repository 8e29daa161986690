"""The costs of the kernels and transfers of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multimesh.core import checks
from multimesh.errors import UsageError
from multimesh.ir.flops import count_flops
from multimesh.plan.instructions import PlanData, Run, Send
from multimesh.schedules import Cell
from multimesh.schedules.costs import ESTIMATED, PHASES, Key, StageCosts, cost
from multimesh.schedules.published import AHEAD


@dataclass(frozen=True)
class Costs:
    """The time of every kernel of a plan, and of its transfers."""

    programs: tuple[float, ...]  # for each of the plan's kernels
    # (from submesh, to submesh, bytes) to the time of such a transfer
    transfers: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    transfer: float = 0.0  # time of all other transfers
    unit: str = ""  # ``s``, or empty for relative times
    note: str = ""  # where the times are from


def estimate(plan: PlanData) -> Costs:
    """Return the floating-point operations of every kernel of a plan on each of its devices."""
    return Costs(
        tuple(count_flops(k.ops) / plan.submeshes[k.submesh].size for k in plan.kernels), note=f"costs {ESTIMATED}"
    )


def costs_of(plan: PlanData, costs: Mapping[Any, float]) -> Costs:
    """Return the costs of a plan's kernels, given as a mapping.

    The first key that fits counts: (stage, phase), (task, phase), task, phase. A kernel that covers several phases
    costs their sum: B makes the weight gradients too unless the plan has kernels for W, and the last stage's B runs
    its forward where `jit` joined the two. Where `jit` split a B because another process waits for it, a W without a
    cost of its own is part of B's. ``transfer`` is the time of each transfer, by default 0. A kernel outside
    of microbatch loops is free unless its task is named.

    Raises ``UsageError`` for a key that nothing in the plan has, a phase without a cost, and a value that is no cost.
    """
    costs = dict(checks.pairs("costs", costs, "a mapping of a phase, task or stage to a time"))
    runs, covers = plan.first_runs, plan.covers
    keys_of_plan: dict[Key, None] = {"transfer": None}
    for run in runs.values():
        if run.cell:
            phases = covers[run.cell.stage, run.cell.phase]
            keys_of_plan |= dict.fromkeys(key for p in phases for key in _keys(run.cell.stage, run.task, p))
        keys_of_plan[run.task] = None
    for key in costs:
        if key not in keys_of_plan and key not in PHASES:
            names = ", ".join(sorted({repr(k) for k in keys_of_plan if isinstance(k, str) and k}))
            raise UsageError(f"costs: {key!r} is no phase, task or stage of this plan; it has {names}")
    times = {key: cost(value, repr(key)) for key, value in costs.items()}

    def time(run: Run) -> float:
        if run.cell is None:
            return times.get(run.task, 0.0)
        stage, task = run.cell.stage, run.task
        keys = {phase: _keys(stage, task, phase) for phase in covers[stage, run.cell.phase]}
        if task in times and not any(key in times for fitting in keys.values() for key in fitting[:2]):
            return times[task]
        free = run.cell.phase == "W" and AHEAD.issuperset(plan.schedules)
        if run.cell.phase in keys and not free and not times.keys() & set(keys[run.cell.phase]):  # late ones are free
            raise UsageError(f"costs: none for {run.cell.phase} of stage {stage} (task {task!r})")
        return sum(next((times[key] for key in fitting if key in times), 0.0) for fitting in keys.values())

    shown = ", ".join(f"{'.'.join(map(str, k)) if isinstance(k, tuple) else k} {v:g}" for k, v in times.items())
    programs = tuple(time(runs[k]) if k in runs else 0.0 for k in range(len(plan.kernels)))
    return Costs(programs, {}, times.get("transfer", 0.0), "", f"costs given: {shown}")


def _keys(stage: int, task: str, phase: str) -> tuple[Key, ...]:
    return ((stage, phase), (task, phase), phase)


def stage_costs_of(plan: PlanData, costs: Costs, estimated: StageCosts) -> StageCosts:
    """Return measured costs of the stages of a plan with one loop.

    A kernel that covers several phases shares its time among them as they are estimated. The transfer between two
    stages is the longest one in either direction; memory is as estimated.
    """
    times = [[0.0] * len(PHASES) for _ in estimated.times]
    hops = [0.0] * (len(times) - 1)
    made_by: dict[int, int] = {}  # slot to the stage that fills it
    sent: dict[int, tuple[int, float]] = {}  # slot to the stage that its array comes from, and the time of the transfer
    for instruction in plan.instructions:
        match instruction:
            case Send(transfer=number):
                transfer = plan.transfers[number]
                lasts = costs.transfers.get((transfer.source, transfer.target, plan.bytes_of(transfer)), costs.transfer)
                origin = next((made_by[slot] for slot in transfer.ins if slot in made_by), None)
                sent.update(dict.fromkeys(transfer.outs, (origin, lasts)) if origin is not None else {})
            case Run(kernel=kernel, ins=ins, outs=outs, cell=Cell(own_phase, stage)):
                made_by.update(dict.fromkeys(outs, stage))
                for origin, lasts in (sent[slot] for slot in ins if slot in sent):
                    if abs(origin - stage) == 1:
                        boundary = min(origin, stage)
                        hops[boundary] = max(hops[boundary], lasts)
                covers = plan.covers[stage, own_phase]
                total = estimated.of(stage, covers)
                for phase in covers:
                    share = estimated.of(stage, phase) / total if total else 1 / len(covers)
                    times[stage][PHASES.index(phase)] = costs.programs[kernel] * share
    measured = tuple((f, b, w) for f, b, w in times)
    note = costs.note.removeprefix("costs ")
    return StageCosts(measured, tuple(hops), estimated.activations, costs.unit, estimated.sizes, note, estimated.kept)

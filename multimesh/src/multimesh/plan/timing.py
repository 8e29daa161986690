"""The times at which the kernels of a plan run on ideal submeshes."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

from multimesh.core import names
from multimesh.errors import UsageError
from multimesh.observe.timelines.spans import Hop, Levels, Span, levels
from multimesh.observe.timelines.timeline import Timeline
from multimesh.plan.instructions import Free, PlanData, Recv, Run, Send, Transfer
from multimesh.plan.kernel_costs import Costs, costs_of
from multimesh.schedules.costs import UNIT_COSTS
from multimesh.schedules.scheduler import run
from multimesh.schedules.simulate import sizes

if TYPE_CHECKING:
    from multimesh_planner import Device


def title(plan: PlanData) -> str:
    """Return the schedules and sizes of a plan."""
    cells = [(run.submesh, run.cell) for run in plan.runs if run.cell]
    numbers = {cell.microbatch for _, cell in cells}
    stages = {(submesh, cell.stage) for submesh, cell in cells if cell.phase == "B"}
    most = max(collections.Counter(submesh for submesh, _ in stages).values(), default=1)
    names = " and ".join(dict.fromkeys(plan.schedules)) or "plan"
    return sizes(names, len(plan.submeshes), most, len(numbers))


Times = Mapping[int, tuple[float, float]]


def simulate(plan: PlanData, costs: str | Device | Costs | Mapping[Any, float] = UNIT_COSTS) -> Timeline:
    """Run a plan on ideal submeshes; see `multimesh.Plan.simulate`.

    A submesh runs its kernels in order, each as soon as its inputs have arrived. A transfer starts when its arrays are
    made, wherever its SEND stands. Transfers between the same two submeshes follow each other; none keeps a submesh
    from computing.
    """
    if isinstance(costs, Costs):
        lasts = costs
    elif not isinstance(costs, str) and not is_dataclass(costs):
        lasts = costs_of(plan, costs)
    else:
        lasts = names.load_extra("multimesh_planner.plan_seconds", "Plan.simulate of a device").on_device(plan, costs)
    if len(lasts.programs) != len(plan.kernels):
        raise UsageError(
            f"costs: measured on a plan of {len(lasts.programs)} kernels, but this one has {len(plan.kernels)}; "
            "profile it as well"
        )
    return assemble(plan, _times(plan, lasts), f"forecast, {lasts.note}", lasts.unit)


def _times(plan: PlanData, costs: Costs) -> Times:
    """Return start and end of each RUN and SEND. Kernels of a submesh follow each other, and transfers of a lane."""
    rows: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    lasts: list[float] = [0.0] * len(plan.instructions)
    needs: dict[int, set[int]] = {}
    maker: dict[int, int] = {}  # slot to the instruction that last filled it
    for number, item in items_in_time(plan):
        needs[number] = {maker[slot] for slot in item.ins if slot in maker}
        if isinstance(item, Transfer):
            link = (item.source, item.target)
            lasts[number] = costs.transfers.get((*link, plan.bytes_of(item)), costs.transfer)
            rows[link].append(number)
        else:
            lasts[number] = costs.programs[item.kernel]
            rows[item.submesh,].append(number)
        maker.update(dict.fromkeys(item.outs, number))
    return run(list(rows.values()), needs.__getitem__, lasts.__getitem__)


def items_in_time(plan: PlanData) -> Iterator[tuple[int, Run | Transfer]]:
    """Yield each RUN, and the transfer of each SEND, with the number of the instruction: these take time."""
    for number, instruction in enumerate(plan.instructions):
        match instruction:
            case Run():
                yield number, instruction
            case Send():
                yield number, plan.transfers[instruction.transfer]


def assemble(plan: PlanData, times: Times, note: str, unit: str) -> Timeline:
    """Return the timeline of a plan from the start and end of each RUN and SEND, by number of the instruction.

    An array is alive from the start of the kernel or transfer that fills its slot to the end of the last one that
    reads it.
    """
    spans: list[Span] = []
    transfers: list[Hop] = []
    maker: dict[int, int] = {}  # slot to the span that makes it
    carrier: dict[int, int] = {}  # slot to the transfer that brings it
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for number, item in items_in_time(plan):
        if isinstance(item, Transfer):
            producer = max((maker[slot] for slot in item.ins if slot in maker), default=None)
            carrier.update(dict.fromkeys(item.outs, len(transfers)))
            transfers.append(Hop(item.source, item.target, *times[number], plan.bytes_of(item), producer))
        else:
            for hop in dict.fromkeys(carrier[slot] for slot in item.ins if slot in carrier):
                readers[hop].append(len(spans))
            maker.update(dict.fromkeys(item.outs, len(spans)))
            place = (item.cell.stage, item.cell.microbatch) if item.cell else (None, None)
            spans.append(Span(item.submesh, *times[number], plan.shown(item.cell), plan.name(item), *place))
    sends = tuple(replace(t, consumers=tuple(readers[n])) for n, t in enumerate(transfers))
    rows = tuple(f"submesh {i}" for i in range(len(plan.submeshes)))
    return Timeline(title(plan), note, unit, rows, tuple(spans), sends, _live(plan, times))


def _live(plan: PlanData, times: Times) -> tuple[Levels, ...]:
    """Return the bytes alive on each submesh over time."""
    until: dict[int, tuple[float, int]] = {}  # slot to the end of its last use, and the number of that instruction
    sent: dict[int, int] = {}  # transfer to its SEND
    changes: list[list[tuple[float, int, float]]] = [[] for _ in plan.submeshes]
    for number, (instruction, filled, emptied) in enumerate(plan.liveness()):
        if isinstance(instruction, Send):
            sent[instruction.transfer] = number
        at = sent[instruction.transfer] if isinstance(instruction, Recv) else number
        if not isinstance(instruction, Free):
            start, end = times[at]
            for slot in (*instruction.ins, *instruction.outs):
                until[slot] = max(until.get(slot, (0.0, 0)), (end, 2 * at + 1))
            changes[instruction.submesh] += ((start, 2 * at, plan.slots[slot].nbytes) for slot in filled)
        changes[instruction.submesh] += ((*until[slot], -plan.slots[slot].nbytes) for slot in emptied)
    return tuple(levels(part) for part in changes)

"""Forecasts: when the cells of a schedule's table, or the programs of a plan, run on ideal submeshes."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from multimesh.errors import UsageError
from multimesh.schedules import Cell, Table, needs
from multimesh.schedules.costs import UNIT_COSTS, Costs, StageCosts, costs_of, covered
from multimesh.schedules.scheduler import run
from multimesh.timelines.timeline import Hop, Levels, Span, Timeline, levels

if TYPE_CHECKING:
    from multimesh.plan.plan import Instruction, Plan, Transfer


def simulate(
    table: Table, costs: Mapping[str, float] | StageCosts = UNIT_COSTS, *, transfer: float = 0.0, title: str = ""
) -> Timeline:
    """Run a table on ideal submeshes.

    A submesh starts its next cell as soon as it is free and what the cell needs has arrived. A transfer starts when its
    cell ends, whenever the schedule issues it, and keeps no submesh from computing.

    Parameters
    ----------
    table
        For each submesh its cells in order.
    costs
        Time of F, B and W of every stage, or of each; where a table has no W, its B takes the time of both.
    transfer
        Time between the end of a cell and the arrival of its result on another submesh, of stages that cost the same.
    title
        Of the timeline.

    Returns
    -------
    Timeline
        Its ``live`` counts activations, or their memory where the costs have that: that of a stage and microbatch is
        alive from the start of F to the end of its last phase.

    Raises
    ------
    UsageError
        When cells wait for each other; names them.
    """
    place = {cell: row for row, cells in enumerate(table) for cell in cells}
    covers = covered((cell.stage, cell.phase) for cell in place)
    stages = 1 + max((cell.stage for cell in place), default=0)
    reads = {cell: [source for source in needs(cell, stages) if source in place] for cell in place}
    known = costs if isinstance(costs, StageCosts) else StageCosts.alike(costs, stages, transfer)

    def hop(source: Cell, cell: Cell) -> float:
        return known.hop(source.stage, cell.stage)

    times = run(table, reads.__getitem__, lambda cell: known.of(cell.stage, covers[cell.stage, cell.phase]), hop)
    if len(times) < len(place):
        waiting = (next((cell for cell in row if cell not in times), None) for row in table)
        stuck = ", ".join(str(cell) for cell in waiting if cell is not None)
        raise UsageError(f"the schedule deadlocks: {stuck} wait for what comes later")
    number = {cell: n for n, cell in enumerate(times)}
    spans = [Span(place[c], *times[c], c.phase, "", c.stage, c.microbatch) for c in times]
    transfers = []
    for cell, reader in number.items():
        for source in (source for source in reads[cell] if place[source] != place[cell]):
            sent = times[source][1]
            got = sent + hop(source, cell)
            transfers.append(Hop(place[source], place[cell], sent, got, None, number[source], (reader,)))
    rows = tuple(f"submesh {row}" for row in range(len(table)))
    several = any(len({cell.stage for cell in row}) > 1 for row in table)
    note = f"forecast with {_described(known, covers, costs is known)}"
    note += "; an activation is that of one stage" if several and not known.sizes else ""
    live = tuple(_activations([s for s in spans if s.row == row], known) for row in range(len(table)))
    unit = known.sizes or "activations"
    return Timeline(title, note, known.unit, rows, tuple(spans), tuple(transfers), live, unit)


def _described(costs: StageCosts, covers: Mapping[tuple[int, str], str], own: bool) -> str:
    if own:
        return costs.note or "the costs of each stage"
    names = sorted(set(covers.values()), key="FBW".find)
    parts = [f"{'+'.join(name)} {costs.of(0, name):g}" for name in names]
    return ", ".join([*parts, f"transfers {costs.hop(0, 1):g}"])


def _activations(spans: Sequence[Span], costs: StageCosts) -> Levels:
    """Memory of activations on a submesh."""
    last = {(span.stage, span.microbatch): order for order, span in enumerate(spans)}
    alive: dict[tuple[int | None, int | None], float] = {}
    changes = []
    for order, span in enumerate(spans):
        key, final = (span.stage, span.microbatch), spans[last[span.stage, span.microbatch]].phases
        by = costs.grows(span.stage or 0, span.phases, last=final if final == "W" else "B")
        if span.phases == "F":
            changes.append((span.start, 2 * order, by))
            alive[key] = by
        following = spans[order + 1] if order + 1 < len(spans) else None
        at_once = following is not None and (following.stage, following.microbatch, following.phases) == (*key, "W")
        if key in alive and (order == last[key] or (span.phases == "B" and not at_once)):
            left = 0.0 if order == last[key] else alive[key] + by
            changes.append((span.end, 2 * order + 1, left - alive[key]))
            alive[key] = left
    return levels(changes)


def title(plan: Plan) -> str:
    """Schedules and sizes of a plan."""
    numbers = {step.microbatch for step in plan.instructions if step.microbatch is not None}
    stages = {(step.submesh, step.stage) for step in plan.instructions if step.kind == "RUN" and step.phase == "B"}
    most = max(collections.Counter(submesh for submesh, _ in stages).values(), default=1)
    names = " and ".join(dict.fromkeys(plan.schedules)) or "plan"
    return sizes(names, len(plan.submeshes), most, len(numbers))


def sizes(name: str, submeshes: int, chunks: int, microbatches: int) -> str:
    """Title of a timeline: ``1f1b: 4 submeshes, 8 microbatches``."""
    parts = [f"{submeshes} submesh{'' if submeshes == 1 else 'es'}{f' of {chunks} stages' if chunks > 1 else ''}"]
    if microbatches:
        parts.append(f"{microbatches} microbatch{'' if microbatches == 1 else 'es'}")
    return f"{name}: {', '.join(parts)}"


def _span(plan: Plan, step: Instruction, start: float, end: float) -> Span:
    """Span of a RUN."""
    name = step.task or plan.kernels[step.kernel or 0].name
    return Span(step.submesh, start, end, plan.shown(step), name, step.stage, step.microbatch)


Times = Mapping[int, tuple[float, float]]


def forecast(plan: Plan, costs: Costs | Mapping[Any, float] = UNIT_COSTS) -> Timeline:
    """Run a plan on ideal submeshes; see `multimesh.Plan.forecast`.

    A submesh runs its programs in order, each as soon as what it reads has arrived. A transfer starts when its arrays
    are there, whenever it is issued; transfers between the same two submeshes follow each other, and none keeps a
    submesh from computing.
    """
    known = costs if isinstance(costs, Costs) else costs_of(plan, costs)
    if len(known.programs) != len(plan.kernels):
        raise UsageError(
            f"costs: measured on a plan of {len(known.programs)} programs, but this one has {len(plan.kernels)}; "
            "profile it as well"
        )
    return assembled(plan, _times(plan, known), f"forecast, {known.note}", known.unit)


def _times(plan: Plan, costs: Costs) -> Times:
    """Programs of a submesh follow each other, and so do transfers between the same two submeshes."""
    rows: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    lasts: list[float] = [0.0] * len(plan.instructions)
    needs: dict[int, set[int]] = {}
    maker: dict[int, int] = {}  # slot to what last filled it
    for number, step, transfer in timed(plan):
        needs[number] = {maker[slot] for slot in step.ins if slot in maker}
        if transfer is not None:
            link = (transfer.source, transfer.target)
            lasts[number] = costs.transfers.get((*link, plan.bytes_of(transfer)), costs.transfer)
            rows[link].append(number)
        else:
            lasts[number] = costs.programs[step.kernel or 0]
            rows[step.submesh,].append(number)
        maker.update(dict.fromkeys(step.outs if transfer is None else transfer.outs, number))
    return run(list(rows.values()), needs.__getitem__, lasts.__getitem__)


def timed(plan: Plan) -> Iterator[tuple[int, Instruction, Transfer | None]]:
    """Yield what takes time, with its number: each RUN, and each SEND with its transfer."""
    for number, step in enumerate(plan.instructions):
        if step.kind == "RUN":
            yield number, step, None
        elif step.kind == "SEND":
            yield number, step, plan.transfers[step.transfer or 0]


def assembled(plan: Plan, times: Times, note: str, unit: str) -> Timeline:
    """Timeline of a plan from the start and end of each RUN and SEND, by number of the instruction.

    An array is alive from the start of what makes or receives it to the end of the last that reads it.
    """
    spans: list[Span] = []
    transfers: list[Hop] = []
    maker: dict[int, int] = {}  # slot to the span that makes it
    carrier: dict[int, int] = {}  # slot to the transfer that brings it
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for number, step, transfer in timed(plan):
        if transfer is not None:
            made = max((maker[slot] for slot in transfer.ins if slot in maker), default=None)
            carrier.update(dict.fromkeys(transfer.outs, len(transfers)))
            ends = (transfer.source, transfer.target)
            transfers.append(Hop(*ends, *times[number], plan.bytes_of(transfer), made))
        else:
            for hop in dict.fromkeys(carrier[slot] for slot in step.ins if slot in carrier):
                readers[hop].append(len(spans))
            maker.update(dict.fromkeys(step.outs, len(spans)))
            spans.append(_span(plan, step, *times[number]))
    sends = tuple(replace(t, consumers=tuple(readers[n])) for n, t in enumerate(transfers))
    rows = tuple(f"submesh {i}" for i in range(len(plan.submeshes)))
    return Timeline(title(plan), note, unit, rows, tuple(spans), sends, _live(plan, times))


def _live(plan: Plan, times: Times) -> tuple[Levels, ...]:
    given = {slot for _, slot in (*plan.inputs, *plan.constants)}
    until: dict[int, tuple[float, int]] = {}  # slot to the end of its last use, and the number of that
    alive: set[int] = set()
    changes: list[list[tuple[float, int, float]]] = [[] for _ in plan.submeshes]
    for number, step, transfer in timed(plan):
        start, end = times[number]
        made = step.outs if transfer is None else transfer.outs
        for slot in (*step.ins, *made):
            until[slot] = max(until.get(slot, (0.0, 0)), (end, 2 * number + 1))
        for slot in set(made) - alive - given:
            alive.add(slot)
            changes[plan.slots[slot].submesh].append((start, 2 * number, plan.slots[slot].nbytes))
    for step in plan.instructions:
        for slot in alive.intersection(step.ins) if step.kind == "FREE" else ():
            changes[step.submesh].append((*until[slot], -plan.slots[slot].nbytes))
    return tuple(levels(part) for part in changes)

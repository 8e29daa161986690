"""The times at which the cells of a table run, on ideal submeshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from multimesh.observe.timelines.spans import Hop, Levels, Span, levels
from multimesh.observe.timelines.timeline import Timeline
from multimesh.schedules.costs import UNIT_COSTS, StageCosts, map_covers
from multimesh.schedules.scheduler import needs, run
from multimesh.schedules.table import Cell, Table


def simulate(
    table: Table, costs: Mapping[str, float] | StageCosts = UNIT_COSTS, *, transfer: float = 0.0, title: str = ""
) -> Timeline:
    """Run a valid table on ideal submeshes.

    A transfer starts when its cell ends, whenever the schedule issues it. It keeps no submesh from computing.
    ``costs`` are the time of F, B and W of every stage, or of each; if all stages cost the same, ``transfer`` is that
    of a transfer. ``live`` of the result counts activations, or their memory if the costs have it: that of a stage and
    microbatch is alive from the start of F to the end of its last phase.
    """
    place = {cell: row for row, cells in enumerate(table) for cell in cells}
    covers = map_covers((cell.stage, cell.phase) for cell in place)
    stages = 1 + max((cell.stage for cell in place), default=0)
    reads = {cell: [source for source in needs(cell, stages) if source in place] for cell in place}
    stage_costs = costs if isinstance(costs, StageCosts) else StageCosts.alike(costs, stages, transfer)

    def hop(source: Cell, cell: Cell) -> float:
        return stage_costs.hop(source.stage, cell.stage)

    times = run(table, reads.__getitem__, lambda cell: stage_costs.of(cell.stage, covers[cell.stage, cell.phase]), hop)
    number = {cell: n for n, cell in enumerate(times)}
    spans = [Span(place[c], *times[c], c.phase, "", c.stage, c.microbatch) for c in times]
    transfers = []
    for cell, reader in number.items():
        for source in (source for source in reads[cell] if place[source] != place[cell]):
            sent = times[source][1]
            arrival = sent + hop(source, cell)
            transfers.append(Hop(place[source], place[cell], sent, arrival, None, number[source], (reader,)))
    rows = tuple(f"submesh {row}" for row in range(len(table)))
    several = any(len({cell.stage for cell in row}) > 1 for row in table)
    note = f"forecast with {_describe(stage_costs, covers, costs is stage_costs)}"
    note += "; an activation is that of one stage" if several and not stage_costs.sizes else ""
    live = tuple(_activations([s for s in spans if s.row == row], stage_costs) for row in range(len(table)))
    unit = stage_costs.sizes or "activations"
    return Timeline(title, note, stage_costs.unit, rows, tuple(spans), tuple(transfers), live, unit)


def _describe(costs: StageCosts, covers: Mapping[tuple[int, str], str], by_stage: bool) -> str:
    if by_stage:
        return costs.note or "the costs of each stage"
    names = sorted(set(covers.values()), key="FBW".find)
    parts = [f"{'+'.join(name)} {costs.of(0, name):g}" for name in names]
    return ", ".join([*parts, f"transfers {costs.hop(0, 1):g}"])


def _activations(spans: Sequence[Span], costs: StageCosts) -> Levels:
    """Return the memory of activations on a submesh over time."""
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
            remaining = 0.0 if order == last[key] else alive[key] + by
            changes.append((span.end, 2 * order + 1, remaining - alive[key]))
            alive[key] = remaining
    return levels(changes)


def sizes(name: str, submeshes: int, chunks: int, microbatches: int) -> str:
    """Return the title of a timeline: ``1f1b: 4 submeshes, 8 microbatches``."""
    parts = [f"{submeshes} submesh{'' if submeshes == 1 else 'es'}{f' of {chunks} stages' if chunks > 1 else ''}"]
    if microbatches:
        parts.append(f"{microbatches} microbatch{'' if microbatches == 1 else 'es'}")
    return f"{name}: {', '.join(parts)}"

"""From a placed program to parts in order: straight segments, and loops with their fragments as a schedule has them."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multimesh import ir
from multimesh.errors import UsageError
from multimesh.marking.contexts import Options
from multimesh.passes.cutting.fragment import Fragment, fragment
from multimesh.passes.cutting.order import LoopOrder, order
from multimesh.passes.cutting.recompute import send_less
from multimesh.passes.cutting.stages import Pipeline, stages
from multimesh.passes.cutting.unfuse import unfused, unfused_order
from multimesh.passes.placing.route import in_order
from multimesh.passes.reading.repeats import cut_repeats
from multimesh.schedules import Auto


@dataclass(frozen=True, eq=False)
class Segment:
    """Straight code between loops; ``results`` are read outside of it."""

    fragments: tuple[Fragment, ...]
    results: frozenset[ir.Value]

    def __str__(self) -> str:
        return "\n".join(map(str, self.fragments))


@dataclass(frozen=True, eq=False)
class CutLoop:
    """A loop cut into the stages of a pipeline; ``results`` are read outside of its body."""

    loop: ir.Loop
    pipeline: Pipeline
    results: frozenset[ir.Value]

    def __str__(self) -> str:
        return "\n".join([f"loop x{self.loop.mark.count}:", *map(str, self.pipeline.fragments)])


@dataclass(frozen=True, eq=False)
class OrderedLoop:
    """A loop with its fragments in the order of its schedule."""

    loop: ir.Loop
    order: LoopOrder

    def __str__(self) -> str:
        stages = self.order.stages
        cells = " ".join(f"{stages[s].phase}{stages[s].number}.{k}" for s, k in self.order.cells)
        return "\n".join([cells, *(str(s.fragment) for s in stages)])


def cut(program: ir.Program, options: Options | None = None) -> tuple[Segment | CutLoop, ...]:
    """Cut a placed program into straight segments and loops, and these into fragments."""
    options = options or Options()
    loops = [item for item in program.items if isinstance(item, ir.Loop)]
    epochs = _epochs(program)
    rows = {v for loop in loops for v in loop.linked.values()}
    read_at: dict[ir.Value, set[int]] = collections.defaultdict(set)
    for item, epoch in zip(program.items, epochs, strict=True):
        if isinstance(item, ir.Op):
            for v in (*item.reads, *item.after):
                read_at[v].add(epoch)
    outside = {v for loop in loops for v in loop.reads} | set(ir.values(program.outputs))
    parts: list[Segment | CutLoop] = []
    for epoch in range(len(loops) + 1):
        ops = [i for i, e in zip(program.items, epochs, strict=True) if e == epoch and isinstance(i, ir.Op)]
        results = {o for op in ops for o in op.outs if o in outside or read_at[o] - {epoch}}
        parts.append(Segment(fragment(ops, results, phased=False), frozenset(results)))
        if epoch < len(loops):
            parts.append(_cut(program, loops[epoch], rows, options))
    return tuple(parts)


def _cut(program: ir.Program, loop: ir.Loop, rows: set[ir.Value], options: Options) -> CutLoop:
    results = set(ir.values(loop.leaves))
    results |= {o for op in loop.ops for o in op.outs if o in rows}
    ops = cut_repeats(program, loop)
    ops = send_less(ops) if options.enable_recomputation else ops
    fragments = fragment(ops, results, phased=True)
    schedule, along = loop.mark.schedule, in_order(loop.ops)
    pipeline = stages(fragments, results, schedule, along)
    if isinstance(schedule, Auto) and not schedule.route and len(pipeline.submeshes) > 1:
        turned = _turned(schedule, len(pipeline.submeshes))
        shape = stages(fragments, results, turned, along)
        if shape.complete and (shape.chunks < pipeline.chunks or not pipeline.complete):
            loop, pipeline = replace(loop, mark=replace(loop.mark, schedule=turned)), shape
    return CutLoop(loop, pipeline, frozenset(results))


def _turned(auto: Auto, submeshes: int) -> Auto:
    """For a loop whose tasks go down the submeshes and come back up."""
    return replace(auto, route=(*range(submeshes), *reversed(range(submeshes))))


def arrange(parts: Sequence[Segment | CutLoop], options: Options | None = None) -> tuple[Segment | OrderedLoop, ...]:
    """Order each loop by its schedule."""
    options = options or Options()
    return tuple(_segment(part, options) if isinstance(part, Segment) else _ordered(part, options) for part in parts)


def _segment(part: Segment, options: Options) -> Segment:
    straight = part.fragments if options.fuse_segments else unfused(part.fragments)
    return Segment(straight, part.results)


def _ordered(part: CutLoop, options: Options) -> OrderedLoop:
    ordered = order(part.pipeline, part.loop.mark, set(part.results), recompute=options.enable_recomputation)
    made = OrderedLoop(part.loop, ordered if options.fuse_loops else unfused_order(ordered))
    _check_states(made)
    return made


def _check_states(part: OrderedLoop) -> None:
    """Refuse an order in which a cell reads a state before the microbatch before it has left one."""
    loop, stages = part.loop, part.order.stages
    at = {cell: n for n, cell in enumerate(part.order.cells)}
    for state, carry in loop.carries.items():
        maker = next(i for i, s in enumerate(stages) if carry.leaf in s.fragment.made)
        for reader, stage in enumerate(stages):
            late = [k for k in range(1, loop.mark.count) if at[maker, k - 1] >= at[reader, k]]
            if state in stage.fragment.ins and late:
                made, read = (f"{s.phase}{s.number} ({s.fragment.task})" for s in (stages[maker], stage))
                raise UsageError(
                    f"{loop.mark.where}: {loop.mark.schedule} runs {read} of microbatch {late[0]}, which reads the "
                    f"state in carry=, before {made} of microbatch {late[0] - 1} has updated it; update the state in "
                    "the stage and phase that first reads it, or choose another schedule"
                )


def _epochs(program: ir.Program) -> list[int]:
    """For each item the number of loops it must come after; what needs none waits for its first reader."""
    epoch_of: dict[ir.Value, int] = {}
    epochs: list[int] = []
    loops = 0
    for item in program.items:
        epoch = max((epoch_of.get(v, 0) for v in item.reads), default=0)
        if isinstance(item, ir.Loop):
            loops += 1
            epoch = loops
        epochs.append(epoch)
        epoch_of.update(dict.fromkeys(item.outs, epoch))
    first_read: dict[ir.Value, int] = {}
    for i in reversed(range(len(program.items))):
        item = program.items[i]
        late = min((first_read[o] for o in item.outs if o in first_read), default=None)
        if isinstance(item, ir.Op) and epochs[i] == 0 and late is not None and not item.effects:
            epochs[i] = late
        at = epochs[i] - 1 if isinstance(item, ir.Loop) else epochs[i]
        for v in (*item.reads, *(item.after if isinstance(item, ir.Op) else ())):
            first_read[v] = min(first_read.get(v, at), at)
    return epochs

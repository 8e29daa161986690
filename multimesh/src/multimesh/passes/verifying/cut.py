"""Rules of a program that is cut into parts: segments and loops of fragments, before and after their order is known."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

from multimesh import ir
from multimesh.core.submesh import describe
from multimesh.passes.cutting.parts import Fragment, Pipeline, Segment
from multimesh.passes.placing.note_routes import position
from multimesh.passes.placing.owners import find_task_inputs
from multimesh.passes.verifying.faults import Fault, in_order, show, twice

Part = Segment | Pipeline
Rule = Callable[[Sequence[Part]], Iterator[Fault]]


def on_one_submesh(parts: Sequence[Part]) -> Iterator[Fault]:
    """Check that the operations of a fragment run on its submesh."""
    for fragment in _all(parts):
        for op in fragment.ops:
            if op.mesh != fragment.mesh:
                yield Fault(f"{op} is in a fragment on {describe(fragment.mesh)}", op.source)


def fragments_are_assigned_once(parts: Sequence[Part]) -> Iterator[Fault]:
    """Check that no value is made by two fragments, or twice in one."""
    return twice((op.outs, op.source) for fragment in _all(parts) for op in fragment.ops)


def operations_are_in_order(parts: Sequence[Part]) -> Iterator[Fault]:
    """Check that an operation of a fragment comes after its producers in it."""
    for fragment in _all(parts):
        values = fragment.values
        inputs = {v for op in fragment.ops for v in op.needs if v not in values}
        yield from in_order(fragment.ops, inputs, "in a fragment")


def interfaces_are_complete(parts: Sequence[Part]) -> Iterator[Fault]:
    """Check that a fragment lists all values that it uses and does not make, and outputs only values it makes."""
    for fragment in _all(parts):
        values = fragment.values
        reads = {v: op for op in fragment.ops for v in op.reads if v not in values}
        for v in reads.keys() - set(fragment.ins):
            yield Fault(f"a fragment of {_who(fragment)} reads {show(v)}, which it is not given", reads[v].source)
        for v in set(fragment.outs) - values:
            yield Fault(f"a fragment of {_who(fragment)} gives {show(v)}, which it does not make", _source(fragment))


def reads_are_given(parts: Sequence[Part]) -> Iterator[Fault]:
    """Check that a fragment reads values that earlier fragments give."""
    maker = {o: fragment for fragment in _all(parts) for o in fragment.values}
    outs = {v for fragment in _all(parts) for v in fragment.outs}
    values: set[ir.Value] = set()
    for fragment in _all(parts):
        for v in fragment.ins:
            if v in maker and v not in outs:
                yield Fault(f"{_who(fragment)} reads {show(v)}, which {_who(maker[v])} keeps", _source(fragment))
            elif v in maker and v not in values:
                yield Fault(f"{_who(fragment)} reads {show(v)} before {_who(maker[v])} has made it", _source(fragment))
        values |= fragment.values


def leaves_are_given(parts: Sequence[Part]) -> Iterator[Fault]:
    """Check that every sum, stack and carry of an iteration is given by one of its fragments."""
    for part in parts:
        if not isinstance(part, Segment):
            outs = {v for fragment in _fragments(part) for v in fragment.outs}
            for leaf in part.loop.leaves:
                if leaf not in outs:
                    yield Fault(f"no fragment gives {leaf}, a result of an iteration", part.loop.mark.where)


def stages_read_earlier_ones(parts: Sequence[Part]) -> Iterator[Fault]:
    """Check that forward stages read from earlier stages, backward ones from later ones, and none late values."""
    for part in parts:
        if not _numbered(part):
            continue
        maker = {o: f for f in part.fragments for o in f.values}
        for f in part.fragments:
            for v in f.needs:
                if v in maker and _is_later(maker[v], f):
                    other = maker[v]
                    yield Fault(f"{f.phase}{f.stage} reads {show(v)} of {other.phase}{other.stage}", _source(f))


def _is_later(maker: Fragment, reader: Fragment) -> bool:
    """Return whether a fragment comes after a reader in the order of a microbatch: F, then B from behind, then L."""
    if maker.phase == reader.phase and maker.phase in ("F", "B"):
        return ((maker.stage or 0) - (reader.stage or 0)) * (1 if maker.phase == "F" else -1) > 0
    return (maker.phase, reader.phase) == ("B", "F") or (maker.phase == "L" and reader.phase != "L")


def tasks_decide_the_stages(parts: Sequence[Part]) -> Iterator[Fault]:
    """Check that operations outside tasks add no turn of a microbatch along the pipeline.

    One that no task waits for may come back: gradients that are clipped by their norm over all stages go home again.
    """
    for part in parts:
        if not _numbered(part):
            continue
        meshes = part.submeshes
        route = [meshes[rank] for rank in part.loop.mark.schedule.placement(len(meshes))]
        leading = find_task_inputs(op for f in part.fragments for op in f.ops)
        for phase, way in (("F", route), ("B", route[::-1])):
            ops = [op for f in part.fragments if f.phase == phase for op in f.ops]
            tasks = {op for op in ops if op.task is not None}
            needed, _ = _rounds(ops, way, tasks)
            rounds, last = _rounds(ops, way, tasks | {op for op in ops if not leading.isdisjoint(op.outs)})
            if last is not None and rounds > max(needed, 1):
                yield Fault(
                    f"{last.prim.name} outside tasks makes {show(last.outs[0])} so late that a microbatch goes "
                    f"through the {len(meshes)} submeshes {rounds} times, where its tasks do so {needed} times",
                    last.source,
                )


def _rounds(ops: Sequence[ir.Op], way: Sequence[object], fixed: set[ir.Op]) -> tuple[int, ir.Op | None]:
    """Return how often ``fixed`` operations take a microbatch along the route, and the last unmarked one of them."""
    at: dict[ir.Value, int] = {}
    end = -1
    last = None
    for op in ops:
        place = max((at[v] for v in op.needs if v in at), default=0)
        if op in fixed:
            place = position(way, op.mesh, place)
            end = max(end, place)
            last = op if op.task is None else last
        at.update(dict.fromkeys(op.outs, place))
    return end // len(way) + 1, last


def cells_run_once(parts: Sequence[Part]) -> Iterator[Fault]:
    """Check that an ordered loop runs each of its fragments once for each microbatch."""
    for part in parts:
        if isinstance(part, Pipeline) and part.cells:
            times = collections.Counter(part.cells)
            for n, f in enumerate(part.fragments):
                for k in range(part.loop.mark.count):
                    if times.pop((n, k), 0) != 1:
                        yield Fault(f"{f.phase}{f.stage} does not run once for microbatch {k}")
            yield from (Fault(f"a cell {cell} of no fragment or microbatch") for cell in times)


def cells_run_after_their_inputs(parts: Sequence[Part]) -> Iterator[Fault]:
    """Check that a cell comes after the cells of its microbatch whose values it uses."""
    for part in parts:
        if not isinstance(part, Pipeline):
            continue
        maker = {o: n for n, f in enumerate(part.fragments) for o in f.values}
        done: set[tuple[int, int]] = set()
        for n, k in part.cells:
            done.add((n, k))
            f = part.fragments[n]
            for v in f.needs:
                if v in maker and (maker[v], k) not in done:
                    early, late = (f"{fragment.phase}{fragment.stage}" for fragment in (f, part.fragments[maker[v]]))
                    yield Fault(f"{early} of microbatch {k} runs before {late}, which makes {show(v)}", _source(f))


RULES: tuple[Rule, ...] = (
    on_one_submesh,
    fragments_are_assigned_once,
    operations_are_in_order,
    interfaces_are_complete,
    reads_are_given,
    leaves_are_given,
    stages_read_earlier_ones,
    tasks_decide_the_stages,
    cells_run_once,
    cells_run_after_their_inputs,
)


def _numbered(part: Part) -> TypeGuard[Pipeline]:
    """Return whether a part is a loop whose stages are numbered, and not yet split, joined or ordered."""
    return isinstance(part, Pipeline) and bool(part.submeshes) and not part.table


def _fragments(part: Part) -> tuple[Fragment, ...]:
    """Return the fragments of a part, in the order in which data goes through them."""
    if isinstance(part, Segment) or not part.cells:
        return part.fragments
    first = {cell: n for n, cell in reversed([*enumerate(part.cells)])}
    order = sorted(range(len(part.fragments)), key=lambda n: first.get((n, 0), 0))
    return tuple(part.fragments[n] for n in order)


def _all(parts: Sequence[Part]) -> Iterator[Fragment]:
    return (fragment for part in parts for fragment in _fragments(part))


def _who(fragment: Fragment) -> str:
    stage = "" if fragment.stage is None else f"stage {fragment.phase}{fragment.stage} of "
    return f"{stage}{fragment.task or 'what is outside tasks'}"


def _source(fragment: Fragment) -> object:
    return next((op.source for op in fragment.ops), None)

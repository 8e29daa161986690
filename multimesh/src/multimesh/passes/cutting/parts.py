"""Cuts a placed program into its parts until planning: straight segments, and pipelines, both of fragments."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core.grouping import grouped
from multimesh.ir import graph
from multimesh.passes.cutting.fragment import Fragment, fragment
from multimesh.schedules import Choice, Table


@dataclass(frozen=True, eq=False)
class Segment:
    """Straight code between loops; ``results`` are read outside of it."""

    fragments: tuple[Fragment, ...]
    results: frozenset[ir.Value]

    def __str__(self) -> str:
        return "\n".join(map(str, self.fragments))


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A loop, and what the passes have made of it so far.

    From the pass ``stages`` on each fragment has a stage. Those of phase L are late: no table has them, and they run
    when what they read is there. Where the schedule has fronts, a transfer is issued ``ahead`` fronts before the cell
    that reads it, else as soon as the value is made.
    """

    loop: ir.Loop
    fragments: tuple[Fragment, ...]
    results: frozenset[ir.Value]  # values of an iteration that are read outside of it
    submeshes: tuple[Mesh, ...] = ()  # from `stages` on, in the order of the stages
    chunks: int = 1  # stages on each of them
    table: Table = ()  # from `table` on: for each submesh its cells in order
    cells: tuple[tuple[int, int], ...] = ()  # from `order` on: (index of a fragment, microbatch) as dispatched
    fronts: tuple[int, ...] | None = None  # of each cell
    ahead: int = 0
    choice: Choice | None = None  # the tables that `auto` chose from

    @property
    def stages(self) -> int:
        """Number of stages that have a fragment."""
        return len({part.stage for part in self.fragments})

    @property
    def complete(self) -> bool:
        """Whether every stage has a fragment."""
        return self.stages == len(self.submeshes) * self.chunks

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        """Submeshes, stages on each, microbatches, and whether there is a backward pass: what a schedule asks for."""
        backward = any(part.phase == "B" for part in self.fragments)
        return len(self.submeshes), self.chunks, self.loop.mark.count, backward

    def issue(self, n: int, value: ir.Value, mesh: Mesh) -> int:
        """Number of the cell before which a value that cell ``n`` makes is sent to a submesh; mostly ``n + 1``."""
        if self.fronts is None:
            return n + 1
        readers = [i for i, part in enumerate(self.fragments) if part.mesh == mesh and value in part.ins]
        first = min((self._front[i, self.cells[n][1]] for i in readers), default=0)
        due = max(first - self.ahead, self.fronts[n])
        return n + 1 if due == self.fronts[n] else bisect.bisect_left(self.fronts, due)

    @functools.cached_property
    def _front(self) -> dict[tuple[int, int], int]:
        return dict(zip(self.cells, self.fronts or (), strict=True))

    def __str__(self) -> str:
        cells = (f"{self.fragments[n].phase}{self.fragments[n].stage}.{k}" for n, k in self.cells)
        return "\n".join([" ".join(cells) or f"loop x{self.loop.mark.count}:", *map(str, self.fragments)])


@dataclass(frozen=True, eq=False)
class Parts:
    """A placed program, cut."""

    program: ir.Program
    parts: tuple[Segment | Pipeline, ...]

    def each_pipeline(self, change: Callable[[Pipeline], Pipeline]) -> Parts:
        """The parts with every pipeline changed."""
        return replace(self, parts=tuple(change(p) if isinstance(p, Pipeline) else p for p in self.parts))

    def __str__(self) -> str:
        return "\n\n".join(filter(None, map(str, self.parts)))


def cut(program: ir.Program) -> Parts:
    """Cut a placed program into straight segments and loops, and these into fragments."""
    epochs = _epochs(program)
    rows = program.linked
    straight = [(i, e) for i, e in zip(program.items, epochs, strict=True) if isinstance(i, ir.Op)]
    read_at = grouped((v, epoch) for op, epoch in straight for v in op.needs)
    outside = {v for loop in program.loops for v in loop.reads} | set(ir.values(program.outputs))

    def segment(epoch: int) -> Segment:
        ops = [op for op, e in straight if e == epoch]
        results = {o for op in ops for o in op.outs if o in outside or {*read_at[o]} - {epoch}}
        return Segment(fragment(ops, results, phased=False), frozenset(results))

    parts: list[Segment | Pipeline] = [segment(0)]
    for number, loop in enumerate(program.loops):
        results = {*ir.values(loop.leaves), *(o for op in loop.ops for o in op.outs if o in rows)}
        parts.append(Pipeline(loop, fragment(loop.ops, results, phased=True), frozenset(results)))
        parts.append(segment(number + 1))
    return Parts(program, tuple(parts))


def _epochs(program: ir.Program) -> list[int]:
    """For each operation the number of loops it must come after; what needs none waits for its first reader."""
    epoch_of: dict[ir.Value, int] = {}
    chosen: list[int | None] = []
    loops = 0
    for item in program.items:
        epoch = max((epoch_of.get(v, 0) for v in item.reads), default=0)
        if isinstance(item, ir.Loop):
            chosen.append(loops)  # what only it reads comes before it
            loops += 1
            epoch = loops
        else:
            chosen.append(epoch if epoch or item.effects else None)
        epoch_of.update(dict.fromkeys(item.outs, epoch))
    return graph.with_first_reader(program.items, chosen, 0)

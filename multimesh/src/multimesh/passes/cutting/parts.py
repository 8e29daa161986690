"""The parts of a placed program until planning: straight segments, and pipelines, both of fragments."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from multimesh import ir
from multimesh.schedules.table import Table

if TYPE_CHECKING:
    from multimesh.schedules.choose import Choice


@dataclass(frozen=True, eq=False)
class Fragment:
    """One kernel of a submesh. In a microbatch loop it has a ``phase``, F, B or W, and the number of its ``stage``."""

    mesh: Mesh
    phase: str | None
    level: int
    ops: tuple[ir.Op, ...]
    ins: tuple[ir.Value, ...] = ()
    outs: tuple[ir.Value, ...] = ()
    stage: int | None = None

    @functools.cached_property
    def task(self) -> str:
        """The names of the tasks of its operations, in order."""
        return "+".join(dict.fromkeys(op.task.name for op in self.ops if op.task is not None))

    @functools.cached_property
    def values(self) -> set[ir.Value]:
        """The values that its operations produce."""
        return {o for op in self.ops for o in op.outs}

    @property
    def needs(self) -> Iterator[ir.Value]:
        """The values that must exist before this fragment runs."""
        return itertools.chain(self.ins, (v for op in self.ops for v in op.after))

    def __str__(self) -> str:
        head = f"{self.phase or '-'} level {self.level} {self.task or 'unmarked'} @{self.mesh.devices.flat[0]}"
        names = f"({' '.join(map(str, self.ins))}) -> ({' '.join(map(str, self.outs))})"
        return "\n".join([f"{head} {names}", *(f"  {op}" for op in self.ops)])


@dataclass(frozen=True, eq=False)
class Segment:
    """Operations outside of microbatch loops. Their ``results`` are used elsewhere."""

    fragments: tuple[Fragment, ...]
    results: frozenset[ir.Value]

    def __str__(self) -> str:
        return "\n".join(map(str, self.fragments))


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A microbatch loop cut into fragments, with the stages, table and order that passes have added so far.

    From the pass ``stages`` on each fragment has a stage. Those of phase L are late: no table has them, and they run
    when what they read is there. Where the schedule has fronts, a transfer is issued ``ahead`` fronts before the cell
    that reads it, else as soon as the value is made.
    """

    loop: ir.Loop
    fragments: tuple[Fragment, ...]
    results: frozenset[ir.Value]  # values of an iteration that are read outside of it
    submeshes: tuple[Mesh, ...] = ()  # from `stages` on, in the order of the stages
    chunks: int = 1  # stages on each of them
    table: Table = ()  # from `tables` on: for each submesh its cells in order
    cells: tuple[tuple[int, int], ...] = ()  # from `order` on: (index of a fragment, microbatch) as dispatched
    fronts: tuple[int, ...] | None = None  # of each cell
    ahead: int = 0
    choice: Choice | None = None  # the tables that `auto` chose from

    @property
    def complete(self) -> bool:
        """Whether every stage has a fragment."""
        return len({part.stage for part in self.fragments}) == len(self.submeshes) * self.chunks

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        """The arguments of a schedule: submeshes, stages on each, microbatches, whether there is a backward pass."""
        backward = any(part.phase == "B" for part in self.fragments)
        return len(self.submeshes), self.chunks, self.loop.mark.count, backward

    def issue(self, n: int, value: ir.Value, mesh: Mesh) -> int:
        """Return the number of the cell before which a value of cell ``n`` is sent to a submesh; mostly ``n + 1``."""
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
    """A placed program as a list of segments and pipelines."""

    program: ir.Program
    parts: tuple[Segment | Pipeline, ...]

    def each_pipeline(self, change: Callable[[Pipeline], Pipeline]) -> Parts:
        """Return the parts with ``change`` applied to every pipeline."""
        return replace(self, parts=tuple(change(p) if isinstance(p, Pipeline) else p for p in self.parts))

    def __str__(self) -> str:
        return "\n\n".join(filter(None, map(str, self.parts)))


def with_interfaces(fragments: Sequence[Fragment], results: set[ir.Value]) -> tuple[Fragment, ...]:
    """Drop dead operations, and fill in the inputs and outputs of each fragment."""
    needed = set(results)
    live: list[Fragment] = []
    for part in reversed(fragments):
        ops = tuple(ir.live(part.ops, needed))
        if ops:
            local = {o for op in ops for o in op.outs}
            ins = dict.fromkeys(v for op in ops for v in op.reads if v not in local)
            outs = dict.fromkeys(o for op in ops for o in op.outs if o in needed)
            live.append(replace(part, ops=ops, ins=tuple(ins), outs=tuple(outs)))
            needed.update(v for op in ops for v in op.needs if v not in local)
    return tuple(reversed(live))

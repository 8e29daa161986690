"""Stacked leaves in blocks: an argument whose slices belong to several submeshes has a block on each.

A model whose layers are one array, over which `jax.lax.scan` runs, reads rows of it in each stage. The caller has one
array over all these submeshes, and the program an argument for each block. What is computed from such arguments and
their gradients is computed block by block (`piecewise`), and results that replace them are blocks again. So are
arguments that only meet blocks, such as the moments of an optimizer.

The layout of an array has one run of rows on each device. Where stages read uneven numbers of rows, or a submesh reads
two runs, blocks are even nevertheless, and the rows that another submesh reads are sent to it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax
from jax.sharding import Mesh

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.ir import graph
from multimesh.ir.primitives import elementwise, is_small
from multimesh.ir.program import all_ops, task_meshes
from multimesh.passes.placing.owners import Owners
from multimesh.stacked.hoist_slices import hoist_slices
from multimesh.stacked.row_blocks import Blocks, Stacks

_Reads = list[tuple[int, int, Mesh]]  # first row and end, and the submesh that reads them


def cut_stacks(program: ir.Program, replaced: Mapping[int, int]) -> ir.Program:
    """Return the program with blocks in the place of stacked arguments and results."""
    program = _open_lists(program)
    finder = _Finder(program)
    stacks, remarks = finder.stacks()
    while stacks:
        from multimesh.stacked.block_programs import BlockProgram

        maker = BlockProgram(program, stacks, finder.cells)
        result = maker.program(replaced)
        more = finder.of_same_shape(maker.met, stacks)
        if not more:
            return replace(result, stacks=replace(result.stacks, remarks=remarks))
        stacks |= more
    return replace(program, stacks=Stacks(remarks=remarks)) if remarks else program


def _open_lists(program: ir.Program) -> ir.Program:
    """Cut the readers of concatenated arguments, such as a list of stacks with one for each stage, by the arguments."""
    arguments = set(program.inputs)
    arguments |= {inner for loop in program.loops for inner, outer in loop.consts.items() if outer in arguments}
    lists = [
        op.outs[0]
        for op in all_ops(program)
        if op.task is None and op.prim.name == "concatenate" and arguments.issuperset(op.reads)
    ]
    if not lists:
        return program
    from multimesh.stacked.piecewise import in_pieces
    from multimesh.stacked.tiles import join_tiles

    shapes = {v.aval.shape for v in lists}
    program, sums = join_tiles(program, lambda value, *_: () if value.aval.shape in shapes else None)
    return hoist_slices(in_pieces(program, {*lists, *sums})[0])


class _Finder:
    """Looks for arguments whose rows belong to several submeshes."""

    def __init__(self, program: ir.Program):
        self._program, self._meshes = program, task_meshes(program)
        self._number = {v: n for n, v in enumerate(program.inputs)}
        consts = (pair for loop in program.loops for pair in loop.consts.items())
        self._inner = group((outer, inner) for inner, outer in consts if isinstance(outer, ir.Value))
        self._readers = graph.readers(all_ops(program))
        self._maker = graph.makers(item for item in program.items if isinstance(item, ir.Op))
        self._by_row = {v for loop in program.loops for v in loop.slices.values()}
        self._by_row.update(v for loop in program.loops for v in ir.values(c.init for c in loop.carries.values()))
        self.cells: dict[Blocks, tuple[tuple[int, int, Mesh], ...]] = {}  # rows of each stack, and who reads them

    def stacks(self) -> tuple[dict[int, Blocks], dict[int, str]]:
        """Return the arguments that tasks of several submeshes read in slices, and why some can't be stacks."""
        stacks: dict[int, Blocks] = {}
        remarks: dict[int, str] = {}
        if len(self._meshes) < 2:
            return stacks, remarks
        owners: Owners | None = None
        for v, n in self._number.items():
            if not self._may_be_stack(v) or not any(_is_slice(op) for op in self._uses(v)):
                continue
            owners = owners or Owners(self._program, self._meshes, {})
            dim, reads = self._reads(v, owners)
            meshes = tuple(dict.fromkeys(mesh for *_, mesh in sorted(reads, key=lambda read: read[:2])))
            if len(meshes) < 2 or not _each_has_own_rows(reads):
                continue
            count = v.aval.shape[dim]
            if why := _obstacle(count, meshes):
                remarks[n] = why
                continue
            stack = Blocks(dim, count // len(meshes), meshes)
            stacks[n] = stack
            self.cells.setdefault(stack, tuple(_cells(stack, reads)))
            sent = sum(high - low for (low, high, mesh) in self.cells[stack] if mesh != _home(stack, low))
            if sent:
                remarks[n] = (
                    f"{sent} of its {count} rows are sent in each call, as stages read uneven numbers of rows, or a "
                    "submesh has several stages, and an array has as many rows on each; give a list of arrays, one for "
                    "each stage, and concatenate them outside of tasks"
                )
        return stacks, remarks

    def of_same_shape(self, cut: Mapping[ir.Value, Blocks], stacks: Mapping[int, Blocks]) -> dict[int, Blocks]:
        """Return the arguments from which elementwise operations make the values that ``cut`` blocks of a stack."""
        more: dict[int, Blocks] = {}
        for value, stack in cut.items():
            queue = [value]
            while queue:
                v = queue.pop()
                n = self._number.get(v)
                if n is not None and n not in stacks and self._may_be_stack(v):
                    more.setdefault(n, stack)
                op = self._maker.get(v)
                if op is not None and op.task is None and elementwise(op):
                    queue += [r for r in op.reads if r.aval.shape == value.aval.shape]
        return more

    def _may_be_stack(self, v: ir.Value) -> bool:
        extended = jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)
        return not (is_small(v) or extended or v in self._by_row or _compat.memory_kind(v.aval))

    def _uses(self, value: ir.Value) -> Iterator[ir.Op]:
        """Yield the operations that read an argument, or what elementwise operations outside of tasks make of it."""
        visited = {value}
        queue = [value]
        while queue:
            v = queue.pop()
            for name in (v, *self._inner[v]):
                for op in self._readers[name]:
                    yield op
                    if op.task is None and elementwise(op):
                        more = [o for o in op.outs if o not in visited and o.aval.shape == value.aval.shape]
                        visited.update(more)
                        queue += more

    def _reads(self, value: ir.Value, owners: Owners) -> tuple[int, _Reads]:
        """Return the rows that tasks read, along the only dimension in which they slice; none if one reads all."""
        reads: dict[int, _Reads] = collections.defaultdict(list)
        for op in self._uses(value):
            if _is_slice(op):
                for out, dim, low, high in _rows_of(op):
                    on = (op.task.mesh,) if op.task is not None else owners.first_on(out)
                    reads[dim] += [(low, high, mesh) for mesh in on]
            elif op.task is not None or (not elementwise(op) and any(map(owners.tasks_on, op.outs))):
                return 0, []
        return next(iter(reads.items())) if len(reads) == 1 else (0, [])


def _is_slice(op: ir.Op) -> bool:
    if op.prim.name == "split":
        return 0 not in op.params["sizes"]
    return op.prim.name == "slice" and not any(stride != 1 for stride in op.params["strides"] or ())


def _rows_of(op: ir.Op) -> Iterator[tuple[ir.Value, int, int, int]]:
    """Yield each result of a slice of rows with its dimension, first row and end; -1 if several dimensions are cut."""
    if op.prim.name == "split":
        ends = list(itertools.accumulate(op.params["sizes"], initial=0))
        yield from ((o, op.params["axis"], *span) for o, span in zip(op.outs, itertools.pairwise(ends), strict=True))
        return
    shape = op.ins[0].aval.shape
    spans = list(zip(op.params["start_indices"], op.params["limit_indices"], strict=True))
    cut = [d for d, span in enumerate(spans) if span != (0, shape[d])]
    yield (op.outs[0], cut[0], *spans[cut[0]]) if len(cut) == 1 else (op.outs[0], -1, 0, 0)


def _each_has_own_rows(reads: _Reads) -> bool:
    """Return whether each submesh reads as many rows alone as it shares with others.

    Tied weights, of which two read one row, are no stack. Neither are the tokens and the labels of a batch of texts,
    which are all its columns but one.
    """
    unshared, shared = collections.Counter[Mesh](), collections.Counter[Mesh]()
    for low, high, meshes in _spans(reads):
        (unshared if len({*meshes}) == 1 else shared).update(dict.fromkeys(meshes, high - low))
    return all(unshared[mesh] >= max(1, shared[mesh]) for *_, mesh in reads)


def _spans(reads: _Reads, ends: Iterable[int] = ()) -> Iterator[tuple[int, int, list[Mesh]]]:
    """Yield spans of rows and the submeshes that read all of each; a span ends where a read does, and at ``ends``."""
    cuts = sorted({*ends, *(end for low, high, _ in reads for end in (low, high))})
    for low, high in itertools.pairwise(cuts):
        yield low, high, [mesh for first, end, mesh in reads if first <= low and high <= end]


def _obstacle(count: int, meshes: Sequence[Mesh]) -> str:
    """Return why an array of ``count`` rows can't have a block of them on each submesh; "" if it can."""
    remedy = "give a list of arrays, one for each stage, and concatenate them outside of tasks"
    if len({(mesh.axis_names, mesh.devices.shape, mesh.axis_types) for mesh in meshes}) > 1:
        return f"{len(meshes)} submeshes of different axes read its rows; {remedy}"
    if len({device for mesh in meshes for device in mesh.devices.flat}) < sum(mesh.size for mesh in meshes):
        return f"submeshes that share devices read its rows; {remedy}"
    if count % len(meshes):
        return f"its {count} rows are read on {len(meshes)} submeshes, which do not divide them; {remedy}"
    return ""


def _home(stack: Blocks, row: int) -> Mesh:
    return stack.meshes[row // stack.rows]


def _cells(stack: Blocks, reads: _Reads) -> Iterator[tuple[int, int, Mesh]]:
    """Yield the runs of rows that lie in one block and that the same submeshes read, with the first of these."""

    def place(span: tuple[int, int, list[Mesh]]) -> tuple[int, Mesh]:
        low, _, on = span
        home = _home(stack, low)
        return low // stack.rows, home if home in on or not on else on[0]

    for (_, mesh), run in itertools.groupby(_spans(reads, itertools.chain.from_iterable(stack.bounds)), place):
        spans = list(run)
        yield spans[0][0], spans[-1][1], mesh

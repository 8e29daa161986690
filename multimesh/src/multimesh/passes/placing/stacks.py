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
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax
from jax.sharding import Mesh

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.core.row_blocks import Blocks, Stacks, numbers, split_stacks
from multimesh.ir import graph
from multimesh.ir.primitives import elementwise, is_small
from multimesh.ir.program import all_ops
from multimesh.passes.placing.owners import Owners
from multimesh.passes.placing.piecewise import Pieces, cut_arguments, in_pieces
from multimesh.passes.placing.place import task_meshes
from multimesh.passes.placing.tiles import join, join_tiles, rows
from multimesh.passes.reading.slices import hoist_slices

_Reads = list[tuple[int, int, Mesh]]  # first row and end, and the submesh that reads them


def stack_leaves(program: ir.Program, alike: Mapping[int, int]) -> ir.Program:
    """Return the program with blocks in the place of stacked arguments and results.

    ``alike`` maps result leaves to the argument leaves that they replace.
    """
    program = _open_lists(program)
    finder = _Finder(program)
    found, remarks = finder.stacks()
    while found:
        maker = _Maker(program, found, finder.cells)
        made = maker.program(alike)
        more = finder.of_same_shape(maker.met, found)
        if not more:
            return replace(made, stacks=replace(made.stacks, remarks=remarks))
        found |= more
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
        found: dict[int, Blocks] = {}
        remarks: dict[int, str] = {}
        if len(self._meshes) < 2:
            return found, remarks
        owners: Owners | None = None
        for v, n in self._number.items():
            if not self._may_be_stack(v) or not any(_is_slice(op) for op in self._uses(v)):
                continue
            owners = owners or Owners(self._program, self._meshes, {})
            dim, reads = self._reads(v, owners)
            meshes = tuple(dict.fromkeys(mesh for *_, mesh in sorted(reads, key=lambda each: each[:2])))
            if len(meshes) < 2 or not _each_has_own_rows(reads):
                continue
            count = v.aval.shape[dim]
            if why := _obstacle(count, meshes):
                remarks[n] = why
                continue
            stack = Blocks(dim, count // len(meshes), meshes)
            found[n] = stack
            self.cells.setdefault(stack, tuple(_cells(stack, reads)))
            sent = sum(high - low for (low, high, mesh) in self.cells[stack] if mesh != _home(stack, low))
            if sent:
                remarks[n] = (
                    f"{sent} of its {count} rows are sent in each call, as stages read uneven numbers of rows, or a "
                    "submesh has several stages, and an array has as many rows on each; give a list of arrays, one for "
                    "each stage, and concatenate them outside of tasks"
                )
        return found, remarks

    def of_same_shape(self, met: Mapping[ir.Value, Blocks], known: Mapping[int, Blocks]) -> dict[int, Blocks]:
        """Return the arguments from which elementwise operations make the values that ``met`` blocks of a stack."""
        found: dict[int, Blocks] = {}
        for value, stack in met.items():
            left = [value]
            while left:
                v = left.pop()
                n = self._number.get(v)
                if n is not None and n not in known and self._may_be_stack(v):
                    found.setdefault(n, stack)
                op = self._maker.get(v)
                if op is not None and op.task is None and elementwise(op):
                    left += [r for r in op.reads if r.aval.shape == value.aval.shape]
        return found

    def _may_be_stack(self, v: ir.Value) -> bool:
        extended = jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)
        return not (is_small(v) or extended or v in self._by_row or _compat.memory_kind(v.aval))

    def _uses(self, value: ir.Value) -> Iterator[ir.Op]:
        """Yield the operations that read an argument, or what elementwise operations outside of tasks make of it."""
        seen = {value}
        left = [value]
        while left:
            v = left.pop()
            for name in (v, *self._inner[v]):
                for op in self._readers[name]:
                    yield op
                    if op.task is None and elementwise(op):
                        more = [o for o in op.outs if o not in seen and o.aval.shape == value.aval.shape]
                        seen.update(more)
                        left += more

    def _reads(self, value: ir.Value, owners: Owners) -> tuple[int, _Reads]:
        """Return the rows that tasks read, along the only dimension in which they slice; none if one reads all."""
        reads: dict[int, _Reads] = collections.defaultdict(list)
        for op in self._uses(value):
            if _is_slice(op):
                for out, dim, low, high in _rows_of(op):
                    on = (op.task.mesh,) if op.task is not None else owners.first_on(out)
                    reads[dim] += [(low, high, mesh) for mesh in on]
            elif op.task is not None or (not elementwise(op) and any(map(owners.is_read, op.outs))):
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
    """Return whether each submesh reads a row that no other reads. Tied weights, of which two read one row, do not."""
    own = {on[0] for *_, on in _spans(reads) if len(set(on)) == 1}
    return own.issuperset(mesh for *_, mesh in reads)


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
    last: tuple[int, int, Mesh] | None = None
    for low, high, on in _spans(reads, itertools.chain.from_iterable(stack.bounds)):
        home = _home(stack, low)
        mesh = home if home in on or not on else on[0]
        if last is not None and last[2] == mesh and low % stack.rows:
            last = (last[0], high, mesh)
            continue
        if last is not None:
            yield last
        last = (low, high, mesh)
    if last is not None:
        yield last


class _Maker:
    """The program with blocks instead of some arguments."""

    def __init__(
        self,
        program: ir.Program,
        stacks: Mapping[int, Blocks],
        cells: Mapping[Blocks, Sequence[tuple[int, int, Mesh]]],
    ):
        self._program, self._stacks, self._cells = program, stacks, cells
        self.met: dict[ir.Value, Blocks] = {}  # whole values that were cut
        self._pinned: dict[ir.Value, Mesh] = {}
        self._on = _map_tasks(program)

    def program(self, alike: Mapping[int, int]) -> ir.Program:
        """Return the program, and note the whole values that were cut."""
        like: dict[ir.Value, Blocks] = {}
        program, _ = join_tiles(self._program, functools.partial(self._cuts, like))
        blocks: dict[int, tuple[ir.Value, ...]] = {}
        given: dict[ir.Value, Pieces] = {}
        head: list[ir.Op] = []
        for n, stack in self._stacks.items():
            v = program.inputs[n]
            shape = stack.cut(v.aval.shape)
            blocks[n] = tuple(ir.Value(v.aval.update(shape=shape)) for _ in stack.meshes)
            self._pinned.update(zip(blocks[n], stack.meshes, strict=True))
            given[v] = Pieces(stack.dim, tuple(self._rows(blocks[n], stack, head)), stack)
        items, results, self.met = cut_arguments(program, given, like)
        outputs, stacks = self._outputs(results, alike, items)
        wanted = [o for part in outputs for o in part]
        return replace(
            program,
            inputs=tuple(split_stacks(program.inputs, self._stacks, lambda v, _: blocks[self._number(v)])),
            items=tuple(ir.live([*head, *items], wanted)),
            outputs=tuple(wanted),
            given={v: mesh for v, mesh in program.given.items() if v not in given},
            stacks=Stacks(self._stacks, stacks),
            pinned=self._pinned,
        )

    def _runs(self, stack: Blocks) -> Sequence[tuple[int, int, Mesh]]:
        even = ((*span, mesh) for span, mesh in zip(stack.bounds, stack.meshes, strict=True))
        return self._cells.get(stack) or tuple(even)

    def _number(self, value: ir.Value) -> int:
        return self._program.inputs.index(value)

    def _cuts(
        self, like: dict[ir.Value, Blocks], value: ir.Value, dim: int, parts: Sequence[ir.Value]
    ) -> list[int] | None:
        """Return where to cut a sum of padded rows: as a stack of its shape, preferably on the parts' submeshes."""
        inputs = self._program.inputs
        same = [s for n, s in self._stacks.items() if s.dim == dim and inputs[n].aval.shape == value.aval.shape]
        if not same:
            return None
        made_on = {self._on[part] for part in parts if part in self._on}
        like[value] = max(same, key=lambda stack: len(made_on.intersection(stack.meshes)))
        return [0, *(high for _, high, _ in self._runs(like[value]))]

    def _rows(self, blocks: Sequence[ir.Value], stack: Blocks, head: list[ir.Op]) -> Iterator[ir.Value]:
        """Yield the values that tasks read of blocks. Rows that go to another submesh are taken where they are."""
        for low, high, mesh in self._runs(stack):
            n = low // stack.rows
            block = blocks[n]
            like = ir.Op(_compat.copy_p, {}, (block,), (block,))
            found: list[ir.Value] = []
            ops = list(rows(like, block, stack.dim, low - n * stack.rows, high - n * stack.rows, found))
            if not ops and mesh != stack.meshes[n]:
                found = [ir.Value(block.aval)]
                ops = [replace(like, outs=(found[0],))]
            self._pinned.update((o, stack.meshes[n]) for op in ops for o in op.outs)
            head += ops
            yield found[0]

    def _outputs(
        self, results: Sequence[ir.Atom | Pieces], alike: Mapping[int, int], items: list[ir.Item]
    ) -> tuple[list[list[ir.Atom]], dict[int, Blocks]]:
        """Return what stands for each result, and the results that are stacks. Adds operations to ``items``."""
        outputs: list[list[ir.Atom]] = []
        stacks: dict[int, Blocks] = {}
        for n, (result, old) in enumerate(zip(results, self._program.outputs, strict=True)):
            argument = alike.get(n)
            stack = self._stacks.get(argument) if argument is not None else None
            if isinstance(result, Pieces) and result.stack is not None and argument is not None and stack is None:
                self.met[self._program.inputs[argument]] = result.stack
            if stack is None and isinstance(result, Pieces) and result.stack is not None and not is_small(old):
                stack = result.stack
            if stack is None:
                outputs.append([self._whole(result, old, items)])
            else:
                stacks[n] = stack
                outputs.append(list(self._blocks(result, old, stack, items)))
        return outputs, stacks

    def _whole(self, result: ir.Atom | Pieces, old: ir.Atom, items: list[ir.Item]) -> ir.Atom:
        if not isinstance(result, Pieces):
            return result
        found: list[ir.Value] = []
        items += join(_like(old), result.parts, result.dim, found)
        return found[0]

    def _blocks(self, result: ir.Atom | Pieces, old: ir.Atom, stack: Blocks, items: list[ir.Item]) -> Iterator[ir.Atom]:
        """Yield the blocks of a result."""
        if not isinstance(result, Pieces) or result.dim != stack.dim:
            result = Pieces(stack.dim, (self._whole(result, old, items),))
        for low, high in stack.bounds:
            found: list[ir.Value] = []
            for part, first, end in zip(result.parts, result.cuts, result.cuts[1:], strict=False):
                if first < high and low < end:
                    items += rows(_like(old), part, stack.dim, max(low, first) - first, min(high, end) - first, found)
            block: list[ir.Value] = []
            items += join(_like(old), found, stack.dim, block)
            yield block[0]


def _like(old: ir.Atom) -> ir.Op:
    return ir.Op(_compat.copy_p, {}, (old,), (ir.Value(old.aval),))


def _map_tasks(program: ir.Program) -> dict[ir.Value, Mesh]:
    """Map values that tasks make, and sums of these on one submesh, to the submesh."""
    on = {o: op.task.mesh for op in all_ops(program) if op.task is not None for o in op.outs}
    on.update(
        (out, on[leaf])
        for loop in program.loops
        for out, leaf in zip(loop.outs, loop.leaves, strict=True)
        if isinstance(leaf, ir.Value) and leaf in on
    )
    return on


def spread_numbers(pairs: Mapping[int, int], counts: tuple[int, int], stacks: Stacks) -> dict[int, int]:
    """Return results and the arguments that they replace, by the numbers of their blocks."""
    results, arguments = numbers(counts[0], stacks.results), numbers(counts[1], stacks.arguments)
    return {
        a: b
        for n, m in pairs.items()
        if len(results[n]) == len(arguments[m])
        for a, b in zip(results[n], arguments[m], strict=True)
    }

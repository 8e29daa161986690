"""A program with blocks in the place of stacked arguments and results; loaded where there are stacks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir import graph
from multimesh.ir.primitives import is_small
from multimesh.ir.program import all_ops
from multimesh.stacked.piecewise import Pieces, cut_arguments
from multimesh.stacked.row_blocks import Blocks, Stacks, split_stacks
from multimesh.stacked.tiles import join_tiles

Cells = Sequence[tuple[int, int, Mesh]]
"""Runs of rows, from a first row to an end, with the submesh that reads them."""


class BlockProgram:
    """The program with blocks instead of some arguments."""

    def __init__(self, program: ir.Program, stacks: Mapping[int, Blocks], cells: Mapping[Blocks, Cells]):
        self._program, self._stacks, self._cells = program, stacks, cells
        self.met: dict[ir.Value, Blocks] = {}  # whole values that were cut
        self._pinned: dict[ir.Value, Mesh] = {}
        self._on = _map_tasks(program)

    def program(self, replaced: Mapping[int, int]) -> ir.Program:
        """Return the program, and note the whole values that were cut."""
        like: dict[ir.Value, Blocks] = {}
        program, _ = join_tiles(self._program, functools.partial(self._cuts, like))
        blocks: dict[int, tuple[ir.Value, ...]] = {}
        arguments: dict[ir.Value, Pieces] = {}
        head: list[ir.Op] = []
        for n, stack in self._stacks.items():
            v = program.inputs[n]
            shape = stack.cut(v.aval.shape)
            blocks[n] = tuple(ir.Value(v.aval.update(shape=shape)) for _ in stack.meshes)
            self._pinned.update(zip(blocks[n], stack.meshes, strict=True))
            arguments[v] = Pieces(stack.dim, tuple(self._rows(blocks[n], stack, head)), stack)
        items, results, self.met = cut_arguments(program, arguments, like)
        outputs, stacks = self._outputs(results, replaced, items)
        outputs_flat = [o for part in outputs for o in part]
        return replace(
            program,
            inputs=tuple(split_stacks(program.inputs, self._stacks, lambda v, _: blocks[program.inputs.index(v)])),
            items=tuple(ir.live([*head, *items], outputs_flat)),
            outputs=tuple(outputs_flat),
            input_homes={v: mesh for v, mesh in program.input_homes.items() if v not in arguments},
            stacks=Stacks(self._stacks, stacks),
            pinned=self._pinned,
        )

    def _runs(self, stack: Blocks) -> Cells:
        even = ((*span, mesh) for span, mesh in zip(stack.bounds, stack.meshes, strict=True))
        return self._cells.get(stack) or tuple(even)

    def _cuts(
        self, like: dict[ir.Value, Blocks], value: ir.Value, dim: int, parts: Sequence[ir.Value]
    ) -> list[int] | None:
        """Return where to cut a sum of padded rows: as a stack of its shape, preferably on the parts' submeshes."""
        inputs = self._program.inputs
        stacks = [s for n, s in self._stacks.items() if s.dim == dim and inputs[n].aval.shape == value.aval.shape]
        if not stacks:
            return None
        made_on = {self._on[part] for part in parts if part in self._on}
        like[value] = max(stacks, key=lambda stack: len(made_on.intersection(stack.meshes)))
        return [0, *(high for _, high, _ in self._runs(like[value]))]

    def _rows(self, blocks: Sequence[ir.Value], stack: Blocks, head: list[ir.Op]) -> Iterator[ir.Value]:
        """Yield the values that tasks read of blocks. Rows that go to another submesh are taken where they are."""
        for low, high, mesh in self._runs(stack):
            n = low // stack.rows
            block = blocks[n]
            like = ir.Op(_compat.copy_p, {}, (block,), (block,))
            ops: list[ir.Op] = []
            value = graph.take_rows(like, block, stack.dim, low - n * stack.rows, high - n * stack.rows, ops)
            if not ops and mesh != stack.meshes[n]:
                value = ir.Value(block.aval)
                ops = [replace(like, outs=(value,))]
            self._pinned.update((o, stack.meshes[n]) for op in ops for o in op.outs)
            head += ops
            yield value

    def _outputs(
        self, results: Sequence[ir.Atom | Pieces], replaced: Mapping[int, int], items: list[ir.Item]
    ) -> tuple[list[list[ir.Atom]], dict[int, Blocks]]:
        """Return what stands for each result, and the results that are stacks. Adds operations to ``items``."""
        outputs: list[list[ir.Atom]] = []
        stacks: dict[int, Blocks] = {}
        for n, (result, old) in enumerate(zip(results, self._program.outputs, strict=True)):
            argument = replaced.get(n)
            stack = self._stacks.get(argument) if argument is not None else None
            if isinstance(result, Pieces) and result.stack is not None and argument is not None and stack is None:
                self.met[self._program.inputs[argument]] = result.stack
            if stack is None and isinstance(result, Pieces) and result.stack is not None and not is_small(old):
                stack = result.stack
            if stack is None:
                outputs.append([self._join_parts(result, old, items)])
            else:
                stacks[n] = stack
                outputs.append(list(self._blocks(result, old, stack, items)))
        return outputs, stacks

    def _join_parts(self, result: ir.Atom | Pieces, old: ir.Atom, items: list[ir.Item]) -> ir.Atom:
        return graph.join_parts(_like(old), result.parts, result.dim, items) if isinstance(result, Pieces) else result

    def _blocks(self, result: ir.Atom | Pieces, old: ir.Atom, stack: Blocks, items: list[ir.Item]) -> Iterator[ir.Atom]:
        """Yield the blocks of a result."""
        like, dim = _like(old), stack.dim
        if not isinstance(result, Pieces) or result.dim != dim:
            result = Pieces(dim, (self._join_parts(result, old, items),))
        for low, high in stack.bounds:
            spans = zip(result.parts, itertools.pairwise(result.cuts), strict=True)
            parts = [
                graph.take_rows(like, part, dim, max(low, first) - first, min(high, end) - first, items)
                for part, (first, end) in spans
                if first < high and low < end
            ]
            yield graph.join_parts(like, parts, dim, items)


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

"""Sums of padded parts, as the gradient of a stack is, as the concatenation of the parts.

``pad(a, 0, 2) + pad(b, 2, 0) = concatenate(a, b)``: adding zeros rounds nothing. Parts that cover the same rows are
added there.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jax.extend.core import primitives

from multimesh import ir
from multimesh.ir import graph
from multimesh.passes.reading.slices import as_padding, zero_of


class _Tiles(NamedTuple):
    dim: int
    parts: tuple[tuple[int, ir.Value], ...]  # each with its first row
    zero: ir.Atom


Ends = Callable[[ir.Value, int, Sequence[ir.Value]], Sequence[int] | None]
"""The rows between which to cut a value along a dimension, given the parts that it is the sum of; none: at the parts.

None for a value that stays a sum.
"""


def join_tiles(program: ir.Program, cuts: Ends) -> tuple[ir.Program, set[ir.Value]]:
    """Replace sums of padded parts by concatenations, and return the values so made."""
    made: set[ir.Value] = set()
    given = program.linked
    loops = program.each_loop(lambda loop: _in_body(loop, given, cuts, made))
    items = _join_sums(loops.items, program.outputs, cuts, made)
    return replace(program, items=tuple(ir.live(items, program.outputs))), made


def _in_body(loop: ir.Loop, given: Collection[ir.Value], cuts: Ends, made: set[ir.Value]) -> ir.Loop:
    wanted = [*loop.leaves, *(o for op in loop.ops for o in op.outs if o in given)]
    ops = [op for op in _join_sums(loop.ops, wanted, cuts, made) if isinstance(op, ir.Op)]
    return replace(loop, ops=tuple(ir.live(ops, wanted))) if ops != list(loop.ops) else loop


def _join_sums(given: Sequence[ir.Item], wanted: Iterable[ir.Atom], cuts: Ends, made: set[ir.Value]) -> list[ir.Item]:
    """Return operations in the order of ``given``, without the sums, and add what they make to ``made``."""
    ops = [item for item in given if isinstance(item, ir.Op)]
    maker = graph.makers(ops)
    known: dict[ir.Value, _Tiles] = {}
    adds: set[ir.Item] = set()
    for op in ops:
        found = _read_padding(op, maker) or _add_tiles(op, known)
        if found is not None:
            known[op.outs[0]] = found
            adds.add(op)
    reads = collections.Counter(v for item in given if item not in adds for v in item.reads)
    reads.update(ir.values(wanted))
    items: list[ir.Item] = []
    for item in given:
        tiles = known[item.outs[0]] if item in adds and reads[item.outs[0]] else None
        ends = None
        if tiles is not None and len(tiles.parts) > 1:
            ends = cuts(item.outs[0], tiles.dim, [part for _, part in tiles.parts])
        if isinstance(item, ir.Op) and tiles is not None and ends is not None:
            items += _join_blocks(replace(item, task=None), tiles, ends)
            made.add(item.outs[0])
        else:
            items.append(item)
    return items


def _read_padding(op: ir.Op, maker: Mapping[ir.Value, ir.Op]) -> _Tiles | None:
    found = as_padding(op, maker)
    if found is None or any(min(each) < 0 or each[2] for each in found[1]):
        return None
    part, config = found
    dims = [d for d, (low, high, _) in enumerate(config) if low or high]
    if len(dims) != 1:
        return None
    return _Tiles(dims[0], ((config[dims[0]][0], part),), op.ins[1] if op.prim.name == "pad" else zero_of(op, maker))


def _add_tiles(op: ir.Op, known: Mapping[ir.Value, _Tiles]) -> _Tiles | None:
    if (
        op.task
        or op.prim.name not in ("add", "add_any")
        or not all(isinstance(v, ir.Value) and v in known for v in op.ins)
    ):
        return None
    first, second = (known[v] for v in op.ins)
    return first._replace(parts=first.parts + second.parts) if first.dim == second.dim else None


def _join_blocks(op: ir.Op, tiles: _Tiles, ends: Sequence[int]) -> Iterator[ir.Op]:
    """Yield the operations that make a value of its parts, block by block."""
    spans = [(start, start + part.aval.shape[tiles.dim], part) for start, part in tiles.parts]
    cells = sorted({*ends, *(end for low, high, _ in spans for end in (low, high))})
    blocks: dict[int, list[ir.Value]] = collections.defaultdict(list)
    for low, high in itertools.pairwise(cells):
        over = [(start, part) for start, stop, part in spans if start <= low and high <= stop]
        sums: list[ir.Value] = []
        for start, part in over:
            yield from rows(op, part, tiles.dim, low - start, high - start, sums)
        if not sums:
            yield from _zeros(op, tiles, high - low, sums)
        total = sums[0] if len(sums) == 1 else ir.Value(sums[0].aval)
        yield from graph.chain(replace(op, prim=primitives.add_p, params={}), sums, total)
        blocks[max((n for n, end in enumerate(ends) if end <= low), default=low)].append(total)
    parts: list[ir.Value] = []
    for block in blocks.values():
        yield from join(op, block, tiles.dim, parts)
    yield replace(op, prim=primitives.concatenate_p, params={"dimension": tiles.dim}, ins=tuple(parts))


def rows(op: ir.Op, value: ir.Value, dim: int, low: int, high: int, found: list[ir.Value]) -> Iterator[ir.Op]:
    """Add rows of a value to ``found``, and yield the operation that takes them, if they are not all."""
    shape = value.aval.shape
    if (low, high) == (0, shape[dim]):
        found.append(value)
        return
    starts, limits = [0] * len(shape), list(shape)
    starts[dim], limits[dim] = low, high
    found.append(ir.Value(value.aval.update(shape=(*shape[:dim], high - low, *shape[dim + 1 :]))))
    params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": None}
    yield replace(op, prim=primitives.slice_p, params=params, ins=(value,), outs=(found[-1],), ctx=None)


def join(op: ir.Op, parts: Sequence[ir.Value], dim: int, found: list[ir.Value]) -> Iterator[ir.Op]:
    """Add the concatenation of parts to ``found``, and yield its operation, if there are several."""
    if len(parts) == 1:
        found.append(parts[0])
        return
    shape = parts[0].aval.shape
    size = sum(part.aval.shape[dim] for part in parts)
    found.append(ir.Value(parts[0].aval.update(shape=(*shape[:dim], size, *shape[dim + 1 :]))))
    params = {"dimension": dim}
    yield replace(op, prim=primitives.concatenate_p, params=params, ins=tuple(parts), outs=(found[-1],), ctx=None)


def _zeros(op: ir.Op, tiles: _Tiles, size: int, found: list[ir.Value]) -> Iterator[ir.Op]:
    aval = op.outs[0].aval
    shape = (*aval.shape[: tiles.dim], size, *aval.shape[tiles.dim + 1 :])
    found.append(ir.Value(aval.update(shape=shape)))
    params = {"shape": shape, "broadcast_dimensions": (), "sharding": None}
    yield replace(op, prim=primitives.broadcast_in_dim_p, params=params, ins=(tiles.zero,), outs=(found[-1],), ctx=None)

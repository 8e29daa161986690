"""Sums of padded parts, as the gradient of a stack is, as the concatenation of the parts.

``pad(a, 0, 2) + pad(b, 2, 0) = concatenate(a, b)``: adding zeros rounds nothing. Parts that cover the same rows are
added there.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jax.extend.core import primitives

from multimesh import ir
from multimesh.ir import graph
from multimesh.stacked.hoist_slices import as_padding


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
    sums: set[ir.Value] = set()
    linked = program.linked

    def in_body(loop: ir.Loop) -> ir.Loop:
        results = [*loop.leaves, *(o for op in loop.ops for o in op.outs if o in linked)]
        ops = [op for op in _join_sums(loop.ops, results, cuts, sums) if isinstance(op, ir.Op)]
        return replace(loop, ops=tuple(ir.live(ops, results))) if ops != list(loop.ops) else loop

    items = _join_sums(program.each_loop(in_body).items, program.outputs, cuts, sums)
    return replace(program, items=tuple(ir.live(items, program.outputs))), sums


def _join_sums(body: Sequence[ir.Item], results: Iterable[ir.Atom], cuts: Ends, joined: set[ir.Value]) -> list[ir.Item]:
    """Return operations in the order of ``body``, without the sums, and add what they make to ``joined``."""
    ops = [item for item in body if isinstance(item, ir.Op)]
    maker = graph.makers(ops)
    tiles_of: dict[ir.Value, _Tiles] = {}
    adds: set[ir.Item] = set()
    for op in ops:
        candidate = _read_padding(op, maker) or _add_tiles(op, tiles_of)
        if candidate is not None:
            tiles_of[op.outs[0]] = candidate
            adds.add(op)
    reads = collections.Counter(v for item in body if item not in adds for v in item.reads)
    reads.update(ir.values(results))
    items: list[ir.Item] = []
    for item in body:
        tiles = tiles_of[item.outs[0]] if item in adds and reads[item.outs[0]] else None
        ends = None
        if tiles is not None and len(tiles.parts) > 1:
            ends = cuts(item.outs[0], tiles.dim, [part for _, part in tiles.parts])
        if isinstance(item, ir.Op) and tiles is not None and ends is not None:
            items += _join_blocks(replace(item, task=None), tiles, ends)
            joined.add(item.outs[0])
        else:
            items.append(item)
    return items


def _read_padding(op: ir.Op, maker: Mapping[ir.Value, ir.Op]) -> _Tiles | None:
    padding = as_padding(op, maker)
    if padding is None or any(min(edges) < 0 or edges[2] for edges in padding[1]):
        return None
    part, config, zero = padding
    dims = [d for d, (low, high, _) in enumerate(config) if low or high]
    if len(dims) != 1:
        return None
    return _Tiles(dims[0], ((config[dims[0]][0], part),), zero)


def _add_tiles(op: ir.Op, tiles_of: Mapping[ir.Value, _Tiles]) -> _Tiles | None:
    if op.task or op.prim.name not in ("add", "add_any"):
        return None
    if not all(isinstance(v, ir.Value) and v in tiles_of for v in op.ins):
        return None
    first, second = (tiles_of[v] for v in op.ins)
    return first._replace(parts=first.parts + second.parts) if first.dim == second.dim else None


def _join_blocks(op: ir.Op, tiles: _Tiles, ends: Sequence[int]) -> list[ir.Op]:
    """Return the operations that make a value of its parts, block by block."""
    dim, ops = tiles.dim, list[ir.Op]()
    spans = [(start, start + part.aval.shape[dim], part) for start, part in tiles.parts]
    cells = sorted({*ends, *(end for low, high, _ in spans for end in (low, high))})
    blocks: dict[int, list[ir.Value]] = collections.defaultdict(list)
    for low, high in itertools.pairwise(cells):
        over = [(start, part) for start, stop, part in spans if start <= low and high <= stop]
        sums = [graph.take_rows(op, part, dim, low - start, high - start, ops) for start, part in over]
        sums = sums or [_zeros(op, tiles, high - low, ops)]
        total = sums[0] if len(sums) == 1 else ir.Value(sums[0].aval)
        ops += graph.chain(replace(op, prim=primitives.add_p, params={}), sums, total)
        blocks[max((n for n, end in enumerate(ends) if end <= low), default=low)].append(total)
    parts = tuple(graph.join_parts(op, block, dim, ops) for block in blocks.values())
    return [*ops, replace(op, prim=primitives.concatenate_p, params={"dimension": dim}, ins=parts)]


def _zeros(op: ir.Op, tiles: _Tiles, rows: int, ops: list[ir.Op]) -> ir.Value:
    shape = list(op.outs[0].aval.shape)
    shape[tiles.dim] = rows
    zeros = ir.Value(op.outs[0].aval.update(shape=tuple(shape)))
    params = {"shape": tuple(shape), "broadcast_dimensions": (), "sharding": None}
    ops.append(
        replace(op, prim=primitives.broadcast_in_dim_p, params=params, ins=(tiles.zero,), outs=(zeros,), ctx=None)
    )
    return zeros

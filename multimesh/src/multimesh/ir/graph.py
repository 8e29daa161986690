"""Producers and users of values, and operations with renamed values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jax.extend.core import primitives

from multimesh.core.grouping import group
from multimesh.ir.program import AnyItem, Atom, Item, Loop, Op, Value

Names = Mapping[Value, Atom]
"""Values to what stands in their place."""


def makers(items: Iterable[AnyItem]) -> dict[Value, AnyItem]:
    """Map each value to the item that produces it."""
    return {o: item for item in items for o in item.outs}


def readers(ops: Iterable[Op]) -> dict[Value, list[Op]]:
    """Map each value to the operations that use it."""
    return group((v, op) for op in ops for v in op.reads)


def with_first_reader(ops: Sequence[Item], chosen: Sequence[int | None], others: int) -> list[int]:
    """Return a group number for each operation: its own, or that of its first user, or else ``others``."""
    first: dict[Value, int] = {}
    readers = [others] * len(ops)
    for i in reversed(range(len(ops))):
        at = chosen[i]
        readers[i] = min((first[o] for o in ops[i].outs if o in first), default=others) if at is None else at
        for v in ops[i].needs:
            first[v] = min(first.get(v, readers[i]), readers[i])
    return readers


def resolve(atom: Atom, names: Names) -> Atom:
    """Follow ``names`` from an atom to its final replacement; most often the atom itself."""
    while isinstance(atom, Value) and atom in names:
        atom = names[atom]
    return atom


def rename_op(op: Op, names: Names) -> Op:
    """Return the operation with its operands replaced."""
    if not any(v in names for v in op.reads):
        return op
    return replace(op, ins=tuple(resolve(i, names) for i in op.ins))


def repeat_op(op: Op, names: dict[Value, Atom]) -> Op:
    """Return a copy of the operation with operands replaced and new results, which are added to ``names``."""
    copy = replace(rename_op(op, names), outs=tuple(Value(o.aval) for o in op.outs))
    names.update(zip(op.outs, copy.outs, strict=True))
    return copy


def chain(op: Op, operands: Sequence[Atom], out: Value) -> list[Op]:
    """Apply an operation of two operands repeatedly, in order, until ``out`` combines all operands."""
    adds: list[Op] = []
    total = operands[0]
    for n, operand in enumerate(operands[1:], 2):
        result = out if n == len(operands) else Value(out.aval)
        adds.append(replace(op, ins=(total, operand), outs=(result,)))
        total = result
    return adds


def take_slice(like: Op, value: Value, lows: Sequence[int], highs: Sequence[int], items: list[AnyItem]) -> Value:
    """Return a slice of a value. Unless it is all of it, add its operation, beside ``like``, to ``items``."""
    shape = tuple(high - low for low, high in zip(lows, highs, strict=True))
    if shape == value.aval.shape:
        return value
    result = Value(value.aval.update(shape=shape))
    params = {"start_indices": tuple(lows), "limit_indices": tuple(highs), "strides": None}
    items.append(replace(like, prim=primitives.slice_p, params=params, ins=(value,), outs=(result,), ctx=None))
    return result


def take_rows(like: Op, value: Value, dim: int, low: int, high: int, items: list[AnyItem]) -> Value:
    """Return the rows ``low`` to ``high`` of a value along a dimension, as `take_slice` does."""
    lows, highs = [0] * value.aval.ndim, list(value.aval.shape)
    lows[dim], highs[dim] = low, high
    return take_slice(like, value, lows, highs, items)


def join_parts(like: Op, parts: Sequence[Value], dim: int, items: list[AnyItem]) -> Value:
    """Return the concatenation of parts. If there are several, add its operation, beside ``like``, to ``items``."""
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].aval.shape)
    shape[dim] = sum(part.aval.shape[dim] for part in parts)
    result = Value(parts[0].aval.update(shape=tuple(shape)))
    params = {"dimension": dim}
    items.append(
        replace(like, prim=primitives.concatenate_p, params=params, ins=tuple(parts), outs=(result,), ctx=None)
    )
    return result


def rename_loop(loop: Loop, names: Names) -> Loop:
    """Return the loop with outer values replaced."""
    return replace(
        loop,
        consts={k: resolve(v, names) for k, v in loop.consts.items()},
        slices={k: resolve(v, names) for k, v in loop.slices.items()},
        sums=tuple(replace(s, init=resolve(s.init, names)) for s in loop.sums),
        carries={k: replace(c, init=resolve(c.init, names)) for k, c in loop.carries.items()},
    )


def with_leaves(loop: Loop, leaves: Iterable[Atom]) -> Loop:
    """Return the loop with other leaves, given in the order of its own."""
    remaining = iter(leaves)
    return replace(
        loop,
        sums=tuple(replace(s, leaf=next(remaining)) for s in loop.sums),
        stacks={out: next(remaining) for out in loop.stacks},
        carries={k: replace(c, leaf=next(remaining)) for k, c in loop.carries.items()},
    )


def rename_body(loop: Loop, names: Names) -> Loop:
    """Return the loop with values of its body replaced, in operations and leaves."""
    ops = tuple(rename_op(op, names) for op in loop.ops)
    return replace(with_leaves(loop, [resolve(leaf, names) for leaf in loop.leaves]), ops=ops)

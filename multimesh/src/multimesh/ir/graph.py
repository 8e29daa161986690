"""Who makes a value, who reads it, and the same operations under new names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from multimesh.core.grouping import grouped
from multimesh.ir.program import AnyItem, Atom, Item, Loop, Op, Value

Names = Mapping[Value, Atom]
"""Values to what stands in their place."""


def makers(items: Iterable[AnyItem]) -> dict[Value, AnyItem]:
    """Values to the item that makes each."""
    return {o: item for item in items for o in item.outs}


def readers(ops: Iterable[Op]) -> dict[Value, list[Op]]:
    """Values to the operations that read each."""
    return grouped((v, op) for op in ops for v in op.reads)


def with_first_reader(ops: Sequence[Item], chosen: Sequence[int | None], rest: int) -> list[int]:
    """Numbers of groups of operations: one without a number joins its first reader, or the group ``rest``."""
    first: dict[Value, int] = {}
    done = [rest] * len(ops)
    for i in reversed(range(len(ops))):
        at = chosen[i]
        done[i] = min((first[o] for o in ops[i].outs if o in first), default=rest) if at is None else at
        for v in ops[i].needs:
            first[v] = min(first.get(v, done[i]), done[i])
    return done


def renamed(atom: Atom, names: Names) -> Atom:
    """What stands in the place of an atom in the end; most often itself."""
    while isinstance(atom, Value) and atom in names:
        atom = names[atom]
    return atom


def rename_op(op: Op, names: Names) -> Op:
    """The operation with its operands replaced."""
    if not any(v in names for v in op.reads):
        return op
    return replace(op, ins=tuple(renamed(i, names) for i in op.ins))


def repeat_op(op: Op, names: dict[Value, Atom]) -> Op:
    """The operation once more, with its operands replaced; ``names`` receives its new results."""
    again = replace(rename_op(op, names), outs=tuple(Value(o.aval) for o in op.outs))
    names.update(zip(op.outs, again.outs, strict=True))
    return again


def chained(op: Op, operands: Sequence[Atom], out: Value) -> list[Op]:
    """An operation of two operands, again and again: in order, until ``out`` is made of all."""
    again: list[Op] = []
    total = operands[0]
    for n, operand in enumerate(operands[1:], 2):
        result = out if n == len(operands) else Value(out.aval)
        again.append(replace(op, ins=(total, operand), outs=(result,)))
        total = result
    return again


def rename_loop(loop: Loop, names: Names) -> Loop:
    """The loop with outer values replaced."""
    return replace(
        loop,
        consts={k: renamed(v, names) for k, v in loop.consts.items()},
        slices={k: renamed(v, names) for k, v in loop.slices.items()},
        sums=tuple(replace(s, init=renamed(s.init, names)) for s in loop.sums),
        carries={k: replace(c, init=renamed(c.init, names)) for k, c in loop.carries.items()},
    )


def with_leaves(loop: Loop, leaves: Iterable[Atom]) -> Loop:
    """The loop with other leaves, in the order of its own."""
    left = iter(leaves)
    return replace(
        loop,
        sums=tuple(replace(s, leaf=next(left)) for s in loop.sums),
        stacks={out: next(left) for out in loop.stacks},
        carries={k: replace(c, leaf=next(left)) for k, c in loop.carries.items()},
    )


def rename_body(loop: Loop, names: Names) -> Loop:
    """The loop with values of its body replaced, in operations and leaves."""
    ops = tuple(rename_op(op, names) for op in loop.ops)
    return replace(with_leaves(loop, [renamed(leaf, names) for leaf in loop.leaves]), ops=ops)


def rename_item(item: Item, names: Names) -> Item:
    """The item with outer values replaced."""
    return rename_op(item, names) if isinstance(item, Op) else rename_loop(item, names)

"""What most submeshes run alike between loops, cut out as programs of their own.

Every stage of a pipeline runs the same optimizer, each on arrays of its own; the first and the last stage have a few
arrays more, and so programs that are equal to no other. Cut in two, the part that most stages have is compiled once.

No arithmetic is reordered: parts share no array, and scalars that several of them read are computed in each, from the
same values. What has effects is not cut.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from multimesh import _compat, _executables, ir
from multimesh.fingerprint import text
from multimesh.passes.fragment import Fragment, with_interfaces

T = TypeVar("T")


def cut_common(fragments: Sequence[Fragment], results: set[ir.Value]) -> tuple[Fragment, ...]:
    """Cut each unmarked fragment in two where most submeshes of its shape and level have a part of it.

    Parameters
    ----------
    fragments
        Of straight code, in order. Those with tasks or effects stay whole.
    results
        Values that are read outside.
    """
    if not _executables.shares_programs(d for part in fragments for d in part.mesh.devices.flat):
        return tuple(fragments)
    alike: dict[Hashable, list[int]] = collections.defaultdict(list)
    for i, part in enumerate(fragments):
        if not any(op.task is not None or op.effects for op in part.ops):
            alike[part.level, part.mesh.axis_names, part.mesh.devices.shape].append(i)
    pieces: dict[int, list[Fragment]] = {}
    for indices in alike.values():
        groups = [components(fragments[i]) for i in indices]
        keys = [[signature(ops, fragments[i].outs) for ops in group] for i, group in zip(indices, groups, strict=True)]
        for i, cut in zip(indices, in_two(groups, keys), strict=True):
            pieces[i] = [replace(fragments[i], ops=tuple(op for ops in half for op in ops)) for half in cut]
    return with_interfaces([piece for i, part in enumerate(fragments) for piece in pieces.get(i, [part])], results)


def in_two(groups: Sequence[Sequence[T]], keys: Sequence[Sequence[Hashable]]) -> list[list[list[T]]]:
    """Cut each group into the items that more than half of the groups have, and the rest; empty halves are left out.

    The n-th item of a key in one group corresponds to the n-th of that key in another.
    """
    numbered = [_numbered(mine) for mine in keys]
    count = collections.Counter(key for mine in numbered for key in mine)
    cut: list[list[list[T]]] = []
    for group, mine in zip(groups, numbered, strict=True):
        common = [2 * count[key] > len(groups) for key in mine]
        halves = [[x for x, here in zip(group, common, strict=True) if here == half] for half in (True, False)]
        cut.append([half for half in halves if half])
    return cut


def _numbered(keys: Sequence[Hashable]) -> list[tuple[Hashable, int]]:
    seen: collections.Counter[Hashable] = collections.Counter()
    numbered = []
    for key in keys:
        numbered.append((key, seen[key]))
        seen[key] += 1
    return numbered


def components(part: Fragment) -> list[list[ir.Op]]:
    """Operations of a fragment in groups that share no intermediate array, each in order.

    Arithmetic on scalars alone (a learning rate) connects nothing: every group that reads its results repeats it.
    """
    maker = {o: i for i, op in enumerate(part.ops) for o in op.outs}
    before = [sorted({maker[v] for v in (*op.reads, *op.after) if v in maker}) for op in part.ops]
    scalar: list[bool] = []
    for op, makers in zip(part.ops, before, strict=True):
        scalar.append(all(v.aval.shape == () for v in (*op.reads, *op.outs)) and all(scalar[j] for j in makers))
    root = list(range(len(part.ops)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i, makers in enumerate(before):
        for j in makers:
            if not scalar[j]:
                low, high = sorted((find(i), find(j)))
                root[high] = low
    given = set(part.outs)
    groups: dict[int, list[int]] = collections.defaultdict(list)
    for i, op in enumerate(part.ops):
        if not scalar[i] or not given.isdisjoint(op.outs):
            groups[find(i)].append(i)
    return [_with_scalars(part.ops, own, before) for own in groups.values()]


def _with_scalars(ops: Sequence[ir.Op], own: Sequence[int], before: Sequence[Sequence[int]]) -> list[ir.Op]:
    """Operations of a group after copies of what they read of other groups, with results of their own."""
    needed, stack = set(own), list(own)
    while stack:
        new = set(before[stack.pop()]) - needed
        needed |= new
        stack += new
    copies = {o: ir.Value(o.aval) for i in needed - set(own) for o in ops[i].outs}

    def renamed(atoms: tuple[ir.Atom, ...]) -> tuple[ir.Atom, ...]:
        return tuple(copies.get(a, a) if isinstance(a, ir.Value) else a for a in atoms)

    return [
        replace(op, ins=renamed(op.ins), outs=renamed(op.outs), after=renamed(op.after))
        for op in (ops[i] for i in sorted(needed))
    ]


def signature(ops: Sequence[ir.Op], given: Iterable[ir.Value]) -> tuple[Any, ...]:
    """What operations do, whatever their arrays are called; ``given`` are values that are read outside."""
    given = set(given)
    number: dict[ir.Value, int] = {}

    def atom(a: ir.Atom) -> Any:
        if not isinstance(a, ir.Value):
            return str(a)
        known = a in number
        name = number.setdefault(a, len(number))
        return name if known else (name, _compat.shape_of(a.aval), a in given)

    return tuple((op.prim.name, text(op.params), *map(atom, (*op.ins, *op.outs))) for op in ops)

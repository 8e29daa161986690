"""Cuts operations into fragments: those of one submesh at one dataflow level, each compiled as one kernel.

The level of an operation says how often its data changed submesh, or turned from the forward to the backward pass. So
fragments never wait for each other in a circle.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.errors import UsageError, internal_error
from multimesh.ir import graph
from multimesh.passes.cutting.parts import Fragment, Parts, Pipeline, Segment, with_interfaces

_Key = tuple[Mesh, str | None, int]


def cut_operations(
    ops: Sequence[ir.Op], results: Iterable[ir.Atom], *, phased: bool, rows: Iterable[ir.Value] = ()
) -> tuple[Fragment, ...]:
    """Cut placed operations into fragments, ordered by level; if ``phased``, forward and backward pass apart.

    ``rows`` are the inputs that each iteration has for itself.
    """
    results = set(ir.values(results))
    keys = _keys(ops, phased, set(rows))
    groups = group((key, i) for i, key in enumerate(keys))
    _coalesce(ops, groups)
    ordered = sorted(groups.items(), key=lambda item: (item[0][1] == "B", item[0][2], item[1][0]))
    fragments = tuple(Fragment(*key, tuple(ops[i] for i in sorted(indices))) for key, indices in ordered)
    return with_interfaces(fragments, results)


def _keys(ops: Sequence[ir.Op], phased: bool, rows: set[ir.Value]) -> list[_Key]:
    """Return the submesh, phase and level of each operation.

    An operation on inputs only (a cast of a weight) joins the first fragment of its submesh that uses it, a
    forward one if there is any: so no forward fragment ever waits for a backward one. What a stage that
    `multimesh.pipeline` made computes from rows stays in its forward fragment, as in the stages that get an activation.
    """
    maker = {o: i for i, op in enumerate(ops) for o in op.outs}
    readers: dict[int, list[int]] = collections.defaultdict(list)
    keys: list[_Key] = []
    source: list[bool] = []
    for i, op in enumerate(ops):
        if op.mesh is None:
            raise internal_error(f"unplaced operation {op}")
        before = sorted({maker[v] for v in op.needs if v in maker})
        for j in before:
            readers[j].append(i)
        back = phased and (op.backward or any(keys[j][1] == "B" for j in before))
        phase = ("B" if back else "F") if phased else None
        local = [source[j] and ops[j].mesh == op.mesh for j in before]
        source.append(all(local) and not op.effects)
        levels = [
            keys[j][2] + (keys[j][:2] != (op.mesh, phase)) for j, near in zip(before, local, strict=True) if not near
        ]
        keys.append((op.mesh, phase, max(levels, default=0)))
    for i, op in enumerate(ops):
        if any(v in rows for v in op.reads):
            rows.update(op.outs)
            source[i] = source[i] and (op.task is None or not op.task.cuts)
    for i in reversed(range(len(ops))):
        if source[i] and readers[i] and all(ops[j].mesh == ops[i].mesh for j in readers[i]):
            keys[i] = min((keys[j] for j in readers[i]), key=lambda key: (key[1] == "B", key[2]))
    return keys


def _coalesce(ops: Sequence[ir.Op], groups: dict[_Key, list[int]]) -> None:
    """Merge a fragment into its first user if all users are later fragments of the same submesh and phase."""
    group_of = {i: key for key, indices in groups.items() for i in indices}
    maker = {o: i for i, op in enumerate(ops) for o in op.outs}
    readers: dict[_Key, set[_Key]] = collections.defaultdict(set)
    for i, op in enumerate(ops):
        for v in op.needs:
            if v in maker and group_of[maker[v]] != group_of[i]:
                readers[group_of[maker[v]]].add(group_of[i])
    for key in sorted(groups, key=lambda key: -key[2]):
        to = readers[key]
        if to and all(other[:2] == key[:2] for other in to):
            target = min(to, key=lambda other: other[2])
            groups[target] += groups.pop(key)
            readers[target] |= to - {target}
            for others in readers.values():
                if key in others:
                    others.discard(key)
                    others.add(target)
            readers[target].discard(target)


def cut_fragments(program: ir.Program) -> Parts:
    """Cut a placed program into straight segments and loops, and these into fragments."""
    epochs = _epochs(program)
    rows = program.linked
    straight = [(i, e) for i, e in zip(program.items, epochs, strict=True) if isinstance(i, ir.Op)]
    read_at = group((v, epoch) for op, epoch in straight for v in op.needs)
    outside = {v for loop in program.loops for v in loop.reads} | set(ir.values(program.outputs))

    def segment(epoch: int) -> Segment:
        ops = [op for op, e in straight if e == epoch]
        results = {o for op in ops for o in op.outs if o in outside or {*read_at[o]} - {epoch}}
        return Segment(cut_operations(ops, results, phased=False), frozenset(results))

    parts: list[Segment | Pipeline] = [segment(0)]
    for number, loop in enumerate(program.loops):
        results = {*ir.values(loop.leaves), *(o for op in loop.ops for o in op.outs if o in rows)}
        parts.append(
            Pipeline(loop, cut_operations(loop.ops, results, phased=True, rows=loop.slices), frozenset(results))
        )
        parts.append(segment(number + 1))
    for part in parts:
        _check_refs(part.fragments)
    return Parts(program, tuple(parts))


def _check_refs(fragments: Iterable[Fragment]) -> None:
    """Refuse a mutable array that two kernels would share, or a kernel and the caller."""
    for part in fragments:
        for op in part.ops:
            if any(_compat.is_ref(v.aval) and v in part.ins for v in op.reads):
                raise UsageError(
                    f"{_compat.user_line(op.source)}: {op.prim.name}{f' in task {op.task.name!r}' if op.task else ''} "
                    "uses a mutable array (jax.new_ref) that was made elsewhere, but programs of several submeshes "
                    "can't share one; give the task its value, x[...], and write what the task returns outside of "
                    "multimesh.jit, or make the array inside the task"
                )


def _epochs(program: ir.Program) -> list[int]:
    """Return for each operation the number of loops before it. One that needs no loop waits for its first user."""
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

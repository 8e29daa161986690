"""The way of a microbatch along the submeshes of a loop."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from multimesh import ir


def in_order(ops: Sequence[ir.Op]) -> tuple[Mesh, ...]:
    """Submeshes of the tasks of a loop, as a microbatch comes to them; those without a forward last.

    What a task makes of weights alone does not count before the microbatch that is read with it.
    """
    found: dict[ir.Value, tuple[int, Mesh | None]] = {}
    levels: list[int] = []
    for op in ops:
        before = [found[v] for v in op.reads if v in found]
        mesh = op.task.mesh if op.task is not None else None
        levels.append(max((at + (mesh not in (None, other) and other is not None) for at, other in before), default=0))
        last = max(before, key=lambda each: each[0], default=(0, None))[1]
        found.update((o, (levels[-1], mesh or last)) for o in op.outs)
    first: dict[Mesh, tuple[bool, int, int]] = {}
    read_at: dict[ir.Value, int] = {}  # the level of the first forward reader on its own submesh; 0 for others
    for n, (op, level) in reversed([*enumerate(zip(ops, levels, strict=True))]):
        if not op.backward:
            level = level or min((read_at[o] for o in op.outs if o in read_at), default=0)
            own = {v for v in op.reads if op.task is not None and found.get(v, (0, None))[1] == op.task.mesh}
            read_at.update((v, min(read_at.get(v, level), level) if v in own else 0) for v in op.reads)
        if op.task is None:
            continue
        mesh = op.task.mesh
        key = (op.backward, -level, -n) if op.backward else (False, level, n)
        first[mesh] = min(first.get(mesh, key), key)
    return tuple(sorted(first, key=lambda mesh: first[mesh]))


def position(route: Sequence[object], mesh: object, first: int) -> int:
    """First position of a submesh that is not before ``first``, on a way that begins again at its end."""
    return next(at for at in range(first, first + len(route)) if route[at % len(route)] == mesh)

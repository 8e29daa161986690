"""The route of a microbatch along the submeshes of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import Mesh

from multimesh import ir


def note_routes(program: ir.Program) -> ir.Program:
    """Return the program with the submeshes of each loop noted, in the order of a microbatch."""
    return program.each_loop(lambda loop: replace(loop, submeshes=order_submeshes(loop.ops)))


def order_submeshes(ops: Sequence[ir.Op]) -> tuple[Mesh, ...]:
    """Return the submeshes of the tasks of a loop, in the order in which a microbatch comes to them.

    A submesh comes where something of its forward pass first leaves it: what a task makes of weights or labels alone
    counts where it is read with the microbatch. Where nothing leaves it, its latest operation counts; with a backward
    pass it comes last, and several such in the order in which the backward pass ends.
    """
    arrivals: dict[ir.Value, tuple[int, Mesh | None]] = {}
    levels: list[int] = []
    for op in ops:
        before = [arrivals[v] for v in op.reads if v in arrivals]
        mesh = op.task.mesh if op.task is not None else None
        levels.append(max((at + (mesh not in (None, other) and other is not None) for at, other in before), default=0))
        last = max(before, key=lambda arrival: arrival[0], default=(0, None))[1]
        arrivals.update(dict.fromkeys(op.outs, (levels[-1], mesh or last)))
    leaves: dict[ir.Value, int] = {}  # the first level at which anything made of a value leaves its submesh
    first: dict[Mesh, tuple[int, int]] = {}
    ends: dict[Mesh, tuple[int, int]] = {}
    back: dict[Mesh, tuple[int, int]] = {}
    for n, (op, level) in reversed([*enumerate(zip(ops, levels, strict=True))]):
        onward = min((leaves[o] for o in op.outs if o in leaves), default=None)
        mesh = next((arrivals[o][1] for o in op.outs), None)
        for v in op.reads:
            at, other = arrivals.get(v, (0, None))
            crosses = None not in (mesh, other) and mesh != other
            leaving = at if crosses else None if op.backward else onward
            if leaving is not None:
                leaves[v] = min(leaves.get(v, leaving), leaving)
        if op.task is None:
            continue
        if op.backward:
            back[op.task.mesh] = min(back.get(op.task.mesh, (0, 0)), (-level, -n))
        elif onward is not None:
            first[op.task.mesh] = min(first.get(op.task.mesh, (onward, n)), (onward, n))
        else:
            ends[op.task.mesh] = max((level, n), ends.get(op.task.mesh, (level, n)), key=lambda end: end[0])
    forward = {mesh: end for mesh, end in ends.items() if mesh not in back} | first
    return (*sorted(forward, key=forward.__getitem__), *sorted(back.keys() - forward, key=back.__getitem__))


def position(route: Sequence[object], mesh: object, first: int) -> int:
    """Return the first position of a submesh that is not before ``first``, on a route that begins again at its end."""
    return next(at for at in range(first, first + len(route)) if route[at % len(route)] == mesh)

"""Cuts, at the borders between submeshes, of the recomputation that `jax.checkpoint` asks for.

A checkpoint around several stages repeats the forward of all of them: the backward pass would first go forward through
the pipeline. But the forward pass sent each stage its input. The stage reads that input where it repeats its own part,
as under one checkpoint for each stage. The forward pass is then kept even if nothing else reads it.

Nothing is rounded otherwise: the same operation made the value that is read from the same operands.
"""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from multimesh import ir
from multimesh.passes.reading.find_recomputation import find_recomputation


def cut_repeats(program: ir.Program) -> ir.Program:
    """Let recomputed operations of loops read the forward pass's value in place of another submesh's recomputed one."""
    return program.each_loop(lambda loop: replace(loop, ops=_cut(program, loop)))


def _cut(program: ir.Program, loop: ir.Loop) -> tuple[ir.Op, ...]:
    """Return a loop's operations; recomputed ones read no value that another submesh recomputes."""
    first = find_recomputation(program, loop)
    if not first:
        return loop.ops
    made_on = {o: op.mesh for op in loop.ops for o in op.outs}

    def read(atom: ir.Atom, mesh: Mesh | None) -> ir.Atom:
        return first.get(atom, atom) if isinstance(atom, ir.Value) and made_on.get(atom, mesh) != mesh else atom

    return tuple(
        replace(op, ins=tuple(read(atom, op.mesh) for atom in op.ins)) if op.backward else op for op in loop.ops
    )

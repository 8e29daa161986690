"""Evaluation of operations as calls of JAX: how kernels are traced for a submesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.sharding import Mesh, NamedSharding

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import axis_names, carry_over, decisions, translate
from multimesh.core.submesh import describe


def evaluate(ops: Sequence[ir.Op], env: dict[ir.Value, Any], mesh: Mesh) -> None:
    """Evaluate operations in order on ``mesh``. ``env`` maps values to arrays; the results are added to it."""
    for op in ops:
        args = [env[i] if isinstance(i, ir.Value) else i.val for i in op.ins]
        with _compat.keep_line(op.source):
            results = _constrain(op, args) if op.prim is _compat.sharding_constraint_p else None
            if results is None:
                results = _compat.bind(op.prim, op.params, op.ctx, args, mesh)
        env.update(zip(op.outs, results, strict=True))


def _constrain(op: ir.Op, args: Sequence[Any]) -> Sequence[Any] | None:
    """Apply a sharding constraint on the submesh of the operation. Return None if JAX can apply it as it is."""
    if op.params.get("identity"):
        return args
    (x,) = args
    if op.mesh is None:
        return args
    mesh = _compat.auto(op.mesh)
    if "logical" in op.params:
        spec = op.params["logical"]
        if op.task is None or len(spec) > x.ndim or op.params["rank"] != x.ndim:
            return args  # batched by vmap: the layout of the new dimension is the compiler's choice
        return [lax.with_sharding_constraint(x, NamedSharding(mesh, translate(spec, op.task)))]
    sharding = op.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return None
    lost = [axis for axis in axis_names(sharding.spec) if axis not in mesh.axis_names]
    if lost:
        _compat.warn_at(
            _compat.user_line(op.source),
            f"a sharding constraint names axis {lost[0]!r}, which submesh "
            f"{describe(mesh)} does not have, so that its dimension is replicated there; name an axis of the submesh, "
            "or a logical axis with multimesh.with_sharding_constraint",
        )
    layout = carry_over(sharding.spec, x.shape, mesh)
    axes_left = [axes for _, axes in decisions(sharding.spec, x.ndim) if set(lost).isdisjoint(axes)]
    uneven = [axis for axes in axes_left for axis in axes if axis not in axis_names(layout.spec)]
    if uneven:
        _compat.warn_at(
            _compat.user_line(op.source),
            f"a sharding constraint lays out an array of shape {x.shape} as {sharding.spec}, but axis {uneven[0]!r} of "
            f"submesh {describe(mesh)} does not divide its dimension, which is replicated there; change the size, or "
            "constrain another dimension",
        )
    return [lax.with_sharding_constraint(x, layout)]

"""Traces: whether one is in force, and equations, evaluated again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from multimesh.core._compat.mesh_contexts import auto, is_explicit


def _trace_in_force() -> Any:
    with core.take_current_trace() as trace:
        return trace


with jax.core.eval_context():
    _RUNS = type(_trace_in_force())
_recording: list[type] = []
jax.make_jaxpr(lambda: _recording.append(type(_trace_in_force())))()
_RECORDS = tuple(_recording)


def staged() -> bool:
    """Whether operations are recorded (by ``jax.jit``, ``scan`` or ``make_jaxpr``), whatever they read."""
    trace = _trace_in_force()
    while not isinstance(trace, _RUNS):
        if isinstance(trace, _RECORDS) or not hasattr(trace, "parent_trace"):
            return True
        trace = trace.parent_trace
    return False


def eager() -> bool:
    """Whether no transformation is in force."""
    return isinstance(_trace_in_force(), _RUNS)


def bind(prim: Any, params: dict[str, Any], ctx: Any, args: Sequence[Any], mesh: Mesh) -> Sequence[Any]:
    """Evaluate an equation again on ``mesh``.

    The context in which it was traced is in force, unless that was the context of another mesh.
    """
    if ctx is not None and not ctx.cur_abstract_mesh.empty and auto(ctx.cur_abstract_mesh) != auto(mesh).abstract_mesh:
        ctx = None
    if ctx is None or ctx.cur_abstract_mesh == auto(ctx.cur_abstract_mesh):
        params = {name: None if is_explicit(given) else given for name, given in params.items()}
    with ctx.manager if ctx is not None else contextlib.nullcontext():
        out = prim.bind(*args, **prim.get_bind_params(params))
    return out if prim.multiple_results else [out]

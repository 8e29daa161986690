"""Equations of traced functions: renamed, and evaluated one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util
from jax.sharding import AbstractMesh, Mesh

from multimesh.core._compat.jaxprs import Literal, jit_p, remat_p
from multimesh.core._compat.traces import bind, bind_once

_CALLED = {"closed_call": "call_jaxpr", "core_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr"}


def variable(aval: Any) -> Any:
    """Make a new variable."""
    return core.Var(aval)


def row_aval(aval: Any) -> Any:
    """Return the abstract value of one row of a stack."""
    return jax.core.ShapedArray(aval.shape[1:], aval.dtype, weak_type=getattr(aval, "weak_type", False))


def callee_of(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the traced function that an equation calls once, and its constants; None for any other equation."""
    if eqn.primitive is jit_p or eqn.primitive is remat_p:
        inner = eqn.params["jaxpr"]
    elif eqn.primitive.name in _CALLED:
        inner = eqn.params[_CALLED[eqn.primitive.name]]
    else:
        return None
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def rename(eqn: Any, names: Mapping[Any, Any], calls: Sequence[Any] = ()) -> Any:
    """Return the equation with its operands replaced, and new results. Its scopes start with those of ``calls``."""
    source = eqn.source_info
    for call in reversed(calls):
        source = source.replace(name_stack=call.source_info.name_stack + source.name_stack)
        if source.traceback is None:
            source = source.replace(traceback=call.source_info.traceback)
    ins = [a if isinstance(a, Literal) else names[a] for a in eqn.invars]
    return eqn.replace(invars=ins, outvars=[core.Var(o.aval) for o in eqn.outvars], source_info=source)


def evaluate(
    eqn: Any, params: dict[str, Any], args: Sequence[Any], mesh: Mesh | AbstractMesh | None = None
) -> Sequence[Any]:
    """Evaluate an equation with parameters of its primitive, in its scopes; on ``mesh``, in its context too."""
    source = eqn.source_info
    scopes = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=scopes):
        if mesh is not None:
            return bind(eqn.primitive, params, eqn.ctx, args, mesh)
        return bind_once(eqn.primitive, params, args)

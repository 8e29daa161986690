"""The primitive of a traced function: how it runs, and how JAX's transformations change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from multimesh.core._compat.jaxprs import without_layout
from multimesh.core._compat.traces import explicit_spec, fit_to_mesh, fit_to_type


def call_primitive(name: str) -> Any:
    """Return the primitive that calls the traced function in its parameter ``jaxpr``, by way of ``call``.

    That has a method for each use: ``run`` on arrays, ``function`` inside another program, and ``linearize``,
    ``transposed`` and ``batched``, which return functions of the same kind. See `multimesh.calling.transforms.Call`.
    """
    prim = core.Primitive(name)
    prim.multiple_results = True
    prim.def_impl(lambda *args, jaxpr, call: call.run(*args))
    prim.def_effectful_abstract_eval(lambda *_, jaxpr, call: ([*map(without_layout, jaxpr.out_avals)], jaxpr.effects))
    inlined = mlir.lower_fun(lambda *args, jaxpr, call: call.function(*args), multiple_results=True)
    mlir.register_lowering(prim, inlined)
    ad.primitive_jvps[prim] = _jvp
    ad.primitive_transposes[prim] = _transpose
    batching.primitive_batchers[prim] = _batch
    return prim


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, call: Any) -> tuple[list[Any], list[Any]]:
    moving = tuple(type(t) is not ad.Zero and t.dtype != jax.dtypes.float0 for t in tangents)
    forward, push, moved = call.linearize(moving)
    outputs = forward(*primals)
    results, residuals = [*map(fit_to_mesh, outputs[: len(moved)])], outputs[len(moved) :]
    nonzero = (t for t, moves in zip(tangents, moving, strict=True) if moves)
    pushed = iter(push(*residuals, *nonzero) if any(moved) else ())
    zeros = (ad.Zero(without_layout(aval).to_tangent_aval()) for aval in jaxpr.out_avals)
    return results, [next(pushed) if flag else zero for flag, zero in zip(moved, zeros, strict=True)]


def _transpose(cotangents: Sequence[Any], *args: Any, jaxpr: Any, call: Any) -> list[Any]:
    """Return the cotangents of linear arguments, in the types of these (JAX compares them), and None for the others."""
    linear = tuple(map(ad.is_undefined_primal, args))
    types = [x.aval for x in args if ad.is_undefined_primal(x)]
    transposed = call.transposed(linear, tuple(map(explicit_spec, types)))
    fixed = (x for x in args if not ad.is_undefined_primal(x))
    typed = map(fit_to_type, transposed(*fixed, *map(ad.instantiate_zeros, cotangents)), types)
    return [next(typed) if flag else None for flag in linear]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, call: Any) -> tuple[Sequence[Any], list[Any]]:
    """Batch a call. Unbatched results stay so, unless a mesh is in force: then JAX can't broadcast them later."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    batched, rows = call.batched(size, tuple(dims), jax.sharding.get_abstract_mesh().empty)
    return batched(*args), [0 if flag else None for flag in rows]

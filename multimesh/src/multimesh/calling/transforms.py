"""`multimesh.jit` under JAX's transformations: ``jax.grad(mm.jit(f))``, ``jax.vmap``, ``jax.jvp``, ``jax.linearize``.

The arguments lie on several submeshes, so JAX can't run the operations one by one. Instead the call is one primitive,
and each transformation of it is traced once and runs as a plan of its own.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from multimesh.core import _compat
from multimesh.marking.tracing import partitioning


class Call:
    """A traced function of flat arrays. A call binds the primitive, which runs as ``jit`` of the function."""

    def __init__(
        self,
        closed: Any,
        jit: Callable[..., Callable[..., Any]],
        layouts: Sequence[PartitionSpec | None] = (),
        types: AbstractMesh | None = None,
    ):
        """``jit(function, layouts=...)`` compiles; ``layouts`` are those of results, ``types`` is the trace's mesh."""
        self.closed, self.types = closed, types
        self._of = _compat.jaxpr_as_fun(closed)
        self._jit, self._layouts = functools.partial(jit, types=types), layouts
        self._made: dict[Hashable, Any] = {}  # each transformation is traced and compiled once

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Bind the primitive: it runs, or is transformed."""
        return _call_p.bind(*args, jaxpr=self.closed, call=self)

    def function(self, *args: Any) -> Sequence[Any]:
        """Evaluate the trace."""
        return self._of(*_compat.fit_types(args, self.closed.in_avals))

    def run(self, *args: Any) -> Sequence[Any]:
        """Run on arrays."""
        return self._once("run", lambda: self._jit(self.function, layouts=self._layouts))(*args)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _traced(self, fn: Callable[..., Any], *shapes: Any, layouts: Sequence[PartitionSpec | None] = ()) -> Call:
        with (
            partitioning(),
            _compat.devices_free(self.types),
            _compat.explain_trace(lambda: "a transformed function of multimesh.jit"),
        ):
            return Call(jax.make_jaxpr(fn)(*shapes), self._jit, layouts, self.types)

    @property
    def _shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [_compat.struct_of(aval) for aval in self.closed.in_avals]

    def linearize(self, moving: tuple[bool, ...]) -> tuple[Call, Call, list[bool]]:
        """Return the function with its residuals, its tangent function, and a flag per result that has a tangent.

        ``moving`` flags the arguments that have tangents. The first function returns results, then residuals. The
        second takes residuals, then tangents.
        """
        return self._once(("linearize", moving), lambda: self._linearize(moving))

    def _linearize(self, moving: tuple[bool, ...]) -> tuple[Call, Call, list[bool]]:
        pushes: list[Callable[..., Sequence[Any]]] = []

        def forward(*primals: Any) -> list[Any]:
            fixed = [x for x, moves in zip(primals, moving, strict=True) if not moves]
            of = lambda *values: self.function(*_interleave(moving, values, fixed))  # noqa: E731
            results, push = jax.linearize(of, *itertools.compress(primals, moving))
            pushed = jax.make_jaxpr(lambda *values: list(itertools.compress(push(*values), moved)))(*tangents)
            pushed, residuals = _compat.hoist(pushed)
            push_of = _compat.jaxpr_as_fun(pushed)
            if self.types is None:
                pushes.append(push_of)
                return [*results, *residuals]
            pushes.append(lambda *values: push_of(*_compat.fit_auto(values, pushed.in_avals)))
            return [*map(_compat.leave_auto, (*results, *residuals))]

        moved = [bool(jnp.issubdtype(aval.dtype, jnp.inexact)) for aval in self.closed.out_avals]
        tangents = list(itertools.compress(self._shapes, moving))
        linearized = self._traced(forward, *self._shapes, layouts=self._layouts)
        residuals = [_compat.struct_of(aval) for aval in linearized.closed.out_avals[len(moved) :]]
        layouts = tuple(itertools.compress(self._layouts, moved))
        return linearized, self._traced(pushes[0], *residuals, *tangents, layouts=layouts), moved

    def transposed(self, linear: tuple[bool, ...], layouts: tuple[PartitionSpec | None, ...]) -> Call:
        """Return the transposed function: it returns the cotangents of the ``linear`` arguments, in these layouts.

        It takes the other arguments and the cotangents of the results.
        """

        def pull(fixed: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
            of = lambda *moving: self.function(*_interleave(linear, moving, fixed))  # noqa: E731
            return jax.linear_transpose(of, *linear_shapes)(list(cotangents))

        linear_shapes = list(itertools.compress(self._shapes, linear))
        fixed_shapes = [x for x, flag in zip(self._shapes, linear, strict=True) if not flag]
        results = [_compat.struct_of(aval) for aval in self.closed.out_avals]
        trace = functools.partial(self._traced, pull, fixed_shapes, results, layouts=layouts)
        return self._once(("transposed", linear, layouts), trace)

    def batched(self, size: int, dims: tuple[int | None, ...], some: bool) -> tuple[Call, list[bool]]:
        """Return the function over ``size`` rows along ``dims`` of the arguments.

        Also return whether each result has rows, which are then in front: ``some``, or all.
        """
        return self._once(("batched", size, dims, some), lambda: self._batched(size, dims, some))

    def _batched(self, size: int, dims: tuple[int | None, ...], some: bool) -> tuple[Call, list[bool]]:
        flags: list[bool] = []

        def fn(*args: Any) -> list[Any]:
            unbatched: list[Any] = []

            def of(*row: Any) -> list[Any]:
                results = [*map(_compat.leave_mesh, self.function(*row))]
                flags[:] = [not some or _compat.has_rows(x) for x in results]
                unbatched[:] = itertools.compress(results, map(operator.not_, flags))
                return [*itertools.compress(results, flags)]

            rows = jax.vmap(of, in_axes=dims, axis_size=size)(*args)
            return _interleave(flags, rows, unbatched)

        shapes = [
            one if d is None else _compat.with_rows(one, d, size) for one, d in zip(self._shapes, dims, strict=True)
        ]
        batched = self._traced(fn, *shapes)
        layouts = [
            spec if spec is None or not flag else PartitionSpec(None, *spec)
            for spec, flag in zip(self._layouts, flags, strict=False)
        ]
        return Call(batched.closed, self._jit, layouts, self.types), flags


def _interleave(flags: Sequence[bool], chosen: Any, others: Any) -> list[Any]:
    """Take from ``chosen`` where the flag is set, and else from ``others``."""
    first, second = iter(chosen), iter(others)
    return [next(first) if flag else next(second) for flag in flags]


_call_p = _compat.call_primitive("multimesh_call")

"""Traces: the one in force, its mesh, meshes in the types of arrays and in layouts, and equations, evaluated again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core, source_info_util
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from multimesh.core._compat import versions
from multimesh.core._compat.jaxprs import without_layout
from multimesh.errors import UsageError

AnyMesh = TypeVar("AnyMesh", Mesh, AbstractMesh)


def auto(mesh: AnyMesh) -> AnyMesh:
    """Return the mesh with Auto axes only. Everything is traced and lowered under such meshes.

    Types with Explicit axes can't be mixed with those of another submesh, and passes that move operations break them.
    """
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == kinds:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names) if isinstance(mesh, Mesh) else mesh.update(axis_types=kinds)


def _without_trace(look: Callable[[Any], Any]) -> Any:
    """Return ``look(trace)`` of the current trace, which is removed meanwhile, and restored after any interrupt."""
    trace = core.take_current_trace()
    try:
        return look(trace.__enter__())
    finally:
        try:
            trace.__exit__(None, None, None)
        except AttributeError:  # the interrupt came before anything was taken
            pass
        except BaseException:
            trace.__exit__(None, None, None)
            raise


def _concrete_mesh_is_empty() -> bool:
    try:
        return bool(_without_trace(lambda _: jax.sharding.get_mesh().empty))  # JAX refuses to say inside a trace
    except ValueError:  # jax < 0.12, inside a trace that names an axis: there are no devices
        return True


def without_mesh(*, concrete_only: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh of an enclosing ``jax.set_mesh``. Under it nothing can be compiled or run on other devices."""
    if _concrete_mesh_is_empty() and (concrete_only or jax.sharding.get_abstract_mesh().empty):
        return contextlib.nullcontext()
    try:
        return _without_trace(lambda _: jax.set_mesh(Mesh(np.empty((), object), ())))  # JAX refuses to in a trace
    except ValueError as error:  # jax < 0.12, inside a trace that names an axis
        raise UsageError(
            f"multimesh.jit in jax.vmap(axis_name=) and jax.set_mesh: drop one of them ({error})"
        ) from None


@contextlib.contextmanager
def devices_free(types: AbstractMesh | None = None) -> Iterator[None]:
    """Leave the devices of an enclosing ``jax.set_mesh``, but keep its axes for bare constraints in a trace.

    Trace on ``types`` instead, if layouts on that mesh are in the types of values.
    """
    none, axes = AbstractMesh((), ()), auto(jax.sharding.get_abstract_mesh())
    with (
        without_mesh(concrete_only=True),
        jax.sharding.use_abstract_mesh(axes if types is None else none),
        jax.sharding.use_abstract_mesh(axes if types is None else types),
    ):
        yield


@contextlib.contextmanager
def abstract_mesh_context(mesh: Mesh | AbstractMesh, *, typed: bool = False) -> Iterator[None]:
    """Resolve bare ``PartitionSpec`` constraints in a trace on ``mesh``, without its devices.

    JAX goes from one mesh to one of another size only by way of none. Axes are Auto, or with ``typed`` as they are.
    """
    none, target = AbstractMesh((), ()), (mesh if typed else auto(mesh)).abstract_mesh
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(target):
        yield


def identity_primitive(name: str, lowered: Callable[..., None]) -> Any:
    """Make a primitive that returns its operand, and calls ``lowered`` with its parameters when it is lowered."""
    prim = core.Primitive(name)

    def lower(_: Any, x: Any, **params: Any) -> list[Any]:
        lowered(**params)
        return [x]

    prim.def_impl(lambda x, **_: x)
    prim.def_abstract_eval(lambda x, **_: x)
    ad.deflinear2(prim, lambda cotangent, _, **params: [cotangent])
    batching.defvectorized(prim)
    mlir.register_lowering(prim, lower)
    return prim


_leave_p = core.Primitive("multimesh_leave")
_leave_p.def_impl(versions.without_type)
_leave_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type))
ad.deflinear2(_leave_p, lambda cotangent, _: [leave_mesh(cotangent)])
batching.defvectorized(_leave_p)
mlir.register_lowering(_leave_p, lambda ctx, x: [x])


def leave_mesh(x: Any) -> Any:
    """Return ``x`` itself, without the mesh in its type: JAX mixes no meshes of different sizes in a backward pass."""
    if not isinstance(x, jax.Array) or jax.typeof(x).sharding.mesh.empty:
        return x
    return _leave_p.bind(x)


def leave_auto(x: Any) -> Any:
    """Return ``x`` itself, without its mesh in its type if that has no Explicit axes.

    Values inside of `jax.sharding.auto_axes`, as `.at[].get(out_sharding=)` calls it, have such a type. Outside of it
    JAX can't make zeros of this type.
    """
    mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None
    return x if mesh is None or mesh.empty or AxisType.Explicit in mesh.axis_types else _leave_p.bind(x)


def fit_to_mesh(x: Any) -> Any:
    """Return an array without its mesh in its type if the mesh in force is another, under which JAX refuses that type.

    ``jax.grad`` makes a cotangent in the mesh in force, of the type of the result that it is for.
    """
    ambient, mesh = jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.mesh
    if mesh.empty or ambient == mesh or (ambient == auto(ambient) and mesh == auto(mesh)):
        return x
    return _leave_p.bind(x)


def fit_to_type(x: Any, aval: Any) -> Any:
    """Return an array without its mesh in its type if that contradicts the layout of an abstract value."""
    sharding, target = jax.typeof(x).sharding, aval.sharding
    fits = sharding == target or sharding.mesh.empty or target.mesh.empty
    if fits or (sharding.mesh == auto(sharding.mesh) and target.mesh == auto(target.mesh)):
        return x
    return _leave_p.bind(x)


def is_explicit(param: Any) -> bool:
    """Return whether a parameter is a layout on Explicit axes. It has no meaning where axes are Auto."""
    return isinstance(param, NamedSharding) and param.mesh != auto(param.mesh)


def _trace_in_force() -> Any:
    return _without_trace(lambda trace: trace)


with jax.core.eval_context():
    _RUNS = type(_trace_in_force())
_recording: list[type] = []
jax.make_jaxpr(lambda: _recording.append(type(_trace_in_force())))()
_RECORDS = tuple(_recording)


@functools.cache
def _type_of_rows() -> type:
    """Return the type of a value that ``jax.vmap`` has cut into rows."""
    types: list[type] = []
    jax.vmap(lambda x: types.append(type(x)))(np.zeros(1))
    return types[0]


def has_rows(x: Any) -> bool:
    """Return whether a value inside of ``jax.vmap`` depends on a value that is cut into rows."""
    return isinstance(x, _type_of_rows())


def in_a_trace() -> bool:
    """Return whether operations are recorded (by ``jax.jit``, ``scan`` or ``make_jaxpr``), whatever they read."""
    trace = _trace_in_force()
    while not isinstance(trace, _RUNS):
        if isinstance(trace, _RECORDS) or not hasattr(trace, "parent_trace"):
            return True
        trace = trace.parent_trace
    return False


def eager() -> bool:
    """Return whether no transformation is in force."""
    return isinstance(_trace_in_force(), _RUNS)


def bind(prim: Any, params: dict[str, Any], ctx: Any, args: Sequence[Any], mesh: Mesh | AbstractMesh) -> Sequence[Any]:
    """Evaluate an equation again on ``mesh``, in the context of its trace unless that was of another mesh."""
    if ctx is not None and not ctx.cur_abstract_mesh.empty and auto(ctx.cur_abstract_mesh) != auto(mesh).abstract_mesh:
        ctx = None
    if ctx is None or ctx.cur_abstract_mesh == auto(ctx.cur_abstract_mesh):
        params = {name: None if is_explicit(param) else param for name, param in params.items()}
    with ctx.manager if ctx is not None else contextlib.nullcontext():
        return bind_once(prim, params, args)


def bind_once(prim: Any, params: dict[str, Any], args: Sequence[Any]) -> Sequence[Any]:
    """Evaluate an equation of a traced function, and return its results."""
    out = prim.bind(*args, **prim.get_bind_params(params))
    return out if prim.multiple_results else [out]


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
    transposed = call.transposed(linear, tuple(t.sharding.spec if any(t.sharding.spec) else None for t in types))
    fixed = (x for x in args if not ad.is_undefined_primal(x))
    typed = map(fit_to_type, transposed(*fixed, *map(ad.instantiate_zeros, cotangents)), types)
    return [next(typed) if flag else None for flag in linear]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, call: Any) -> tuple[Sequence[Any], list[Any]]:
    """Batch a call. Unbatched results stay so, unless a mesh is in force: then JAX can't broadcast them later."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    batched, rows = call.batched(size, tuple(dims), jax.sharding.get_abstract_mesh().empty)
    return batched(*args), [0 if flag else None for flag in rows]

"""Traced functions: their primitives, equations and parts, and values of a trace."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, linear_util
from jax.extend.core import primitives
from jax.interpreters import partial_eval
from jax.sharding import Mesh, NamedSharding

Literal = core.Literal
jit_p = primitives.jit_p
remat_p = primitives.remat_p
sharding_constraint_p = primitives.sharding_constraint_p
add_p = primitives.add_p
device_put_p = primitives.device_put_p
copy_p = primitives.copy_p
jaxpr_as_fun: Callable[[Any], Callable[..., Any]] = core.jaxpr_as_fun


_CALLED = {"closed_call": "call_jaxpr", "core_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr"}


def _primitive_of(fn: Callable[..., Any], size: int) -> Any:
    """Return the primitive that a function binds, if JAX does not name it in public."""
    return jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((size,), np.float32)).jaxpr.eqns[0].primitive


optimization_barrier_p = _primitive_of(jax.lax.optimization_barrier, 1)

PRIMITIVES: Mapping[str, Any] = {  # by name; an extension may give another primitive one of these names
    p.name: p
    for p in (
        *vars(primitives).values(),
        optimization_barrier_p,
        _primitive_of(lambda x: jax.lax.split(x, (1, 1)), 2),
    )
    if isinstance(p, core.Primitive)
}


def subjaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation."""
    for value in params.values():
        for jaxpr in value if isinstance(value, tuple | list) else (value,):
            if isinstance(jaxpr, core.Jaxpr | core.ClosedJaxpr):
                yield getattr(jaxpr, "jaxpr", jaxpr)


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


def replace_meshes(params: Mapping[str, Any], change: Callable[[Mesh], Mesh]) -> dict[str, Any]:
    """Return the parameters of an equation with other meshes, also those of layouts and of jaxprs in them."""

    @functools.cache
    def inside(jaxpr: Any) -> Any:
        return jaxpr.replace(eqns=[eqn.replace(params=of(eqn.params)) for eqn in jaxpr.eqns])

    def other(value: Any) -> Any:
        if isinstance(value, Mesh):
            return change(value)
        if isinstance(value, NamedSharding) and isinstance(value.mesh, Mesh):
            return NamedSharding(change(value.mesh), value.spec, memory_kind=value.memory_kind)
        if isinstance(value, core.Jaxpr):
            return inside(value)
        if isinstance(value, core.ClosedJaxpr):  # before jax 0.12
            return core.ClosedJaxpr(inside(value.jaxpr), value.consts)
        return type(value)(map(other, value)) if type(value) in (tuple, list) else value

    def of(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: other(value) for name, value in values.items()}

    return of(params)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of constants and of carries of a scan. They come first among its operands."""
    if "ft_in" in params:  # trees; before jax 0.12, numbers
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def scan_params(params: dict[str, Any], body: Any, num_consts: int, num_carry: int) -> dict[str, Any]:
    """Return parameters of a scan with another body, and other numbers of constants and carries."""
    rows, results = len(body.in_avals) - num_consts - num_carry, len(body.out_avals) - num_carry
    return params | _scan_groups(num_consts, num_carry, rows, results) | {"jaxpr": body}


@functools.cache
def _scan_groups(num_consts: int, num_carry: int, rows: int, results: int) -> dict[str, Any]:
    """Return the parameters of a scan that hold these numbers, in the form of this JAX: read off a small scan."""

    def scan(consts: list[Any], carry: list[Any], xs: list[Any]) -> Any:
        def body(carry: list[Any], row: list[Any]) -> Any:
            total = sum([*consts, *carry, *row], jnp.float32(1))  # each is read, none is handed on
            return [total + i for i in range(num_carry)], [total - i for i in range(1, results + 1)]

        return jax.lax.scan(body, carry, xs, length=2)

    one, two = np.float32(0), np.zeros(2, np.float32)
    (eqn,) = jax.make_jaxpr(scan)([one] * num_consts, [one] * num_carry, [two] * rows).eqns
    return {name: eqn.params[name] for name in ("num_consts", "num_carry", "ft_in", "ft_out") if name in eqn.params}


def dce(branches: Sequence[Any], used: Sequence[bool]) -> tuple[tuple[Any, ...], list[bool]]:
    """Cut the branches of a conditional down to the used results. Return them, and which operands they still read."""
    reads = [partial_eval.dce_jaxpr(b.jaxpr, list(used))[1] for b in branches]
    union = [any(flags) for flags in zip(*reads, strict=True)]
    cut = [partial_eval.dce_jaxpr(b.jaxpr, list(used), instantiate=union)[0] for b in branches]
    return tuple(core.ClosedJaxpr(j, b.consts) for j, b in zip(cut, branches, strict=True)), union


def retrace(fn: Callable[..., Any], avals: Sequence[Any], names: Any) -> Any:
    """Return the jaxpr of a function of flat arguments, which may be references; ``names`` is its debug info."""
    flat = linear_util.wrap_init(fn, debug_info=names)
    return partial_eval.trace_to_jaxpr_dynamic(flat, [*avals])[0]


def constant_results(closed: Any) -> dict[int, Any]:
    """Return results that a traced function holds and does not compute: position to value."""
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    results = enumerate(closed.jaxpr.outvars)
    return {i: v.val if isinstance(v, Literal) else env[v] for i, v in results if isinstance(v, Literal) or v in env}


def part(closed: Any, positions: Sequence[int]) -> Callable[[], list[Any]]:
    """Return a function that computes only the results at these positions of a traced function without arguments."""
    flags = [i in set(positions) for i in range(len(closed.jaxpr.outvars))]
    cut, used, _ = partial_eval.dce_jaxpr_consts(closed.jaxpr, flags)
    return core.jaxpr_as_fun(core.ClosedJaxpr(cut, [c for c, keep in zip(closed.consts, used, strict=True) if keep]))


def hoist(closed: Any) -> tuple[Any, list[Any]]:
    """Convert the tracers that a traced function captures to its first arguments. Return the function and them."""
    tracers = [c for c in closed.consts if is_tracer(c)]
    if not tracers:
        return closed, []

    def fn(values: Sequence[Any], *args: Any) -> Any:
        captured = iter(values)
        consts = [next(captured) if is_tracer(c) else c for c in closed.consts]
        return jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, consts))(*args)

    shapes = [shape_of(jax.typeof(c)) for c in tracers]
    return jax.make_jaxpr(fn)(shapes, *map(shape_of, closed.in_avals)), tracers


def is_tracer(x: Any) -> bool:
    """Return whether ``x`` is a value of an enclosing trace."""
    return isinstance(x, jax.core.Tracer)


def primal(x: Any) -> Any:
    """Return the value behind a differentiated one, such as the array that ``jax.grad`` was called with."""
    while is_tracer(x) and hasattr(x, "primal"):
        x = x.primal
    return x


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Return an abstract value as an argument to trace with."""
    return struct(aval.shape, aval.dtype, getattr(aval, "weak_type", False), memory_kind(aval))


def struct(shape: tuple[int, ...], dtype: Any, weak_type: bool, memory: str | None) -> jax.ShapeDtypeStruct:
    """Return the type of an argument to trace with, without a layout; ``memory`` is None for that of the device."""
    nowhere = jax.sharding.AbstractMesh((), ())
    layout = None if memory is None else jax.NamedSharding(nowhere, jax.P(), memory_kind=memory)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type, sharding=layout)


def without_layout(aval: Any) -> Any:
    """Return the abstract value without a mesh in its type, which fits every mesh of a ``jax.set_mesh``."""
    if not hasattr(aval, "sharding") or aval.sharding.mesh.empty:
        return aval
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type, memory_space=aval.memory_space)


def stack(aval: Any, length: int) -> Any:
    """Return the abstract value of ``length`` stacked rows."""
    return jax.core.ShapedArray((length, *aval.shape), aval.dtype)


def nbytes(aval: Any) -> int:
    """Return the size of an array of this abstract value in bytes; zero for tokens."""
    if not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)


def is_ref(aval: Any) -> bool:
    """Return whether an abstract value is that of a mutable array, as `jax.new_ref` makes."""
    return hasattr(aval, "inner_aval")


def memory_kind(aval: Any) -> str | None:
    """Return the memory that an abstract value is in; None for that of the device."""
    space = getattr(aval, "memory_space", None)
    return "pinned_host" if space is not None and space.name == "Host" else None


def cast_weak_type(x: Any, aval: Any) -> Any:
    """Give ``x`` the weak type of an abstract value of the same dtype."""
    weak = getattr(aval, "weak_type", False)
    if not hasattr(x, "dtype") or getattr(jax.typeof(x), "weak_type", False) == weak or x.dtype != aval.dtype:
        return x
    return primitives.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)


def copy(x: Any) -> Any:
    """Copy ``x``. ``jax.grad`` removes a bare identity from the forward pass, but no copy."""
    return primitives.copy_p.bind(x)

"""Traced functions without layouts in their types: what types say stands in sharding constraints.

The passes move operations between kernels and make new ones, which would not fit types with layouts. So a function is
traced as it was written, on Explicit axes, and read on Auto axes. A constraint keeps each layout that is asked for.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from multimesh.core._compat.jaxprs import Literal, is_ref, retrace, shape_of, subjaxprs, without_layout
from multimesh.core._compat.lines import scopes, user_line
from multimesh.core._compat.traces import abstract_mesh_context, bind_once, is_explicit
from multimesh.core._compat.typed import is_typed, partitions, struct_of
from multimesh.errors import UsageError

_CALLS = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "closed_call": "call_jaxpr"}
_MOVES = ("reshard", "mesh_cast")
_DECIDED = frozenset(("dot_general", "ragged_dot_general", "conv_general_dilated", "gather", *_MOVES))
"""Operations whose layout the program decides. That of all others follows from their operands."""


def erase(closed: Any) -> Any:
    """Return a traced function without layouts in its types."""
    consts, jaxpr = [*map(_erase_constant, closed.consts)], closed.jaxpr
    eraser = _Eraser()
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        avals = [shape_of(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
        flat = jax.make_jaxpr(functools.partial(eraser.evaluate, jaxpr))(*avals).jaxpr
    names = flat.debug_info._replace(arg_names=None, result_paths=None)
    ins = flat.invars
    erased = flat.replace(constvars=[*ins[: len(consts)]], invars=[*ins[len(consts) :]], debug_info=names)
    return core.ClosedJaxpr(erased, consts)


class _Eraser:
    """Evaluates equations without types, each jaxpr inside of one once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, bool], Any] = {}
        self._backward = False  # whether a transposition made the jaxpr around an equation

    def evaluate(self, jaxpr: Any, *args: Any) -> list[Any]:
        """Evaluate a jaxpr; ``args`` has its constants, then its arguments."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

        def read(atom: Any) -> Any:
            return _erase_constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            outer, self._backward = self._backward, self._backward or scopes(eqn)[1]
            with _place_of(eqn):
                env.update(zip(eqn.outvars, self._results(eqn, [*map(read, eqn.invars)]), strict=True))
            self._backward = outer
        return [*map(read, jaxpr.outvars)]

    def _results(self, eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in _CALLS:
            called = eqn.params[_CALLS[name]]
            return self.evaluate(called.jaxpr, *map(_erase_constant, called.consts), *args)
        if name in (*_MOVES, "multimesh_retype"):
            results: Sequence[Any] = args
            if _only_sums(eqn):
                return args
        elif name == "sharding_constraint":
            return [_constrain_both(args[0], eqn)]
        elif name == "shard_map":
            return self._shard_map(eqn, args)
        elif name == "call_hi_primitive":
            return self._expand(eqn, args)
        else:
            params = {key: self._erased(value) for key, value in eqn.params.items()}
            results = bind_once(eqn.primitive, params, args)
        if name not in _DECIDED or (name not in _MOVES and self._backward):
            return results  # a weight's gradient lies as the weight, once it is summed up
        return [*map(_constrain, results, (v.aval for v in eqn.outvars))]

    def _erased(self, param: Any) -> Any:
        """Return a parameter of an equation, and what it holds, without layouts on Explicit axes."""
        if isinstance(param, core.ClosedJaxpr):
            return core.ClosedJaxpr(self._inner(param.jaxpr), [*map(_erase_constant, param.consts)])
        if isinstance(param, core.Jaxpr):
            return self._inner(param)
        if isinstance(param, AbstractMesh):
            return _auto(param)
        if isinstance(param, jax.core.AbstractValue):
            return _erase_type(param)
        if type(param) in (tuple, list):
            return type(param)(map(self._erased, param))
        if isinstance(param, tuple) and hasattr(param, "_make"):  # the programs of a custom_linear_solve
            return param._make(map(self._erased, param))
        if dataclasses.is_dataclass(param) and not isinstance(param, type):  # the grid of a pallas_call
            return self._erased_fields(param)
        return None if is_explicit(param) else param

    def _erased_fields(self, param: Any) -> Any:
        before = {field.name: getattr(param, field.name) for field in dataclasses.fields(param)}
        changes = {name: new for name, old in before.items() if (new := self._erased(old)) is not old and new != old}
        if not changes:
            return param
        changed = copy.copy(param)
        for name, value in changes.items():
            object.__setattr__(changed, name, value)
        return changed

    def _expand(self, eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
        """Evaluate the equations that a primitive with types of its own stands for, as `jnp.searchsorted` binds one."""
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), eqn.ctx.manager:
            expand = functools.partial(eqn.primitive.to_lojax, **eqn.params)
            closed = jax.make_jaxpr(expand)(*(struct_of(atom.aval) for atom in eqn.invars))
        return self.evaluate(closed.jaxpr, *map(_erase_constant, closed.consts), *args)

    def _inner(self, jaxpr: Any) -> Any:
        if _is_plain(jaxpr):
            return jaxpr
        key = id(jaxpr), self._backward
        if key not in self._made:
            avals = [_erase_type(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
            erased = retrace(functools.partial(self.evaluate, jaxpr), avals, jaxpr.debug_info)
            count = len(jaxpr.constvars)
            names = erased.debug_info._replace(arg_names=None, result_paths=None)
            inner = erased.replace(constvars=erased.invars[:count], invars=erased.invars[count:], debug_info=names)
            self._made[key] = jaxpr, inner  # which keeps the jaxpr alive, and so its id
        return self._made[key][1]

    def _shard_map(self, eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
        params = eqn.params
        for spec in (*params["in_specs"], *params["out_specs"]):
            if getattr(spec, "reduced", None) or getattr(spec, "unreduced", None):
                raise UsageError(
                    f"{user_line(eqn.source_info)}: jax.shard_map takes or returns {spec} here, whose terms would lie "
                    "on several devices; reshard the operand to P(...) without reduced= before it"
                )
        manual = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
        inner = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
        run = jax.shard_map(
            lambda *local: tuple(self.evaluate(inner, *local)),
            mesh=_auto(params["mesh"]),
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=frozenset(manual),
            check_vma=params["check_vma"],
        )
        return run(*args)


@contextlib.contextmanager
def _place_of(eqn: Any) -> Iterator[None]:
    """Enter the scopes and the context of an equation, with its mesh on Auto axes."""
    source, mesh = eqn.source_info, eqn.ctx.cur_abstract_mesh
    scopes = source_info_util.current_name_stack() + source.name_stack
    on_auto = abstract_mesh_context(_auto(mesh), typed=True) if is_typed(mesh) else contextlib.nullcontext()
    with source_info_util.user_context(source.traceback, name_stack=scopes), eqn.ctx.manager, on_auto:
        yield


def _auto(mesh: Any) -> Any:
    """Return the abstract mesh with Auto axes in the place of Explicit ones."""
    kinds = (AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    return mesh.abstract_mesh.update(axis_types=tuple(kinds))


def _erase_type(aval: Any) -> Any:
    """Return an abstract value without layout, but with the Manual axes along which it varies."""
    if is_ref(aval):
        return aval.update(inner_aval=_erase_type(aval.inner_aval))
    if getattr(getattr(aval, "manual_axis_type", None), "varying", None):
        return aval.update(sharding=NamedSharding(_auto(aval.sharding.mesh), PartitionSpec()))
    return without_layout(aval)


def _erase_constant(x: Any) -> Any:
    """Return a constant of a trace without a layout in its type, which a view of an array of NumPy's does not keep."""
    return x.view() if isinstance(x, np.ndarray) else x


def _is_plain(jaxpr: Any) -> bool:
    """Return whether nothing in a jaxpr is on a mesh with Explicit axes, as where `jax.shard_map` makes all Manual."""
    variables = (*jaxpr.invars, *jaxpr.constvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars))
    layouts = (getattr(getattr(v.aval, "inner_aval", v.aval), "sharding", None) for v in variables)
    if any(layout is not None and is_typed(layout.mesh) for layout in layouts):
        return False
    return not any(is_typed(e.ctx.cur_abstract_mesh) for e in jaxpr.eqns) and all(
        map(_is_plain, (inner for e in jaxpr.eqns for inner in subjaxprs(e.params)))
    )


def _only_sums(eqn: Any) -> bool:
    """Return whether a layout stays, and only says whether terms of several devices are summed up."""
    specs = [getattr(v.aval.sharding, "spec", None) for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal)]
    return len(specs) == 2 and partitions(specs[0]) == partitions(specs[1]) and specs[0] != specs[1]


def _constrain(x: Any, aval: Any) -> Any:
    """Return a value in the layout that a type says; as it is if the type says that its terms are not summed up."""
    layout = aval.sharding
    if not aval.shape or not is_typed(layout.mesh) or getattr(layout.spec, "unreduced", None):
        return x
    axes = zip(layout.mesh.axis_names, layout.mesh.axis_types, strict=True)
    free = any(kind != AxisType.Explicit and layout.mesh.shape[name] > 1 for name, kind in axes)
    entries = [PartitionSpec.UNCONSTRAINED if free and e is None else e for e in partitions(layout.spec)]
    return lax.with_sharding_constraint(x, NamedSharding(_auto(layout.mesh), PartitionSpec(*entries)))


def _constrain_both(x: Any, eqn: Any) -> Any:
    """Apply a constraint on the Auto axes of a mesh; the Explicit ones stay as the type says."""
    sharding, typed = eqn.params["sharding"], partitions(eqn.outvars[0].aval.sharding.spec)
    free = PartitionSpec.UNCONSTRAINED

    def merge(entry: Any, axes: Any) -> Any:
        if entry in (None, free) or axes is None:
            return entry if axes is None else axes
        return tuple(itertools.chain(*(e if isinstance(e, tuple) else (e,) for e in (axes, entry))))

    entries = (*partitions(sharding.spec), *(None for _ in x.shape))[: x.ndim]
    spec = PartitionSpec(*map(merge, entries, (*typed, *(None for _ in x.shape))[: x.ndim]))
    return lax.with_sharding_constraint(x, NamedSharding(_auto(sharding.mesh.abstract_mesh), spec))

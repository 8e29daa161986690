"""A jaxpr as a `Program`: calls are inlined, marks become the ``task`` of operations, marked scans become `Loop`."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import carry_over, strip
from multimesh.core.submesh import Placement, describe
from multimesh.errors import MultiMeshError, UsageError
from multimesh.ir import graph
from multimesh.ir.primitives import is_pure
from multimesh.ir.program import has_tasks
from multimesh.marking import marks, registrations
from multimesh.passes.reading import loops

_CALLS = {  # primitive name -> parameter that holds the called jaxpr
    "jit": "jaxpr",
    "multimesh_call": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    _compat.remat_p.name: "jaxpr",
}


_NOTHING = frozenset(("multimesh_leave", "multimesh_task"))  # primitives of our own that compute nothing


_IN_SMALLER: dict[str, Callable[..., list[jax.Array]]] = {
    "unstack": lambda x, axis: [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])],
    "stack": lambda *rows, axis: [jax.lax.concatenate([jax.lax.expand_dims(row, (axis,)) for row in rows], axis)],
}
"""Primitives that simpler ones replace, in which each row of an array has a place of its own."""


@dataclass(frozen=True)
class _Where:
    """The context of an equation, inherited by everything that it calls."""

    task: Placement | None = None
    registered: bool = False  # the task is that of a scope, by `register_task`
    backward: bool = False
    loop: tuple[marks.LoopMark, str] | None = None
    constraint: tuple[PartitionSpec, int] | None = None  # of logical axes, with the rank of what it was written for
    scope: tuple[str, ...] = ()
    calls: tuple[Any, ...] = ()  # sources of the enclosing calls, outermost first

    def line(self, eqn: Any) -> str:
        """Return the user's line of an equation, else that of the nearest call around it that has one."""
        sources = (eqn.source_info, *reversed(self.calls))
        return next(filter(None, map(_compat.user_line, sources)), "a line that JAX did not record")


class _Inliner:
    """A walk over jaxprs, with scopes already looked up, captured constants, and arguments that tasks pass through."""

    def __init__(self, devices: tuple[jax.Device, ...], specs: Mapping[ir.Value, PartitionSpec | None]):
        self._devices = devices
        self._specs = specs
        self._registrations = registrations.in_force()
        self._scope_cache: dict[tuple[tuple[str, ...], bool], Placement | None] = {}
        self._paths: dict[str, None] = {}  # of the named scopes that were met, outside tasks
        self.consts: dict[ir.Value, Any] = {}
        self.passed: dict[ir.Value, ir.Atom] = {}  # copies of what tasks pass through, with the original

    def check_registrations(self, *, placed: bool) -> None:
        """Warn of a pattern that no scope matches; raise an error if a name is near and nothing is ``placed``."""
        names = list(dict.fromkeys(name for path in self._paths for name in path.split("/")))
        for r in self._registrations:
            if any(map(r.pattern.search, self._paths)):
                continue
            literal = re.sub(r"\\[a-zA-Z]|[^\w/]", "", r.pattern.pattern)
            near = difflib.get_close_matches(literal, dict.fromkeys((*names, *self._paths)), n=4)
            if placed and not near:
                continue
            problem = f"register_task({r.pattern.pattern!r}) matches no named scope of a function that is traced"
            if near:
                hint = f"near names are {', '.join(map(repr, near))}"
            elif names:
                hint = f"it runs without tasks; its scopes are {', '.join(map(repr, names[:8]))}"
            else:
                hint = "it has none and runs without tasks; write jax.named_scope in Flax NNX modules"
            if near and not placed:
                raise UsageError(f"{r.where}: {problem}, and nothing else in it is a task; {hint}")
            _compat.warn_at(r.where, f"{problem}: {hint}")

    def jaxpr(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[ir.Atom], where: _Where, out: list[ir.Item]
    ) -> list[ir.Atom]:
        """Append the items of a jaxpr to ``out`` and return its results."""
        env: dict[Any, ir.Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = ir.Value(var.aval)
            self.consts[env[var]] = const
        for eqn in jaxpr.eqns:
            ins = [a if isinstance(a, _compat.Literal) else env[a] for a in eqn.invars]
            env.update(zip(eqn.outvars, self._eqn(eqn, ins, where, out), strict=True))
        return [a if isinstance(a, _compat.Literal) else env[a] for a in jaxpr.outvars]

    def _eqn(self, eqn: Any, ins: list[ir.Atom], where: _Where, out: list[ir.Item]) -> Sequence[ir.Atom]:
        where = self._at(eqn, where)
        name = eqn.primitive.name
        if name in _CALLS:
            where = replace(where, calls=(*where.calls, eqn.source_info))
            return self._call(eqn, ins, where, out)
        if name in _IN_SMALLER:
            return self._in_smaller(eqn, ins, where, out)
        counts = where.loop is not None and eqn.params.get("length") == where.loop[0].count
        if name == "scan" and counts and _calls(eqn.params["jaxpr"].jaxpr, marks.BODY.__eq__):
            return self._loop(eqn, ins, where, out)  # others are scans of the user's that ``grad`` hoisted
        if name in _NOTHING or (name == "convert_element_type" and _same_type(ins[0], eqn.outvars[0])):
            return ins
        if eqn.primitive is _compat.device_put_p and any(map(_is_place, eqn.params["devices"])):
            return self._device_put(eqn, ins, where, out)
        if eqn.primitive is _compat.sharding_constraint_p and where.task is None and self._has_layout(eqn, ins):
            return ins  # a kernel for it would copy the argument
        if isinstance(eqn.params.get("sharding"), jax.sharding.SingleDeviceSharding):
            raise MultiMeshError(
                f"{where.line(eqn)}: {eqn.primitive.name} to one device, where a task runs on a submesh; give a "
                "PartitionSpec or a NamedSharding"
            )
        results = tuple(ir.Value(v.aval) for v in eqn.outvars)
        task = self._task_inside(eqn, where)
        prim, source = eqn.primitive, eqn.source_info
        params = {name: _with_ints(param) for name, param in eqn.params.items()}
        if where.constraint is not None and prim is _compat.copy_p:  # of a value, of its tangent or of its cotangent
            prim = _compat.sharding_constraint_p
            params = {"logical": where.constraint[0], "rank": where.constraint[1]}
            source = where.calls[-1]
        out.append(
            ir.Op(
                prim,
                params,
                tuple(ins),
                results,
                task=task,
                backward=where.backward,
                ctx=eqn.ctx if prim is eqn.primitive else None,
                source=source,
                effects=not is_pure(eqn),
                again=where.backward and _compat.REMATTED in where.scope,
            )
        )
        return results

    def _has_layout(self, eqn: Any, ins: Sequence[ir.Atom]) -> bool:
        """Return whether a sharding constraint repeats the layout that an argument has anyway."""
        sharding, (x,) = eqn.params["sharding"], ins
        spec = self._specs.get(x) if isinstance(x, ir.Value) else None
        return spec is not None and isinstance(sharding, NamedSharding) and strip(sharding.spec) == strip(spec)

    def _at(self, eqn: Any, where: _Where) -> _Where:
        """Enter the scopes of an equation, from the outermost inwards.

        A gradient that is taken inside of a task is a part of the task, and no backward pass of the pipeline.
        """
        for step in _compat.scopes_and_transpositions(eqn):
            if step is None or step == marks.BACKWARD:
                where = where if where.task is not None or where.backward else replace(where, backward=True)
            else:
                where = self._in_scope(eqn, replace(where, scope=(*where.scope, step)), step)
        return where

    def _in_scope(self, eqn: Any, where: _Where, name: str) -> _Where:
        marked = marks.TASKS.find(name)
        if marked is not None:
            where = replace(where, task=_check_nesting(eqn, where, marked), registered=False)
        task = self._registered(where) if self._registrations else None
        if task is None:
            return where
        if where.task is not None and not where.registered:
            _check_nesting(eqn, where, task)
            return where
        return replace(where, task=task, registered=True)

    def _registered(self, where: _Where) -> Placement | None:
        key = (where.scope, where.backward)
        if key not in self._scope_cache:
            path = "/".join(where.scope)
            if where.task is None:
                self._paths.setdefault(path)
            tasks = (r.resolve(path, where.backward, self._devices) for r in self._registrations)
            self._scope_cache[key] = next((task for task in tasks if task is not None), None)
        return self._scope_cache[key]

    def _call(self, eqn: Any, ins: list[ir.Atom], where: _Where, out: list[ir.Item]) -> Sequence[ir.Atom]:
        called = eqn.params[_CALLS[eqn.primitive.name]]
        consts = getattr(called, "consts", ())
        jaxpr = getattr(called, "jaxpr", called)
        if eqn.primitive is _compat.jit_p:
            name = eqn.params["name"]
            constraint = marks.CONSTRAINTS.find(name)
            if constraint is not None:
                where = replace(where, constraint=constraint)
            loop = marks.LOOPS.find(name)
            if loop is not None and where.task is None:
                again = _compat.REMATTED in where.scope  # the forward pass of a loop inside jax.checkpoint
                where = replace(where, loop=(loop, name), backward=where.backward and not again)
            task = marks.TASKS.find(name)
            if task is not None:
                where = replace(where, task=_check_nesting(eqn, where, task), registered=False)
                return self._task(eqn, jaxpr, consts, ins, where, out)
        elif eqn.primitive is _compat.remat_p and where.backward and eqn.params.get("prevent_cse", True):
            staged = _calls(jaxpr, marks.LOOPS.find)  # runs stage by stage, in kernels apart from those of the forward
            ins = ins if staged else self._barrier(eqn, ins, where, out)
        return self.jaxpr(jaxpr, consts, ins, where, out)

    def _in_smaller(self, eqn: Any, ins: list[ir.Atom], where: _Where, out: list[ir.Item]) -> list[ir.Atom]:
        with eqn.ctx.manager:
            fn = functools.partial(_IN_SMALLER[eqn.primitive.name], **eqn.params)
            closed = jax.make_jaxpr(fn)(*(_compat.shape_of(i.aval) for i in ins))
        before = len(out)
        results = self.jaxpr(closed.jaxpr, closed.consts, ins, where, out)
        out[before:] = [replace(item, source=eqn.source_info) for item in out[before:]]
        return results

    def _task(
        self, eqn: Any, jaxpr: Any, consts: Sequence[Any], ins: list[ir.Atom], where: _Where, out: list[ir.Item]
    ) -> Sequence[ir.Atom]:
        """Return the results of a marked call: a copy in the task of each that is a literal or an argument.

        A task that does nothing moves its arguments to its submesh. Of any other, only results of loops and of the
        function are copies: tasks read the original.
        """
        before = len(out)
        results = self.jaxpr(jaxpr, consts, ins, where, out)
        idle = len(out) == before
        values = {o for item in out[before:] for o in item.outs}
        copied: list[ir.Atom] = []
        for atom, var in zip(results, eqn.outvars, strict=True):
            if isinstance(atom, ir.Value) and atom in values:
                copied.append(atom)
                continue
            copy = ir.Op(_compat.copy_p, {}, (atom,), (ir.Value(var.aval),), where.task, backward=where.backward)
            out.append(replace(copy, source=eqn.source_info))
            copied += copy.outs
            if not idle:
                self.passed[copy.outs[0]] = atom
        return copied

    def read_through(self, items: Iterable[ir.Item]) -> Iterator[ir.Item]:
        """Let tasks and loops read the argument of a task, not the copy of it among the task's results."""
        for item in items:
            if isinstance(item, ir.Loop):
                yield graph.rename_loop(item, self.passed)
            else:
                yield item if item.task is None else graph.rename_op(item, self.passed)

    def _device_put(self, eqn: Any, ins: list[ir.Atom], where: _Where, out: list[ir.Item]) -> list[ir.Value]:
        """Add one operation for each value: a constraint on its target submesh, which sends it there."""
        results = [ir.Value(v.aval) for v in eqn.outvars]
        for i, (atom, result) in enumerate(zip(ins, results, strict=True)):
            target, task = eqn.params["devices"][i], where.task
            params = {name: values[i : i + 1] for name, values in eqn.params.items()}
            op = ir.Op(eqn.primitive, params, (atom,), (result,), task, backward=where.backward)
            if task is not None and target in task.mesh.devices.flat:
                target, op.params["devices"] = None, (None,)  # says nothing within a program, as in jax.jit
            if isinstance(target, jax.sharding.SingleDeviceSharding | jax.Device):
                devices = target.device_set if isinstance(target, jax.sharding.Sharding) else {target}
                kind = target.memory_kind if isinstance(target, jax.sharding.Sharding) else None
                target = NamedSharding(Mesh(np.array([*devices]), ("device",)), PartitionSpec(), memory_kind=kind)
            if isinstance(target, NamedSharding) and isinstance(target.mesh, Mesh):
                if task is None:
                    op = replace(op, task=Placement("device_put", target.mesh))
                elif set(task.mesh.devices.flat) != target.device_set:
                    raise MultiMeshError(
                        f"{where.line(eqn)}: device_put to {describe(target.mesh)} inside task {task.name!r}, which "
                        f"runs on {describe(task.mesh)}; put it there outside the task, or give it to a task there"
                    )
                if target.memory_kind in (None, next(iter(target.device_set)).default_memory().kind):
                    op = replace(op, prim=_compat.sharding_constraint_p, params={"sharding": target})
                else:
                    on = _compat.auto(op.task.mesh if op.task else target.mesh)
                    layout = NamedSharding(on, carry_over(target.spec, result.aval.shape, on).spec)
                    op.params["devices"] = (layout.with_memory_kind(target.memory_kind),)
            elif _is_place(target):
                raise MultiMeshError(
                    f"{where.line(eqn)}: device_put to a {type(target).__name__}; give a NamedSharding, a device or a "
                    "memory kind"
                )
            out.append(replace(op, source=eqn.source_info))
        return results

    def _barrier(self, eqn: Any, ins: list[ir.Atom], where: _Where, out: list[ir.Item]) -> list[ir.Atom]:
        """Tie a recomputation to the cotangents that it is for, as jax's own lowering of remat does."""
        values = tuple(ir.values(ins))
        tied = tuple(ir.Value(v.aval) for v in values)
        op = ir.Op(_compat.optimization_barrier_p, {}, values, tied, where.task, backward=True, source=eqn.source_info)
        out.append(op)
        after = dict(zip(values, tied, strict=True))
        return [after[i] if isinstance(i, ir.Value) else i for i in ins]

    def _loop(self, eqn: Any, ins: list[ir.Atom], where: _Where, out: list[ir.Item]) -> Sequence[ir.Atom]:
        mark, uid = where.loop  # type: ignore[misc]  # the caller checked
        body = eqn.params["jaxpr"]
        args = [ir.Value(v.aval) for v in body.jaxpr.invars]
        items: list[ir.Item] = []
        results = self.jaxpr(body.jaxpr, body.consts, args, replace(where, loop=None), items)
        outs = [ir.Value(v.aval) for v in eqn.outvars]
        ops = [i for i in items if isinstance(i, ir.Op)]
        if len(ops) < len(items):
            raise MultiMeshError(f"{mark.where}: a microbatch loop inside another; use one loop")
        fixed, carried = _compat.scan_counts(eqn.params)
        states = args[fixed : fixed + carried]
        originals = {copy: graph.resolve(copy, self.passed) for copy in self.passed}
        passed = {copy: arg for copy, arg in originals.items() if arg in states}  # a sum or none is one
        ops = [graph.rename_op(op, passed) for op in ops]
        carries = [
            state if isinstance(r, ir.Value) and passed.get(r) is state else r
            for state, r in zip(states, results, strict=False)
        ]
        results = [*carries, *results[carried:]]
        loop = loops.make_loop(eqn, mark, uid, args, ops, results, ins, outs)
        ops = [i for i in self.read_through(loop.ops) if isinstance(i, ir.Op)]
        out.append(replace(loop, ops=tuple(ops), backward=where.backward, source=eqn.source_info))
        last = zip(states, carries, ins[fixed:], outs, strict=False)
        return [*(init if leaf is state else o for state, leaf, init, o in last), *outs[carried:]]

    def _task_inside(self, eqn: Any, where: _Where) -> Placement | None:
        """Return the task of an operation that runs jaxprs (a scan, a condition): all of it must be on one submesh."""
        inner = replace(where, calls=(*where.calls, eqn.source_info))
        outer = () if where.task is None else (where.task,)
        tasks = dict.fromkeys((*outer, *self._tasks_in(_compat.subjaxprs(eqn.params), inner)))
        meshes = {task.mesh for task in tasks}
        if len(meshes) > 1:
            names = ", ".join(task.name for task in tasks)
            raise MultiMeshError(
                f"{where.line(eqn)}: this {eqn.primitive.name} has tasks on {len(meshes)} submeshes "
                f"inside ({names}), and one such operation runs on one submesh; write the loop in Python, or as "
                "multimesh.microbatch; of optimizers with a line search (optax.lbfgs), call the search outside of "
                "multimesh.jit, or drop it: linesearch=None"
            )
        return next(iter(tasks), None)

    def _tasks_in(self, jaxprs: Iterable[Any], where: _Where) -> Iterable[Placement]:
        for jaxpr in jaxprs:
            for eqn in jaxpr.eqns:
                inner = self._at(eqn, where)
                task = marks.TASKS.find(eqn.params["name"]) if eqn.primitive is _compat.jit_p else None
                if task is not None:
                    inner = replace(inner, task=_check_nesting(eqn, inner, task), registered=False)
                if inner.task is not None:
                    yield inner.task
                deeper = replace(inner, calls=(*inner.calls, eqn.source_info))
                yield from self._tasks_in(_compat.subjaxprs(eqn.params), deeper)


def _with_ints(param: Any) -> Any:
    """Return a parameter with ints in the place of NumPy's integers, which rules of ``jax.vmap`` leave in it."""
    if type(param) is tuple:
        return tuple(map(_with_ints, param))
    return int(param) if isinstance(param, np.integer) else param


def _is_place(target: Any) -> bool:
    """Return whether a target of ``device_put`` is a device or a sharding; None and a memory space are not."""
    return isinstance(target, jax.Device | jax.sharding.Sharding)


def _calls(jaxpr: Any, is_known: Callable[[str], Any]) -> bool:
    """Return whether a jaxpr calls a function of a known name, itself or in a jaxpr inside."""
    named = (eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive is _compat.jit_p)
    return any(map(is_known, named)) or any(
        _calls(inner, is_known) for eqn in jaxpr.eqns for inner in _compat.subjaxprs(eqn.params)
    )


def _check_nesting(eqn: Any, where: _Where, inner: Placement) -> Placement:
    outer = where.task
    if outer is not None and outer.mesh != inner.mesh:
        raise UsageError(
            f"{where.line(eqn)}: task {inner.name!r} is inside task {outer.name!r}, which is on "
            "another submesh; a task runs on one submesh: call one after the other"
        )
    return inner


def _same_type(a: ir.Atom, var: Any) -> bool:
    weak = [getattr(atom.aval, "weak_type", False) for atom in (a, var)]
    return isinstance(a, ir.Value) and a.aval.dtype == var.aval.dtype and weak[0] == weak[1]


def inline_calls(
    closed: Any, devices: tuple[jax.Device, ...], specs: Sequence[PartitionSpec | None] | None = None
) -> ir.Program:
    """Return a traced function as a `Program` without submeshes. ``specs`` are those of its arguments."""
    inputs = [ir.Value(v.aval) for v in closed.jaxpr.invars]
    walker = _Inliner(devices, dict(zip(inputs, specs or (), strict=specs is not None)))
    items: list[ir.Item] = []
    outputs = walker.jaxpr(closed.jaxpr, closed.consts, inputs, _Where(), items)
    program = ir.Program(tuple(inputs), walker.consts, tuple(walker.read_through(items)), tuple(outputs))
    walker.check_registrations(placed=has_tasks(program))
    return program


def flatten(op: ir.Op, closed: Any, args: Sequence[ir.Value]) -> tuple[tuple[ir.Op, ...], list[ir.Atom]] | None:
    """Return the body of a placed control-flow operation as operations, and its results; None if it captures arrays."""
    walker = _Inliner((), {})
    walker._registrations = ()
    items: list[ir.Item] = []
    results = walker.jaxpr(closed.jaxpr, closed.consts, args, _Where(op.task, backward=op.backward), items)
    if walker.consts:
        return None
    return tuple(replace(item, mesh=op.mesh) for item in items if isinstance(item, ir.Op)), results

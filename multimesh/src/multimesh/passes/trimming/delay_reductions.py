"""Sums of gradients over data-parallel devices once, after the loop, and not in every microbatch.

The rows of a microbatch lie on several devices, and a gradient sums over them: each backward kernel would end in an
all-reduce. Instead accumulators hold a term for each device, as many bytes on each as before. Axes that lay out a
weight are left alone: a term would be larger there than the accumulator.

A scan over layers stacks a gradient of each of them: it then makes and stacks their terms.

Operations between the sum over rows and the accumulator then apply to each term, so they must be linear. The order of
additions changes, so the dtype must allow that. `primitives` knows both.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import Axes, size
from multimesh.core.stable import text
from multimesh.errors import internal_error
from multimesh.ir import graph
from multimesh.ir.evaluate import evaluate
from multimesh.ir.primitives import Group, linear_in, sums_over
from multimesh.ir.program import all_ops
from multimesh.passes.placing.derive_layouts import Arrays, Bodies, spread_constraints
from multimesh.passes.placing.follow_operands import Homes
from multimesh.passes.reading.inline_calls import flatten
from multimesh.passes.reading.scan_bodies import build_scan, read_scan


@dataclass(frozen=True, eq=False)
class _Term:
    """The reduction over rows that a leaf comes from, and the operations from it, or from its scan, to the leaf."""

    chain: tuple[ir.Op, ...]
    rows: Mapping[ir.Value, int]  # operand of the reduction to its dimension of rows
    mesh: Mesh
    axes: Axes
    stack: ir.Value | None = None  # the result of the scan, if one makes the reduction
    inner: _Term | None = None  # the term of each row that the scan stacks

    @property
    def ways(self) -> int:
        """The number of terms: one for each part of the rows."""
        return size(self.mesh, self.axes)


def delay_reductions(program: ir.Program, specs: Sequence[PartitionSpec | None]) -> ir.Program:
    """Let accumulators hold a term for each data-parallel device where their leaves sum over rows."""
    if all(mesh.size == 1 for mesh in {op.mesh for op in all_ops(program) if op.mesh is not None}):
        return program
    input_specs = {v: spec for v, spec in zip(program.inputs, specs, strict=True) if spec is not None}
    homes = dict(program.homes)
    items: list[ir.Item] = []
    traces: _Traces = {}
    scans = (op for op in all_ops(program) if op.prim.name == "scan") if program.loops else ()
    bodies = {op: body for op in scans if (body := read_scan(op))}
    for n, item in enumerate(program.items):
        if isinstance(item, ir.Op):
            items.append(item)
            continue
        # What comes after the loop, such as the state of an optimizer, says nothing of the layouts in it.
        arrays = spread_constraints(replace(program, items=program.items[: n + 1]), input_specs, bodies)
        items += _delay(item, arrays, bodies, program.linked, homes, traces)
    return replace(program, items=tuple(items), homes=homes)


_Traces = dict[tuple[Any, ...], Any]  # layers repeat themselves: what was traced once is not traced again


def _delay(
    loop: ir.Loop, arrays: Arrays, bodies: Bodies, linked: Collection[ir.Value], homes: Homes, traces: _Traces
) -> list[ir.Item]:
    """Return the loop and the operations that sum up its accumulators. ``homes`` gets their submeshes."""
    sums: list[ir.Sum] = []
    totals: list[ir.Op] = []
    new_ops: dict[ir.Op, tuple[ir.Op, ...]] = {}
    stacks: dict[ir.Op, dict[ir.Value, tuple[ir.Value, ir.Value]]] = collections.defaultdict(dict)
    of_weights: dict[Mesh, set[str]] = collections.defaultdict(set)  # axes that lay out what all microbatches read
    for mesh, array in (at for value in loop.consts for at in arrays[value].items()):
        of_weights[mesh].update(*array.divided)
    search = _Search(loop.ops, [*loop.leaves, *linked], arrays, bodies, of_weights)
    for s in loop.sums:
        term = search.term(s.leaf)
        if term is None:
            sums.append(s)
            continue
        stack = None
        if term.inner is not None and term.stack is not None:
            scan = term.chain[0]
            ops, row = _cut(term.inner, traces)
            _put(new_ops, term.inner.chain, ops)
            stack = ir.Value(_compat.stack(row.aval, scan.params["length"]))
            stacks[scan][term.stack] = stack, row
        ops, leaf = _cut(term, traces, stack)
        _put(new_ops, term.chain, ops)
        out = ir.Value(leaf.aval)
        homes[out] = term.mesh
        sums.append(replace(s, out=out, leaf=leaf, over=term.axes))
        totals += _total(out, s.out, term, loop, traces)
    for op, stacked in stacks.items():
        body = bodies[op]
        inside = [new for old in body.ops for new in new_ops.get(old, (old,))]
        outs = dict(stacked.get(out, (out, leaf)) for out, leaf in body.stacks.items())
        new_ops[op] = (build_scan(op, body, inside, set(body.carries), outs), *new_ops[op])
    ops = tuple(new for op in loop.ops for new in new_ops.get(op, (op,)))
    return [replace(loop, ops=ops, sums=tuple(sums)), *totals]


def _put(new_ops: dict[ir.Op, tuple[ir.Op, ...]], chain: Sequence[ir.Op], ops: Sequence[ir.Op]) -> None:
    """Note operations that take the place of a chain. Only the scan at its start may be in other chains too."""
    for op in chain:
        new_ops.setdefault(op, ())
    new_ops[chain[-1]] += tuple(ops)


class _Search:
    """The search for the reduction that a leaf comes from, in the operations of a loop or of a scan's body."""

    def __init__(
        self,
        ops: Sequence[ir.Op],
        results: Sequence[ir.Atom],
        arrays: Arrays,
        bodies: Bodies,
        of_weights: Mapping[Mesh, set[str]],
    ):
        self._arrays, self._bodies, self._of_weights = arrays, bodies, of_weights
        self._maker = graph.makers(ops)
        self._uses = collections.Counter(v for op in ops for v in op.needs)
        self._uses.update(ir.values(results))

    def term(self, leaf: ir.Atom) -> _Term | None:
        """Return the term of a leaf: from a reduction over rows through linear operations with one user each."""
        op = self._maker.get(leaf) if isinstance(leaf, ir.Value) and self._uses[leaf] == 1 else None
        if op is None or op.mesh is None or op.effects or op.after:
            return None
        if op in self._bodies:
            return self._term_of_row(op, leaf)
        if len(op.outs) != 1:
            return None
        for rows in sums_over(op, self._maker):
            names = self._names(rows, op.mesh)
            if size(op.mesh, names) > 1:
                return _Term((op,), dict(rows), op.mesh, names)
        before = next(filter(None, (self.term(op.ins[i]) for i in linear_in(op))), None)
        if before is None or op.mesh != before.mesh:
            return None
        if op.backward and not before.chain[0].backward:  # a cast of a gradient, to sum it in more bits, is forward
            return None
        if any(v in before.rows for v in op.reads):  # needs all rows, of which a part of the sum has a part
            return None
        return replace(before, chain=(*before.chain, op))

    def _term_of_row(self, op: ir.Op, stack: ir.Value) -> _Term | None:
        """Return the term of a result of a scan, if it stacks rows that have one."""
        body = self._bodies[op]
        if stack not in body.stacks:
            return None
        search = _Search(body.ops, body.leaves, self._arrays, self._bodies, self._of_weights)
        term = search.term(body.stacks[stack])
        if term is None or term.inner is not None:  # of a scan in a scan
            return None
        return _Term((op,), {}, term.mesh, term.axes, stack, term)

    def _names(self, rows: Group, mesh: Mesh) -> Axes:
        names = next(filter(None, (self._arrays[v][mesh].axes[d] for v, d in rows)), ())
        return tuple(itertools.takewhile(lambda name: name not in self._of_weights.get(mesh, ()), names))


def _cut(term: _Term, traces: _Traces, stack: ir.Value | None = None) -> tuple[tuple[ir.Op, ...], ir.Value]:
    """Return the operations that compute the terms of a leaf, of a scan's ``stack`` or not, and their result."""
    before = term.stack
    chain = term.chain if before is None else term.chain[1:]
    inner = {op.outs[0] for op in chain}
    operands = list(dict.fromkeys(v for op in chain for v in op.reads if v not in inner))
    if before is not None and not chain:
        operands = [before]
    dims = [1 if v is before else term.rows.get(v) for v in operands]

    def one(*args: Any) -> Any:
        env: dict[Any, Any] = dict(zip(operands, args, strict=True))
        evaluate(chain, env, term.mesh)
        return env[chain[-1].outs[0] if chain else before]

    def split(v: ir.Value, x: Any, d: int | None) -> Any:
        if d is None or v is before:
            return x
        return x.reshape(*x.shape[:d], term.ways, x.shape[d] // term.ways, *x.shape[d + 1 :])

    def terms(*args: Any) -> Any:
        return jax.vmap(one, in_axes=dims)(*map(split, operands, args, dims))

    numbers: dict[Any, int] = {v: n for n, v in enumerate((*operands, *(op.outs[0] for op in chain)))}
    wiring = [
        (op.prim.name, text(op.params), [numbers[i] if isinstance(i, ir.Value) else text(i.val) for i in op.ins])
        for op in chain
    ]
    args = [stack if stack is not None and v is before else v for v in operands]
    key = f"{term.ways} {dims} {numbers.get(before)} {wiring}"
    return _trace(terms, args, term.chain[0], term.mesh, traces, key)


def _total(terms: ir.Value, out: ir.Value, term: _Term, loop: ir.Loop, traces: _Traces) -> tuple[ir.Op, ...]:
    """Return the operations that sum an accumulator's terms into the result that the loop had."""
    like = replace(term.chain[0], task=None, backward=loop.backward)
    ops, result = _trace(lambda x: jnp.sum(x, 0, dtype=x.dtype), [terms], like, term.mesh, traces, "total")
    return tuple(replace(op, outs=tuple(out if o is result else o for o in op.outs)) for op in ops)


def _trace(
    fn: Any, operands: Sequence[ir.Value], like: ir.Op, mesh: Mesh, traces: _Traces, text: str
) -> tuple[tuple[ir.Op, ...], ir.Value]:
    """Trace a function as operations beside ``like``, and return its result too. ``text`` identifies the function."""
    key = (mesh, text, *((v.aval.shape, v.aval.dtype) for v in operands))
    if key not in traces:
        with _compat.abstract_mesh_context(mesh):
            traces[key] = jax.make_jaxpr(fn)(*(_compat.shape_of(v.aval) for v in operands))
    flat = flatten(like, traces[key], operands)
    if flat is None or not isinstance(flat[1][0], ir.Value):
        raise internal_error(f"no terms of {like}")
    ops, (result,) = flat
    return tuple(replace(op, source=like.source) for op in ops), result

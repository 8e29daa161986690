"""Sums of gradients over data-parallel devices once, after the loop, and not in every microbatch.

The rows of a microbatch lie on several devices, and a gradient sums over them: each backward kernel would end in an
all-reduce. Instead accumulators hold a term for each device, as many bytes on each as before. Axes that lay out a
weight are left alone: a term would be larger there than the accumulator.

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
from multimesh.passes.placing.autoshard import Arrays, spread_constraints
from multimesh.passes.placing.place import Homes
from multimesh.passes.reading.inline import flatten


@dataclass(frozen=True, eq=False)
class _Term:
    """The reduction over rows that a leaf comes from, and the operations from that reduction to the leaf."""

    chain: tuple[ir.Op, ...]
    rows: Mapping[ir.Value, int]  # operand of the reduction to its dimension of rows
    mesh: Mesh
    axes: Axes

    @property
    def ways(self) -> int:
        """The number of terms."""
        return size(self.mesh, self.axes)


def delay_reductions(program: ir.Program, specs: Sequence[PartitionSpec | None]) -> ir.Program:
    """Let accumulators hold a term for each data-parallel device where their leaves sum over rows."""
    given = {v: spec for v, spec in zip(program.inputs, specs, strict=True) if spec is not None}
    homes = dict(program.homes)
    items: list[ir.Item] = []
    traces: _Traces = {}
    for n, item in enumerate(program.items):
        if isinstance(item, ir.Op):
            items.append(item)
            continue
        # What comes after the loop, such as the state of an optimizer, says nothing of the layouts in it.
        arrays = spread_constraints(replace(program, items=program.items[: n + 1]), given)
        items += _delay(item, arrays, program.linked, homes, traces)
    return replace(program, items=tuple(items), homes=homes)


_Traces = dict[tuple[Any, ...], Any]  # layers repeat themselves: what was traced once is not traced again


def _delay(loop: ir.Loop, arrays: Arrays, linked: Collection[ir.Value], homes: Homes, traces: _Traces) -> list[ir.Item]:
    """Return the loop and the operations that sum up its accumulators. ``homes`` gets their submeshes."""
    sums: list[ir.Sum] = []
    totals: list[ir.Op] = []
    made: dict[ir.Op, tuple[ir.Op, ...]] = {}
    search = _Search(loop, arrays, linked)
    for s in loop.sums:
        term = search.term(s.leaf)
        if term is None:
            sums.append(s)
            continue
        ops, leaf = _cut(term, traces)
        made.update(dict.fromkeys(term.chain, ()))
        made[term.chain[-1]] = ops
        out = ir.Value(leaf.aval)
        homes[out] = term.mesh
        sums.append(replace(s, out=out, leaf=leaf, over=term.axes))
        totals += _total(out, s.out, term, loop, traces)
    ops = tuple(new for op in loop.ops for new in made.get(op, (op,)))
    return [replace(loop, ops=ops, sums=tuple(sums)), *totals]


class _Search:
    """The search for the reduction that a leaf comes from."""

    def __init__(self, loop: ir.Loop, arrays: Arrays, linked: Collection[ir.Value]):
        self._arrays = arrays
        self._maker = graph.makers(loop.ops)
        self._uses = collections.Counter(v for op in loop.ops for v in op.needs)
        self._uses.update(ir.values([*loop.leaves, *linked]))
        self._of_weights: dict[Mesh, set[str]] = collections.defaultdict(set)
        for value in loop.consts:
            for mesh, array in arrays[value].items():
                self._of_weights[mesh].update(*array.divided)

    def term(self, leaf: ir.Atom) -> _Term | None:
        """Return the term of a leaf: from a reduction over rows through linear operations with one user each."""
        op = self._maker.get(leaf) if isinstance(leaf, ir.Value) and self._uses[leaf] == 1 else None
        if op is None or op.mesh is None or len(op.outs) != 1 or op.effects or op.after:
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

    def _names(self, rows: Group, mesh: Mesh) -> Axes:
        names = next(filter(None, (self._arrays[v][mesh].axes[d] for v, d in rows)), ())
        return tuple(itertools.takewhile(lambda name: name not in self._of_weights[mesh], names))


def _cut(term: _Term, traces: _Traces) -> tuple[tuple[ir.Op, ...], ir.Value]:
    """Return the operations that compute the terms of a leaf, stacked, and their result."""
    made = {op.outs[0] for op in term.chain}
    given = list(dict.fromkeys(v for op in term.chain for v in op.reads if v not in made))
    dims = [term.rows.get(v) for v in given]

    def one(*args: Any) -> Any:
        env = dict(zip(given, args, strict=True))
        evaluate(term.chain, env, term.mesh)
        return env[term.chain[-1].outs[0]]

    def terms(*args: Any) -> Any:
        parts = [x if d is None else _split(x, d, term.ways) for x, d in zip(args, dims, strict=True)]
        return jax.vmap(one, in_axes=dims)(*parts)

    numbers = {v: n for n, v in enumerate((*given, *(op.outs[0] for op in term.chain)))}
    wiring = [
        (op.prim.name, text(op.params), [numbers[i] if isinstance(i, ir.Value) else text(i.val) for i in op.ins])
        for op in term.chain
    ]
    return _trace(terms, given, term.chain[0], term.mesh, traces, f"{term.ways} {dims} {wiring}")


def _split(x: Any, dim: int, ways: int) -> Any:
    return x.reshape(*x.shape[:dim], ways, x.shape[dim] // ways, *x.shape[dim + 1 :])


def _total(terms: ir.Value, out: ir.Value, term: _Term, loop: ir.Loop, traces: _Traces) -> tuple[ir.Op, ...]:
    """Return the operations that sum an accumulator's terms into the result that the loop had."""
    like = replace(term.chain[0], task=None, backward=loop.backward)
    ops, result = _trace(lambda x: jnp.sum(x, 0, dtype=x.dtype), [terms], like, term.mesh, traces, "total")
    return tuple(replace(op, outs=tuple(out if o is result else o for o in op.outs)) for op in ops)


def _trace(
    fn: Any, given: Sequence[ir.Value], like: ir.Op, mesh: Mesh, traces: _Traces, text: str
) -> tuple[tuple[ir.Op, ...], ir.Value]:
    """Trace a function as operations beside ``like``, and return its result too. ``text`` identifies the function."""
    key = (mesh, text, *((v.aval.shape, v.aval.dtype) for v in given))
    if key not in traces:
        with _compat.abstract_mesh_context(mesh):
            traces[key] = jax.make_jaxpr(fn)(*(_compat.shape_of(v.aval) for v in given))
    flat = flatten(like, traces[key], given)
    if flat is None or not isinstance(flat[1][0], ir.Value):
        raise internal_error(f"no terms of {like}")
    ops, (result,) = flat
    return tuple(replace(op, source=like.source) for op in ops), result

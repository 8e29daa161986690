"""A traced function as units: the smallest parts that a stage can be made of.

A unit is an equation, or some rows of a scan. Calls are looked into, so that a stage may end inside of them. Under
``jax.checkpoint`` that is done only where the call is long: each stage then repeats its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax

from multimesh.core import _compat
from multimesh.errors import UsageError
from multimesh.ir import primitives
from multimesh.ir.flops import operations
from multimesh.marking import marks

_WHOLE = 0.5  # parts of a stage: a checkpointed call of fewer operations stays whole
_LONG = 0.75  # parts of a stage: rows of a scan with more operations are looked into
_FEW = 1 / 32  # parts of a stage: a scan of fewer operations stays whole
_BACKWARD = 2  # operations of a backward pass for each of the forward pass
_TASK = "pipeline cuts functions without marks, and this one has a task; drop the mark, or drop pipeline"
KEPT_LOOP = (
    "pipeline can't cut a multimesh.microbatch that is in a jax.jit, which keeps its trace; drop that jax.jit, or put "
    "multimesh.pipeline around the function that multimesh.microbatch takes"
)
_CASTS = frozenset(("convert_element_type", "copy"))


@dataclass(frozen=True)
class Rows:
    """Rows of a stack: of an operand or of a result of a scan."""

    of: Any
    start: int
    stop: int

    @property
    def aval(self) -> Any:
        """The shape and dtype of the rows."""
        return _compat.stack(_compat.row_aval(self.of.aval), self.stop - self.start)


@dataclass(frozen=True)
class ScanCarry:
    """A carry of a scan after some of its rows; ``of`` is the last one."""

    of: Any
    after: int

    @property
    def aval(self) -> Any:
        """The shape and dtype of the carry."""
        return self.of.aval


@dataclass(frozen=True, eq=False)
class Unit:
    """An equation, rows of a scan, or the join of a scan's results."""

    eqn: Any  # with the variables of the whole function
    cost: float  # operations
    rows: range | None = None  # which iterations of a scan: in the order of time, from the first
    within: Any = None  # the checkpointed call that it is a part of
    parts: tuple[tuple[Rows, ...], ...] = ()  # of a join: the rows of each result

    @property
    def joins(self) -> bool:
        """Whether it joins the rows that the pieces of a scan produce."""
        return self.rows is not None and not self.rows

    def _stacks(self, variables: Sequence[Any], rows: range) -> Iterator[Rows]:
        length = self.eqn.params["length"]
        start, stop = rows.start, rows.stop
        if self.eqn.params["reverse"]:
            start, stop = length - stop, length - start
        yield from (Rows(v, start, stop) for v in variables)

    @property
    def reads(self) -> list[Any]:
        """The operands of the unit: variables, rows and carries, and literals."""
        if self.rows is None:
            return list(self.eqn.invars)
        consts, carries = _compat.scan_counts(self.eqn.params)
        if self.joins:
            return [row for rows in self.parts for row in rows]
        first = self.eqn.invars[consts : consts + carries]
        carried = [ScanCarry(v, self.rows.start) for v in self.eqn.outvars[:carries]] if self.rows.start else first
        return [*self.eqn.invars[:consts], *carried, *self._stacks(self.eqn.invars[consts + carries :], self.rows)]

    @property
    def makes(self) -> list[Any]:
        """The results of the unit."""
        if self.rows is None:
            return list(self.eqn.outvars)
        _, carries = _compat.scan_counts(self.eqn.params)
        if self.joins:
            return list(self.eqn.outvars[carries:])
        last = self.rows.stop == self.eqn.params["length"]
        carried = [v if last else ScanCarry(v, self.rows.stop) for v in self.eqn.outvars[:carries]]
        return [*carried, *self._stacks(self.eqn.outvars[carries:], self.rows)]

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the unit's primitive."""
        return self.eqn.params if self.rows is None else self.eqn.params | {"length": len(self.rows)}


def kind_of(unit: Unit) -> tuple[Any, ...]:
    """Return a value that units of the same operation, types and rows share."""
    types = (*(str(v.aval) for v in unit.eqn.invars), "", *(str(v.aval) for v in unit.eqn.outvars))
    return unit.eqn.primitive.name, unit.cost, None if unit.rows is None else len(unit.rows), *types


@dataclass(frozen=True)
class Units:
    """A traced function as units, in order, with those of its backward passes apart."""

    arguments: tuple[Any, ...]  # its arguments and constants
    consts: dict[Any, Any]  # values of the constants
    free: tuple[Any, ...]  # cheap equations of arguments alone; they run where they are read
    units: tuple[Unit, ...]  # all others, in an order in which they can run
    outs: tuple[Any, ...]  # results: variables and literals
    trained: frozenset[Any]  # arguments with a gradient
    # backward passes that the function has itself, and what follows them. ``units`` has what comes before
    after: tuple[Unit, ...] = ()
    roots: tuple[Any, ...] = ()  # results of which a gradient is taken; empty: all

    def live(self) -> Units:
        """Drop units that neither a result nor an effect needs."""
        needed = {v for v in self.outs if not isinstance(v, _compat.Literal)}
        alive: set[Any] = set()
        for eqn in reversed([*self.free, *(unit.eqn for unit in (*self.units, *self.after))]):
            if eqn.effects or not needed.isdisjoint(eqn.outvars):
                alive.add(eqn)
                needed.update(a for a in eqn.invars if not isinstance(a, _compat.Literal))
        before, after = (tuple(unit for unit in group if unit.eqn in alive) for group in (self.units, self.after))
        return replace(self, free=tuple(eqn for eqn in self.free if eqn in alive), units=before, after=after)

    @property
    def forward(self) -> Units:
        """The function up to its own backward passes, with all that these read as results."""
        read = (a for unit in self.after for a in unit.eqn.invars)
        results = {v for unit in self.units for v in unit.eqn.outvars}
        return replace(self, after=(), outs=tuple(v for v in (*self.outs, *read) if is_in(v, results)))


def read(closed: Any, stages: int, trained: Iterable[int]) -> Units:
    """Make units of a traced function, small enough for this number of stages; ``trained`` numbers its arguments."""
    forward = (eqn for eqn in closed.jaxpr.eqns if not _compat.scopes(eqn)[1])  # what no transposition added
    goal = sum(operations(eqn.primitive.name, eqn.params, eqn.invars, eqn.outvars) for eqn in forward) / stages
    reader = _Reader(goal)
    outs = reader.walk(closed.jaxpr, closed.consts, closed.jaxpr.invars, (), None)
    ins = (*closed.jaxpr.invars, *reader.consts)
    free, units = _split_cheap(reader.units, ins)
    before, after = _split_backward(units, lambda unit: _compat.scopes(unit.eqn)[1])
    if _leads_to_scalar(after, outs):  # a gradient inside is a part of this loss; its own backward comes after that
        before, after = _split_backward(units, lambda unit: _compat.is_transposed_last(unit.eqn))
        if _leads_to_scalar(after, outs):
            before, after = units, ()
        free = tuple(map(_compat.without_transpositions, free))
    results = {v for unit in before for v in unit.eqn.outvars}
    scalars = tuple(v for v in outs if is_in(v, results) and getattr(v.aval, "shape", None) == ())
    roots = scalars if scalars[:1] == outs[:1] else ()  # as of a loss with metrics beside it
    return Units(ins, reader.consts, free, before, outs, frozenset(ins[i] for i in trained), after, roots).live()


class _Reader:
    """Walks equations, and looks into calls."""

    def __init__(self, goal: float):
        self._goal = goal
        self._maker: dict[Any, Any] = {}
        self._rows: dict[Any, tuple[Any, ...]] = {}  # of a stack that was made of them
        self.consts: dict[Any, Any] = {}
        self.units: list[Unit] = []

    def walk(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], calls: tuple[Any, ...], within: Any
    ) -> tuple[Any, ...]:
        """Add the equations of a jaxpr with these constants and arguments, and return its results."""
        self.consts.update(zip(jaxpr.constvars, consts, strict=True))
        names = {v: v for v in jaxpr.constvars} | dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            names.update(zip(eqn.outvars, self._results(eqn, names, calls, within), strict=True))
        return tuple(_substitute(a, names) for a in jaxpr.outvars)

    def _results(self, eqn: Any, names: dict[Any, Any], calls: tuple[Any, ...], within: Any) -> Sequence[Any]:
        cost = operations(eqn.primitive.name, eqn.params, eqn.invars, eqn.outvars)
        inner = _compat.callee_of(eqn)
        if eqn.primitive is _compat.remat_p:
            if cost <= _WHOLE * self._goal:
                inner = None
            elif within is None:
                within = _compat.rename(eqn, names, calls)  # another one each time that it is read
        elif inner is not None and _is_mark(eqn, calls):
            inner = None
        if inner is not None:
            return self.walk(*inner, [_substitute(a, names) for a in eqn.invars], (*calls, eqn), within)
        if eqn.primitive.name == "scan":
            behind = _BACKWARD if _compat.scopes(_compat.rename(eqn, names, calls))[1] else 1
            if cost > behind * _LONG * self._goal * eqn.params["length"] and eqn.params["length"] > 1:
                return self._unrolled(eqn, names, calls, within)
            if cost > _FEW * self._goal:
                eqn = self._cast_inside(_compat.rename(eqn, names, calls))
                rows = range(eqn.params["length"])
                self._add(Unit(eqn, cost, rows, within))
                return list(eqn.outvars)
        new = _compat.rename(eqn, names, calls)
        self._add(Unit(new, cost, within=within))
        return list(new.outvars)

    def _add(self, unit: Unit) -> None:
        self.units.append(unit)
        self._maker.update(dict.fromkeys(unit.eqn.outvars, unit))

    def _unrolled(self, eqn: Any, names: dict[Any, Any], calls: tuple[Any, ...], within: Any) -> Sequence[Any]:
        """Read the rows of a scan one after the other, each as its own operations."""
        consts, carries = _compat.scan_counts(eqn.params)
        body, length = _compat.jaxpr_as_fun(eqn.params["jaxpr"]), eqn.params["length"]
        ins = [_substitute(a, names) for a in eqn.invars]

        def rows_apart(fixed: Any, carried: Any, stacks: Any) -> Any:
            rows: list[Sequence[Any]] = [()] * length
            for row in reversed(range(length)) if eqn.params["reverse"] else range(length):
                operands = (
                    x[row] if isinstance(x, tuple) else jax.lax.index_in_dim(x, row, keepdims=False) for x in stacks
                )
                outs = body(*fixed, *carried, *operands)
                carried, rows[row] = outs[:carries], outs[carries:]
            results = list(zip(*rows, strict=True))
            return (
                carried,
                results,
                [jax.lax.concatenate([jax.lax.expand_dims(x, (0,)) for x in row], 0) for row in results],
            )

        # A stack that was made of rows is read as these.
        args = ins[:consts], ins[consts : consts + carries], [self._rows.get(x, x) for x in ins[consts + carries :]]
        avals = jax.tree.map(lambda a: _compat.shape_of(a.aval), args)
        closed, out = jax.make_jaxpr(rows_apart, return_shape=True)(*avals)
        outs = self.walk(closed.jaxpr, closed.consts, jax.tree.leaves(args), (*calls, eqn), within)
        carried, rows, results = jax.tree.unflatten(jax.tree.structure(out), outs)
        self._rows.update(zip(results, rows, strict=True))
        return [*carried, *results]

    def _cast_inside(self, eqn: Any) -> Any:
        """The scan of stacks that are cast before it, with the casts in its body: a stage then reads rows as given."""
        consts, carries = _compat.scan_counts(eqn.params)
        ins = list(eqn.invars)
        casts: dict[int, list[Any]] = {}
        for i in range(consts + carries, len(ins)):
            while ins[i] in self._maker and self._maker[ins[i]].eqn.primitive.name in _CASTS:
                cast = self._maker[ins[i]].eqn
                if isinstance(cast.invars[0], _compat.Literal):
                    break
                casts.setdefault(i, []).insert(0, cast)
                ins[i] = cast.invars[0]
        if not casts:
            return eqn
        body = _compat.jaxpr_as_fun(eqn.params["jaxpr"])

        def cast_first(*args: Any) -> Any:
            full = list(args)
            for i, chain in casts.items():
                for cast in chain:
                    (full[i],) = _compat.evaluate(cast, cast.params, [full[i]])
            return body(*full)

        shapes = [_compat.shape_of(a) for a in eqn.params["jaxpr"].in_avals]
        for i in casts:
            shapes[i] = _compat.shape_of(_compat.row_aval(ins[i].aval))
        return eqn.replace(invars=ins, params=eqn.params | {"jaxpr": jax.make_jaxpr(cast_first)(*shapes)})


def _substitute(atom: Any, names: Mapping[Any, Any]) -> Any:
    return atom if isinstance(atom, _compat.Literal) else names[atom]


def is_in(atom: Any, values: Set[Any]) -> bool:
    """Return whether an atom of an equation is one of these values."""
    return not isinstance(atom, _compat.Literal) and atom in values


def _is_mark(eqn: Any, calls: Sequence[Any]) -> bool:
    """Return whether a call is a constraint of ours, which stays whole; refuse a task or a microbatch loop."""
    name = eqn.params.get("name", "")
    for kind, problem in ((marks.TASKS, _TASK), (marks.LOOPS, KEPT_LOOP)):
        if isinstance(name, str) and name.startswith(kind.prefix):
            sources = (eqn.source_info, *(call.source_info for call in reversed(calls)))
            line = next(filter(None, map(_compat.user_line, sources)), "a line that JAX did not record")
            raise UsageError(f"{line}: {problem}")
    return isinstance(name, str) and name.startswith(marks.CONSTRAINTS.prefix)


def _split_backward(
    units: Sequence[Unit], is_backward: Callable[[Unit], bool]
) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """Return the units before the first backward pass, and the units of backward passes with all their users."""
    before, after, results = list[Unit](), list[Unit](), set[Any]()
    for unit in units:
        if is_backward(unit) or any(is_in(a, results) for a in unit.eqn.invars):
            after.append(unit)
            results.update(unit.eqn.outvars)
        else:
            before.append(unit)
    return tuple(before), tuple(after)


def _leads_to_scalar(after: Sequence[Unit], outs: Sequence[Any]) -> bool:
    """Whether the first result is a scalar that these units compute, as a loss of forces is."""
    results = {v for unit in after for v in unit.eqn.outvars if getattr(v.aval, "shape", None) == ()}
    return any(is_in(v, results) for v in outs[:1])


def _split_cheap(candidates: Sequence[Unit], arguments: Iterable[Any]) -> tuple[tuple[Any, ...], tuple[Unit, ...]]:
    """Return the cheap equations that need only arguments, and all other units."""
    cheap = set(arguments)
    free, units = [], []
    for unit in candidates:
        independent = all(isinstance(a, _compat.Literal) or a in cheap for a in unit.eqn.invars)
        if independent and unit.rows is None and not unit.eqn.effects and primitives.is_cheap(unit.eqn.primitive):
            free.append(unit.eqn)
            cheap.update(unit.eqn.outvars)
        else:
            units.append(unit)
    return tuple(free), tuple(units)

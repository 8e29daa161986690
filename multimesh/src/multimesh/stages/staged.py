"""Units as the tasks of stages: each task evaluates its units, and returns what others read."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from multimesh.core import _compat
from multimesh.core.specs import AnyMesh
from multimesh.core.submesh import Placement
from multimesh.errors import UsageError
from multimesh.marking import marks
from multimesh.marking.tasks import mark_function, scope
from multimesh.stages.chains import in_pieces
from multimesh.stages.units import Rows, Unit, Units


def run(
    function: Units,
    stages: Sequence[Sequence[Unit]],
    places: Sequence[Placement],
    arrays: Sequence[Any],
) -> list[Any]:
    """Run each stage as a task in its place, then each backward pass of the function; return its flat results."""
    arguments = (v for v in function.arguments if v not in function.consts)
    env = _Values(itertools.chain(zip(arguments, arrays, strict=True), function.consts.items()))
    for eqn in function.free:
        results = _compat.evaluate(eqn, eqn.params, env.many(eqn.invars), places[0].types)
        env.update(zip(eqn.outvars, results, strict=True))
    back = list(_backward_stages(function.after, stages))
    tasks = list(_merge_rows([*stages, *(units for _, units in back)]))
    ins = [_inputs(units) for units in tasks]
    _refuse_shared_references(tasks)
    for number, (units, placed) in enumerate(zip(tasks, places, strict=False)):
        outs = _outputs(units, [*function.outs, *itertools.chain(*ins[number + 1 :])])
        call = mark_function(_evaluation(units, ins[number], outs, placed.types or placed.mesh), placed)
        env.update(zip(outs, call(*env.many(ins[number])), strict=True))
    for (behind, _), units in zip(back, tasks[len(stages) :], strict=True):
        if behind is None:
            _evaluate(units, env, None)
            continue
        with jax.named_scope(marks.BACKWARD), scope(places[behind]):
            _evaluate(units, env, places[behind].types or places[behind].mesh)
    return env.many(function.outs)


def _refuse_shared_references(stages: Sequence[Sequence[Unit]]) -> None:
    """Refuse a mutable array that several stages read or update: submeshes share no memory."""
    users: dict[Any, int] = {}
    for number, unit in ((number, unit) for number, units in enumerate(stages) for unit in units):
        references = (v for v in (*unit.reads, *unit.makes) if _compat.is_ref(v.aval))
        if (first := next((users[v] for v in references if users.setdefault(v, number) != number), None)) is not None:
            line = _compat.user_line(unit.eqn.source_info) or "A line that JAX did not record"
            raise UsageError(
                f"{line}: pipeline: stages {first} and {number} both use this mutable array (jax.new_ref), and they "
                "share no memory; let each layer return its term, and add the terms up, or make the array in a layer"
            )


def _backward_stages(
    after: Sequence[Unit], stages: Sequence[Sequence[Unit]]
) -> Iterator[tuple[int | None, tuple[Unit, ...]]]:
    """Yield backward passes by stage, and what is in no stage, such as an optimizer, in the order in which they run.

    A unit stays in the stage of its cotangents, or goes to the next one before it that has all that the unit reads.
    """
    at: dict[Any, set[int]] = collections.defaultdict(set)  # stages that have a value of the forward pass, or a part
    for number, units in enumerate(stages):
        for unit in units:
            for v in (*unit.reads, *unit.makes):
                if not isinstance(v, _compat.Literal):
                    at[v].add(number)
    behind: dict[Any, int | None] = {}  # the stage of a value of the backward pass

    def stage_of(unit: Unit) -> int | None:
        read = [v for v in unit.reads if not isinstance(v, _compat.Literal)]
        from_behind = [behind[v] for v in read if v in behind]
        if not _compat.scopes(unit.eqn)[1] or None in from_behind:
            return None
        last = min((s for s in from_behind if s is not None), default=len(stages) - 1)
        groups = [numbers for v in read if v not in behind and (numbers := _stages_with(v, at))]
        return next((s for s in range(last, -1, -1) if all(s in numbers for numbers in groups)), last)

    placed: list[tuple[int | None, Unit]] = []
    for unit in in_pieces(after):
        stage = stage_of(unit) if not unit.joins else placed[-1][0]
        behind.update(dict.fromkeys(unit.makes, stage))
        placed.append((stage, unit))
    for stage, group in itertools.groupby(placed, key=lambda pair: pair[0]):
        yield stage, tuple(unit for _, unit in group)


def _stages_with(value: Any, at: Mapping[Any, set[int]]) -> set[int]:
    """Return the stages that have a forward value, or some of its rows; none for a value that is everywhere."""
    if not isinstance(value, Rows) or value in at:
        return at.get(value, set())
    parts = (v for v in at if isinstance(v, Rows) and v.of is value.of)
    return set().union(*(at[v] for v in parts if v.start < value.stop and value.start < v.stop))


class _Values(dict[Any, Any]):
    """Values of variables; rows of a stack are cut where they are read."""

    def many(self, atoms: Sequence[Any]) -> list[Any]:
        """Return the values of several atoms."""
        return [a.val if isinstance(a, _compat.Literal) else self._of(a) for a in atoms]

    def _of(self, atom: Any) -> Any:
        if isinstance(atom, Rows) and atom not in self:
            return jax.lax.slice_in_dim(self[atom.of], atom.start, atom.stop)
        return self[atom]


def _merge_rows(stages: Sequence[Sequence[Unit]]) -> Iterator[tuple[Unit, ...]]:
    """Yield stages with neighboring rows of a scan as one unit. A join gets the rows that stages produce."""
    rows: dict[Any, list[Rows]] = {}
    for stage in stages:
        units: list[Unit] = []
        for unit in stage:
            last = units[-1] if units else None
            if unit.rows and last is not None and last.eqn is unit.eqn and last.rows:
                units[-1] = replace(last, rows=range(last.rows.start, unit.rows.stop))
            else:
                units.append(unit)
        for i, unit in enumerate(units):
            if unit.joins:
                parts = (sorted(rows[v], key=lambda r: r.start) for v in unit.makes)
                units[i] = replace(unit, parts=tuple(map(tuple, parts)))
            for v in unit.makes:
                if isinstance(v, Rows):
                    rows.setdefault(v.of, []).append(v)
        yield tuple(units)


def _inputs(units: Sequence[Unit]) -> list[Any]:
    """Return the values that units read and other units or arguments make."""
    makes: set[Any] = set()
    inputs: dict[Any, None] = {}
    for unit in units:
        for v in unit.reads:
            if not isinstance(v, _compat.Literal) and v not in makes and not (isinstance(v, Rows) and v.of in makes):
                inputs.setdefault(v)
        makes.update(unit.makes)
    return list(inputs)


def _outputs(units: Sequence[Unit], later: Sequence[Any]) -> list[Any]:
    """Return the results of units that other units or the function's results read."""
    read = {v for v in later if not isinstance(v, _compat.Literal)}
    read |= {v.of for v in read if isinstance(v, Rows)}
    return [v for unit in units for v in unit.makes if v in read]


def _evaluation(
    units: Sequence[Unit], ins: Sequence[Any], outs: Sequence[Any], mesh: AnyMesh
) -> Callable[..., list[Any]]:
    """Return a function that computes ``outs`` from ``ins``."""

    def evaluate(*args: Any) -> list[Any]:
        env = _Values(zip(ins, args, strict=True))
        groups = [(within, tuple(members)) for within, members in itertools.groupby(units, key=lambda u: u.within)]
        for number, (within, group) in enumerate(groups):
            if within is None:
                _evaluate(group, env, mesh)
                continue
            read, later = _inputs(group), [unit for _, members in groups[number + 1 :] for unit in members]
            results = _outputs(group, [*outs, *(v for unit in later for v in unit.reads)])
            inner = [replace(unit, within=None) for unit in group]
            options = {name: within.params[name] for name in ("policy", "prevent_cse")}
            call = jax.checkpoint(_evaluation(inner, read, results, mesh), **options)
            env.update(zip(results, call(*env.many(read)), strict=True))
        return env.many(outs)

    return evaluate


def _evaluate(units: Sequence[Unit], env: _Values, mesh: AnyMesh | None) -> None:
    for unit in units:
        args = env.many(unit.reads)
        if unit.joins:
            arguments = iter(args)
            parts = [list(itertools.islice(arguments, len(rows))) for rows in unit.parts]
            results: Sequence[Any] = [p[0] if len(p) == 1 else jax.lax.concatenate(p, 0) for p in parts]
        else:
            results = _constrain(unit, args) or _compat.evaluate(unit.eqn, unit.params, args, mesh)
        env.update(zip(unit.makes, results, strict=True))


def _constrain(unit: Unit, args: Sequence[Any]) -> list[Any] | None:
    """Apply a layout constraint on the submesh of the stage, not on that of the trace; None for other operations."""
    sharding = unit.eqn.params.get("sharding")
    if unit.eqn.primitive is not _compat.sharding_constraint_p or not isinstance(sharding, NamedSharding):
        return None
    return [jax.lax.with_sharding_constraint(args[0], sharding.spec)]

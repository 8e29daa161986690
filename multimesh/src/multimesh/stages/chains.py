"""Units of a traced function in the orders in which they may run, and what each order costs."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir import primitives
from multimesh.schedules.cuts import Chain, Need
from multimesh.schedules.partitioning import STATES, LayerCosts
from multimesh.schedules.stage_cuts import Work
from multimesh.stages.units import Carried, Rows, Unit, Units
from multimesh.stages.work import PRODUCTS, Gradients, count_work, find_gradients, find_residuals, scale_work

_COPY = 2  # a copy of it, with its part of the gradient
_PIECES = 64  # of a scan, at most


def orders(units: Units) -> Iterator[tuple[Unit, ...]]:
    """Yield orders to cut: as written, and depth first, which keeps independent towers apart.

    Scans are in pieces. A unit whose results are no smaller than its operands comes right before its user. A small
    result of a parameter, such as the decay of its weights, comes right after the layer that has this parameter.
    """
    for order in (_late(units), _depth_first(units)):
        yield in_pieces(_beside(units, order))


def chain_of(units: Units, order: Sequence[Unit], works: Sequence[Work]) -> Chain:
    """Return the costs of units in an order, by their ``works``, with the values that each reads, makes and keeps.

    A stage holds each argument that it reads; a trained one with its gradient, and where it is first read with its
    moments. Of each microbatch it keeps what backward passes read: nothing if no trained argument is behind it, and of
    a product each operand whose partner has a gradient.
    """
    origin = _origins(units)
    gradients = _gradients(units)
    parts: dict[Any, list[Any]] = collections.defaultdict(list)
    made_rows: dict[Any, list[Any]] = collections.defaultdict(list)
    for unit in order:
        for found, values in ((parts, unit.reads), (made_rows, unit.makes)):
            for v in values:
                if isinstance(v, Rows):
                    found[v.of].append(v)
    given = set(units.given) | set(origin)
    reads, makes, costs, needs = [], [], [], []
    for unit, work in zip(order, works, strict=True):
        read = [v for y in unit.makes for v in made_rows[y]] if unit.joins else _read_by(unit, origin)
        made = [part for v in unit.makes for part in (v, *parts.get(v, ()))]
        kept = set() if primitives.fuses(unit.eqn.primitive) else _for_backward(unit, origin, gradients)
        costs.append(LayerCosts(sum(work)))
        needs.append(tuple(_need(v, kept, gradients.active, given=_base(v) in given) for v in read))
        reads.append(tuple(read))
        makes.append(tuple(made))
    sizes = {v: ir.nbytes(v) for group in (*reads, *makes) for v in group}
    return Chain(tuple(costs), tuple(reads), tuple(makes), sizes, tuple(needs))


def work_of(units: Units, order: Sequence[Unit]) -> list[Work]:
    """Return the operations of units in a training step: of backward passes those that something needs."""
    gradients = _gradients(units)
    weights = {*units.given, *(v for eqn in units.free for v in eqn.outvars)}
    calls: dict[Any, list[Any]] = collections.defaultdict(list)
    for unit in units.units:
        if unit.within is not None:
            calls[unit.within].append(unit.eqn)
    saved = {eqns[i] for within, eqns in calls.items() for i in find_residuals(eqns, within.policy)}
    whole: dict[Any, Work] = {}
    for unit in order:
        if unit.eqn not in whole:
            again = unit.within is not None and unit.eqn not in saved
            whole[unit.eqn] = count_work(unit.eqn, gradients, weights, again=again)
    return [scale_work(whole[unit.eqn], _share(unit)) for unit in order]


def uneven_rows(units: Units, stages: Sequence[Sequence[Unit]]) -> tuple[int, ...]:
    """Return how many rows of an argument each stage reads, of the first that some read more of than others."""
    given = set(units.given)
    rows: dict[Any, list[int]] = {}
    for number, stage in enumerate(stages):
        for v in itertools.chain.from_iterable(unit.reads for unit in stage):
            if isinstance(v, Rows) and v.of in given:
                rows.setdefault(v.of, [0] * len(stages))[number] += v.stop - v.start
    return next((tuple(counts) for counts in rows.values() if len({*filter(None, counts)}) > 1), ())


def rescale(chain: Chain, ends: Sequence[int], seconds: Sequence[float]) -> Chain:
    """Return the chain in seconds: the operations of each stage between ``ends`` took those of its number."""
    costs = list(chain.costs)
    for (start, end), took in zip(itertools.pairwise(ends), seconds, strict=True):
        total = sum(c.time for c in costs[start:end])
        for i in range(start, end):
            costs[i] = replace(costs[i], time=costs[i].time * took / total if total else took / (end - start))
    return replace(chain, costs=tuple(costs))


def _need(value: Any, kept: set[Any], active: Set[Any], *, given: bool) -> Need:
    size = ir.nbytes(value)
    if not given:
        return Need(value, 0.0, 0.0, size if value in kept else 0.0)
    trained = _base(value) in active
    return Need(value, STATES * size if trained else size, _COPY * size if trained else size, 0.0)


def _share(unit: Unit) -> float:
    return 1.0 if unit.rows is None else len(unit.rows) / unit.eqn.params["length"]


def _base(value: Any) -> Any:
    """Return the array that rows or a carry of a scan belong to; any other value as it is."""
    return value.of if isinstance(value, Rows | Carried) else value


def _gradients(units: Units) -> Gradients:
    return find_gradients([*units.free, *(unit.eqn for unit in units.units)], units.trained, units.roots or units.outs)


def _for_backward(unit: Unit, origin: Mapping[Any, frozenset[Any]], gradients: Gradients) -> set[Any]:
    """Return the residuals of a unit: values that its backward pass may read."""
    ins = [v for v in unit.reads if not isinstance(v, _compat.Literal)]
    wanted = set(gradients.of(unit.eqn.invars, unit.eqn.outvars))
    with_gradient = [v for v in ins if _base(v) in wanted or (isinstance(v, Carried) and wanted)]
    if unit.eqn.primitive.name in PRODUCTS and len(ins) == 2:
        ins = [v for v, partner in zip(ins, ins[::-1], strict=True) if partner in with_gradient]
    return {source for v in ins for source in origin.get(v, (v,))} if with_gradient else set()


def _read_by(unit: Unit, origin: Mapping[Any, frozenset[Any]]) -> list[Any]:
    """Return the operands of a unit, each once. A value that is cheap to recompute stands as the arguments it needs."""
    read: dict[Any, None] = {}
    for v in unit.reads:
        if not isinstance(v, _compat.Literal):
            read.update(dict.fromkeys(origin.get(v, (v,))))
    return list(read)


def _origins(units: Units) -> dict[Any, frozenset[Any]]:
    """Map each value that is cheap to recompute from arguments to the arguments (or slices) that it needs."""
    found: dict[Any, frozenset[Any]] = {}
    for eqn in units.free:
        ins = [a for a in eqn.invars if not isinstance(a, _compat.Literal)]
        sources = frozenset().union(*(found.get(v, {v}) for v in ins))
        whole = sum(map(ir.nbytes, sources))
        for out in eqn.outvars:
            found[out] = frozenset([out]) if 2 * ir.nbytes(out) <= whole else sources
    return found


def _readers(units: Units) -> dict[Any, list[int]]:
    readers: dict[Any, list[int]] = collections.defaultdict(list)
    for i, unit in enumerate(units.units):
        for v in unit.eqn.invars:
            if not isinstance(v, _compat.Literal):
                readers[v].append(i)
    return readers


def _late(units: Units) -> list[Unit]:
    """Return units in order, but each whose results are larger than its operands right before its first user."""
    readers = _readers(units)
    given = set(units.given) | {o for eqn in units.free for o in eqn.outvars}
    number = len(units.units)
    anchor = list(range(number))
    for i in reversed(range(number)):
        unit = units.units[i]
        used = [anchor[r] for v in unit.eqn.outvars for r in readers.get(v, ())]
        read = {v for v in unit.eqn.invars if not isinstance(v, _compat.Literal) and v not in given}
        if used and not unit.eqn.effects and sum(map(ir.nbytes, unit.eqn.outvars)) >= sum(map(ir.nbytes, read)):
            anchor[i] = min(used)
    return [units.units[i] for i in sorted(range(number), key=lambda i: (anchor[i], i))]


def _beside(units: Units, order: Sequence[Unit]) -> list[Unit]:
    """Return units in order, but each small result of a parameter moved to the first unit that uses that parameter."""
    origin = _origins(units)
    arguments = set(units.given)
    small: dict[Unit, Any] = {}
    at: dict[Any, int] = {}  # place of the first other reader of an argument
    first: dict[Any, int] = {}  # place of the first reader of a value
    for i, unit in enumerate(order):
        values = [v for v in unit.eqn.invars if not isinstance(v, _compat.Literal)]
        for v in values:
            first.setdefault(v, i)
        sources = {source for v in values for source in origin.get(v, (v,))}
        largest = max(sources & arguments, key=ir.nbytes, default=None)
        made = sum(map(ir.nbytes, unit.eqn.outvars))
        if largest is not None and sources <= arguments and 2 * made <= ir.nbytes(largest) and not unit.eqn.effects:
            small[unit] = largest
        else:
            for source in sources:
                at.setdefault(source, i)
    places = []
    for i, unit in enumerate(order):
        place = at.get(small.get(unit), i)
        used = min((first[v] for v in unit.eqn.outvars if v in first), default=i)
        places.append((place, 1, i) if place < min(i, used) else (i, 0, i))
    return [order[i] for *_, i in sorted(places)]


def _depth_first(units: Units) -> list[Unit]:
    """Sort units depth first from each result, the longest chain first: one tower ends before the next one starts."""
    maker = {v: unit for unit in units.units for v in unit.eqn.outvars}
    depth: dict[Unit, int] = {}
    sources: dict[Unit, list[Unit]] = {}
    for unit in units.units:
        found = dict.fromkeys(maker[v] for v in unit.eqn.invars if not isinstance(v, _compat.Literal) and v in maker)
        depth[unit] = 1 + max((depth[s] for s in found), default=0)
        sources[unit] = sorted(found, key=lambda s: depth[s])  # the deepest is the first to leave the stack
    done: dict[Unit, None] = {}
    read = {s for found in sources.values() for s in found}
    for root in (unit for unit in units.units if unit not in read):
        stack = [root]
        while stack:
            unit = stack[-1]
            waiting = [s for s in sources[unit] if s not in done]
            if waiting:
                stack.append(waiting[-1])
            else:
                done.setdefault(stack.pop())
    return list(done)


def in_pieces(order: Sequence[Unit]) -> tuple[Unit, ...]:
    """Split each scan into pieces of several rows, and add a unit that joins their results."""
    made: list[Unit] = []
    for unit in order:
        if unit.rows is None:
            made.append(unit)
            continue
        step = math.ceil(len(unit.rows) / _PIECES)
        made += [replace(unit, rows=unit.rows[i : i + step]) for i in range(0, len(unit.rows), step)]
        if len(unit.eqn.outvars) > _compat.scan_counts(unit.eqn.params)[1]:
            made.append(replace(unit, rows=range(0)))
    return tuple(made)

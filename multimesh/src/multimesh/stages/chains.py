"""Units of a traced function in the orders in which they may run, and what each costs in a training step.

Nothing is counted for a gradient that nobody asks for: of frozen arguments, behind `jax.lax.stop_gradient`, of results
that no loss depends on. Under `jax.checkpoint` the forward pass is counted again, without what its policy saves.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.ir.flops import operations
from multimesh.stages.balance import Chain
from multimesh.stages.stage_cuts import Work
from multimesh.stages.units import Rows, ScanCarry, Unit, Units, is_in

STATES = 4
"""Arrays of a trained parameter's size: itself, its gradient and two moments; a copy elsewhere has no moments."""

_PIECES = 64  # of a scan, at most
PRODUCTS = frozenset(("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"))
_OPAQUE = frozenset(("pallas_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "ffi_call"))
_BACKWARD = 2  # operations of a backward pass that we can't read, for each of its forward pass
_STOPS = "stop_gradient"


def orders(units: Units) -> Iterator[tuple[Unit, ...]]:
    """Yield orders to cut, with scans in pieces: as written, and depth first, which keeps independent towers apart."""
    for order in (units.units, _depth_first(units)):
        yield in_pieces(_beside(units, order))


def chain_of(units: Units, order: Sequence[Unit], works: Sequence[Work]) -> Chain:
    """Return the times of units in an order, by their ``works``, with the values that each reads and makes."""
    origin = _origins(units)
    parts = group((v.of, v) for unit in order for v in unit.reads if isinstance(v, Rows))
    results = group((v.of, v) for unit in order for v in unit.makes if isinstance(v, Rows))
    reads, makes = [], []
    for unit in order:
        reads.append(tuple([v for y in unit.makes for v in results[y]] if unit.joins else _read_by(unit, origin)))
        makes.append(tuple(part for v in unit.makes for part in (v, *parts.get(v, ()))))
    sizes = {v: ir.nbytes(v) for group in (*reads, *makes) for v in group}
    return Chain(tuple(map(sum, works)), tuple(reads), tuple(makes), sizes)


def count_state(units: Units, stages: Sequence[Sequence[Unit]]) -> list[float]:
    """Return the bytes of what each stage reads: of trained ones with a gradient, where first read with moments."""
    origin, trained = _origins(units), _gradients(units).active
    arguments = set(units.arguments) | set(origin)
    earlier: set[Any] = set()
    held = []
    for stage in stages:
        read = {v for unit in stage if not unit.joins for v in _read_by(unit, origin) if _base(v) in arguments}
        held.append(sum(ir.nbytes(v) * (STATES - 2 * (v in earlier) if _base(v) in trained else 1) for v in read))
        earlier |= read
    return held


def work_of(units: Units, order: Sequence[Unit]) -> list[Work]:
    """Return the work of units in a training step, with those backward passes that a gradient needs."""
    gradients = _gradients(units)
    weights = {*units.arguments, *(v for eqn in units.free for v in eqn.outvars)}
    calls = group((unit.within, unit.eqn) for unit in units.units if unit.within is not None)
    saved = {eqns[i] for within, eqns in calls.items() for i in find_residuals(eqns, within.params["policy"])}
    work_of_eqn: dict[Any, Work] = {}
    for unit in order:
        if unit.eqn not in work_of_eqn:
            again = unit.within is not None and unit.eqn not in saved
            work_of_eqn[unit.eqn] = count_work(unit.eqn, gradients, weights, again=again)
    shares = (1.0 if unit.rows is None else len(unit.rows) / unit.eqn.params["length"] for unit in order)
    return [scale_work(work_of_eqn[unit.eqn], share) for unit, share in zip(order, shares, strict=True)]


def scan_over_time(units: Units, stages: Sequence[Sequence[Unit]]) -> str:
    """Return the line of a scan that several stages run, and whose steps read the same weights; "" if there is none."""
    origin, weights = _origins(units), units.trained or set(units.arguments)
    readers: dict[Any, set[int]] = collections.defaultdict(set)
    for number, unit in ((number, unit) for number, stage in enumerate(stages) for unit in stage if unit.rows):
        readers[unit.eqn].add(number)
    for eqn in (eqn for eqn, numbers in readers.items() if len(numbers) > 1):
        consts, carries = _compat.scan_counts(eqn.params)
        sources = [() if isinstance(a, _compat.Literal) else origin.get(a, (a,)) for a in eqn.invars]
        sizes = [sum(ir.nbytes(v) for v in values if v in weights) for values in sources]
        if sum(sizes[:consts]) > sum(sizes[consts + carries :]):  # a scan over layers has its weights among its rows
            return _compat.user_line(eqn.source_info) or "a line that JAX did not record"
    return ""


def rescale(chain: Chain, ends: Sequence[int], seconds: Sequence[float]) -> Chain:
    """Return the chain with times in seconds, from the measured seconds of each stage between ``ends``."""
    times: list[float] = []
    for (start, end), took in zip(itertools.pairwise(ends), seconds, strict=True):
        total = sum(chain.times[start:end])
        times += [time * took / total if total else took / (end - start) for time in chain.times[start:end]]
    return replace(chain, times=tuple(times))


def _base(value: Any) -> Any:
    """Return the array that rows or a carry of a scan belong to; any other value as it is."""
    return value.of if isinstance(value, Rows | ScanCarry) else value


def _gradients(units: Units) -> Gradients:
    return find_gradients([*units.free, *(unit.eqn for unit in units.units)], units.trained, units.roots or units.outs)


def _read_by(unit: Unit, origin: Mapping[Any, frozenset[Any]]) -> list[Any]:
    """Return the operands of a unit, each once. A value that is cheap to recompute stands as the arguments it needs."""
    read: dict[Any, None] = {}
    for v in unit.reads:
        if not isinstance(v, _compat.Literal):
            read.update(dict.fromkeys(origin.get(v, (v,))))
    return list(read)


def _origins(units: Units) -> dict[Any, frozenset[Any]]:
    """Map each value that is cheap to recompute from arguments to the arguments (or slices) that it needs."""
    origins: dict[Any, frozenset[Any]] = {}
    for eqn in units.free:
        ins = [a for a in eqn.invars if not isinstance(a, _compat.Literal)]
        sources = frozenset().union(*(origins.get(v, {v}) for v in ins))
        size = sum(map(ir.nbytes, sources))
        for out in eqn.outvars:
            origins[out] = frozenset([out]) if 2 * ir.nbytes(out) <= size else sources
    return origins


def _beside(units: Units, order: Sequence[Unit]) -> list[Unit]:
    """Sort units so that a small result of a parameter, such as its decay, comes right after its first user."""
    origin = _origins(units)
    arguments = set(units.arguments)
    small: dict[Unit, Any] = {}
    at: dict[Any, int] = {}  # place of the first other reader of an argument
    first: dict[Any, int] = {}  # place of the first reader of a value
    for i, unit in enumerate(order):
        values = [v for v in unit.eqn.invars if not isinstance(v, _compat.Literal)]
        for v in values:
            first.setdefault(v, i)
        sources = {source for v in values for source in origin.get(v, (v,))}
        largest = max(sources & arguments, key=ir.nbytes, default=None)
        size = sum(map(ir.nbytes, unit.eqn.outvars))
        if largest is not None and sources <= arguments and 2 * size <= ir.nbytes(largest) and not unit.eqn.effects:
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
        makers = dict.fromkeys(maker[v] for v in unit.eqn.invars if not isinstance(v, _compat.Literal) and v in maker)
        depth[unit] = 1 + max((depth[s] for s in makers), default=0)
        sources[unit] = sorted(makers, key=lambda s: depth[s])  # the deepest is the first to leave the stack
    done: dict[Unit, None] = {}
    read = {s for makers in sources.values() for s in makers}
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
    parts: list[Unit] = []
    for unit in order:
        if unit.rows is None:
            parts.append(unit)
            continue
        step = math.ceil(len(unit.rows) / _PIECES)
        parts += [replace(unit, rows=unit.rows[i : i + step]) for i in range(0, len(unit.rows), step)]
        if len(unit.eqn.outvars) > _compat.scan_counts(unit.eqn.params)[1]:
            parts.append(replace(unit, rows=range(0)))
    return tuple(parts)


@dataclass(frozen=True)
class Gradients:
    """The values of a function that have a gradient in a training step."""

    active: Set[Any]  # trained arguments, and what is computed from them
    needed: Set[Any]  # those of them whose cotangent a backward pass computes


def find_gradients(eqns: Sequence[Any], trained: Iterable[Any], outs: Iterable[Any]) -> Gradients:
    """Return which values have a gradient, by the ``trained`` arguments and the ``outs`` that have a cotangent."""
    active = {v for v in trained if _is_differentiable(v)}
    for eqn in eqns:
        if eqn.primitive.name != _STOPS and any(is_in(a, active) for a in eqn.invars):
            active.update(filter(_is_differentiable, eqn.outvars))
    needed = {v for v in outs if is_in(v, active)}
    for eqn in reversed(eqns):
        if eqn.primitive.name != _STOPS and any(v in needed for v in eqn.outvars):
            needed.update(a for a in eqn.invars if is_in(a, active))
    return Gradients(active, needed)


def count_work(eqn: Any, gradients: Gradients, weights: Set[Any], *, again: bool = False) -> Work:
    """Return the work of an equation in a training step; under `jax.checkpoint` it is computed ``again``.

    A product's gradient for one of the ``weights``, arguments and what is cheaply computed of them, is W and not B.
    """
    forward = operations(eqn.primitive.name, eqn.params, eqn.invars, eqn.outvars)
    cotangents = [v for v in eqn.invars if is_in(v, gradients.needed)]
    if not cotangents or gradients.needed.isdisjoint(eqn.outvars):
        return Work(forward)
    name = eqn.primitive.name
    inner = [_count_inside(eqn, jaxpr, gradients, weights) for jaxpr in _compat.subjaxprs(eqn.params)]
    counted = [work for work in inner if work is not None]
    if name in PRODUCTS:
        late = sum(v in weights for v in cotangents)
        back = Work(0.0, forward * (len(cotangents) - late), forward * late)
    elif name in _OPAQUE or len(counted) < len(inner):
        back = Work(0.0, _BACKWARD * forward)
    elif not inner:
        back = Work(0.0, forward)
    else:
        back = max(counted, key=sum) if name == "cond" else add_work(counted)
    return Work(forward, back.backward + (forward if again else 0.0), back.weights)


def find_residuals(eqns: Sequence[Any], policy: Any) -> frozenset[int]:
    """Return the numbers of the equations that a policy of `jax.checkpoint` saves, or whose only readers it saves."""
    readers = group((v, i) for i, eqn in enumerate(eqns) for v in eqn.invars if not isinstance(v, _compat.Literal))
    saved: set[int] = set()
    for i, eqn in reversed([*enumerate(eqns)] if policy is not None else []):
        users = [r for v in eqn.outvars for r in readers[v]]
        named = users and saved.issuperset(users) and all(eqns[r].primitive.name == "name" for r in users)
        if named or _is_saved(policy, eqn):
            saved.add(i)
    return frozenset(saved)


def _is_saved(policy: Any, eqn: Any) -> bool:
    verdict = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    return verdict is True or (not isinstance(verdict, bool) and type(verdict).__name__ != "RecomputeType")


def _count_inside(eqn: Any, jaxpr: Any, gradients: Gradients, weights: Set[Any]) -> Work | None:
    """Return the work of a program of an equation; None if nobody knows which operand is which of its arguments."""
    ins = eqn.invars[len(eqn.invars) - len(jaxpr.invars) :]
    if len(ins) != len(jaxpr.invars):
        return None
    names: Mapping[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
    trained = {v for v, a in names.items() if is_in(a, gradients.active)}
    late = {v for v, a in names.items() if is_in(a, weights)}
    outs, times = list(jaxpr.outvars), 1
    if len(outs) == len(eqn.outvars):
        outs = [v for v, of in zip(outs, eqn.outvars, strict=True) if of in gradients.needed]
    if eqn.primitive.name == "scan":
        times = eqn.params["length"]
        consts, carries = _compat.scan_counts(eqn.params)
        carried = jaxpr.invars[consts : consts + carries]
        late.difference_update(carried)
        trained.update(v for v, of in zip(carried, eqn.outvars, strict=False) if of in gradients.active)
        outs += [v for v, of in zip(jaxpr.outvars[:carries], carried, strict=True) if of in trained]
    inside = find_gradients(jaxpr.eqns, trained, (v for v in outs if not isinstance(v, _compat.Literal)))
    again = eqn.primitive is _compat.remat_p
    saved = find_residuals(jaxpr.eqns, eqn.params["policy"]) if again else frozenset()
    works = (count_work(e, inside, late, again=again and i not in saved) for i, e in enumerate(jaxpr.eqns))
    return scale_work(add_work(works), times)


def add_work(many: Iterable[Work]) -> Work:
    """Return the sum of the work of several equations."""
    return Work(*map(sum, zip(Work(0.0), *many, strict=True)))


def scale_work(work: Work, times: float) -> Work:
    """Return the work of several runs."""
    return Work(*(times * part for part in work))


def _is_differentiable(value: Any) -> bool:
    return getattr(value.aval.dtype, "kind", "V") in "fcV"

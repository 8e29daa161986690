"""A function as a row of pieces, between which a pipeline may cut it, with what each costs on a device."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from multimesh import ir
from multimesh.core import _compat
from multimesh.errors import UsageError
from multimesh.hardware.devices import Device
from multimesh.ir.flops import operations
from multimesh.ir.seconds import Costed, estimate_lines

_MOST = 64  # pieces
_NARROW = 1.5  # times what crosses the narrowest place near by: where a pipeline may cut
_NEAR = 1 / 16  # share of the seconds that is near by


@dataclass(frozen=True)
class Portion:
    """Some operations of a function on a microbatch."""

    seconds: float  # of its forward
    operations: float  # of its forward, those of matrix products and convolutions
    # parameters, numbers: bytes and elements of the parameters that it is the first to read
    parameters: float
    numbers: float
    kept: float  # bytes that its backward reads
    crossing: float  # bytes that later pieces read of this one and those before


@dataclass(frozen=True)
class _Item:
    """A line of the function, or one round of a scan: its share of what the line reads and gives."""

    line: Costed
    share: float
    inside: float  # bytes that it hands to the next round


def pieces(
    fn: Callable[..., Any], params: Any, batch: Sequence[Any], device: Device, start: float
) -> tuple[Portion, ...]:
    """Return the pieces of ``fn(params, *batch)``.

    ``fn``: the forward function, which is traced with its derivative.
    ``params``, ``batch``: types of its arguments.
    ``device``: where it runs.
    ``start``: seconds to start a kernel.
    """

    def both(weights: Any, rows: Sequence[Any]) -> Any:
        out, back = jax.vjp(lambda w: fn(w, *rows), weights)
        return out, jax.tree.leaves(back)

    count = len(jax.tree.leaves(params))
    results = len(jax.tree.leaves(jax.eval_shape(fn, params, *batch)))
    jaxpr = jax.make_jaxpr(both)(params, tuple(batch)).jaxpr
    given = [_Value(v.aval) for v in jaxpr.invars]
    lines: list[Costed] = []
    outs = _flatten(jaxpr, given, lines)
    weights = dict.fromkeys(given[:count])
    residuals = {value for value in outs[results:] if ir.is_value(value)} - weights.keys()
    return _join(tuple(_items(lines)), weights, residuals, device, start)


class _Value:
    """A value of one call of a function: a program that is called twice has its variables twice."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


def _flatten(jaxpr: Any, given: Sequence[Any], lines: list[Costed]) -> list[Any]:
    """Append the lines of a program, and of those that it calls other than loops and branches; return its results."""
    names: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))

    def named(atom: Any) -> Any:
        return names.setdefault(atom, _Value(atom.aval)) if ir.is_value(atom) else atom

    for eqn in jaxpr.eqns:
        ins = [named(v) for v in eqn.invars]
        inner = list(_compat.subjaxprs(eqn.params))
        called = len(inner) == 1 and eqn.primitive.name not in ("scan", "while", "cond")
        if called and len(inner[0].invars) == len(ins) and len(inner[0].outvars) == len(eqn.outvars):
            names.update(zip(eqn.outvars, _flatten(inner[0], ins, lines), strict=True))
        else:
            lines.append(Costed(eqn.primitive, eqn.params, ins, [named(v) for v in eqn.outvars]))
    return [named(v) for v in jaxpr.outvars]


def _items(lines: Sequence[Costed]) -> Iterator[_Item]:
    for line in lines:
        rounds = int(line.params.get("length", 1)) if line.prim.name == "scan" else 1
        carried = 0.0
        if rounds > 1:
            _, carries = _compat.scan_counts(line.params)
            carried = sum(map(ir.nbytes, line.outs[:carries]))
        for number in range(rounds):
            yield _Item(line, 1 / rounds, carried if number < rounds - 1 else 0.0)


def _join(
    items: Sequence[_Item], weights: Mapping[Any, None], residuals: set[Any], device: Device, start: float
) -> tuple[Portion, ...]:
    """Join items between places where little crosses, until pieces have about equal times."""
    made: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for number, item in enumerate(items):
        made |= dict.fromkeys(item.line.outs, number)
        last |= dict.fromkeys(filter(ir.is_value, item.line.ins), number)
    ends: dict[int, float] = defaultdict(float)
    for value, at in made.items():
        if last.get(value, -1) > at:
            ends[at] += ir.nbytes(value)
            ends[last[value]] -= ir.nbytes(value)
    crossing, alive = [], 0.0
    for number, item in enumerate(items):
        alive += ends[number]
        crossing.append(alive + item.inside)
    seconds = [_seconds(item, last, number, device, start) for number, item in enumerate(items)]
    places, least = _places(crossing, seconds), sum(seconds) / _MOST
    owner: dict[Any, Costed] = {}
    for item in items:
        for atom in filter(ir.is_value, item.line.ins):
            if atom in weights:
                owner.setdefault(atom, item.line)
    found: list[Portion] = []
    group: list[int] = []
    for number in range(len(items)):
        group.append(number)
        end = number == len(items) - 1
        if end or (places[number] and sum(seconds[n] for n in group) >= least):
            between = 0.0 if end else crossing[number]
            found.append(_piece(items, group, last, owner, residuals, between, device, start))
            group = []
    if not found:
        raise UsageError("suggest: the function computes nothing")
    return tuple(found)


def _places(crossing: Sequence[float], seconds: Sequence[float]) -> list[bool]:
    """Return for each place whether a pipeline may cut there: no place near it, in seconds, sends far fewer bytes."""
    ends = list(itertools.accumulate(seconds))
    near = ends[-1] * _NEAR
    found, first, last = [], 0, 0
    for size, end in zip(crossing, ends, strict=True):
        while ends[first] < end - near:
            first += 1
        while last < len(ends) and ends[last] <= end + near:
            last += 1
        found.append(size <= _NARROW * min(crossing[first:last]))
    return found


def _piece(
    items: Sequence[_Item],
    group: Sequence[int],
    last: Mapping[Any, int],
    owner: Mapping[Any, Costed],
    residuals: set[Any],
    crossing: float,
    device: Device,
    start: float,
) -> Portion:
    seconds = work = held = numbers = kept = 0.0
    for item in (items[n] for n in group):
        own = [a for a in dict.fromkeys(filter(ir.is_value, item.line.ins)) if owner.get(a) is item.line]
        work += item.share * operations(item.line.prim.name, item.line.params, item.line.ins, item.line.outs)
        held += item.share * sum(map(ir.nbytes, own))
        numbers += item.share * sum(math.prod(ir.shape(a)) for a in own)
        kept += item.share * sum(ir.nbytes(out) for out in item.line.outs if out in residuals)
        if item.share < 1:
            seconds += _seconds(item, last, group[-1], device, start)
    together = [items[n].line for n in group if items[n].share == 1]
    read = [out for line in together for out in line.outs if last.get(out, -1) > group[-1]]
    return Portion(seconds + estimate_lines(together, read, device, start), work, held, numbers, kept, crossing)


def _seconds(item: _Item, last: Mapping[Any, int], number: int, device: Device, start: float) -> float:
    read = [out for out in item.line.outs if last.get(out, -1) > number]
    return item.share * estimate_lines([item.line], read, device, start)

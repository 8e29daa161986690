"""What a broken rule says, and what the rules share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multimesh import ir


@dataclass(frozen=True)
class Fault:
    """Where a rule is broken: ``what`` names the value, ``source`` is that of the operation, or the line of a loop."""

    what: str
    source: Any = None


def kind(of: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a value, literal or slot."""
    aval = getattr(of, "aval", of)
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)


def shown(of: Any) -> str:
    """A value or literal with its type."""
    text = of.aval.str_short(short_dtypes=True) if hasattr(of.aval, "str_short") else str(of.aval)
    return f"{of}:{text}"


def in_order(ops: Iterable[ir.Op], given: Iterable[ir.Value], where: str) -> Iterator[Fault]:
    """Faults of operations that read, or wait for, what is neither given nor made before."""
    known = set(given)
    for op in ops:
        for v in op.needs:
            if v not in known:
                yield Fault(f"{op.prim.name} reads {shown(v)} {where}, before anything makes it", op.source)
        known.update(op.outs)


def twice(makers: Iterable[tuple[Sequence[ir.Value], Any]]) -> Iterator[Fault]:
    """Faults of values that are made a second time; ``makers`` are values, each with the source of what makes them."""
    known: set[ir.Value] = set()
    for made, source in makers:
        for v in made:
            if v in known:
                yield Fault(f"{shown(v)} is made twice", source)
            known.add(v)

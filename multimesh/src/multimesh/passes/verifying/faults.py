"""The report of a broken rule, and helpers of the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from multimesh import ir


@dataclass(frozen=True)
class Fault:
    """A broken rule: ``message`` names the value, ``source`` is that of the operation, or the line of a loop."""

    message: str
    source: Any = None


def kind(of: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype of a value, literal or slot."""
    aval = getattr(of, "aval", of)
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)


def show(of: Any) -> str:
    """Format a value or literal with its type."""
    text = of.aval.str_short(short_dtypes=True) if hasattr(of.aval, "str_short") else str(of.aval)
    return f"{of}:{text}"


def in_order(ops: Iterable[ir.Op], values: set[ir.Value], where: str) -> Iterator[Fault]:
    """Yield faults of operations that use a value that is not there yet, or make one again. Add theirs to ``values``."""
    for op in ops:
        for v in op.needs:
            if v not in values:
                yield Fault(f"{op.prim.name} reads {show(v)} {where}, before anything makes it", op.source)
        for v in op.outs:
            if v in values:
                yield Fault(f"{show(v)} is made twice", op.source)
            values.add(v)

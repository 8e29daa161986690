"""The text of a plan that is the same in every process, and its digest.

Processes that run a plan together must have made the same one. Their texts can be compared: they hold no address, no
order of a set and no count of other work, and number values as they appear.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from multimesh.core.stable import atoms, text
from multimesh.ir.program import Op
from multimesh.plan.instructions import PlanData, record


def digest(plan: PlanData) -> str:
    """Return the SHA-256 of the lines of a plan, in hexadecimal."""
    sha = hashlib.sha256()
    for line in lines(plan):  # the text of a large plan has tens of megabytes
        sha.update(line.encode() + b"\n")
    return sha.hexdigest()


class Lines:
    """The lines of a plan, produced anew each time that they are read."""

    def __init__(self, plan: PlanData) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[str]:
        return lines(self._plan)


def lines(plan: PlanData) -> Iterator[str]:
    """Yield the whole plan, line by line. The first line that differs says where two plans part."""
    for name in ("jax", "jaxlib", "multimesh-jax"):
        yield f"{name} {_version(name)}"
    yield from (f"{name} {text(value)}" for name, value in plan.settings.items())
    yield from (f"submesh {i} {text(mesh)}" for i, mesh in enumerate(plan.submeshes))
    for n, kernel in enumerate(plan.kernels):
        numbers: dict[Any, int] = {}
        sums, rows, ins, outs = (atoms(v, numbers) for v in (kernel.sums, kernel.rows, kernel.ins, kernel.outs))
        yield f"kernel {n} {kernel.name} submesh {kernel.submesh} {kernel.make} ({rows}; {ins}) -> ({sums}; {outs})"
        yield from (f"  {_operation(op, numbers)}" for op in kernel.ops)
    text_of = functools.cache(text)  # few slots differ
    yield from (f"slot {i} {text_of(slot)}" for i, slot in enumerate(plan.slots))
    yield from map(text, plan.transfers)
    yield from (f"Instruction{text([*record(instruction).values()])}" for instruction in plan.instructions)
    for array, slot in plan.constants:
        yield f"constant s{slot} {text(array)}"
    shown = ("settings", "submeshes", "kernels", "slots", "transfers", "instructions", "constants", "derived")
    for name in (f.name for f in dataclasses.fields(plan) if f.name not in shown):
        yield f"{name} {text(getattr(plan, name))}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _operation(op: Op, numbers: dict[Any, int]) -> str:
    ins, outs = atoms(op.ins, numbers), atoms(op.outs, numbers)
    task = f" @{text((op.task.name, op.task.logical_axes))}" if op.task is not None else ""
    back = " [backward]" if op.backward else ""
    return f"{outs} = {op.prim.name} {ins} {text(op.params)}{task}{back}"

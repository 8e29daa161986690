"""The facts that the text of a compiled kernel gives, from one reading of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from multimesh.observe.collectives import Collective, find_collectives
from multimesh.observe.custom_calls import count_custom_calls
from multimesh.observe.hlo import read_computations
from multimesh.observe.operations import product_operations


@dataclass(frozen=True)
class KernelText:
    """The collectives of a kernel, its custom calls, and the operations of its products in one run on a device."""

    collectives: tuple[Collective, ...] = ()
    custom_calls: Mapping[str, int] = field(default_factory=dict)
    operations: float = 0.0


def read_kernel(hlo: str) -> KernelText:
    """Return the facts of a kernel. ``hlo``: optimized HLO, as ``as_text()`` of a compiled function gives it."""
    program = read_computations(hlo)
    return KernelText(find_collectives(program), count_custom_calls(program), product_operations(program))

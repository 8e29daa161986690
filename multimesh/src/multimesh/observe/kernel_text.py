"""The costs of one run of a compiled program on a device, read off its text: of kernels, and of any other program."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from multimesh.observe.hlo import (
    Collective,
    collective_bytes,
    count_custom_calls,
    find_collectives,
    product_operations,
    read_computations,
)
from multimesh.observe.traffic import Traffic, count_traffic


@dataclass(frozen=True)
class KernelText:
    """The collectives of a program, its custom calls, the operations of its products, and its traffic on a device."""

    collectives: tuple[Collective, ...] = ()
    custom_calls: Mapping[str, int] = field(default_factory=dict)
    operations: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    @functools.cached_property
    def costs(self) -> dict[str, float]:
        """Operations and bytes of one run, by the names of `Compiled.cost_analysis`."""
        traffic = self.traffic
        values = {"flops": self.operations, "bytes accessed": traffic.accessed}
        return values | {"copies": traffic.copies, "bytes copied": traffic.copied} | collective_bytes(self.collectives)


def read_kernel(hlo: str) -> KernelText:
    """Return the facts of a program. ``hlo``: optimized HLO, as ``as_text()`` of a compiled function gives it."""
    program = read_computations(hlo)
    return KernelText(
        find_collectives(program), count_custom_calls(program), product_operations(program), count_traffic(program)
    )


def count_costs(hlo: str) -> dict[str, float]:
    """Return what one run of a compiled program costs on a device, by the names of `Compiled.cost_analysis`.

    A step of a pipeline is compared so with one program of the same model: ``jax.jit(step).lower(...).compile()``.

    Parameters
    ----------
    hlo
        Optimized HLO, as ``as_text()`` of a compiled function gives it.
    """
    return read_kernel(hlo).costs

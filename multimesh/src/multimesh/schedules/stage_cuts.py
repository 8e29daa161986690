"""The stages of a function that `multimesh.pipeline` has cut, as data and as tables. Nothing here imports JAX."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from multimesh.core.text import amount, columns
from multimesh.schedules.partitioning import LayerCosts

_NONE = 5e-4  # share of a stage's work that a table shows as 0.0 %


class Work(NamedTuple):
    """Operations on a microbatch in a training step, as far as something needs their results."""

    forward: float  # of F
    backward: float = 0.0  # of B: gradients of activations, and what `jax.checkpoint` computes again
    weights: float = 0.0  # of W: gradients of parameters


@dataclass(frozen=True)
class StageCut:
    """A stage of a function that `pipeline` has cut.

    Attributes
    ----------
    line
        The user's line of its first operation: ``file:line``, the modules around it, and the row of a scan.
    text
        The text of that line; empty if nobody knows.
    costs
        Operations of F, B and W (or your measured seconds), bytes that it holds all the time, and bytes that it keeps
        of a microbatch. See `pipeline`.
    received
        Bytes that it gets from stages before it, for each microbatch; a shared parameter counts too.
    work
        Operations of F, B and W apart.
    """

    line: str
    text: str
    costs: LayerCosts
    received: float
    work: Work

    @property
    def start(self) -> str:
        """Its line and text, with the file as seen from the current folder."""
        path, sign, rest = self.line.partition(":")
        near = os.path.relpath(path) if os.path.isabs(path) and os.path.exists(path) else path
        where = f"{path if near.startswith(os.pardir) else near}{sign}{rest}"
        return f"{where}: {self.text}" if self.text else where


@dataclass(frozen=True)
class Cuts:
    """The stages into which `pipeline` has cut a function; ``str`` is a table of them.

    Attributes
    ----------
    stages
        One for each stage, in order.
    name
        Of the function.
    uneven
        Rows of an array of stacked layers that each stage reads, where they are not as many for each.
    """

    stages: tuple[StageCut, ...]
    name: str
    uneven: tuple[int, ...] = ()

    @property
    def slowest(self) -> float:
        """The operations (or measured seconds) of the longest stage, as a multiple of the mean."""
        times = [stage.costs.time for stage in self.stages]
        return max(times) * len(times) / sum(times) if any(times) else 1.0

    @property
    def sent(self) -> float:
        """The bytes that stages get from stages before them."""
        return sum(stage.received for stage in self.stages)

    @property
    def shares(self) -> tuple[str, ...]:
        """The share of the operations of each stage."""
        total = sum(stage.costs.time for stage in self.stages) or 1.0
        return tuple(f"{100 * stage.costs.time / total:.1f} %" for stage in self.stages)

    @property
    def remark(self) -> str:
        """A sentence about stages that have nothing to do, or of which the rows lie elsewhere; empty for all others."""
        times = [stage.costs.time for stage in self.stages]
        idle = [str(s) for s, time in enumerate(times) if time < _NONE * sum(times)]
        if not idle and self.uneven:
            return (
                f"stages read {', '.join(map(str, self.uneven))} rows of stacked layers, which lie in equal blocks: "
                "memory_forecast of the step counts them where they lie"
            )
        if not idle:
            return ""
        many, best = "stages" if len(idle) > 1 else "stage", len(times) - len(idle)
        return (
            f"{many} {' and '.join(idle)} of {len(times)} would have 0.0 % of the work: {best} "
            f"stage{'s are' if best > 1 else ' is'} as good"
        )

    def short(self) -> list[str]:
        """Return the lines of a table of where stages start and how even they are."""
        starts = [stage.start for stage in self.stages]
        parts = [("stage", [*map(str, range(len(starts)))]), ("share", self.shares), ("starts at", starts)]
        head = f"{self.name} is cut into {len(starts)} stages; the slowest has {self.slowest:.2f} x the mean"
        return [head, *columns(parts, left=(2,)), *filter(None, [self.remark])]

    def __str__(self) -> str:
        parts: list[tuple[str, Sequence[str]]] = [
            ("stage", [str(s) for s in range(len(self.stages))]),
            *((part, [amount(getattr(s.work, part), "") for s in self.stages]) for part in Work._fields),
            ("share", self.shares),
            ("state", [amount(stage.costs.held, "bytes") for stage in self.stages]),
            ("receives", [amount(stage.received, "bytes") for stage in self.stages]),
            ("starts at", [stage.start for stage in self.stages]),
        ]
        end = f"the slowest stage has {self.slowest:.2f} x the mean; {amount(self.sent, 'bytes')} are sent"
        return "\n".join([*columns(parts, left=(7,)), end, *filter(None, [self.remark])])

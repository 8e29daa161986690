"""The stages of a function that `multimesh.pipeline` has cut, as data and as tables. Nothing here imports JAX."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from multimesh.core.grouping import group
from multimesh.core.text import amount, columns

WIDTH = 120  # columns of a table
_IDLE = 0.25  # of the mean: a stage with less work is named


class Work(NamedTuple):
    """The operations of a stage on a microbatch in a training step: forward, and two kinds of backward."""

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
    time
        Operations of F, B and W together (or your measured seconds).
    state
        Bytes of the arguments that it reads: frozen ones once; trained ones four times, with a gradient and two moments
        (twice if an earlier stage reads them too).
    received
        Bytes that it gets from stages before it, for each microbatch; a shared parameter counts too.
    work
        Operations of F, B and W apart.
    """

    line: str
    text: str
    time: float
    state: float
    received: float
    work: Work

    @property
    def start(self) -> str:
        """The line at which the stage starts and its text, with the file as seen from the current folder."""
        path, sign, place = self.line.partition(":")
        near = os.path.relpath(path) if os.path.isabs(path) and os.path.exists(path) else path
        where = f"{path if near.startswith(os.pardir) else near}{sign}{place}"
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
    equal
        Groups of stages with the same operations; these share their kernels.
    finest
        The operations (or measured seconds) of the longest stage if cuts inside of layers were taken.
    over_time
        The line of a scan that several stages run, and each step of which reads the same weights; else empty.
    """

    stages: tuple[StageCut, ...]
    name: str
    equal: tuple[tuple[int, ...], ...] = ()
    finest: float = 0.0
    over_time: str = ""

    @property
    def slowest(self) -> float:
        """The operations (or measured seconds) of the longest stage, as a multiple of the mean."""
        times = [stage.time for stage in self.stages]
        return max(times) * len(times) / sum(times) if any(times) else 1.0

    @property
    def sent(self) -> float:
        """The bytes that stages get from stages before them."""
        return sum(stage.received for stage in self.stages)

    @property
    def shares(self) -> tuple[str, ...]:
        """The share of the operations of each stage."""
        total = sum(stage.time for stage in self.stages) or 1.0
        return tuple(f"{100 * stage.time / total:.1f} %" for stage in self.stages)

    @property
    def remark(self) -> str:
        """A sentence about a scan over time, or stages with little work; empty for all others."""
        times = [stage.time for stage in self.stages]
        idle = [s for s, time in enumerate(times) if time * len(times) < _IDLE * sum(times)]
        if self.over_time:
            return (
                f"{self.over_time}: each step of this scan reads the same weights, as a scan over time does, and "
                "several stages run it: all of them hold these weights; leave it out of multimesh.pipeline, which cuts "
                "the layers of one step, and give it the loss alone"
            )
        if not idle:
            return ""
        many, best = "stages" if len(idle) > 1 else "stage", len(times) - len(idle)
        return (
            f"{many} {' and '.join(map(str, idle))} of {len(times)} would have "
            f"{' and '.join(self.shares[s] for s in idle)} of the work: {best} "
            f"stage{'s are' if best > 1 else ' is'} about as good; or give layers that {len(times)} divides"
        )

    @property
    def notes(self) -> list[str]:
        """Lines about equal stages, about cuts inside of layers, and the `remark`."""
        times = [stage.time for stage in self.stages]
        groups = (f"{_name_numbers(group)} are equal" for group in self.equal)
        lines = [f"stages {' and '.join(groups)}, and share their kernels"] if self.equal else []
        if self.finest and max(times) > self.finest:
            gain = self.finest * len(times) / sum(times)
            lines.append(f"cuts inside of layers would give {gain:.2f} x the mean: pipeline(..., within_layers=True)")
        return [*lines, *filter(None, [self.remark])]

    def short(self) -> list[str]:
        """Return the lines of a table of where stages start and how even they are."""
        starts = [stage.start for stage in self.stages]
        parts = [("stage", [*map(str, range(len(starts)))]), ("share", self.shares), ("starts at", starts)]
        head = f"{self.name} is cut into {len(starts)} stages; the slowest has {self.slowest:.2f} x the mean"
        return [head, *columns(parts, texts=(2,)), *self.notes]

    def __str__(self) -> str:
        parts: list[tuple[str, Sequence[str]]] = [
            ("stage", [str(s) for s in range(len(self.stages))]),
            *((part, [amount(getattr(s.work, part), "") for s in self.stages]) for part in Work._fields),
            ("share", self.shares),
            ("state", [amount(stage.state, "bytes") for stage in self.stages]),
            ("receives", [amount(stage.received, "bytes") for stage in self.stages]),
            ("starts at", [stage.start for stage in self.stages]),
        ]
        end = f"the slowest stage has {self.slowest:.2f} x the mean; {amount(self.sent, 'bytes')} are sent"
        lines = (line.rstrip() for line in columns(parts, texts=(7,)))
        return "\n".join(
            [*(f"{line[: WIDTH - 4]} ..." if len(line) > WIDTH else line for line in lines), end, *self.notes]
        )


def _name_numbers(numbers: Sequence[int]) -> str:
    """Return numbers in order as text, ranges of at least three as ``2 to 5``."""
    runs = group((n - place, n) for place, n in enumerate(numbers)).values()
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)

"""The result of a search: a table of the best configurations, and why others lost."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from multimesh.core.text import amount, columns
from multimesh.planner import picture
from multimesh.planner.best_first import Option
from multimesh.planner.configuration import Configuration
from multimesh.planner.lost import describe_how

_WIDTH = 100  # of the table
_DETAILED = 3  # options whose layers are shown
_AXES = (
    *(("dp", "dp"), ("fsdp", "fsdp"), ("tp", "tp"), ("cp", "cp"), ("ep", "ep"), ("pp", "pp")),
    *(("interleave", "v"), ("microbatch", "mb")),
)
_PARTS = {
    "matrix products": "products",
    "tensor parallelism": "TP traffic",
    "context parallelism": "CP traffic",
    "expert parallelism": "EP traffic",
    "sharded parameters": "FSDP",
}


@dataclass(frozen=True)
class Suggestions:
    """The best configurations, the fastest first; ``str`` is a table of 100 columns at most.

    Attributes
    ----------
    title
        The space of configurations.
    options
        The best.
    lost
        A sentence on each other family of configurations: why it lost.
    limit
        Bytes of a device that may be used.
    considered, simulated
        How many configurations were considered, and how many of them simulated. Bounds show that the others are
        slower, or do not fit.
    unit
        The items that `Option.tokens_per_second` counts.
    notes
        Effects that the cost model does not see.
    simplest
        The simplest of those that are about as fast as the fastest; None: it is the fastest.
    front
        The fastest, the fastest in less memory, and so on, if that was asked for.
    """

    title: str
    options: tuple[Option, ...]
    lost: tuple[str, ...]
    limit: float
    considered: int
    simulated: int
    unit: str = "tok"
    notes: tuple[str, ...] = ()
    front: tuple[Option, ...] = ()
    simplest: Configuration | None = None

    @property
    def fastest(self) -> Option:
        """The fastest."""
        return self.options[0]

    @property
    def best(self) -> Option:
        """The simplest of those that are about as fast as the fastest."""
        return next((option for option in self.options if option.how == self.simplest), self.fastest)

    def changed(self, options: Sequence[Option], notes: Sequence[str] = ()) -> Suggestions:
        """Return a copy with other options, and further notes."""
        return replace(self, options=tuple(options), notes=(*self.notes, *notes))

    def __str__(self) -> str:
        lines = [f"{self.title}; up to {amount(self.limit, 'bytes')} of a device", ""]
        lines += [line.rstrip() for line in columns(_table(self.options, self.unit), left=_left(self.options), gap=" ")]
        consists = f"{self._number(self.best)}, by its {self.best.seconds:.4g} s: {_consists(self.best)}"
        lines += ["", *(line for text in (*self.legend(), consists) for line in _wrap(text, ""))]
        if self.lost:
            lines += ["", "why others lost", *(line for sentence in self.lost for line in _wrap(sentence, "  "))]
        if self.notes:
            lines += ["", *(line for note in self.notes for line in _wrap(f"note: {note}", ""))]
        return "\n".join(lines)

    def legend(self) -> list[str]:
        """Return lines that explain the table."""
        what, parts = ("sequences", "layers") if self.unit == "tok" else ("rows", "pieces")
        found = [
            f"mb: {what} of a microbatch; v: stages of a submesh; GB: of the fullest stage's devices",
            f"{self.considered} configurations, of which bounds leave {self.simulated} to be simulated",
        ]
        if self.best is not self.fastest:
            found.append(f"suggested: {self._number(self.best)}, the simplest of those about as fast as the fastest")
        if self.best.memory_parts:
            band = "" if self.best.memory_band is None else f", within {100 * self.best.memory_band:.0f} %"
            sizes = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in self.best.memory_parts if size > 5e7)
            found.append(f"GB of {self._number(self.best)}: {sizes}{band}")
        if self.best.nearest:
            found.append(f"nearest measured run to {self._number(self.best)}: {self.best.nearest}")
        for number, option in enumerate(self.options[:_DETAILED], 1):
            if option.how.layers and option.how.pp > 1:
                found.append(f"{parts} of the stages of {number}: {_runs(option.how.layers)}")
        return found

    def _number(self, option: Option) -> int:
        return self.options.index(option) + 1

    def to_json(self) -> dict[str, Any]:
        """Return the suggestions as data for JSON."""
        return {
            "title": self.title,
            "limit": self.limit,
            "considered": self.considered,
            "simulated": self.simulated,
            "suggestions": [
                {**asdict(option), "shares": dict(option.shares), "bound": option.bound} for option in self.options
            ],
            "suggested": self.options.index(self.best),
            "front": [asdict(option) | {"shares": dict(option.shares)} for option in self.front],
            "lost": list(self.lost),
            "notes": list(self.notes),
        }

    def to_svg(self, file: str | Path) -> None:
        """Draw memory against the time of a step, with the names of those that are best for their memory."""
        points = dict.fromkeys(
            picture.Point(o.seconds, o.bytes, describe_how(o.how)) for o in (*self.options, *self.front)
        )
        Path(file).write_text(picture.draw(self.title, tuple(points), self.limit), encoding="utf-8")


def _table(options: Sequence[Option], unit: str) -> list[tuple[str, Sequence[str]]]:
    parts: list[tuple[str, Sequence[str]]] = [("", [str(n) for n in range(1, len(options) + 1)])]
    for name, head in _AXES:
        sizes = [getattr(option.how, name) for option in options]
        if max(sizes) > 1 or name == "microbatch":
            parts.append((head, [str(size) for size in sizes]))
    if any(option.how.pp > 1 for option in options):
        parts.append(("schedule", [option.how.schedule if option.how.pp > 1 else "-" for option in options]))
    if len({option.how.precision for option in options}) > 1 or options[0].how.precision != "bf16":
        parts.append(("type", [option.how.precision for option in options]))
    if any(option.how.gather_once for option in options):
        parts.append(("gather", ["once" if option.how.gather_once else "-" for option in options]))
    if any(option.how.offload for option in options):
        parts.append(("host", ["keeps" if option.how.offload else "-" for option in options]))
    parts += [
        ("remat", [option.how.recompute for option in options]),
        ("step s", [f"{option.seconds:.4g}{_band(option)}" for option in options]),
        (f"{unit}/s/dev", [_rate(option.tokens_per_second) for option in options]),
        ("MFU", [f"{100 * option.utilization:.1f}%" for option in options]),
        ("bubble", [f"{100 * option.bubble:.1f}%" for option in options]),
        ("GB", [f"{option.bytes / 1e9:.1f}" for option in options]),
        ("bound by", [_PARTS.get(option.bound, option.bound) for option in options]),
    ]
    if any(option.checked for option in options):
        parts.append(("plan", [option.checked for option in options]))
    return parts


def _left(options: Sequence[Option]) -> tuple[int, ...]:
    heads = [head for head, _ in _table(options, "")]
    return tuple(
        number
        for number, head in enumerate(heads)
        if head in ("schedule", "type", "gather", "host", "remat", "bound by", "plan")
    )


def _band(option: Option) -> str:
    return "" if option.band is None else f"±{100 * option.band:.0f}%"


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _consists(option: Option) -> str:
    """Return the parts that take more than a percent of a step, the largest first."""
    shares = sorted(((seconds, name) for name, seconds in option.shares), reverse=True)
    return ", ".join(
        f"{name} {100 * seconds / option.seconds:.0f} %" for seconds, name in shares if seconds > 0.01 * option.seconds
    )


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _runs(layers: Sequence[int]) -> str:
    """Numbers in a row that are equal, together: ``3 x 3, 13 x 2``."""
    groups = ((size, len(list(same))) for size, same in itertools.groupby(layers))
    return ", ".join(f"{number} x {size}" if number > 1 else str(size) for size, number in groups)

"""Suggestions: the best configurations, and their table."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multimesh.core.text import amount, columns

from multimesh_planner.best_first import Option
from multimesh_planner.configuration import Configuration

_WIDTH = 100  # of the table
_LEFT = ("", "schedule", "type", "gather", "host", "remat", "bound by", "exactly")  # columns of words
_USUAL = {"1", "-", "bf16", ""}  # a column in which no configuration has anything else is left out
_AXES = {"dp": "dp", "fsdp": "fsdp", "tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "interleave": "v"}
_PARTS = {
    "matrix products": "products",
    "tensor parallelism": "TP traffic",
    "context parallelism": "CP traffic",
    "expert parallelism": "EP traffic",
    "sharded parameters": "FSDP",
}
UNMEASURED = {
    "zb-v": "its authors alone measured it, on up to 32 A100 (arXiv 2401.10241)",
    "interleaved-zb": "no run of it on GPUs was published",
    "eager-1f1b": "no run of it on GPUs was published",
}
"""Schedules of which no published training run can be compared with a forecast, and what is known of them."""


@dataclass(frozen=True)
class Suggestions:
    """The best configurations, the fastest first; ``str`` is a table of 100 columns at most."""

    title: str  # the space of configurations
    options: tuple[Option, ...]
    limit: float  # bytes of a device that may be used
    # how many configurations were considered, and how many simulated: bounds show that others are slower or do not fit
    considered: int
    simulated: int
    notes: tuple[str, ...] = ()  # effects that the cost model does not see
    simplest: Configuration | None = None  # of those about as fast as the fastest; None: it is the fastest
    roomy: Configuration | None = None  # the fastest that fits even if memory is forecast too low; None: the suggested

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
        head = f"{self.title}; up to {amount(self.limit, 'bytes')} of a device"
        parts = self._table()
        for name in ("bubble", "tok/s/dev", "MFU"):  # where there are too many columns
            if sum(max(map(len, (head, *cells))) + 1 for head, cells in parts) > _WIDTH + 1:
                parts = [part for part in parts if part[0] != name]
        words = tuple(number for number, (head, _) in enumerate(parts) if head in _LEFT)
        table = [line.rstrip() for line in columns(parts, texts=words, gap=" ")]
        notes = [line for note in self.notes for line in _wrap(f"note: {note}")]
        legend = [line for text in self.legend() for line in _wrap(text)]
        return "\n".join([head, "", *table, "", *legend, *([""] if notes else []), *notes])

    def legend(self) -> Iterator[str]:
        """Yield lines that explain the table."""
        best = self.best
        number, roomy = self.options.index(best) + 1, [n for n, o in enumerate(self.options, 1) if o.how == self.roomy]
        yield "mb: sequences of a microbatch; v: stages of a submesh; GB: of the fullest stage's devices"
        yield f"{self.considered} configurations, of which bounds leave {self.simulated} to be simulated"
        reason = "the fastest" if best is self.fastest else "the simplest of those within 5 % of the fastest"
        if best.checked:
            reason = "its exact forecast fits"
        low, high = (max(0.0, 1 + sign * best.band) * best.seconds for sign in (-1, 1))
        yield f"> {number} is suggested: {reason}, {low:.3g} to {high:.3g} s by the software that runs it"
        shares = sorted((share for share in best.shares if share[1] > 0.01 * best.seconds), key=lambda s: -s[1])
        parts = (f"{name} {100 * seconds / best.seconds:.0f} %" for name, seconds in shares)
        yield f"{number}, by its {best.seconds:.4g} s: {', '.join(parts)}"
        sizes = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in best.memory_parts.items() if size > 5e7)
        yield f"GB of {number}: {sizes}, within {100 * best.memory_band:.0f} %"
        if any(option.may_not_fit(self.limit) for option in self.options):
            yield "GB with ?: may not fit, as the limit is within the error of the forecast"
        if best.may_not_fit(self.limit) and not best.checked:
            after = "none fits even then: try it before you rely on it"
            yield f"{number} may not fit; {f'{roomy[0]} fits even then' if roomy else after}"
        for name in dict.fromkeys(option.how.schedule for option in self.options if _is_unmeasured(option.how)):
            yield f"{name}*: {UNMEASURED[name]}"
        if best.how.layers and best.how.pp > 1:
            groups = ((size, len(list(group))) for size, group in itertools.groupby(best.how.layers))
            layers = (f"{count} x {size}" if count > 1 else str(size) for size, count in groups)
            yield f"layers of the stages of {number}: {', '.join(layers)}"

    def to_json(self) -> dict[str, Any]:
        """Return the suggestions as data for JSON."""
        return {
            "title": self.title,
            "limit": self.limit,
            "considered": self.considered,
            "simulated": self.simulated,
            "suggestions": [
                {**o.to_json(), "bound": o.bound, "may_not_fit": o.may_not_fit(self.limit)} for o in self.options
            ],
            "suggested": self.options.index(self.best),
            "notes": list(self.notes),
        }

    def _table(self) -> list[tuple[str, Sequence[str]]]:
        best = self.best
        numbers = {id(option): number for number, option in enumerate(self.options, 1)}
        cells: dict[str, Callable[[Option], str]] = {
            "": lambda o: f"{'>' if o is best else ' '}{numbers[id(o)]:2}",
            **{head: _read_axis(name) for name, head in _AXES.items()},
            "mb": _read_axis("microbatch"),
            "schedule": lambda o: f"{o.how.schedule}{'*' * _is_unmeasured(o.how)}" if o.how.pp > 1 else "-",
            "type": lambda o: o.how.precision,
            "gather": lambda o: "once" if o.how.gather_once else "-",
            "host": lambda o: "+".join(["acts"] * o.how.offload + ["state"] * o.how.offload_optimizer) or "-",
            "remat": lambda o: o.how.recompute,
            "step s": lambda o: f"{o.seconds:.4g}±{100 * o.band:.0f}%",
            "tok/s/dev": lambda o: (
                f"{o.tokens_per_second:,.0f}" if o.tokens_per_second >= 100 else f"{o.tokens_per_second:.3g}"
            ),
            "MFU": lambda o: f"{100 * o.utilization:.1f}%",
            "bubble": lambda o: f"{100 * o.bubble:.1f}%",
            "GB": lambda o: f"{o.bytes / 1e9:.1f}{'?' * o.may_not_fit(self.limit)}",
            "bound by": lambda o: _PARTS.get(o.bound, o.bound),
            "exactly": lambda o: o.checked,
        }
        table = [(head, [cell(option) for option in self.options]) for head, cell in cells.items()]
        return [part for part in table if part[0] == "mb" or {*part[1]} - _USUAL]


def _read_axis(name: str) -> Callable[[Option], str]:
    return lambda option: str(getattr(option.how, name))


def describe_how(how: Configuration) -> str:
    """Return a configuration in words."""
    return ", ".join(
        [how.shown()] + [how.schedule] * (how.pp > 1) + [f"recompute {how.recompute}"] * (how.recompute != "none")
    )


def _is_unmeasured(how: Configuration) -> bool:
    return how.pp > 1 and how.schedule in UNMEASURED


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")

"""The texts of kernels and transfers in a picture, for readers who point at them."""

from __future__ import annotations

from multimesh.core.grouping import group
from multimesh.core.text import amount
from multimesh.timelines.spans import Hop, Span, Spans

_NOISE = 1e-6  # of the whole: a shorter gap is not called waiting


def of_spans(timeline: Spans) -> tuple[str, ...]:
    """Return a few lines for each span: name, times, why its submesh waited, and its transfers."""
    leaving = group((hop.producer, hop) for hop in timeline.transfers if hop.producer is not None)
    arriving = group((reader, hop) for hop in timeline.transfers for reader in hop.consumers)
    free = [0.0] * len(timeline.rows)
    said = [""] * len(timeline.spans)
    for number, span in sorted(enumerate(timeline.spans), key=lambda pair: (pair[1].start, pair[1].end)):
        lines = [str(span) or "kernel", _when(timeline, span)]
        waited = span.start - free[span.row]
        if waited > _NOISE * timeline.makespan:
            lines.append(f"after waiting {amount(waited, timeline.unit)}{_reason(timeline, arriving[number])}")
        lines += [f"receives {_load(hop)} from {timeline.rows[hop.source]}" for hop in arriving[number]]
        lines += [f"sends {_load(hop)} to {timeline.rows[hop.target]}" for hop in leaving[number]]
        said[number] = "\n".join(dict.fromkeys(lines))
        free[span.row] = max(free[span.row], span.end)
    return tuple(said)


def of_transfer(timeline: Spans, hop: Hop) -> str:
    """Return a few lines for a transfer: source, target, times and bytes."""
    lines = [f"{_load(hop)} from {timeline.rows[hop.source]} to {timeline.rows[hop.target]}", _when(timeline, hop)]
    if hop.producer is not None:
        lines.append(f"made by {timeline.spans[hop.producer]}")
    lines += [f"read by {timeline.spans[reader]}" for reader in hop.consumers]
    return "\n".join(lines)


def _when(timeline: Spans, thing: Span | Hop) -> str:
    start, end, lasting = (amount(t, timeline.unit) for t in (thing.start, thing.end, thing.end - thing.start))
    return f"{start} to {end} ({lasting})"


def _load(hop: Hop) -> str:
    return "arrays" if hop.nbytes is None else amount(hop.nbytes, "bytes")


def _reason(timeline: Spans, arriving: list[Hop]) -> str:
    """Return the kernel behind the transfer that came last."""
    last = max(arriving, key=lambda hop: hop.end, default=None)
    if last is None or last.producer is None:
        return ""
    return f" for {timeline.spans[last.producer]} of {timeline.rows[last.source]}"

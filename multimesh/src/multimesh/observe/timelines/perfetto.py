"""A timeline as Chrome-trace JSON (the Trace Event Format), for ``ui.perfetto.dev``.

One process has a thread for each submesh and for each direction of transfers. Kernels and transfers are complete events
(``X``). An arrow leads from a kernel through its transfer to the kernel that reads it (``s``, ``t``, ``f``). A counter
(``C``) shows the live memory of each submesh.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from multimesh.observe.timelines.spans import Hop, Span, Spans

_PID = 1
_FIRST = 2  # thread of the first submesh: in Perfetto 0 is the idle thread, and 1 that of the process
_TICK = 0.125  # microseconds; readers count nanoseconds, and would cut off other fractions
_UNIT = 1000.0  # microseconds for one unit of relative costs


def trace(timeline: Spans) -> str:
    """Return the JSON text of a timeline. Times without a unit are shown as milliseconds."""
    scale = 1e6 if timeline.unit == "s" else _UNIT
    lanes = sorted({(t.source, t.target) for t in timeline.transfers})
    tids = {lane: _FIRST + len(timeline.rows) + n for n, lane in enumerate(lanes)}
    events = [*_names(timeline, lanes), *_kernels(timeline, scale), *_transfers(timeline, tids, scale)]
    events += _counters(timeline, scale)
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": timeline.title, "note": timeline.note, "makespan": timeline.makespan},
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def _names(timeline: Spans, lanes: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", _PID, name=timeline.title)
    names = [*timeline.rows, *(f"transfers {source} to {target}" for source, target in lanes)]
    for tid, name in enumerate(names, _FIRST):
        yield _metadata("thread_name", tid, name=name)
        yield _metadata("thread_sort_index", tid, sort_index=tid)


def _metadata(kind: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PID, "tid": tid, "args": args}


def _kernels(timeline: Spans, scale: float) -> Iterator[dict[str, Any]]:
    for span in timeline.spans:
        if span.duration:
            facts = {"task": span.name, "stage": span.stage, "microbatch": span.microbatch}
            args = {key: value for key, value in facts.items() if value not in (None, "")}
            yield _event("X", str(span), span.phases or "other", _FIRST + span.row, span.start * scale) | {
                "dur": _us(span.end * scale) - _us(span.start * scale),
                "args": args,
            }


def _transfers(timeline: Spans, tids: dict[tuple[int, int], int], scale: float) -> Iterator[dict[str, Any]]:
    number = 0
    for transfer in timeline.transfers:
        tid = tids[transfer.source, transfer.target]
        name = f"to submesh {transfer.target}"
        start, lasting = transfer.start * scale, transfer.end > transfer.start
        if lasting:
            args = {} if transfer.nbytes is None else {"bytes": transfer.nbytes}
            lasted = _us((transfer.end - transfer.start) * scale)
            yield _event("X", name, "transfer", tid, start) | {"dur": lasted, "args": args}
        for maker, reader in _ends(timeline, transfer):
            number += 1
            flow = {"id": number}
            last = max(maker.start * scale, _us(maker.end * scale) - _TICK)  # an arrow starts inside of its kernel
            yield _event("s", name, "flow", _FIRST + maker.row, last) | flow
            if lasting:
                yield _event("t", name, "flow", tid, start) | flow
            yield _event("f", name, "flow", _FIRST + reader.row, reader.start * scale) | flow | {"bp": "e"}


def _ends(timeline: Spans, transfer: Hop) -> list[tuple[Span, Span]]:
    """Return the kernel that made the sent arrays, with each that reads them. Those without duration are left out."""
    if transfer.producer is None or not timeline.spans[transfer.producer].duration:
        return []
    readers = (timeline.spans[reader] for reader in transfer.consumers)
    return [(timeline.spans[transfer.producer], reader) for reader in readers if reader.duration]


def _counters(timeline: Spans, scale: float) -> Iterator[dict[str, Any]]:
    for row, steps in zip(timeline.rows, timeline.live, strict=False):
        for time, alive in dict(steps).items():  # of several values at one time, the last
            event = {"ph": "C", "name": f"live on {row}", "pid": _PID, "tid": _PID, "ts": _us(time * scale)}
            yield event | {"args": {timeline.live_unit: alive}}


def _event(ph: str, name: str, category: str, tid: int, ts: float) -> dict[str, Any]:
    return {"ph": ph, "name": name, "cat": category, "pid": _PID, "tid": tid, "ts": _us(ts)}


def _us(microseconds: float) -> float:
    return round(microseconds / _TICK) * _TICK

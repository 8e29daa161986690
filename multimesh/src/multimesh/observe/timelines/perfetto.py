"""A timeline as Chrome-trace JSON (the Trace Event Format), for ``ui.perfetto.dev``.

One process has a thread for each submesh and for each direction of transfers. Kernels and transfers are complete events
(``X``). An arrow leads from a kernel through its transfer to the kernel that reads it (``s``, ``t``, ``f``). A counter
(``C``) shows the live memory of each submesh.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from multimesh.observe.timelines.spans import Spans

_PID = 1
_FIRST = 2  # thread of the first submesh: in Perfetto 0 is the idle thread, and 1 that of the process
_TICK = 0.125  # microseconds; readers count nanoseconds, and would cut off other fractions
_UNIT = 1000.0  # microseconds for one unit of relative costs


def trace(timeline: Spans) -> str:
    """Return the JSON text of a timeline. Times without a unit are shown as milliseconds."""
    document = {
        "traceEvents": [*_events(timeline, 1e6 if timeline.unit == "s" else _UNIT)],
        "displayTimeUnit": "ms",
        "otherData": {"title": timeline.title, "note": timeline.note, "makespan": timeline.makespan},
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def _event(ph: str, name: str, tid: int, **fields: Any) -> dict[str, Any]:
    return {"ph": ph, "name": name, "pid": _PID, "tid": tid, **fields}


def _us(microseconds: float) -> float:
    return round(microseconds / _TICK) * _TICK


def _events(timeline: Spans, scale: float) -> Iterator[dict[str, Any]]:
    """Yield the names of threads, kernels, transfers with their arrows, and counters. ``scale``: unit in us."""
    lanes = sorted({(t.source, t.target) for t in timeline.transfers})
    lane_tids = {lane: _FIRST + len(timeline.rows) + n for n, lane in enumerate(lanes)}
    yield _event("M", "process_name", _PID, args={"name": timeline.title})
    names = [*timeline.rows, *(f"transfers {source} to {target}" for source, target in lanes)]
    for tid, name in enumerate(names, _FIRST):
        yield _event("M", "thread_name", tid, args={"name": name})
        yield _event("M", "thread_sort_index", tid, args={"sort_index": tid})
    for span in timeline.spans:
        facts = {"task": span.name, "stage": span.stage, "microbatch": span.microbatch}
        args = {key: value for key, value in facts.items() if value not in (None, "")}
        start, end = _us(span.start * scale), _us(span.end * scale)
        if span.duration:
            fields = {"cat": span.phases or "other", "ts": start, "dur": end - start, "args": args}
            yield _event("X", str(span), _FIRST + span.row, **fields)
    numbers = itertools.count(1)
    for transfer in timeline.transfers:
        name, tid = f"to submesh {transfer.target}", lane_tids[transfer.source, transfer.target]
        start, lasted = _us(transfer.start * scale), _us((transfer.end - transfer.start) * scale)
        if transfer.end > transfer.start:
            args = {} if transfer.nbytes is None else {"bytes": transfer.nbytes}
            yield _event("X", name, tid, cat="transfer", ts=start, dur=lasted, args=args)
        maker = transfer.producer is not None and timeline.spans[transfer.producer]
        for reader in (timeline.spans[number] for number in transfer.consumers):
            if not (maker and maker.duration and reader.duration):
                continue
            flow = {"cat": "flow", "id": next(numbers)}
            last = max(maker.start * scale, _us(maker.end * scale) - _TICK)  # an arrow starts inside of its kernel
            yield _event("s", name, _FIRST + maker.row, ts=_us(last), **flow)
            if transfer.end > transfer.start:
                yield _event("t", name, tid, ts=start, **flow)
            yield _event("f", name, _FIRST + reader.row, ts=_us(reader.start * scale), bp="e", **flow)
    for row, steps in zip(timeline.rows, timeline.live, strict=False):
        for time, alive in dict(steps).items():  # of several values at one time, the last
            yield _event("C", f"live on {row}", _PID, ts=_us(time * scale), args={timeline.live_unit: alive})

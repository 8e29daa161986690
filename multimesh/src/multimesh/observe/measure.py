"""Runs of a compiled plan under an observer that waits for kernels and transfers: when each started and ended."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from multimesh.observe import clocks
from multimesh.plan.instructions import Send
from multimesh.plan.plan import Plan
from multimesh.plan.timing import Times
from multimesh.processes import agree
from multimesh.runtime.actions import Action, actions, all_actions, processes
from multimesh.runtime.resharding import Call
from multimesh.runtime.runner import Runner, copy_buffer, watch_calls

_WAITERS = 64  # threads, each of which waits for the arrays of a move
_profiles = itertools.count(1)


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run, in seconds."""

    times: Times  # start and end of each RUN and SEND, by number of the instruction
    lasts: Mapping[int, float]  # the time that each took by itself
    error: float = 0.0  # possible difference between the clocks of two processes

    @property
    def end(self) -> float:
        """The time of the last end."""
        return max((end for _, end in self.times.values()), default=0.0)


@dataclass
class Observations:
    """Times that one process saw in a run, by number of the action, on the clock of process 0."""

    runs: dict[int, tuple[float, float]] = field(default_factory=dict)  # start and end of its kernels
    sent: dict[int, float] = field(default_factory=dict)  # when the arrays of a move were ready
    got: dict[int, tuple[float, float]] = field(default_factory=dict)  # when they were asked for, and when they arrived


class _RunObserver:
    """The observer of one process's run, one kernel at a time.

    While a kernel runs, the transfers after it are under way, as in an ordinary call; threads wait for their arrays.
    With ``is_single``, for a process without others, it waits for each kernel and transfer before the next.
    """

    def __init__(self, plan: Plan, pool: ThreadPoolExecutor, ahead: float, is_single: bool) -> None:
        self._is_single, self.record, self._now = is_single, Observations(), lambda: clocks.now() + ahead
        self._here, self._pool = [jax.process_index() in owners for owners in processes(plan)], pool
        self._arriving: dict[int, Future[None]] = {}  # slot to the thread that waits for its array
        self._running: tuple[Action, float, Sequence[Any]] | None = None
        self._unsent: list[int] = []  # moves of results of the kernel that runs

    def __call__(self, action: Action, call: Call) -> Call:
        """See `Observer`."""
        return functools.partial(self._move if action.kernel is None else self._run, action, call)

    def _run(self, action: Action, call: Call, *arrays: Any) -> Sequence[Any]:
        self.finish()
        for slot in self._arriving.keys() & set(action.ins):
            self._arriving.pop(slot).result()
        start = self._now()
        results = call(*arrays)
        self._running = action, start, results
        if self._is_single:
            self.finish()
        return results

    def _move(self, action: Action, call: Call, *arrays: Any) -> Sequence[Any]:
        start = self._now()
        results = call(*arrays)
        sends, receives = (self._here[submesh] for submesh in action.submeshes)
        if sends and self._running is not None and not set(self._running[0].outs).isdisjoint(action.ins):
            self._unsent.append(action.number)
        elif sends:
            self.record.sent[action.number] = start
        if self._is_single:
            self._arrived(action.number, start, results)
        elif receives:
            arrival = self._pool.submit(self._arrived, action.number, start, results)
            self._arriving.update(dict.fromkeys(action.outs, arrival))
        return results

    def _arrived(self, number: int, requested: float, results: Sequence[Any]) -> None:
        jax.block_until_ready(results)
        self.record.got[number] = requested, self._now()

    def finish(self) -> None:
        """Wait for the kernel that runs."""
        if self._running is not None:
            action, start, results = self._running
            jax.block_until_ready(results)
            self.record.runs[action.number] = start, self._now()
            self.record.sent.update(dict.fromkeys(self._unsent, self.record.runs[action.number][1]))
            self._unsent.clear()
            self._running = None


class Measurement:
    """The measurement of a plan, for which all processes make the same calls."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._plan, self._is_single = runner, runner.compiled.plan, not agree.several()
        if self._is_single:  # each transfer by itself
            self._actions = actions(self._plan, lambda transfer: transfer.id)
            self._calls = runner.bound(self._actions)
            self.note = "one kernel at a time, each waited for: nothing overlaps here"
        else:
            self._actions, self._calls = all_actions(self._plan), runner.calls
            self.note = "all processes at the same time, each of which waits for its kernels"
        self._name, self._rounds = f"profile {next(_profiles)}", itertools.count()

    def run(self, args: Sequence[Any]) -> MeasuredRun:
        """Measure all processes' kernels and transfers on one clock."""
        name = f"{self._name}/{next(self._rounds)}"
        env = _ready(self._runner.staged(self._runner.in_blocks(_copies(args))))
        ahead, error = (0.0, 0.0) if self._is_single else clocks.offset(name)
        with ThreadPoolExecutor(_WAITERS) as pool:
            observer = _RunObserver(self._plan, pool, ahead, self._is_single)
            self._runner.run(env, watch_calls(self._calls, observer))
            observer.finish()
        times = [error, *([*times.items()] for times in vars(observer.record).values())]

        def merge(every: Sequence[bytes]) -> bytes:
            reports = [agree.unpack(report) for report in every]
            errors = sorted((error for error, *_ in reports), reverse=True)
            run = self._merge([Observations(*map(dict, r)) for _, *r in reports], sum(errors[:2]))
            return agree.pack([[*run.times.items()], [*run.lasts.items()], run.error])

        spans, lasts, most = agree.unpack(agree.decide_together(name, agree.pack(times), merge))
        return MeasuredRun({number: tuple(span) for number, span in spans}, dict(lasts), most)

    def call(self, args: Sequence[Any]) -> float:
        """Return the seconds from the first process's start of an ordinary call to the last one's end."""
        copies = _copies(args)
        name = f"{self._name}/{next(self._rounds)}"
        ahead = 0.0 if self._is_single else clocks.offset(name)[0]
        start = clocks.now()
        jax.block_until_ready(self._runner(copies))
        span = [start + ahead, clocks.now() + ahead]

        def last(every: Sequence[bytes]) -> bytes:
            spans = [json.loads(report) for report in every]
            return json.dumps(max(end for _, end in spans) - min(start for start, _ in spans)).encode()

        return float(json.loads(agree.decide_together(name, json.dumps(span).encode(), last)))

    def _merge(self, every: Sequence[Observations], error: float) -> MeasuredRun:
        """Merge what all processes saw into one run.

        A kernel or transfer of several processes starts when the last of them comes to it. A transfer lasts from when
        it was sent and asked for to its arrival.
        """
        times: dict[int, tuple[float, float]] = {}
        lasts: dict[int, float] = {}
        for action in self._actions:
            number = action.number
            if action.kernel is not None:
                spans = [record.runs[number] for record in every if number in record.runs]
                span = max(start for start, _ in spans), max(end for _, end in spans)
                times[action.instructions[0]], lasts[action.instructions[0]] = span, span[1] - span[0]
                continue
            got = [record.got[number] for record in every if number in record.got]
            end = max(end for _, end in got)
            sent = min(end, max(record.sent[number] for record in every if number in record.sent))
            requested = min(end, max(requested for requested, _ in got))
            for n, share in _shares(self._plan, action).items():
                times[n], lasts[n] = (sent, end), share * (end - max(sent, requested))
        origin = min((start for start, _ in times.values()), default=0.0)
        return MeasuredRun({n: (start - origin, end - origin) for n, (start, end) in times.items()}, lasts, error)


def _shares(plan: Plan, action: Action) -> dict[int, float]:
    """Divide the time of an action among its SENDs, in proportion to their bytes."""
    sends = ((n, plan.instructions[n]) for n in action.instructions)
    sizes = {n: plan.bytes_of(plan.transfers[send.transfer]) for n, send in sends if isinstance(send, Send)}
    total = sum(sizes.values())
    return {n: size / total if total else 1 / len(sizes) for n, size in sizes.items()}


def _copies(args: Sequence[Any]) -> list[Any]:
    """Return copies of arguments. Donating these leaves the caller's arrays as they are."""
    return list(_ready([copy_buffer(x) if isinstance(x, jax.Array) else x for x in args]))


def _ready(arrays: Iterable[Any]) -> list[Any]:
    values = list(arrays)
    jax.block_until_ready(values)
    return values

"""Runs of a compiled plan in which programs and transfers are waited for: when each started and ended."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from multimesh.core import _compat
from multimesh.observe import clocks
from multimesh.plan.forecast import Times, timed
from multimesh.plan.instructions import Free, Send, Transfer
from multimesh.plan.plan import Plan
from multimesh.processes import agree
from multimesh.runtime.project import Step, processes, steps
from multimesh.runtime.runner import Runner, copied
from multimesh.runtime.transport import Call, Transport

_WAITERS = 64  # threads, each of which waits for the arrays of a call
_profiles = itertools.count(1)


@dataclass(frozen=True)
class Run:
    """A measured run, in seconds.

    Attributes
    ----------
    times
        Start and end of each RUN and SEND, by number of the instruction.
    lasts
        What each took by itself.
    error
        By how much the clocks of two processes may differ.
    """

    times: Times
    lasts: Mapping[int, float]
    error: float = 0.0

    @property
    def end(self) -> float:
        """When the last came to its end."""
        return max((end for _, end in self.times.values()), default=0.0)


class Alone:
    """Measures a plan of one process: one program or transfer at a time."""

    note = "one kernel at a time, each waited for: nothing overlaps here"

    def __init__(self, runner: Runner) -> None:
        self._runner, self._plan = runner, runner.compiled.plan
        layouts, transport = runner.compiled.layouts, Transport()

        def move(transfer: Transfer) -> Call:
            sources, targets = ([layouts[slot] for slot in slots] for slots in (transfer.ins, transfer.outs))
            return transport.mover(sources, targets, [self._plan.slots[slot] for slot in transfer.ins])

        self._moves = {n: move(item) for n, item in timed(self._plan) if isinstance(item, Transfer)}

    def run(self, args: Sequence[Any]) -> Run:
        """Every program and transfer by itself."""
        env = _ready(self._runner.staged(_copies(args)))
        waited, programs = dict(timed(self._plan)), self._runner.compiled.programs
        times: dict[int, tuple[float, float]] = {}
        origin = clocks.now()
        for number, instruction in enumerate(self._plan.instructions):
            if number in waited:
                start = clocks.now()
                item = waited[number]
                given = [env[slot] for slot in item.ins]
                call = self._moves[number] if isinstance(item, Transfer) else programs[item.kernel]
                with _compat.explicit_transfers():
                    results = call(*given)
                del given
                jax.block_until_ready(results)
                times[number] = (start - origin, clocks.now() - origin)
                for slot, array in zip(item.outs, results, strict=True):
                    env[slot] = array
            elif isinstance(instruction, Free):
                for slot in instruction.ins:
                    env[slot] = None
        return Run(times, {number: end - start for number, (start, end) in times.items()})

    def call(self, args: Sequence[Any]) -> float:
        """Seconds of an ordinary call."""
        start, end = _called(self._runner, _copies(args))
        return end - start


@dataclass
class Seen:
    """What one process saw of a run, by number of the step: in the time of process 0.

    Attributes
    ----------
    runs
        Start and end of its programs.
    sent
        When the arrays of a call were there to be sent.
    got
        When they were asked for, and when they had arrived.
    """

    runs: dict[int, tuple[float, float]] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)
    got: dict[int, tuple[float, float]] = field(default_factory=dict)


class Together:
    """Measures a plan with all other processes, which all make the same calls.

    Each runs its part, one program at a time. While a program runs, the transfers that follow are under way, as in an
    ordinary call; threads wait for what arrives.
    """

    note = "all processes at the same time, each of which waits for its kernels"

    def __init__(self, runner: Runner) -> None:
        self._runner, self._plan = runner, runner.compiled.plan
        self._me, self._owners = jax.process_index(), processes(self._plan)
        self._name, self._rounds = f"profile {next(_profiles)}", itertools.count()

    def run(self, args: Sequence[Any]) -> Run:
        """All processes' programs and transfers on one clock."""
        name = f"{self._name}/{next(self._rounds)}"
        env = _ready(self._runner.staged(_copies(args)))
        offset = clocks.offset(name)
        seen = self._part(env)
        shifted = [
            [[n, *(time + offset.seconds for time in times)] for n, times in found]
            for found in (seen.runs.items(), ((n, [at]) for n, at in seen.sent.items()), seen.got.items())
        ]
        told = [json.loads(said) for said in agree.exchanged(name, json.dumps([offset.error, *shifted]).encode())]
        every = [
            Seen({n: (a, b) for n, a, b in runs}, dict(sent), {n: (a, b) for n, a, b in got})
            for _, runs, sent, got in told
        ]
        errors = sorted((error for error, *_ in told), reverse=True)
        return merged(self._plan, every, sum(errors[:2]))

    def _part(self, env: list[Any]) -> Seen:
        """Run this process's steps, with all slots as they are before."""
        seen = Seen()
        arriving: dict[int, Future[None]] = {}  # slot to what notes when it is there
        running: tuple[int, float, Sequence[Any], set[int]] | None = None
        unsent: list[int] = []  # calls that wait for the program that runs

        def finish() -> None:
            nonlocal running
            if running is not None:
                number, start, results, _ = running
                jax.block_until_ready(results)
                seen.runs[number] = start, clocks.now()
                seen.sent.update(dict.fromkeys(unsent, seen.runs[number][1]))
                unsent.clear()
                running = None

        def arrived(number: int, asked: float, results: Sequence[Any]) -> None:
            jax.block_until_ready(results)
            seen.got[number] = asked, clocks.now()

        with ThreadPoolExecutor(_WAITERS) as pool:
            for step, (call, ins, outs, frees) in zip(self._runner.parts, self._runner.steps, strict=True):
                moves = step.kernel is None
                if not moves:
                    finish()
                    for slot in arriving.keys() & set(ins):
                        arriving.pop(slot).result()
                given = [env[slot] for slot in ins]
                start = clocks.now()
                with _compat.explicit_transfers():
                    results = call(*given)
                del given
                if not moves:
                    running = step.number, start, results, set(outs)
                elif self._me in self._owners[step.submeshes[0]]:
                    if running is not None and not running[3].isdisjoint(ins):
                        unsent.append(step.number)
                    else:
                        seen.sent[step.number] = start
                if moves and self._me in self._owners[step.submeshes[1]]:
                    arrival = pool.submit(arrived, step.number, start, results)
                    arriving.update(dict.fromkeys(outs, arrival))
                for slot, array in zip(outs, results):  # noqa: B905 - a process has no results of what it only sends
                    env[slot] = array
                del results
                for slot in frees:
                    env[slot] = None
            finish()
        return seen

    def call(self, args: Sequence[Any]) -> float:
        """Seconds from the first process's start of an ordinary call to the last one's end."""
        copies = _copies(args)
        name = f"{self._name}/{next(self._rounds)}"
        ahead = clocks.offset(name).seconds
        own = [time + ahead for time in _called(self._runner, copies)]
        every = [json.loads(said) for said in agree.exchanged(name, json.dumps(own).encode())]
        return float(max(end for _, end in every) - min(start for start, _ in every))


def merged(plan: Plan, every: Sequence[Seen], error: float = 0.0) -> Run:
    """One run of what all processes saw.

    A program or transfer of several processes starts when all of them have come to it. A transfer lasts from when it
    was sent and asked for to its arrival.
    """
    programs: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
    arrivals: dict[int, float] = {}
    for n, (_, end) in (found for seen in every for found in seen.got.items()):
        arrivals[n] = max(end, arrivals.get(n, end))
    for seen in every:
        for n, found in seen.runs.items():
            programs[n].append(found)
    times: dict[int, tuple[float, float]] = {}
    lasts: dict[int, float] = {}
    for step in steps(plan, by_route=len(frozenset().union(*processes(plan))) > 1):
        if step.kernel is not None:
            span = max(start for start, _ in programs[step.number]), max(end for _, end in programs[step.number])
            times[step.instructions[0]], lasts[step.instructions[0]] = span, span[1] - span[0]
            continue
        end = arrivals[step.number]
        sent = min(end, max(seen.sent[step.number] for seen in every if step.number in seen.sent))
        asked = min(end, max(seen.got[step.number][0] for seen in every if step.number in seen.got))
        for n, share in _shares(plan, step).items():
            times[n], lasts[n] = (sent, end), share * (end - max(sent, asked))
    origin = min((start for start, _ in times.values()), default=0.0)
    return Run({n: (start - origin, end - origin) for n, (start, end) in times.items()}, lasts, error)


def _shares(plan: Plan, step: Step) -> dict[int, float]:
    """Part of a call that each of its SENDs takes: that of its bytes."""
    sends = ((n, plan.instructions[n]) for n in step.instructions)
    sizes = {n: plan.bytes_of(plan.transfers[send.transfer]) for n, send in sends if isinstance(send, Send)}
    total = sum(sizes.values())
    return {n: size / total if total else 1 / len(sizes) for n, size in sizes.items()}


def _copies(args: Sequence[Any]) -> list[Any]:
    """Arguments that may be donated without the caller's noticing."""
    return list(_ready([copied(x) if isinstance(x, jax.Array) else x for x in args]))


def _ready(arrays: Iterable[Any]) -> list[Any]:
    found = list(arrays)
    jax.block_until_ready(found)
    return found


def _called(runner: Runner, args: Sequence[Any]) -> tuple[float, float]:
    """Start and end of an ordinary call."""
    start = clocks.now()
    jax.block_until_ready(runner(args))
    return start, clocks.now()

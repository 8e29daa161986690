"""A measured run of a plan: every program and every transfer by itself, each waited for."""

from __future__ import annotations

import collections
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from multimesh.compiling import CompiledPlan
from multimesh.costs import Costs
from multimesh.forecast import Times, assembled, forecast, timed
from multimesh.plan import Plan, Transfer
from multimesh.transport import Call, Transport
from multimesh.units import amount, columns
from multimesh.views.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Profile:
    """What a call costs, measured; prints as a table of measured against forecast.

    Attributes
    ----------
    measured
        Timeline of the fastest profiled run. One program ran at a time, so its idle time says nothing about overlap.
    forecast
        The same programs at their median costs, on submeshes that run at the same time.
    costs
        Median seconds of each program and transfer; for `multimesh.Plan.forecast`.
    call
        Median seconds of an ordinary call, in which only its results are waited for.
    platform
        Of the devices.
    serial
        Whether the programs of an ordinary call run one after another here, whatever the schedule.
    """

    measured: Timeline
    forecast: Timeline
    costs: Costs
    call: float
    platform: str
    serial: bool

    def __str__(self) -> str:
        both = (self.measured, self.forecast)
        found: list[tuple[str, list[str]]] = [("submesh", [str(row) for row in range(len(self.measured.rows))])]
        for cells in (
            [[amount(busy, "s") for busy in line.busy] for line in both],
            [[f"{100 * share:.1f} %" for share in line.bubbles] for line in both],
            [[amount(peak, "bytes") for peak in line.peaks] for line in both],
        ):
            found += zip(("measured", "forecast"), cells, strict=True)
        head, *rows = columns(found)
        above = ""
        for place, name in zip(re.finditer("measured", head), ("busy", "bubble", "peak live"), strict=True):
            above = f"{above:<{place.start()}}{name}"
        return "\n".join([self.measured.title, "", above, head, *rows, "", *self.totals()])

    def to_json(self) -> dict[str, Any]:
        """The table as data; times in seconds."""
        return {
            name: {
                "makespan": line.makespan,
                "busy": line.busy,
                "idle": line.idle,
                "bubble": line.bubble,
                "peak_bytes": line.peaks,
            }
            for name, line in (("measured", self.measured), ("forecast", self.forecast))
        } | {"call": self.call, "platform": self.platform, "serial": self.serial}

    def totals(self) -> list[str]:
        """Makespan of the measured run, of the forecast and of an ordinary call, and what they mean."""
        lines = [
            f"measured  {amount(self.measured.makespan, 's'):>8}  one program at a time, each waited for",
            f"forecast  {amount(self.forecast.makespan, 's'):>8}  submeshes and transfers at the same time",
            f"a call    {amount(self.call, 's'):>8}  as it runs without profiling",
        ]
        if self.serial:
            lines.append("XLA runs the multi-device CPU programs of a process one after another: they do not overlap.")
        return lines


def profile(compiled: CompiledPlan, call: Callable[[Sequence[Any]], Any], args: Sequence[Any], repeats: int) -> Profile:
    """Run a compiled plan; see `multimesh.lowered.Compiled.profile`."""
    plan = compiled.plan
    moves = _moves(compiled)
    runs = [_run(compiled, args, moves) for _ in range(repeats + 1)][1:]  # in the first, caches are filled
    calls = [_call(compiled, call, args) for _ in range(repeats + 1)][1:]
    costs = _medians(plan, runs)
    fastest = min(runs, key=lambda times: max(end for _, end in times.values()))
    devices = plan.submeshes[0].devices.flat
    platform = devices[0].platform
    count = len({device for mesh in plan.submeshes for device in mesh.devices.flat})
    note = f"measured on {count} {platform} devices, one program at a time, each waited for: nothing overlaps here"
    measured = assembled(plan, fastest, note, "s")
    serial = platform == "cpu" and any(mesh.size > 1 for mesh in plan.submeshes)
    return Profile(measured, forecast(plan, costs), costs, statistics.median(calls), platform, serial)


def _moves(compiled: CompiledPlan) -> dict[int, Call]:
    """For each SEND what makes its transfer."""
    plan, layouts, transport = compiled.plan, compiled.layouts, Transport()

    def move(transfer: Transfer) -> Call:
        sources, targets = ([layouts[slot] for slot in slots] for slots in (transfer.ins, transfer.outs))
        return transport.mover(sources, targets, [plan.slots[slot] for slot in transfer.ins])

    return {number: move(transfer) for number, _, transfer in timed(plan) if transfer is not None}


def _run(compiled: CompiledPlan, args: Sequence[Any], moves: dict[int, Call]) -> Times:
    """Start and end of each RUN and SEND, in seconds from the first."""
    plan = compiled.plan
    env = _staged(compiled, args)
    waited = {number: transfer for number, _, transfer in timed(plan)}
    times: dict[int, tuple[float, float]] = {}
    origin = time.perf_counter()
    for number, step in enumerate(plan.instructions):
        if number in waited:
            start = time.perf_counter()
            given = [env[slot] for slot in step.ins]
            transfer = waited[number]
            made = step.outs if transfer is None else transfer.outs
            call = moves[number] if step.kernel is None else compiled.programs[step.kernel]
            results = call(*given)
            del given
            jax.block_until_ready(results)
            times[number] = (start - origin, time.perf_counter() - origin)
            env.update(zip(made, results, strict=True))
        elif step.kind == "FREE":
            for slot in step.ins:
                del env[slot]
    return times


def _staged(compiled: CompiledPlan, args: Sequence[Any]) -> dict[int, Any]:
    """Arguments and constants on their submeshes; copies, so that a donated argument stays the caller's."""
    plan = compiled.plan
    given = [*((args[arg], slot) for arg, slot in plan.inputs), *plan.constants]
    layouts = [compiled.layouts[slot] for _, slot in given]
    arrays = jax.device_put([x for x, _ in given], layouts, may_alias=False)
    jax.block_until_ready(arrays)
    return dict(zip((slot for _, slot in given), arrays, strict=True))


def _call(compiled: CompiledPlan, call: Callable[[Sequence[Any]], Any], args: Sequence[Any]) -> float:
    """Seconds of an ordinary call on copies of the arguments."""
    env = _staged(compiled, args)
    copies = list(args)
    for arg, slot in compiled.plan.inputs:
        copies[arg] = env[slot]
    start = time.perf_counter()
    jax.block_until_ready(call(copies))
    return time.perf_counter() - start


def _medians(plan: Plan, runs: Sequence[Times]) -> Costs:
    programs: dict[int, list[float]] = collections.defaultdict(list)
    transfers: dict[tuple[int, int, int], list[float]] = collections.defaultdict(list)
    for number, step, transfer in timed(plan):
        lengths = [times[number][1] - times[number][0] for times in runs]
        if transfer is not None:
            transfers[transfer.source, transfer.target, plan.bytes_of(transfer)] += lengths
        else:
            programs[step.kernel or 0] += lengths
    return Costs(
        tuple(statistics.median(programs.get(k, [0.0])) for k in range(len(plan.kernels))),
        {key: statistics.median(lengths) for key, lengths in transfers.items()},
        unit="s",
        note=f"costs measured: medians of {len(runs)} runs",
    )

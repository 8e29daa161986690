"""Profiles of a plan: measured runs, and the costs and simulation that follow from them."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multimesh.core.grouping import group
from multimesh.core.text import amount, columns
from multimesh.errors import UsageError
from multimesh.observe.measure import MeasuredRun, Measurement
from multimesh.observe.timelines.timeline import Timeline
from multimesh.plan.instructions import Run, Transfer
from multimesh.plan.plan import Plan
from multimesh.plan.timing import Costs, assemble, items_in_time, simulate, stage_costs_of
from multimesh.processes import agree
from multimesh.runtime.actions import processes
from multimesh.runtime.between import exchange
from multimesh.runtime.runner import Runner
from multimesh.schedules import Auto


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured costs of a call; prints as a table of measured against simulated.

    Attributes
    ----------
    measured
        Timeline of the fastest profiled run. In each process one kernel ran at a time, so idle time in a single process
        says nothing about overlap. Several processes have their times on the clock of process 0.
    simulated
        The same kernels at their median costs, on submeshes that run at the same time.
    costs
        Median seconds of each kernel and transfer; for `multimesh.Plan.simulate`.
    call
        Median seconds of an ordinary call, which waits only for its results.
    platform
        Of the devices.
    serial
        Whether the kernels of an ordinary call run one after another here, whatever the schedule.
    processes
        Number of processes with devices of the plan.
    clocks
        Possible error, in seconds, between the times of two processes.
    plan
        The plan that ran.
    """

    measured: Timeline
    simulated: Timeline
    costs: Costs
    call: float
    platform: str
    serial: bool
    processes: int = 1
    clocks: float = 0.0
    plan: Plan | None = field(default=None, repr=False)

    @property
    def schedule(self) -> Auto:
        """The schedule ``auto`` of the profiled step, with the measured costs of its stages.

        Give it to `multimesh.microbatch` as ``schedule=``: `multimesh.jit` then chooses the best table for these costs.
        All processes have the same costs, and so choose the same table.

        Raises
        ------
        UsageError
            When the step has no loop with the schedule ``auto``, or several.
        """
        choices = self.plan.choices if self.plan is not None else ()
        auto = choices[0].schedule if len(choices) == 1 else None
        if self.plan is None or not isinstance(auto, Auto) or len(self.plan.schedules) != 1:
            raise UsageError(
                f"profile.schedule: the profiled step has {len(choices)} loops with schedule='auto'; profile a step "
                "with one, and no other microbatch loop"
            )
        return replace(auto, costs=stage_costs_of(self.plan, self.costs, choices[0].costs))

    def __str__(self) -> str:
        both = (self.measured, self.simulated)
        table: list[tuple[str, list[str]]] = [("submesh", [str(row) for row in range(len(self.measured.rows))])]
        for cells in (
            [[amount(busy, "s") for busy in line.busy] for line in both],
            [[f"{100 * share:.1f} %" for share in line.bubbles] for line in both],
            [[amount(peak, "bytes") for peak in line.peaks] for line in both],
        ):
            table += zip(("measured", "simulated"), cells, strict=True)
        head, *rows = columns(table)
        above = ""
        for place, name in zip(re.finditer("measured", head), ("busy", "bubble", "peak live"), strict=True):
            above = f"{above:<{place.start()}}{name}"
        note = "one kernel at a time, each waited for"
        lines = [
            *(self.measured.title, "", above, head, *rows, ""),
            f"measured  {amount(self.measured.makespan, 's'):>8}  {note}{', in each process' * (self.processes > 1)}",
            f"simulated {amount(self.simulated.makespan, 's'):>8}  submeshes and transfers at the same time",
            f"a call    {amount(self.call, 's'):>8}  as it runs without profiling",
        ]
        if self.serial:
            lines.append("XLA runs the multi-device CPU kernels of a process one after another: they do not overlap.")
        return "\n".join(lines)


def profile(runner: Runner, args: Sequence[Any], repeats: int) -> Profile:
    """Run a compiled plan; see `multimesh.calling.aot.Compiled.profile`."""
    plan, several = runner.compiled.plan, agree.several()
    with exchange.turn:
        measure = Measurement(runner)
        runs = [measure.run(args) for _ in range(repeats + 1)][1:]  # in the first, caches are filled
        calls = [measure.call(args) for _ in range(repeats + 1)][1:]
    costs = _medians(plan, runs)
    fastest = min(runs, key=lambda run: run.end)
    owners = processes(plan)
    count, involved = len({d for mesh in plan.submeshes for d in mesh.devices.flat}), len(frozenset().union(*owners))
    platform = plan.submeshes[0].devices.flat[0].platform
    where = f"{count} {platform} devices" + (f" of {involved} processes" if several else "")
    note = f"measured on {where}, {measure.note}"
    if several:
        note += f"; clocks agree within {amount(fastest.error, 's')}"
    shared = not several or any(a & b for a, b in itertools.combinations(owners, 2))
    serial = platform == "cpu" and any(mesh.size > 1 for mesh in plan.submeshes) and shared
    measured = assemble(plan, fastest.times, note, "s")
    simulated, call = simulate(plan, costs), statistics.median(calls)
    return Profile(measured, simulated, costs, call, platform, serial, involved, fastest.error, plan)


def _medians(plan: Plan, runs: Sequence[MeasuredRun]) -> Costs:
    lasts = [(item, run.lasts[number]) for number, item in items_in_time(plan) for run in runs]
    kernels = group((item.kernel, last) for item, last in lasts if isinstance(item, Run))
    sent = ((item, last) for item, last in lasts if isinstance(item, Transfer))
    transfers = group(((item.source, item.target, plan.bytes_of(item)), last) for item, last in sent)
    return Costs(
        tuple(statistics.median(kernels.get(k, [0.0])) for k in range(len(plan.kernels))),
        {key: statistics.median(lengths) for key, lengths in transfers.items()},
        unit="s",
        note=f"costs measured: medians of {len(runs)} runs",
    )

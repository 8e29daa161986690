"""The costs of a plan's kernels and transfers, and the times at which they run on ideal submeshes."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from multimesh.core import checks, names
from multimesh.errors import UsageError
from multimesh.ir.flops import count_flops
from multimesh.observe.timelines.spans import Hop, Levels, Span, levels
from multimesh.observe.timelines.timeline import Timeline
from multimesh.plan.instructions import Free, PlanData, Recv, Run, Send, Transfer
from multimesh.schedules import scheduler
from multimesh.schedules.costs import ESTIMATED, PHASES, UNIT_COSTS, Key, StageCosts, cost
from multimesh.schedules.published import AHEAD
from multimesh.schedules.simulate import sizes

if TYPE_CHECKING:
    from multimesh_planner import Device


@dataclass(frozen=True)
class Costs:
    """The time of every kernel of a plan, and of its transfers."""

    programs: tuple[float, ...]  # for each of the plan's kernels
    # (from submesh, to submesh, bytes) to the time of such a transfer
    transfers: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    transfer: float = 0.0  # time of all other transfers
    unit: str = ""  # ``s``, or empty for relative times
    note: str = ""  # where the times are from

    def of(self, plan: PlanData, transfer: Transfer) -> float:
        """Return the time of a transfer of a plan."""
        return self.transfers.get((transfer.source, transfer.target, plan.bytes_of(transfer)), self.transfer)


def estimate(plan: PlanData) -> Costs:
    """Return the floating-point operations of every kernel of a plan on each of its devices."""
    return Costs(
        tuple(count_flops(k.ops) / plan.submeshes[k.submesh].size for k in plan.kernels), note=f"costs {ESTIMATED}"
    )


def costs_of(plan: PlanData, costs: Mapping[Any, float]) -> Costs:
    """Return the costs of a plan's kernels, given as a mapping.

    The first key that fits counts: (stage, phase), (task, phase), task, phase. A kernel that covers several phases
    costs their sum: B makes the weight gradients too unless the plan has kernels for W, and the last stage's B runs
    its forward where `jit` joined the two. Where `jit` split a B because another process waits for it, a W without a
    cost of its own is part of B's. ``transfer`` is the time of each transfer, by default 0. A kernel outside
    of microbatch loops is free unless its task is named.

    Raises ``UsageError`` for a key that nothing in the plan has, a phase without a cost, and a value that is no cost.
    """
    costs = dict(checks.pairs("costs", costs, "a mapping of a phase, task or stage to a time"))
    runs, covers = plan.first_runs, plan.covers
    keys_of_plan: dict[Key, None] = {"transfer": None}
    for run in runs.values():
        if run.cell:
            phases = covers[run.cell.stage, run.cell.phase]
            keys_of_plan |= dict.fromkeys(key for p in phases for key in _keys(run.cell.stage, run.task, p))
        keys_of_plan[run.task] = None
    for key in costs:
        if key not in keys_of_plan and key not in PHASES:
            names = ", ".join(sorted({repr(k) for k in keys_of_plan if isinstance(k, str) and k}))
            raise UsageError(f"costs: {key!r} is no phase, task or stage of this plan; it has {names}")
    times = {key: cost(value, repr(key)) for key, value in costs.items()}

    def time(run: Run) -> float:
        if run.cell is None:
            return times.get(run.task, 0.0)
        stage, task = run.cell.stage, run.task
        keys = {phase: _keys(stage, task, phase) for phase in covers[stage, run.cell.phase]}
        if task in times and not any(key in times for fitting in keys.values() for key in fitting[:2]):
            return times[task]
        free = run.cell.phase == "W" and AHEAD.issuperset(plan.schedules)
        if run.cell.phase in keys and not free and not times.keys() & set(keys[run.cell.phase]):  # late ones are free
            raise UsageError(f"costs: none for {run.cell.phase} of stage {stage} (task {task!r})")
        return sum(next((times[key] for key in fitting if key in times), 0.0) for fitting in keys.values())

    shown = ", ".join(f"{'.'.join(map(str, k)) if isinstance(k, tuple) else k} {v:g}" for k, v in times.items())
    work = {k: 1.0 + count_flops(plan.kernels[k].ops) for k in runs}
    total: collections.Counter[Any] = collections.Counter()  # of all parts of a stage, which share its time
    for k, run in runs.items():
        total[run.cell or k, run.task] += work[k]  # type: ignore[assignment]
    times_of = {k: time(run) * work[k] / total[run.cell or k, run.task] for k, run in runs.items()}
    programs = tuple(times_of.get(k, 0.0) for k in range(len(plan.kernels)))
    return Costs(programs, {}, times.get("transfer", 0.0), "", f"costs given: {shown}")


def _keys(stage: int, task: str, phase: str) -> tuple[Key, ...]:
    return ((stage, phase), (task, phase), phase)


def stage_costs_of(plan: PlanData, costs: Costs, estimated: StageCosts) -> StageCosts:
    """Return measured costs of the stages of a plan with one loop.

    A kernel that covers several phases shares its time among them as they are estimated. The transfer between two
    stages is the longest one in either direction; memory is as estimated.
    """
    times = [[0.0] * len(PHASES) for _ in estimated.times]
    hops = [0.0] * (len(times) - 1)
    kernels: set[int] = set()  # whose phases are listed
    stage_of: dict[int, int] = {}  # slot to the stage that fills it
    sent: dict[int, tuple[int, float]] = {}  # slot to the stage that its array comes from, and the time of the transfer
    for _, item in items_in_time(plan):
        if isinstance(item, Transfer):
            origin = next((stage_of[slot] for slot in item.ins if slot in stage_of), None)
            sent.update(dict.fromkeys(item.outs, (origin, costs.of(plan, item))) if origin is not None else {})
        elif item.cell is not None:
            stage = item.cell.stage
            stage_of.update(dict.fromkeys(item.outs, stage))
            for origin, lasts in (sent[slot] for slot in item.ins if slot in sent):
                if abs(origin - stage) == 1:
                    boundary = min(origin, stage)
                    hops[boundary] = max(hops[boundary], lasts)
            covers = plan.covers[stage, item.cell.phase] if item.kernel not in kernels else ""
            kernels.add(item.kernel)
            total = estimated.of(stage, covers)
            for phase in covers:
                share = estimated.of(stage, phase) / total if total else 1 / len(covers)
                times[stage][PHASES.index(phase)] += costs.programs[item.kernel] * share
    measured = tuple((f, b, w) for f, b, w in times)
    note = costs.note.removeprefix("costs ")
    return StageCosts(measured, tuple(hops), estimated.activations, costs.unit, estimated.sizes, note, estimated.kept)


def title(plan: PlanData) -> str:
    """Return the schedules and sizes of a plan."""
    cells = [(run.submesh, run.cell) for run in plan.runs if run.cell]
    numbers = {cell.microbatch for _, cell in cells}
    stages = {(submesh, cell.stage) for submesh, cell in cells if cell.phase == "B"}
    most = max(collections.Counter(submesh for submesh, _ in stages).values(), default=1)
    names = " and ".join(dict.fromkeys(plan.schedules)) or "plan"
    return sizes(names, len(plan.submeshes), most, len(numbers))


Times = Mapping[int, tuple[float, float]]


def simulate(plan: PlanData, costs: str | Device | Costs | Mapping[Any, float] = UNIT_COSTS) -> Timeline:
    """Run a plan on ideal submeshes; see `multimesh.Plan.simulate`.

    A submesh runs its kernels in order, each as soon as its inputs have arrived. A transfer starts when its arrays are
    made, wherever its SEND stands. Transfers between the same two submeshes follow each other; none keeps a submesh
    from computing.
    """
    if isinstance(costs, Costs):
        lasts = costs
    elif not isinstance(costs, str) and not is_dataclass(costs):
        lasts = costs_of(plan, costs)
    else:
        lasts = names.load_extra("multimesh_planner.plan_seconds", "Plan.simulate of a device").on_device(plan, costs)
    if len(lasts.programs) != len(plan.kernels):
        raise UsageError(
            f"costs: measured on a plan of {len(lasts.programs)} kernels, but this one has {len(plan.kernels)}; "
            "profile it as well"
        )
    return assemble(plan, _times(plan, lasts), f"forecast, {lasts.note}", lasts.unit)


def _times(plan: PlanData, costs: Costs) -> Times:
    """Return start and end of each RUN and SEND. Kernels of a submesh follow each other, and transfers of a lane."""
    rows: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    lasts: list[float] = [0.0] * len(plan.instructions)
    needs: dict[int, set[int]] = {}
    maker: dict[int, int] = {}  # slot to the instruction that last filled it
    for number, item in items_in_time(plan):
        needs[number] = {maker[slot] for slot in item.ins if slot in maker}
        if isinstance(item, Transfer):
            lasts[number] = costs.of(plan, item)
            rows[item.source, item.target].append(number)
        else:
            lasts[number] = costs.programs[item.kernel]
            rows[item.submesh,].append(number)
        maker.update(dict.fromkeys(item.outs, number))
    return scheduler.run(list(rows.values()), needs.__getitem__, lasts.__getitem__)


def items_in_time(plan: PlanData) -> Iterator[tuple[int, Run | Transfer]]:
    """Yield each RUN, and the transfer of each SEND, with the number of the instruction: these take time."""
    for number, instruction in enumerate(plan.instructions):
        match instruction:
            case Run():
                yield number, instruction
            case Send():
                yield number, plan.transfers[instruction.transfer]


def assemble(plan: PlanData, times: Times, note: str, unit: str) -> Timeline:
    """Return the timeline of a plan from the start and end of each RUN and SEND, by number of the instruction.

    An array is alive from the start of the kernel or transfer that fills its slot to the end of the last one that
    reads it.
    """
    spans: list[Span] = []
    transfers: list[Hop] = []
    maker: dict[int, int] = {}  # slot to the span that makes it
    carrier: dict[int, int] = {}  # slot to the transfer that brings it
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for number, item in items_in_time(plan):
        if isinstance(item, Transfer):
            producer = max((maker[slot] for slot in item.ins if slot in maker), default=None)
            carrier.update(dict.fromkeys(item.outs, len(transfers)))
            transfers.append(Hop(item.source, item.target, *times[number], plan.bytes_of(item), producer))
        else:
            for hop in dict.fromkeys(carrier[slot] for slot in item.ins if slot in carrier):
                readers[hop].append(len(spans))
            maker.update(dict.fromkeys(item.outs, len(spans)))
            place = (item.cell.stage, item.cell.microbatch) if item.cell else (None, None)
            spans.append(Span(item.submesh, *times[number], plan.shown(item.cell), plan.name(item), *place))
    sends = tuple(replace(t, consumers=tuple(readers[n])) for n, t in enumerate(transfers))
    rows = tuple(f"submesh {i}" for i in range(len(plan.submeshes)))
    return Timeline(title(plan), note, unit, rows, tuple(spans), sends, _live(plan, times))


def _live(plan: PlanData, times: Times) -> tuple[Levels, ...]:
    """Return the bytes alive on each submesh over time."""
    until: dict[int, tuple[float, int]] = {}  # slot to the end of its last use, and the number of that instruction
    sent: dict[int, int] = {}  # transfer to its SEND
    changes: list[list[tuple[float, int, float]]] = [[] for _ in plan.submeshes]
    for number, (instruction, filled, emptied) in enumerate(plan.liveness()):
        if isinstance(instruction, Send):
            sent[instruction.transfer] = number
        at = sent[instruction.transfer] if isinstance(instruction, Recv) else number
        if not isinstance(instruction, Free):
            start, end = times[at]
            for slot in (*instruction.ins, *instruction.outs):
                until[slot] = max(until.get(slot, (0.0, 0)), (end, 2 * at + 1))
            changes[instruction.submesh] += ((start, 2 * at, plan.slots[slot].nbytes) for slot in filled)
        changes[instruction.submesh] += ((*until[slot], -plan.slots[slot].nbytes) for slot in emptied)
    return tuple(levels(part) for part in changes)

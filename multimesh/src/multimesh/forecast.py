"""Simulation of a plan: when its programs run and what is alive, given what each costs."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from multimesh import checks
from multimesh.errors import UsageError
from multimesh.schedules.scheduler import run
from multimesh.simulate import PHASES, UNIT_COSTS, cost
from multimesh.timeline import Hop, Span, Steps, Timeline, live_steps

if TYPE_CHECKING:
    from multimesh.plan import Instruction, Plan, Transfer

Key = str | tuple[str | int, str]


@dataclass(frozen=True)
class Costs:
    """Time of every program of a plan, and of its transfers.

    Attributes
    ----------
    programs
        For each of the plan's kernels.
    transfers
        (from submesh, to submesh, bytes) to the time of such a transfer; others take ``transfer``.
    transfer
        Time of a transfer that ``transfers`` does not name.
    unit
        ``s``, or empty for relative times.
    note
        Where they are from.
    """

    programs: tuple[float, ...]
    transfers: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    transfer: float = 0.0
    unit: str = ""
    note: str = ""


def costs_of(plan: Plan, given: Mapping[Any, float]) -> Costs:
    """Costs of a plan's programs from a mapping.

    The first key that fits counts: (stage, phase), (task, phase), task, phase. A program that covers several phases
    costs their sum: B makes the weight gradients too unless the plan has programs for W, and the last stage's B runs
    its forward where `jit` joined the two. ``transfer`` is the time of each transfer, by default 0. Programs outside
    of microbatch loops are free unless their task is named.

    Raises
    ------
    UsageError
        For a key that nothing in the plan has, a phase without a cost, and what is no cost.
    """
    given = dict(checks.pairs("costs", given, "a mapping of a phase, task or stage to a time"))
    runs = {step.kernel: step for step in plan.instructions if step.kind == "RUN" and step.kernel is not None}
    covers = plan.covers
    known: dict[Key, None] = {"transfer": None}
    for step in runs.values():
        phases = covers.get((step.stage or 0, step.phase or ""), "") if step.phase else ""
        known |= dict.fromkeys([key for p in phases for key in _keys(step, p)])
        known[step.task] = None
    for key in given:
        if key not in known and key not in PHASES:
            names = ", ".join(sorted({repr(k) for k in known if isinstance(k, str) and k}))
            raise UsageError(f"costs: {key!r} is no phase, task or stage of this plan; it has {names}")
    times = {key: cost(value, repr(key)) for key, value in given.items()}

    def time(step: Instruction) -> float:
        if step.phase is None:
            return times.get(step.task, 0.0)
        phases = covers[step.stage or 0, step.phase]
        if step.task in times and not any(key in times for phase in phases for key in _keys(step, phase)[:2]):
            return times[step.task]
        total = 0.0
        for phase in phases:
            key = next((k for k in _keys(step, phase) if k in times), None)
            if key is None and phase == step.phase:
                raise UsageError(f"costs: none for {phase} of stage {step.stage} (task {step.task!r})")
            total += times[key] if key is not None else 0.0
        return total

    shown = ", ".join(f"{'.'.join(map(str, k)) if isinstance(k, tuple) else k} {v:g}" for k, v in times.items())
    programs = tuple(time(runs[k]) if k in runs else 0.0 for k in range(len(plan.kernels)))
    return Costs(programs, {}, times.get("transfer", 0.0), "", f"costs given: {shown}")


def _keys(step: Instruction, phase: str) -> tuple[Key, ...]:
    return ((step.stage or 0, phase), (step.task, phase), phase)


def title(plan: Plan) -> str:
    """Schedules and sizes of a plan."""
    numbers = {step.microbatch for step in plan.instructions if step.microbatch is not None}
    stages = {(step.submesh, step.stage) for step in plan.instructions if step.kind == "RUN" and step.phase == "B"}
    most = max(collections.Counter(submesh for submesh, _ in stages).values(), default=1)
    names = " and ".join(dict.fromkeys(plan.schedules)) or "plan"
    return sizes(names, len(plan.submeshes), most, len(numbers))


def sizes(name: str, submeshes: int, chunks: int, microbatches: int) -> str:
    """Title of a timeline: ``1f1b: 4 submeshes, 8 microbatches``."""
    parts = [f"{submeshes} submesh{'' if submeshes == 1 else 'es'}{f' of {chunks} stages' if chunks > 1 else ''}"]
    if microbatches:
        parts.append(f"{microbatches} microbatch{'' if microbatches == 1 else 'es'}")
    return f"{name}: {', '.join(parts)}"


def _span(plan: Plan, step: Instruction, start: float, end: float) -> Span:
    """Span of a RUN."""
    name = step.task or plan.kernels[step.kernel or 0].name
    return Span(step.submesh, start, end, plan.shown(step), name, step.stage, step.microbatch)


Times = Mapping[int, tuple[float, float]]


def forecast(plan: Plan, costs: Costs | Mapping[Any, float] = UNIT_COSTS) -> Timeline:
    """Run a plan on ideal submeshes; see `multimesh.Plan.forecast`.

    A submesh runs its programs in order, each as soon as what it reads has arrived. A transfer starts when its arrays
    are there, whenever it is issued; transfers between the same two submeshes follow each other, and none keeps a
    submesh from computing.
    """
    known = costs if isinstance(costs, Costs) else costs_of(plan, costs)
    if len(known.programs) != len(plan.kernels):
        raise UsageError(
            f"costs: measured on a plan of {len(known.programs)} programs, but this one has {len(plan.kernels)}; "
            "profile it as well"
        )
    return assembled(plan, _times(plan, known), f"forecast, {known.note}", known.unit)


def _times(plan: Plan, costs: Costs) -> Times:
    """Programs of a submesh follow each other, and so do transfers between the same two submeshes."""
    rows: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    lasts: list[float] = [0.0] * len(plan.instructions)
    needs: dict[int, set[int]] = {}
    maker: dict[int, int] = {}  # slot to what last filled it
    for number, step, transfer in timed(plan):
        needs[number] = {maker[slot] for slot in step.ins if slot in maker}
        if transfer is not None:
            link = (transfer.source, transfer.target)
            lasts[number] = costs.transfers.get((*link, plan.bytes_of(transfer)), costs.transfer)
            rows[link].append(number)
        else:
            lasts[number] = costs.programs[step.kernel or 0]
            rows[step.submesh,].append(number)
        maker.update(dict.fromkeys(step.outs if transfer is None else transfer.outs, number))
    return run(list(rows.values()), needs.__getitem__, lasts.__getitem__)


def timed(plan: Plan) -> Iterator[tuple[int, Instruction, Transfer | None]]:
    """Yield what takes time, with its number: each RUN, and each SEND with its transfer."""
    for number, step in enumerate(plan.instructions):
        if step.kind == "RUN":
            yield number, step, None
        elif step.kind == "SEND":
            yield number, step, plan.transfers[step.transfer or 0]


def assembled(plan: Plan, times: Times, note: str, unit: str) -> Timeline:
    """Timeline of a plan from the start and end of each RUN and SEND, by number of the instruction.

    An array is alive from the start of what makes or receives it to the end of the last that reads it.
    """
    spans: list[Span] = []
    transfers: list[Hop] = []
    maker: dict[int, int] = {}  # slot to the span that makes it
    carrier: dict[int, int] = {}  # slot to the transfer that brings it
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for number, step, transfer in timed(plan):
        if transfer is not None:
            made = max((maker[slot] for slot in transfer.ins if slot in maker), default=None)
            carrier.update(dict.fromkeys(transfer.outs, len(transfers)))
            ends = (transfer.source, transfer.target)
            transfers.append(Hop(*ends, *times[number], plan.bytes_of(transfer), made))
        else:
            for hop in dict.fromkeys(carrier[slot] for slot in step.ins if slot in carrier):
                readers[hop].append(len(spans))
            maker.update(dict.fromkeys(step.outs, len(spans)))
            spans.append(_span(plan, step, *times[number]))
    sends = tuple(replace(t, consumers=tuple(readers[n])) for n, t in enumerate(transfers))
    rows = tuple(f"submesh {i}" for i in range(len(plan.submeshes)))
    return Timeline(title(plan), note, unit, rows, tuple(spans), sends, _live(plan, times))


def _live(plan: Plan, times: Times) -> tuple[Steps, ...]:
    given = {slot for _, slot in (*plan.inputs, *plan.constants)}
    until: dict[int, tuple[float, int]] = {}  # slot to the end of its last use, and the number of that
    alive: set[int] = set()
    changes: list[list[tuple[float, int, float]]] = [[] for _ in plan.submeshes]
    for number, step, transfer in timed(plan):
        start, end = times[number]
        made = step.outs if transfer is None else transfer.outs
        for slot in (*step.ins, *made):
            until[slot] = max(until.get(slot, (0.0, 0)), (end, 2 * number + 1))
        for slot in set(made) - alive - given:
            alive.add(slot)
            changes[plan.slots[slot].submesh].append((start, 2 * number, plan.slots[slot].nbytes))
    for step in plan.instructions:
        for slot in alive.intersection(step.ins) if step.kind == "FREE" else ():
            changes[step.submesh].append((*until[slot], -plan.slots[slot].nbytes))
    return tuple(live_steps(part) for part in changes)

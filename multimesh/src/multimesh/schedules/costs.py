"""What programs and transfers cost: the times that forecasts take."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multimesh.core import checks
from multimesh.errors import UsageError

if TYPE_CHECKING:
    from multimesh.plan.plan import Instruction, Plan

Key = str | tuple[str | int, str]
PHASES = ("F", "B", "W")
UNIT_COSTS: Mapping[str, float] = {"F": 1.0, "B": 1.0, "W": 1.0}
CLOSE = 1e-9  # relative difference of rounding


def cost(value: object, what: str) -> float:
    """A cost as a float.

    Raises
    ------
    UsageError
        When it is no number, infinite, NaN or negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UsageError(f"costs: that of {what} must be a finite number of at least 0, got {value!r}")
    return float(value)


def checked(costs: Mapping[str, float]) -> dict[str, float]:
    """Costs of F, B and W.

    Raises
    ------
    UsageError
        For a missing or unknown phase, and for what is no cost.
    """
    if set(costs) != set(PHASES):
        raise UsageError(f"costs: expected one for each of F, B and W, got {', '.join(map(repr, costs)) or 'none'}")
    return {phase: cost(costs[phase], phase) for phase in PHASES}


def covered(cells: Iterable[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """What each program of a pipeline, given as (stage, phase), covers.

    A stage that has no program for its weight gradients makes them in B. In a pipeline, a stage without a program for
    its forward runs that in B too: `jit` joins a forward and a backward that always follow each other.
    """
    phases: dict[int, set[str]] = collections.defaultdict(set)
    for stage, phase in cells:
        phases[stage].add(phase)
    present = set().union(*phases.values())
    pipeline = "F" not in present or any(len(found) > 1 for found in phases.values())
    covers: dict[tuple[int, str], str] = {}
    for stage, found in phases.items():
        for phase in found:
            front = "F" if phase == "B" and pipeline and "F" not in found else ""
            back = "W" if phase == "B" and "W" not in found else ""
            covers[stage, phase] = front + phase + back
    return covers


def parsed_costs(text: str) -> dict[str, float]:
    """Costs written as ``F=1,B=1,W=1``.

    Raises
    ------
    UsageError
        For anything else.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        phase, _, value = part.partition("=")
        try:
            found[phase.strip()] = float(value)
        except ValueError:
            raise UsageError(f"--costs: expected F=1,B=1,W=1 with your numbers, got {text!r}") from None
    return checked(found)


@dataclass(frozen=True)
class StageCosts:
    """What the stages of a pipeline cost: what tables are simulated with, and chosen for.

    Attributes
    ----------
    times
        For each stage the time of F, B and W of a microbatch.
    transfers
        Between each stage and the next, in either direction; empty: they take no time.
    activations
        Memory that a microbatch takes in each stage from the start of its F to the end of its B; empty: 1.
    kept
        What it takes from there to the end of its W, where a table has W: of what F kept the part that W reads, and
        what B made for it. Empty: as much as before. It does not count where W follows its B at once.
    unit
        Of times: ``s``, or empty for relative times.
    sizes
        Unit of memory: ``bytes``, or empty.
    note
        Where they are from.
    """

    times: tuple[tuple[float, float, float], ...]
    transfers: tuple[float, ...] = ()
    activations: tuple[float, ...] = ()
    unit: str = ""
    sizes: str = ""
    note: str = ""
    kept: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no cost.

        Raises
        ------
        UsageError
            When numbers are not finite, negative, or not as many as there are stages.
        """
        stages = len(self.times)
        for what, found, wanted in (
            ("transfers", self.transfers, (0, stages - 1)),
            ("activations", self.activations, (0, stages)),
            ("kept", self.kept, (0, stages)),
        ):
            if len(found) not in wanted:
                raise UsageError(f"costs of {stages} stages: {what} must be {wanted[1]}, got {len(found)}")
            for number, value in enumerate(found):
                cost(value, f"{what} {number}")
        for stage, times in enumerate(self.times):
            if len(times) != len(PHASES):
                raise UsageError(f"costs: stage {stage} needs a time for each of F, B and W, got {times!r}")
            for phase, value in zip(PHASES, times, strict=True):
                cost(value, f"{phase} of stage {stage}")

    @classmethod
    def alike(cls, costs: Mapping[str, float], stages: int, transfer: float = 0.0) -> StageCosts:
        """Stages that all take the time of F, B and W in ``costs``."""
        known = checked(costs)
        note = ", ".join(f"{phase} {time:g}" for phase, time in known.items()) + f", transfers {transfer:g}"
        times = (known["F"], known["B"], known["W"])
        return cls((times,) * stages, (cost(transfer, "a transfer"),) * (stages - 1), note=note)

    def of(self, stage: int, phases: str) -> float:
        """Time of a program of a stage that covers some phases, such as ``BW``."""
        return sum(self.times[stage][PHASES.index(phase)] for phase in phases)

    def hop(self, one: int, other: int) -> float:
        """Time of a transfer between two stages that follow each other."""
        return self.transfers[min(one, other)] if self.transfers else 0.0

    def grows(self, stage: int, phase: str, *, last: str) -> float:
        """What a cell adds to the memory of its submesh, before it starts, or, below 0, takes away when it ends.

        ``last`` is the phase that ends the use of a microbatch: W where a table has it, else B.
        """
        size = self.activations[stage] if self.activations else 1.0
        kept = 0.0 if last == "B" else self.kept[stage] if self.kept else size
        return {"F": size, "B": kept - size, "W": -kept}[phase]


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


def stage_costs_of(plan: Plan, costs: Costs, estimated: StageCosts) -> StageCosts:
    """Measured costs of the stages of a plan with one loop.

    The time of a program that covers several phases is shared out as they are estimated. A transfer between two stages
    is the longest of those in either direction; memory is as estimated.
    """
    times = [[0.0] * len(PHASES) for _ in estimated.times]
    hops = [0.0] * (len(times) - 1)
    made_by: dict[int, int] = {}  # slot to the stage that makes it
    sent: dict[int, tuple[int, float]] = {}  # slot to where what it holds was made, and what the transfer took
    for step in plan.instructions:
        transfer = plan.transfers[step.transfer] if step.kind == "SEND" and step.transfer is not None else None
        if transfer is not None:
            lasts = costs.transfers.get((transfer.source, transfer.target, plan.bytes_of(transfer)), costs.transfer)
            origin = next((made_by[slot] for slot in transfer.ins if slot in made_by), None)
            sent.update(dict.fromkeys(transfer.outs, (origin, lasts)) if origin is not None else {})
        if step.kind != "RUN" or step.stage is None or step.phase is None:
            continue
        made_by.update(dict.fromkeys(step.outs, step.stage))
        for origin, lasts in (sent[slot] for slot in step.ins if slot in sent):
            if abs(origin - step.stage) == 1:
                boundary = min(origin, step.stage)
                hops[boundary] = max(hops[boundary], lasts)
        covers = plan.covers[step.stage, step.phase]
        total = estimated.of(step.stage, covers)
        for phase in covers:
            share = estimated.of(step.stage, phase) / total if total else 1 / len(covers)
            times[step.stage][PHASES.index(phase)] = costs.programs[step.kernel or 0] * share
    measured = tuple((f, b, w) for f, b, w in times)
    note = costs.note.removeprefix("costs ")
    return StageCosts(measured, tuple(hops), estimated.activations, costs.unit, estimated.sizes, note, estimated.kept)

"""Costs of the cells of a schedule, as times of forecasts."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from multimesh.errors import UsageError

Key = str | tuple[str | int, str]
PHASES = ("F", "B", "W")
PhaseCosts = Mapping[str, float]
UNIT_COSTS: PhaseCosts = {"F": 1.0, "B": 1.0, "W": 1.0}
CLOSE = 1e-9  # relative difference of rounding
ESTIMATED = "estimated: operations on each device, from shapes; transfers take no time"
"""Where the costs of a traced function are from."""


def cost(value: object, name: str) -> float:
    """Return a cost as a float. Raise an error if it is no finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UsageError(f"costs: that of {name} must be a finite number of at least 0, got {value!r}")
    return float(value)


def check_costs(costs: Mapping[str, float]) -> dict[str, float]:
    """Return the costs of F, B and W. Raise an error if a phase is missing or unknown, or a cost is none."""
    if set(costs) != set(PHASES):
        raise UsageError(f"costs: expected one for each of F, B and W, got {', '.join(map(repr, costs)) or 'none'}")
    return {phase: cost(costs[phase], phase) for phase in PHASES}


def map_covers(cells: Iterable[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """Map each (stage, phase) that has a kernel to the phases that the kernel covers; what is late (L) covers none.

    B of a stage without W makes the weight gradients too, and in a pipeline that of a stage without F its forward.
    """
    phases: dict[int, set[str]] = collections.defaultdict(set)
    for stage, phase in cells:
        phases[stage].add(phase)
    present = set().union(*phases.values())
    pipeline = "F" not in present or any(len(phases_here) > 1 for phases_here in phases.values())
    covers: dict[tuple[int, str], str] = {}
    for stage, phases_here in phases.items():
        for phase in phases_here:
            front = "F" if phase == "B" and pipeline and "F" not in phases_here else ""
            back = "W" if phase == "B" and "W" not in phases_here else ""
            covers[stage, phase] = front + phase + back if phase in PHASES else ""
    return covers


def parse_costs(text: str) -> dict[str, float]:
    """Parse costs, written as ``F=1,B=1,W=1``. Raise an error for anything else."""
    costs: dict[str, float] = {}
    for part in text.split(","):
        phase, _, value = part.partition("=")
        try:
            costs[phase.strip()] = float(value)
        except ValueError:
            raise UsageError(f"--costs: expected F=1,B=1,W=1 with your numbers, got {text!r}") from None
    return check_costs(costs)


@dataclass(frozen=True)
class StageCosts:
    """Costs of the stages of a pipeline.

    Attributes
    ----------
    times
        For each stage the time of F, B and W of a microbatch.
    transfers
        Time of a transfer between each stage and the next, in either direction; empty: none.
    activations
        Memory of a microbatch in each stage, from the start of its F to the end of its B; empty: 1.
    kept
        Memory of a microbatch from there to the end of its W, if the table has W: the values of F that W reads, and
        those that B made for it. Empty: as much as before. It does not count if W follows its B at once.
    unit
        Unit of times: ``s``, or empty for relative times.
    sizes
        Unit of memory: ``bytes``, or empty.
    note
        Where the costs are from.
    """

    times: tuple[tuple[float, float, float], ...]
    transfers: tuple[float, ...] = ()
    activations: tuple[float, ...] = ()
    unit: str = ""
    sizes: str = ""
    note: str = ""
    kept: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse numbers that are not finite, negative, or not as many as there are stages."""
        stages = len(self.times)
        for name, values, lengths in (
            ("transfers", self.transfers, (0, stages - 1)),
            ("activations", self.activations, (0, stages)),
            ("kept", self.kept, (0, stages)),
        ):
            if len(values) not in lengths:
                raise UsageError(f"costs of {stages} stages: {name} must be {lengths[1]}, got {len(values)}")
            for number, value in enumerate(values):
                cost(value, f"{name} {number}")
        for stage, times in enumerate(self.times):
            if len(times) != len(PHASES):
                raise UsageError(f"costs: stage {stage} needs a time for each of F, B and W, got {times!r}")
            for phase, value in zip(PHASES, times, strict=True):
                cost(value, f"{phase} of stage {stage}")

    @classmethod
    def alike(cls, costs: Mapping[str, float], stages: int, transfer: float = 0.0) -> StageCosts:
        """Return the costs of stages that all take the time of F, B and W in ``costs``."""
        checked = check_costs(costs)
        note = ", ".join(f"{phase} {time:g}" for phase, time in checked.items()) + f", transfers {transfer:g}"
        times = (checked["F"], checked["B"], checked["W"])
        return cls((times,) * stages, (cost(transfer, "a transfer"),) * (stages - 1), note=note)

    def of(self, stage: int, phases: str) -> float:
        """Return the time of a kernel of a stage that covers these phases, such as ``BW``."""
        return sum(self.times[stage][PHASES.index(phase)] for phase in phases)

    def hop(self, one: int, other: int) -> float:
        """Return the time of a transfer between two neighboring stages."""
        return self.transfers[min(one, other)] if self.transfers else 0.0

    def grows(self, stage: int, phase: str, *, last: str) -> float:
        """Return the memory that a cell adds to its submesh when it starts, or, if negative, frees when it ends.

        ``last`` is the phase that ends the use of a microbatch: W if the table has it, else B.
        """
        size = self.activations[stage] if self.activations else 1.0
        residuals = 0.0 if last == "B" else self.kept[stage] if self.kept else size
        return {"F": size, "B": residuals - size, "W": -residuals}[phase]

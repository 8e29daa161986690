"""``auto``: the shortest published table for given costs and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from multimesh.core import checks
from multimesh.schedules.costs import StageCosts, cost
from multimesh.schedules.table import Schedule, Table

if TYPE_CHECKING:
    from multimesh.schedules.choose import Choice


@dataclass(frozen=True)
class Auto(Schedule):
    """The shortest published table for the costs of the stages and the memory of the submeshes.

    All published tables of the loop's shape are simulated, and the one that fits into memory and ends first is taken.
    The same arguments give the same table in every process.

    Attributes
    ----------
    costs
        Costs of the stages, such as ``profile.schedule.costs``. None: `multimesh.jit` estimates them from the
        operations of the loop; a table without a loop takes all times to be 1.
    memory
        Memory for activations on each submesh, in the unit of the costs' activations. None: the memory of a device
        bounds the whole plan; for a table without a loop, the largest need of 1F1B.
    device
        Bytes of a device. `multimesh.jit` takes no table whose plan needs more, by its ``memory_estimate``. None: the
        memory of the devices of one process, if they tell; else the need of the plan of 1F1B.
    route
        Submesh of stages 0, 1, ..., as in `Schedule.placement`; empty: round and round.
    without
        Names of schedules that are not taken.
    """

    costs: StageCosts | None = None
    memory: float | None = None
    device: float | None = None
    route: tuple[int, ...] = ()
    without: tuple[str, ...] = ()

    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        """Check the types of the fields."""
        if self.costs is not None and not isinstance(self.costs, StageCosts):
            raise checks.refuse("schedules.Auto: costs", "a StageCosts, such as profile.schedule.costs", self.costs)
        for limit, name in ((self.memory, "memory of a submesh"), (self.device, "bytes of a device")):
            if limit is not None:
                cost(limit, f"schedules.Auto: {name}")

    def placement(self, submeshes: int) -> tuple[int, ...]:
        """Return the submesh of each stage: the given route, or each submesh in turn."""
        return self.route or super().placement(submeshes)

    def table(self, submeshes: int, chunks: int, microbatches: int, backward: bool) -> Table:
        """Return the table that `choose` takes."""
        return self.choose(submeshes, chunks, microbatches, backward).taken.table

    def choose(self, submeshes: int, chunks: int, microbatches: int, backward: bool = True) -> Choice:
        """Simulate the published tables of a shape, and choose.

        Raises ``UsageError`` if no table fits into memory, or the costs are of another number of stages.
        """
        from multimesh.schedules import choose  # loaded by loops with ``auto`` alone

        shape = submeshes, chunks, microbatches, backward
        return choose.choose(self, shape, self.costs, self.memory, self.device, self.without)

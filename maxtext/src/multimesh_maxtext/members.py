"""One of several processes that train together: which one this is, as the launcher (srun, mpirun) says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from multimesh.errors import UnsupportedError, UsageError
from multimesh_maxtext.options import Options
from multimesh_maxtext.translate import Paths

_LAUNCHERS = {
    "SLURM_STEP_NODELIST": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
"""A variable that only the launcher's processes have, and those with rank, number and rank on this machine."""

_ALONE = {
    "spawn": "srun or mpirun starts them",
    "checkpoint": "checkpoints of several processes were never tried",
    "text": "every process would read all of it",
    "profile": "every process would record its own",
    "dump": "every process would write the same files",
}
"""Flags that only one process can honour so far, and why."""


@dataclass(frozen=True)
class Member:
    """This process among those that train: its rank, how many there are, and its rank on this machine."""

    rank: int = 0
    count: int = 1
    local: int = 0

    def own(self, paths: Paths) -> Paths:
        """Return where this process writes: the first where the user says, the others below that."""
        if self.rank == 0:
            return paths
        output = paths.output / f"process-{self.rank}"
        return replace(paths, output=output, metrics=output / "metrics.jsonl")


def member(options: Options, environment: Mapping[str, str]) -> Member:
    """Return which of ``--nodes`` processes this is.

    Raises
    ------
    UsageError
        No launcher started this process, or not as many as the flag says.
    UnsupportedError
        A flag that several processes cannot honour so far.
    """
    if options.nodes == 1:
        return Member()
    for name, reason in _ALONE.items():
        if options.has(name):
            raise UnsupportedError(f"--{name} is for one process so far: {reason}; leave it out, or use --nodes 1")
    found = next((names for mark, names in _LAUNCHERS.items() if mark in environment), None)
    if found is None:
        raise UsageError(
            f"--nodes {options.nodes}: no launcher started this process; use `srun --ntasks={options.nodes} ...` or "
            f"`mpirun -n {options.nodes} ...`, or --nodes 1"
        )
    rank, count, local = (int(environment[name]) for name in found)
    if count != options.nodes:
        raise UsageError(f"--nodes {options.nodes}, but the launcher started {count} processes; make them agree")
    return Member(rank, count, local)

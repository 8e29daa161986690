"""Several processes: which of them this one is, by a launcher's variables; and whether they can run pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multimesh.launch import ADDRESS, LAUNCHERS, Launcher, run_together
from multimesh_maxtext.command.flags import Flags
from multimesh_maxtext.errors import FlagError, ProcessLostError, UnfitError


@dataclass(frozen=True)
class Member:
    """This process among those that train: its rank, how many there are, and its rank on this machine."""

    rank: int = 0
    count: int = 1
    local: int = 0


SINGLE = Member()
"""The process of a job that has one."""


def find_members(flags: Flags, environment: Mapping[str, str]) -> list[Member]:
    """Return which of ``--nodes`` processes this is, or all with ``--spawn``; refuse a job that nobody started so."""
    if flags.spawn or flags.nodes == 1:
        return [Member(rank, flags.nodes, rank) for rank in range(flags.nodes)]
    (launcher, this), starts = find_launcher(environment), not (flags.dry_run or flags.forecast)
    if launcher is None and not starts:
        return [Member(count=flags.nodes)]
    if launcher is None:
        raise FlagError(
            f"--nodes {flags.nodes}: no launcher started this process; use `srun --ntasks={flags.nodes} ...` or "
            f"`mpirun -n {flags.nodes} ...`, or --spawn to start all here, or --nodes 1"
        )
    if this.count != flags.nodes:
        raise FlagError(f"--nodes {flags.nodes}, but {launcher.name} started {this.count} processes; make them agree")
    if starts and launcher.address and not {launcher.address, ADDRESS} & environment.keys():
        raise FlagError(
            f"{launcher.name} does not say where process 0 is; give all processes {ADDRESS}=HOST:PORT there"
        )
    return [this]


def find_repeats(flags: Flags, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a line where a job of one process is started several times, as by ``srun`` without ``--nodes``."""
    with contextlib.suppress(FlagError):
        launcher, this = find_launcher(environment)
        if launcher and flags.nodes == 1 and this.rank == 0:
            yield (
                f"{launcher.name} started {this.count} processes, and each that gets here runs this whole job; with "
                f"--nodes {this.count} they train together"
            )


def find_launcher(environment: Mapping[str, str]) -> tuple[Launcher | None, Member]:
    """Return the launcher of this process, if it is one of several, and its place among them."""
    for launcher in (row for row in LAUNCHERS if row.mark in environment):
        rows = filter(None, (launcher.rank, launcher.size, launcher.local))
        names = [next((name for name in row if name in environment), row[-1]) for row in rows]
        values = [environment.get(name, "") for name in names]
        this = Member(*map(int, values)) if all(map(str.isdecimal, values)) else None
        if this is None or max(this.rank, this.local) >= this.count:
            variables = ", ".join(map("=".join, zip(names, values, strict=True)))
            raise FlagError(
                f"{variables}: no process of {launcher.name} has these; start all with one launcher, or unset "
                f"{launcher.mark}"
            )
        if this.count > 1:  # the shell of `srun --pty bash` is one task, which may start others
            return launcher, this
    return None, SINGLE


def check_processes(o: Flags, python: Sequence[str], variables: Sequence[Mapping[str, str]], unfit: Path) -> None:
    """Let processes, each with its variables, check their devices and the way between them; stderr gets the table."""
    shared, stages = (o.checkpoint or o.output or Path()).absolute(), o.pp if o.staged else 1
    words = ("check", "--quick", f"--stages={stages}", f"--folder={shared}", f"--unfit={unfit}")
    command = ("sh", "-c", 'exec "$@" >&2', "check", *python, "multimesh", *words)
    code = run_together([command] * len(variables), variables)
    if code == ProcessLostError.exit_code or code < 0:
        raise ProcessLostError("--check: a process or a transfer did not answer; the table above says which")
    if code:
        nodes = unfit.read_text().split() if unfit.exists() else []
        which = f"; at fault: {', '.join(nodes)}" if nodes else ""
        raise UnfitError(f"--check: these processes cannot run pipelines{which}; the table above says why")

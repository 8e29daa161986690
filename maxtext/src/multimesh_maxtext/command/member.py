"""Finds which of several processes this one is, by a launcher's variables, and where each of them writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from multimesh.launch import ADDRESS, LAUNCHERS, Launcher
from multimesh_maxtext.command.options import Options, Parsed
from multimesh_maxtext.command.translate import Paths
from multimesh_maxtext.errors import UnsupportedError, UsageError

_RANK, _SIZE, _LOCAL = (f"MULTIMESH_MAXTEXT_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK"))
_OWN = Launcher("--spawn or Kubernetes", mark=_RANK, rank=(_RANK,), size=(_SIZE,), local=(_LOCAL,))


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
        process = f"process-{self.rank}"
        return replace(paths.below(process), process=process)

    def variables(self) -> dict[str, str]:
        """Return variables that tell the trainer its rank, also under a launcher that JAX would ask."""
        return {_RANK: str(self.rank), _SIZE: str(self.count), _LOCAL: str(self.local)}


ALONE = Member()
"""The process of a job that has one."""


def find_alone(o: Options) -> Iterator[UnsupportedError]:
    """Yield the flags that several processes cannot honour so far."""
    if o.nodes == 1 or not o.staged or o.forecast:
        return
    if o.verify and o.gpus:
        yield UnsupportedError(
            "--verify is for one process so far on GPUs: the reference trains on all GPUs of a stage; leave it out, or "
            f"use --nodes 1 --gpus {o.nodes * o.gpus} where one machine has them"
        )


def member(options: Options, environment: Mapping[str, str]) -> Member:
    """Return which of ``--nodes`` processes this is.

    Raises ``UsageError`` if no launcher started this process, or not as many as the flag says, or its variables make
    no sense.
    """
    if options.nodes == 1:
        return ALONE
    found, this = find_launcher(environment)
    if found is None and (options.dry_run or options.forecast):
        return Member(count=options.nodes)
    if found is None:
        raise UsageError(
            f"--nodes {options.nodes}: no launcher started this process; use `srun --ntasks={options.nodes} ...` or "
            f"`mpirun -n {options.nodes} ...`, or --spawn to start all here, or --nodes 1"
        )
    if this.count != options.nodes:
        raise UsageError(f"--nodes {options.nodes}, but {found.name} started {this.count} processes; make them agree")
    starts = not (options.dry_run or options.forecast)
    if starts and found.address and not {found.address, ADDRESS} & environment.keys():
        raise UsageError(
            f"{found.name} does not say where process 0 is; give all processes {ADDRESS}=HOST:PORT, a free port there"
        )
    return this


def find_repeats(options: Options, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a line where a job of one process is started several times, as by ``srun`` without ``--nodes``."""
    with contextlib.suppress(UsageError):
        found, this = find_launcher(environment)
        if found and options.nodes == 1 and this.rank == 0:
            yield (
                f"{found.name} started {this.count} processes, and each that gets here runs this whole job; with "
                f"--nodes {this.count} they train together"
            )


def any_member(parsed: Parsed, environment: Mapping[str, str]) -> Member:
    """Return which process this is as far as that can be known from a command line that may be wrong."""
    several = parsed.options.nodes > 1 or "--nodes" in parsed.doubtful
    return find_launcher(environment)[1] if several and not parsed.options.spawn else ALONE


def is_numbered_by_us(environment: Mapping[str, str]) -> bool:
    """Return whether ``--spawn`` or a manifest for Kubernetes numbered this process, for which JAX has no launcher."""
    return find_launcher(environment)[0] is _OWN


def find_launcher(environment: Mapping[str, str]) -> tuple[Launcher | None, Member]:
    """Return the launcher of this process, if it is one of several, and its place among them.

    Raises ``UsageError`` for variables that no launcher sets so.
    """
    for launcher in (_OWN, *LAUNCHERS):
        if launcher.mark not in environment:
            continue
        this = Member(
            *(_number(environment, launcher, names) for names in (launcher.rank, launcher.size, launcher.local))
        )
        if max(this.rank, this.local) >= this.count:
            raise UsageError(
                f"rank {this.rank} ({this.local} on this machine) of {this.count} processes, by the variables of "
                f"{launcher.name}: that cannot be; start all with one launcher, or unset {launcher.mark}"
            )
        if this.count > 1:  # the shell of `srun --pty bash` is one task, which may start others
            return launcher, this
    return None, ALONE


def _number(environment: Mapping[str, str], launcher: Launcher, names: tuple[str, ...]) -> int:
    if not names:
        return 0
    name = next((name for name in names if name in environment), names[-1])
    value = environment.get(name, "")
    if not value.isdecimal():
        said = f"{name}={value} is no number" if value else f"{name} is not set"
        raise UsageError(
            f"{said}, but {launcher.mark} is set, as by {launcher.name}; start all processes with one launcher, or "
            f"unset {launcher.mark}"
        )
    return int(value)

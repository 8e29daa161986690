"""``--fallback``: the grids on which a job goes on when some of its processes cannot be had any more.

Every grid is checked before the job starts. The choice then only needs the number of processes that are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import multimesh
from multimesh import planner
from multimesh_maxtext.command import memory
from multimesh_maxtext.command.checks import Job
from multimesh_maxtext.command.options import Options, read
from multimesh_maxtext.command.settings import read_dataset
from multimesh_maxtext.command.settle import settle
from multimesh_maxtext.command.suggesting import Asked, make_training
from multimesh_maxtext.command.values import GRID_AXES, Axes
from multimesh_maxtext.errors import LauncherError, Several, UsageError


@dataclass(frozen=True)
class Grid:
    """A grid for a number of processes."""

    name: str  # ``dp 2 pp 4``
    processes: int  # how many it takes
    words: tuple[str, ...] = ()  # flags that come after those of the job


def grids(job: Job, argv: Sequence[str], maxtext: Path) -> tuple[Grid, ...]:
    """Return the grid of the flags, and those that ``--fallback`` allows, in the order in which they are taken.

    Raises ``LauncherError`` for a grid that does not come out: it names the grid, and why.
    """
    o = job.options
    own = Grid(o.grid, o.nodes, ("--nodes", str(o.nodes)))
    if o.fallback is None:
        return (own,)
    if read_dataset(o) == "grain":
        raise UsageError(
            "--fallback: dataset_type=grain keeps a position in the data for each process, so the job cannot go on in "
            "another number of processes; leave out --fallback, or use --text"
        )
    listed = _guess(job, argv, maxtext) if isinstance(o.fallback, str) else _grids_of(job, o.fallback, argv, maxtext)
    return (own, *(grid for grid in listed if grid.name != own.name))


def count_processes(options: Options) -> None:
    """Let the grid of the flags say how many processes there are: a batch script asks before it starts any."""
    options.nodes = max(1, options.parallelism // (options.gpus or options.cpus or 1))


def choose(found: Sequence[Grid], processes: int) -> Grid | None:
    """Return the first grid that so many processes can run; none if there is none."""
    return next((grid for grid in found if grid.processes <= processes), None)


def lines(found: Sequence[Grid]) -> str:
    """Return the grids as text for a batch script: a line for each, its processes before its flags."""
    return "\n".join(" ".join((str(grid.processes), *grid.words)) for grid in found)


def _grids_of(job: Job, given: Sequence[Axes], argv: Sequence[str], maxtext: Path) -> Iterator[Grid]:
    """Yield the grids that the user wrote; axes that one does not name are those of the flags."""
    o = job.options
    for axes in given:
        what = "--fallback " + ",".join(f"{name}={size}" for name, size in axes)
        changed = Options(**{**vars(o), **dict(axes)})
        each = job.devices // o.nodes
        if changed.parallelism > job.devices:
            raise UsageError(
                f"{what}: {changed.parallelism} devices, but the job has {job.devices}; name smaller grids"
            )
        if changed.parallelism % each:
            raise UsageError(
                f"{what}: {changed.parallelism} devices are no whole number of processes of {each} devices; "
                f"name a grid of a multiple of {each}"
            )
        grid = _grid(job, axes, changed.parallelism // each)
        try:
            _check(job, settle(read([*argv, *grid.words]), maxtext / "maxtext").job)
        except LauncherError as error:
            first = error.errors[0] if isinstance(error, Several) else error
            raise type(first)(f"{what}: {first}") from error
        yield grid


def _check(job: Job, other: Job) -> None:
    """Refuse a grid on which a step would see other rows of the data: MaxText loads one for each device at least."""
    short = [each.options.microbatch_size < each.options.tp for each in (job, other)]
    if short[0] != short[1] or (short[0] and job.options.grid != other.options.grid):
        raise UsageError(
            f"with --microbatch-size {job.options.microbatch_size} below tp MaxText drops rows, other ones on each "
            f"grid; use --microbatch-size {max(job.options.tp, other.options.tp)}"
        )


def _guess(job: Job, argv: Sequence[str], maxtext: Path) -> Iterator[Grid]:
    """Yield the best grid of each smaller number of processes, the largest first; of its layers the planner knows."""
    o = job.options
    if o.schedule in ("auto", "custom") or o.partition is not None:
        raise UsageError(
            "--fallback auto: the planner deals layers by itself; leave out --partition and such a --schedule, "
            "or name the grids"
        )
    axes = {name: 1 for name in GRID_AXES if name != "interleave"}
    fixed = ["--interleave", str(o.interleave), "--microbatch-size", str(o.microbatch_size)]
    changes = {**axes, "batch_size": job.batch, "sequence_parallel": bool(o.sequence_parallel)}
    each = job.devices // o.nodes
    for processes in range(o.nodes - 1, 0, -1):
        free = Options(**{**vars(o), **changes, "nodes": processes})
        asked = Asked(free, (*without_axes(argv), *fixed, "--batch-size", str(job.batch)), maxtext, job.model)
        training = make_training(asked, float(memory.usable(o) or 0))
        try:
            how = planner.suggest(training, processes * each, count=1, accepts=partial(_accepts, asked)).best.how
        except multimesh.UsageError:
            continue  # such a number of devices makes no grid
        sizes = {"dp": how.dp // how.ep, **{name: getattr(how, name) for name in GRID_AXES[1:]}}
        more = ["--schedule", how.schedule] if how.pp > 1 and o.schedule is None else []
        more += ["--partition", ",".join(map(str, how.layers))] if how.layers else []
        yield _grid(job, tuple(sizes.items()), processes, more)


def _accepts(asked: Asked, how: planner.Configuration) -> bool:
    return asked.accepts(how, asked.options.nodes)


def without_axes(argv: Sequence[str]) -> Iterator[str]:
    """Return the words of a command line without its grid, its processes and what starts them again."""
    values = {f"--{name}" for name in (*GRID_AXES, "nodes", "fallback", "max-restarts")}
    skip = False
    for word in argv:
        if not skip and word.partition("=")[0] not in {*values, "--spawn"}:
            yield word
        skip = not skip and word in values


def _grid(job: Job, axes: Axes, processes: int, more: Sequence[str] = ()) -> Grid:
    changed = Options(**{**vars(job.options), **dict(axes), "nodes": processes})
    sizes = {**dict(axes), "nodes": processes, "batch-size": job.batch}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    return Grid(changed.grid, processes, (*words, *more))

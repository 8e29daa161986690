"""Folders that one run at a time writes to, and the checkpoint that a run begins with; MaxText finds it by a link."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from multimesh_maxtext import checkpoint_folder
from multimesh_maxtext.command.flags import Flags
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.errors import CheckpointError, FileError, FlagError, LauncherError

RUNNING = ".running"
"""A file that is locked while a run writes to an output folder. After a step it says where the checkpoints are."""


@contextmanager
def writing(file: Path, flag: str, kind: type[LauncherError] = FileError) -> Iterator[None]:
    """Reserve a folder for one run by a lock file in it; raise an error of that ``kind`` where another run has it.

    The trainer inherits its descriptor: the reservation ends when both have ended, however they ended.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("a+b")
    except OSError as error:
        raise kind(f"{flag} {file.parent}: {error.strerror}; choose another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise kind(
                f"{flag} {file.parent}: another run writes here (`fuser {file}` names it); wait for it, stop it, or "
                "choose another folder"
            ) from None
        os.set_inheritable(lock.fileno(), True)
        yield


def make_way(o: Flags, first: Paths, paths: Paths) -> None:
    """Keep the files of another run, or remove them where a flag asks for that. Call it while `writing`."""
    folder, output, mark = o.checkpoint or Path(), first.output, first.output / RUNNING
    run = mark.read_text() if mark.is_file() else ""
    steps = bool(o.resume and checkpoint_folder.look(folder))
    goes_on = o.resume and (run == str(folder.resolve()) or (steps and not Path(run).exists()))  # it may be moved
    if run and not (goes_on or o.overwrite):
        also = f"--checkpoint {run} --resume to go on with it, " if Path(run).is_dir() else ""
        remedy = f"another run; add --overwrite to replace it, {also}or choose another folder"
        if o.resume:
            over = f"a run that wrote no checkpoint to {folder}: --resume would write over it"
            remedy = f"{over}; choose another --output"
        raise FileError(f"--output {output} holds {remedy}")
    metrics = paths.metrics if o.metrics_file and paths == first and not (goes_on or steps or o.overwrite) else None
    if metrics and metrics.is_file() and metrics.stat().st_size:
        raise FileError(f"--metrics-file {metrics} has the steps of another run; remove it, or choose another file")
    if o.overwrite:
        names = {path.name for path in paths.output.glob("process-*")} - {f"process-{rank}" for rank in range(o.nodes)}
        for path in (path for name in (*paths.products, *names) for path in paths.output.glob(name)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


PARAMETERS = "load_parameters_path"
"""MaxText's setting for the checkpoint whose parameters a run begins with."""

_POSITIONS = "iter"
"""Folder of a checkpoint in which each process keeps its position in the data."""


@contextmanager
def beginning(job: Job, *, first: bool = True) -> Iterator[int]:
    """Reserve ``--checkpoint`` for this run, and yield the step that it begins with, which stderr tells.

    Only the ``first`` of several processes reserves and prints.
    """
    o = job.flags
    _check_parameters(job)
    if o.checkpoint is None:
        yield 0
        return
    with writing(o.checkpoint / ".writing", "--checkpoint", CheckpointError) if first else nullcontext():
        if first:  # Orbax writes over a half-written step, but a run that goes on may save at others
            for half in o.checkpoint.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(half, ignore_errors=True)
        newest = max(checkpoint_folder.look(o.checkpoint), default=-1)
        if newest >= 0:
            _check_continues(job, newest, o.checkpoint / str(newest))
        if o.resume and first:
            where = f"from checkpoint {newest}" if newest >= 0 else "from step 0: there is no checkpoint yet"
            print(f"resuming {where}", file=sys.stderr)
        yield newest + 1


def _check_parameters(job: Job) -> None:
    """Refuse a checkpoint whose parameters MaxText cannot take: it only reads the run's own form of layers."""
    o = job.flags
    source = str(o.values.get(PARAMETERS) or "")
    if not source or "://" in source:
        return
    folder = Path(source.removesuffix("/items"))
    items = folder / "items"
    remedy = "give the folder that --export writes, or one that ends with a number"
    paths = checkpoint_folder.leaf_paths(items if items.is_dir() else folder, f"{PARAMETERS}={source}", remedy)
    layers = checkpoint_folder.layers_of(paths)
    stored, scans = checkpoint_folder.layout(layers), "in stacks" if o.staged else "scanned"
    expected = scans if job.scans_layers else "unrolled"
    if not layers or stored == expected:
        return
    remedy = f"use --{'no-' if stored == 'unrolled' else ''}scan-layers"
    if stored not in ("unrolled", scans):
        remedy = "write them anew: --checkpoint DIR --export DIR --no-scan-layers"
    raise CheckpointError(f"{PARAMETERS}={source} has its layers {stored}, but this run has them {expected}; {remedy}")


def _check_continues(job: Job, newest: int, folder: Path) -> None:
    """Refuse the newest checkpoint where this run cannot go on from it, or is not to."""
    o = job.flags
    if not o.resume:
        raise FlagError(
            f"--checkpoint {o.checkpoint} has checkpoints up to {newest}; add --resume to go on from it, or choose "
            "another folder"
        )
    layers = checkpoint_folder.layers_of(checkpoint_folder.leaf_paths(folder / "items"))
    stored, expected = checkpoint_folder.layout(layers), "scanned" if job.scans_layers else "unrolled"
    in_groups = o.staged and stored == "scanned" and not job.uniform
    if stored != expected and (in_groups or not o.staged):  # a pipeline takes layers of one kind in any layout
        remedy = {
            "scanned": "use --scan-layers",
            "unrolled": "use --no-scan-layers",
            "in stacks": "go on with --backend multimesh --no-scan-layers once, which writes them unrolled",
        }[stored]
        if in_groups:
            expected, remedy = "in stages", "use --backend spmd --scan-layers with --fsdp or --tp in place of --pp"
        raise CheckpointError(
            f"checkpoint {newest} has its layers {stored}, but this run has them {expected}; {remedy}"
        )
    files = sorted((folder / _POSITIONS).glob("process_*-of-*.json")) if o.dataset == "grain" else []
    if not files:
        return
    try:
        before = len(files), json.loads(files[0].read_text(encoding="utf-8")).get("readers", 1)
    except checkpoint_folder.UNREADABLE as error:
        raise CheckpointError(f"{files[0]}: cannot be read ({error}); copy it again, or remove {folder}") from error
    if before != (o.nodes, job.readers):  # each process has its own part of the files
        raise CheckpointError(
            f"checkpoint {newest} has positions in the data of {before[0]} processes, {before[1]} of which "
            f"read; this run has {o.nodes}, {job.readers} of which read; use the --nodes, --pp and devices that it had"
        )

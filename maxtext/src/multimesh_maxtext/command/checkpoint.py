"""The checkpoint that a run begins with: one run may write to ``--checkpoint``, and MaxText finds it by a link."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from multimesh_maxtext.checkpoint_folder import (
    RECORDS,
    UNREADABLE,
    Checkpoints,
    clear_incomplete,
    layers_of,
    layout,
    leaf_paths,
    look,
)
from multimesh_maxtext.command.checks import Job
from multimesh_maxtext.command.reserve import writing
from multimesh_maxtext.command.settings import read_dataset, read_values
from multimesh_maxtext.errors import CheckpointError, DamagedCheckpointError, FileError, UsageError

PARAMETERS = "load_parameters_path"
"""MaxText's setting for the checkpoint whose parameters a run begins with."""

_POSITIONS = "iter"
"""Folder of a checkpoint in which each process keeps its position in the data."""


_LOCK = ".writing"

_TOLD = re.compile(rf"^{CheckpointError.__module__}\.{CheckpointError.__qualname__}: (.*)$", re.MULTILINE)
"""An error of the trainer's process, as Python prints it."""

_DAMAGED = re.compile(rf"\b{DamagedCheckpointError.__name__}: (.*)$", re.MULTILINE)
"""The same of a damaged one, also as a line of the library tells it of another process."""

_BEGUN = re.compile(r"restoring params from (\S+)$", re.MULTILINE)
_UNLIKE = re.compile(r"Checkpoint does not match the model:\n((?:  - .*\n)+)")
"""MaxText's log on the parameters to begin with."""


@dataclass(frozen=True)
class Beginning:
    """Where a run begins: its first step, and file descriptors that the trainer must inherit."""

    step: int = 0
    inherited: tuple[int, ...] = ()


@contextmanager
def beginning(job: Job, checkpoints: Path, *, first: bool = True, patience: float = 0.0) -> Iterator[Beginning]:
    """Reserve ``--checkpoint`` for this run, find the step that it begins with, and print that to stderr.

    ``checkpoints``: where MaxText keeps its checkpoints.
    ``first``: whether this is the first of several processes. Only that reserves the folder and prints.
    ``patience``: seconds to wait for another run that is about to end.

    Raises ``UsageError`` for checkpoints that nobody asked to go on from, and ``CheckpointError`` for a folder that
    cannot be used, or a checkpoint that this run cannot go on from.
    """
    o = job.options
    _check_parameters(job)
    if o.checkpoint is None:
        yield Beginning()
        return
    lock = writing(o.checkpoint / _LOCK, "--checkpoint", CheckpointError, patience=patience)
    with lock if first else nullcontext() as descriptor:
        found = look(o.checkpoint)
        for line in clear_incomplete(found) if first else ():
            print(line, file=sys.stderr)
        if found.steps:
            _check_continues(job, found)
            _check_position(job, found)
        if o.resume and first:
            where = f"from checkpoint {found.steps[-1]}" if found.steps else "from step 0: there is no checkpoint yet"
            print(f"resuming {where}", file=sys.stderr)
            if found.steps and not any((o.checkpoint / str(found.steps[-1])).glob(RECORDS)):
                print(
                    f"checkpoint {found.steps[-1]} has no checksums (an older version wrote it, or its run was killed "
                    "just after); its bytes are not compared",
                    file=sys.stderr,
                )
        link(checkpoints, o.checkpoint)
        yield Beginning(found.next_step, () if descriptor is None else (descriptor,))


def _check_parameters(job: Job) -> None:
    """Refuse a checkpoint whose parameters MaxText cannot take: it only reads the run's own form of layers."""
    o = job.options
    given = str(read_values(o.settings).get(PARAMETERS) or "")
    if not given or "://" in given:
        return
    folder = Path(given.removesuffix("/items"))
    items = folder / "items"
    try:
        layers = layers_of(leaf_paths(items if items.is_dir() else folder))
    except UNREADABLE as error:
        raise CheckpointError(
            f"{PARAMETERS}={given}: cannot be read as a checkpoint of MaxText ({error}); give the folder that --export "
            "writes, or one that ends with a number"
        ) from error
    kept, scans = layout(layers), "in stacks" if o.staged else "scanned"
    wanted = scans if job.scans_layers else "unrolled"
    if not layers or kept == wanted:
        return
    if kept in ("unrolled", scans):
        remedy = f"use --{'no-' if kept == 'unrolled' else ''}scan-layers"
    else:
        source = folder.parent if folder.name.isdecimal() else "FOLDER, where they come from,"
        remedy = f"write them anew with --checkpoint {source} --export DIR --no-scan-layers, and begin with DIR"
    raise CheckpointError(f"{PARAMETERS}={given} has its layers {kept}, but this run has them {wanted}; {remedy}")


def _check_continues(job: Job, found: Checkpoints) -> None:
    o, newest = job.options, found.steps[-1]
    if not o.resume:
        raise UsageError(
            f"--checkpoint {found.folder} has checkpoints up to {newest}; add --resume to go on from it, or choose "
            "another folder"
        )
    kept, wanted = layout(found.layers()), "scanned" if job.scans_layers else "unrolled"
    if o.staged and kept == "scanned" and not job.alike:
        raise CheckpointError(
            f"checkpoint {newest} has its layers scanned in groups, and a pipeline cannot take them apart yet; "
            "use --backend spmd --scan-layers with --fsdp or --tp in place of --pp"
        )
    if o.staged or kept == wanted:  # a pipeline takes layers of one kind in any layout
        return
    remedy = {
        "scanned": "use --scan-layers",
        "unrolled": "use --no-scan-layers",
        "in stacks": "go on with --backend multimesh --no-scan-layers once, which writes them unrolled",
    }
    raise CheckpointError(f"checkpoint {newest} has its layers {kept}, but this run has them {wanted}; {remedy[kept]}")


def _check_position(job: Job, found: Checkpoints) -> None:
    """Refuse a position in the data that other processes had: each has its own part of the files."""
    o, folder = job.options, found.folder / str(found.steps[-1]) / _POSITIONS
    files = sorted(folder.glob("process_*-of-*.json")) if read_dataset(o) == "grain" else []
    if not files:
        return
    try:
        kept = json.loads(files[0].read_text(encoding="utf-8"))
    except UNREADABLE as error:
        raise CheckpointError(
            f"{files[0]}: cannot be read ({error}); copy it again, or remove {folder.parent}"
        ) from error
    before = (len(files), kept.get("readers", 1))
    if before != (o.nodes, job.readers):
        raise CheckpointError(
            f"checkpoint {found.steps[-1]} has positions in the data of {before[0]} processes, {before[1]} of which "
            f"read; this run has {o.nodes}, {job.readers} of which read; use the --nodes, --pp and devices that it had"
        )


def link(checkpoints: Path, folder: Path) -> None:
    """Make the folder appear where MaxText keeps its checkpoints.

    Raises ``UsageError`` where something else is there already.
    """
    checkpoints.parent.mkdir(parents=True, exist_ok=True)
    if checkpoints.is_symlink():
        checkpoints.unlink()
    if checkpoints.exists():
        raise FileError(f"{checkpoints} is in the way of the link to --checkpoint; choose another --output")
    checkpoints.symlink_to(folder.resolve())


def is_written_to(checkpoints: Path, folder: Path) -> bool:
    """Return whether a run that keeps its checkpoints here wrote to a folder, even if that was moved since."""
    if not checkpoints.is_symlink():
        return False
    return checkpoints.resolve() == folder.resolve() or (not checkpoints.exists() and bool(look(folder).steps))


def explain(log: str, folder: Path | None) -> CheckpointError | None:
    """Return the error that the trainer's log tells of a checkpoint; ``None`` if it tells none.

    ``folder``: that of ``--checkpoint``, if there is one.
    """
    if folder and (damaged := _DAMAGED.search(log)):
        return DamagedCheckpointError(damaged[1])
    told, given, unlike = _TOLD.findall(log), _BEGUN.findall(log), _UNLIKE.search(log)
    if told and folder:
        return CheckpointError(f"--checkpoint {folder}: {told[-1]}")
    if given and unlike:
        first, *more = unlike[1].splitlines()
        rest = f" and {len(more)} more" if more else ""
        return CheckpointError(
            f"{PARAMETERS}={given[-1]} is of another model: {first.removeprefix('  - ')}{rest}; use the flags that it "
            "was written with, but for the parallelism"
        )
    return None

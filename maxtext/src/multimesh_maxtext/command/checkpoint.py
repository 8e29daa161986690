"""Folders that one run at a time writes to, and the checkpoint that a run begins with; MaxText finds it by a link."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from multimesh_maxtext import checkpoint_folder
from multimesh_maxtext.command.dataset import write_corpus
from multimesh_maxtext.command.flags import Flags
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.errors import CheckpointError, FileError, FlagError, LauncherError


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


@contextmanager
def reserve_folders(job: Job, first: Paths, places: Sequence[Paths], texts: Sequence[str]) -> Iterator[None]:
    """Reserve ``--output`` for a run, and make the folders of its processes here, which write to these ``places``."""
    with writing(places[0].running, "--output"):
        for paths in places:
            make_way(job.flags, first, paths)
            prepare_folders(job, paths, texts)
        yield


def make_way(o: Flags, first: Paths, paths: Paths) -> None:
    """Keep the files of another run, or remove them where a flag asks for that."""
    folder, output = o.checkpoint or Path(), first.output
    run = first.running.read_text() if first.running.is_file() else ""
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


def prepare_folders(job: Job, paths: Paths, texts: Sequence[str]) -> None:
    """Make the folders, the corpus, MaxText's link to ``--checkpoint``; remove files that could pass for this run's."""
    o, link = job.flags, paths.checkpoints
    try:
        for folder in (paths.output, paths.metrics.parent, *([o.dump] if o.dump and not o.forecast else [])):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (paths.placement, paths.schedule, paths.unfit):
            file.unlink(missing_ok=True)
        if o.metrics_file:
            paths.metrics.open("ab").close()  # before anything trains
        if o.checkpoint and not (o.forecast or o.dump_only):
            link.parent.mkdir(exist_ok=True)
            if link.is_symlink():
                link.unlink()
            link.symlink_to(o.checkpoint.resolve())
    except OSError as error:
        place = error.filename2 or error.filename
        raise FileError(f"{place}: {error.strerror}; choose another --output, --metrics-file or --dump") from error
    if texts:
        write_corpus(texts, paths.text, sequence_length=o.sequence_length)


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


def check_parameters(job: Job) -> None:
    """Refuse a checkpoint whose parameters MaxText cannot take for this run."""
    source = str(job.flags.values.get(PARAMETERS) or "")
    if not source or "://" in source:
        return
    folder = Path(source.removesuffix("/items"))
    items = folder / "items"
    remedy = "give the folder that --export writes, or one that ends with a number"
    paths = checkpoint_folder.leaf_paths(items if items.is_dir() else folder, f"{PARAMETERS}={source}", remedy)
    remedy = "write them anew: --checkpoint DIR --export DIR --no-scan-layers"
    _check_layers(job, f"{PARAMETERS}={source}", paths, "in stacks" if job.flags.staged else "scanned", remedy)


def _check_layers(job: Job, source: str, paths: Iterable[tuple[str, ...]], stacks: str, remedy: str) -> None:
    """Refuse a checkpoint that has its layers in another form than this run, whose scanned layers are ``stacks``."""
    layers = checkpoint_folder.layers_of(paths)
    stored, expected = checkpoint_folder.layout(layers), stacks if job.scans_layers else "unrolled"
    if layers and stored != expected:
        remedy = {"unrolled": "use --no-scan-layers", stacks: "use --scan-layers"}.get(stored, remedy)
        raise CheckpointError(f"{source} has its layers {stored}, but this run has them {expected}; {remedy}")


def _check_continues(job: Job, newest: int, folder: Path) -> None:
    """Refuse the newest checkpoint where this run cannot go on from it, or is not to."""
    o = job.flags
    if not o.resume:
        raise FlagError(
            f"--checkpoint {o.checkpoint} has checkpoints up to {newest}; add --resume to go on from it, or choose "
            "another folder"
        )
    paths = checkpoint_folder.leaf_paths(folder / "items")
    if not o.staged:
        remedy = "go on with --backend multimesh --no-scan-layers once, which writes them unrolled"
        _check_layers(job, f"checkpoint {newest}", paths, "scanned", remedy)
    elif not job.uniform and checkpoint_folder.layout(checkpoint_folder.layers_of(paths)) == "scanned":
        raise CheckpointError(  # a pipeline takes layers of one kind in any layout
            f"checkpoint {newest} has its layers scanned, but this run has them in stages; use --backend spmd "
            "--scan-layers with --fsdp or --tp in place of --pp"
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

"""Whether the folder is one that all processes share, with locks and renames as a checkpoint needs them."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from multimesh.commands.check.steps import Bench
from multimesh.commands.check.verdicts import OK, Row, make_failure
from multimesh.errors import UsageError
from multimesh.processes import agree
from multimesh.processes.initialize import name_process

SEEN = 5.0  # seconds in which a file of another host must appear; NFS keeps what it knows of a folder for some


def try_files(bench: Bench) -> str:
    """Write, rename, lock and read files of other processes in `Bench.folder`; return the first fault, or ""."""
    folder = bench.folder / agree.first_says("check: folder", f".multimesh-check-{time.time_ns()}")
    fault = ""
    with contextlib.ExitStack() as files:
        for name, act in (("made", _make), ("written", _share), ("read", _look)):
            try:
                fault = fault or act(bench, folder, files)
            except OSError as error:
                fault = f"can't write there: {error.strerror}"
            agree.barrier(f"check: folder {name}")
    if bench.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return fault


def _make(bench: Bench, folder: Path, files: contextlib.ExitStack) -> str:
    """Make the folder, and lock a file there."""
    if bench.rank == 0:
        bench.doing = f"making a folder in {bench.folder}"
        folder.mkdir(parents=True)
        fcntl.flock(files.enter_context((folder / "lock").open("w")), fcntl.LOCK_EX)
    return ""


def _share(bench: Bench, folder: Path, files: contextlib.ExitStack) -> str:
    """Try the lock of process 0, and rename a file."""
    if bench.rank == 0:
        return ""
    bench.doing = f"looking for the folder that process 0 made in {bench.folder}"
    if not _appears(folder / "lock"):
        return "what process 0 wrote is not there"
    bench.doing = "locking a file"
    with (folder / "lock").open("r+") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "a lock of process 0 does not hold here"
    bench.doing = "renaming a file"
    (folder / f"{bench.rank}.part").touch()
    (folder / f"{bench.rank}.part").rename(folder / f"{bench.rank}.done")
    return ""


def _look(bench: Bench, folder: Path, files: contextlib.ExitStack) -> str:
    """Look for the files of all processes."""
    bench.doing = "looking for the files of all processes"
    for number in range(1, len(bench.job.hosts)) if bench.rank == 0 else ():
        if not _appears(folder / f"{number}.done"):
            return f"what {name_process(number)} wrote is not there"
    return ""


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SEEN
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def judge_files(bench: Bench, every: Sequence[str]) -> list[Row]:
    """Name the first process for which the folder is not as it must be."""
    remedy = "give --folder (and checkpoints) a folder on a file system of all hosts: NFS with locks, Lustre, GPFS"
    for rank, fault in sorted(enumerate(every), key=lambda pair: pair[0] == 0):  # process 0 sees only that one is odd
        if fault:
            text = f"in {bench.folder} of {name_process(rank)}: {fault}"
            return [make_failure("shared folder", text, remedy, UsageError.exit_code, processes=[rank])]
    return [Row("shared folder", OK, f"in {bench.folder}: all see each other's files, locks and renames")]

"""Whether the folder is one that all processes share, with locks and renames as a checkpoint needs them."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multimesh.check.steps import Bench
from multimesh.check.verdicts import OK, Row, make_failure
from multimesh.errors import UsageError
from multimesh.processes import agree
from multimesh.processes.initialize import name_process

SEEN = 5.0  # seconds in which a file of another host must appear; NFS keeps what it knows of a folder for some


def try_files(bench: Bench) -> dict[str, Any]:
    """Write, rename, lock and read files of other processes in `Bench.folder`; returns the first fault."""
    rank, count = bench.rank, len(bench.job.hosts)
    name = agree.first_says("check: folder", f".multimesh-check-{time.time_ns()}")
    folder, begun = bench.folder / name, time.monotonic()
    fault = ""
    try:
        if rank == 0:
            bench.doing = f"making a folder in {bench.folder}"
            folder.mkdir(parents=True)
            (folder / "lock").touch()
            lock = (folder / "lock").open("r+")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        fault = f"can't write there: {error.strerror}"
    agree.barrier("check: folder made")
    try:
        fault = fault or _share(bench, folder, rank)
    except OSError as error:
        fault = f"can't write there: {error.strerror}"
    agree.barrier("check: folder written")
    if rank == 0 and not fault:
        bench.doing = "looking for the files of all processes"
        missing = [n for n in range(1, count) if not _appears(folder / f"{n}.done")]
        if missing:
            fault = f"what {name_process(missing[0])} wrote is not there"
    agree.barrier("check: folder read")
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return {"fault": fault, "seconds": time.monotonic() - begun}


def _share(bench: Bench, folder: Path, rank: int) -> str:
    if rank == 0:
        return ""
    bench.doing = f"looking for the folder that process 0 made in {bench.folder}"
    if not _appears(folder / "lock"):
        return "what process 0 wrote is not there"
    bench.doing = "locking a file"
    with (folder / "lock").open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "a lock of process 0 does not hold here"
        except BlockingIOError:
            pass
    bench.doing = "renaming a file"
    (folder / f"{rank}.part").write_text(str(rank))
    (folder / f"{rank}.part").rename(folder / f"{rank}.done")
    return ""


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SEEN
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def judge_files(bench: Bench, every: Sequence[dict[str, Any]]) -> list[Row]:
    """Name the first process for which the folder is not as it must be."""
    where = f"in {bench.folder}"
    remedy = "give --folder (and checkpoints) a folder on a file system of all hosts: NFS with locks, Lustre, GPFS"
    for rank, each in sorted(enumerate(every), key=lambda pair: pair[0] == 0):  # process 0 sees only that one is odd
        if each["fault"]:
            text = f"{where} of {name_process(rank)}: {each['fault']}"
            return [make_failure("shared folder", text, remedy, UsageError.exit_code, processes=[rank])]
    return [Row("shared folder", OK, f"{where}: all see each other's files, locks and renames")]

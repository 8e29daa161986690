"""Saving of a checkpoint: each process writes its own shards, then all agree once, and process 0 names it.

A save writes to a folder of a name that no other writer has, and renames it when it is whole. The rename fails where a
checkpoint is already: of two jobs that save to one path one is told, and nothing is ever a mixture of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from multimesh.checkpoints import background, shard_files
from multimesh.checkpoints.leaves import describe, has_sharding, kind_of, name_leaves
from multimesh.checkpoints.shard_files import Part, Shard
from multimesh.errors import BusyError, DamagedError, MultiMeshError, UsageError
from multimesh.processes import agree
from multimesh.processes.arrays import bounds, is_key

HALF = ".half-written"
"""Ending of the name of a checkpoint that is being written."""

FILE = "process-{}.shards"
_numbers = itertools.count(1)
T = TypeVar("T")


def save(path: Path, tree: Any, *, beside: bool = False, while_saving: str = "wait") -> None:
    """See `multimesh.distributed.save`; ``beside``: in the background."""
    leaves = name_leaves(tree)
    kinds = {name: kind_of(name, x) for name, x in leaves.items()}
    step = f"save {next(_numbers)}"
    if while_saving == "refuse" and agree.first_says(f"{step}/busy", background.busy()):
        raise BusyError(
            f"mm.distributed.save to {path}: the save before it goes on in the background; save later, call "
            'mm.distributed.wait_for_save() first, or leave out while_saving="refuse"'
        )
    background.finish()
    lines = [str(path), *(f"{name}: {kinds[name]}{describe(x)}" for name, x in leaves.items())]
    half = path.with_name(f"{path.name}@{_writer()}.{step.split()[1]}{HALF}")
    contents = {
        "leaves": kinds,
        "writer": half.name,
        "keys": {name: str(jax.random.key_impl(x)) for name, x in leaves.items() if is_key(x)},
    }
    parts = [part for name, x in leaves.items() for part in _parts(name, x)]
    if not beside:
        _save(step, path, half, lines, contents, parts, shard_files.THREADS)
        return
    with ThreadPoolExecutor(shard_files.THREADS) as pool:
        copied = [_copy(part, pool) for part in parts]
    background.begin(functools.partial(_save, step, path, half, lines, contents, copied, 1))


@functools.cache
def _writer() -> str:
    """Return the name of this job as a writer: host and number of process 0, and a random part."""
    return agree.first_says("writer", f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")


def _save(
    step: str,
    path: Path,
    half: Path,
    lines: Sequence[str],
    contents: dict[str, Any],
    parts: Sequence[Part],
    threads: int,
) -> None:
    """Write this process's parts, and let all processes agree that the checkpoint is complete."""

    def write() -> list[Any]:
        if jax.process_index() == 0:
            _refuse(path)
            for left in _halves(path):
                if _is_over(left):
                    shutil.rmtree(left, ignore_errors=True)
        half.mkdir(parents=True, exist_ok=True)
        if not parts:
            return []
        return [shard.row() for shard in shard_files.write(half / FILE.format(jax.process_index()), parts, threads)]

    def finish(told: Sequence[tuple[str, list[Any]]]) -> bool:
        if len({digest for digest, _ in told}) > 1:
            return False
        every = [Shard.of(row) for _, part in told for row in part]

        def is_there() -> None:
            _refuse(path)  # a faster job has removed what this one wrote
            shard_files.check_sizes(half, every)

        shard_files.retry(is_there, half, DamagedError)
        shard_files.write_table(half, contents, every)
        shard_files.settle_folder(half)
        _refuse(path)
        try:
            half.rename(path)  # now the checkpoint is there, and whole; it fails where another one is
        except OSError:
            if not _is_from(path, half):  # NFS, when it asks twice, may call a rename failed that was done
                raise
        shard_files.settle_folder(path.parent)
        for left in _halves(path):  # of jobs that were killed, or that will be told
            shutil.rmtree(left, ignore_errors=True)
        return True

    attempt = functools.partial(_attempt, path, half)
    error, shards = None, list[Any]()
    try:
        shards = attempt(write, "something already")
    except MultiMeshError as wrong:
        error = wrong
    digest = sha256("\n".join(lines).encode()).hexdigest()
    try:
        if not agree.raise_together(step, error, (digest, shards), lambda told: attempt(lambda: finish(told))):
            shutil.rmtree(half, ignore_errors=True)  # of another path it is another folder
            agree.agree_on(step, lines)  # which raises
    except MultiMeshError:
        if jax.process_index() == 0:
            shutil.rmtree(half, ignore_errors=True)
        raise


def _refuse(path: Path) -> None:
    if path.exists():
        raise FileExistsError(errno.EEXIST, "", str(path))


def _is_from(path: Path, half: Path) -> bool:
    """Return whether a checkpoint was written as the unfinished folder ``half``, which has been renamed since."""
    with contextlib.suppress(OSError, UsageError):
        return not half.exists() and shard_files.read_table(path)[0]["writer"] == half.name
    return False


def _halves(path: Path) -> list[Path]:
    """Return the checkpoints of this name that were not finished."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return [p for p in beside if p.name.endswith(HALF) and p.name.rpartition("@")[0] == path.name]


def _is_over(half: Path) -> bool:
    """Return whether the process that made this folder was one of this machine, and has ended."""
    host, pid = half.name.rpartition("@")[2].rsplit("-", 2)[:2]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False


def _parts(name: str, x: Any) -> Iterator[Part]:
    """Yield the parts of a leaf that this process writes: of every part of an array one process writes one copy."""
    x = jax.random.key_data(x) if is_key(x) else x
    if isinstance(x, jax.Array) and has_sharding(x):
        dtype = np.dtype(x.dtype)
        own = [shard for shard in x.addressable_shards if shard.replica_id == 0]
        found = [
            Part(name, bounds(shard.index, x.shape), dtype, functools.partial(np.asarray, shard.data)) for shard in own
        ]
    else:
        host = np.asarray(x)
        whole = [Part(name, tuple((0, n) for n in host.shape), host.dtype, lambda: host)]
        found = whole if jax.process_index() == 0 else []
    return (part for part in found if part.size)


def _copy(part: Part, pool: ThreadPoolExecutor) -> Part:
    """Copy the bytes of a part, as its array may be donated, or change.

    An error comes up when the part is written, and so in all processes.
    """
    return dataclasses.replace(part, fetch=pool.submit(lambda: np.array(part.fetch())).result)


def _attempt(
    path: Path, half: Path, part: Callable[[], T], there: str = "a checkpoint of another job, which was faster"
) -> T:
    """Run a part of a save. Raise any error as one of ours, which says what becomes of the checkpoint."""
    try:
        return part()
    except Exception as wrong:  # whatever the file system, the devices and the store raise
        begun = f"mm.distributed.save to {path}"
        if path.exists():  # also where the one that was faster has removed what this job wrote
            raise UsageError(f"{begun}: there is {there}; give every checkpoint a path of its own") from wrong
        of_system = wrong.strerror if isinstance(wrong, OSError) else None
        said = f"{of_system}: {getattr(wrong, 'filename', None) or half}" if of_system else str(wrong).strip()
        reason = (said or type(wrong).__name__).splitlines()[0]
        raise MultiMeshError(f"{begun}: {reason[:300]}; there is no checkpoint of that name") from wrong

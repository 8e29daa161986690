"""Checkpoints of arrays on any devices: each process writes and reads its own shards, with checksums.

A save writes to a folder of a name that no other writer has, and renames it when it is whole. The rename fails where a
checkpoint is already: of two jobs that save to one path one is told, and nothing is ever a mixture of both.
"""

from __future__ import annotations

import concurrent.futures
import errno
import functools
import itertools
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from multimesh.errors import DamagedError, MultiMeshError, UsageError
from multimesh.processes import agree, shard_files
from multimesh.processes.arrays import absent, is_key
from multimesh.processes.leaves import NUMBERS, compare, described, kind_of, named, placed
from multimesh.processes.shard_files import Part, Shard

HALF = ".half-written"
"""Ending of the name of a checkpoint that is being written."""

_FILE = "process-{}.shards"
_numbers = itertools.count(1)
T = TypeVar("T")


def save(path: Path, tree: Any) -> None:
    """See `multimesh.distributed.save`."""
    leaves = named(tree)
    kinds = {name: kind_of(name, x) for name, x in leaves.items()}
    step = f"save {next(_numbers)}"
    if agree.several():
        agree.agree_on(step, [str(path), *(f"{name}: {kinds[name]}{described(x)}" for name, x in leaves.items())])
    writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    half = path.with_name(f"{path.name}@{writer}{HALF}")
    contents = {
        "leaves": kinds,
        "keys": {name: str(jax.random.key_impl(x)) for name, x in leaves.items() if is_key(x)},
    }

    def begin() -> str:
        _refuse(path)
        for left in _halves(path):
            if _ended(left):
                shutil.rmtree(left, ignore_errors=True)
        half.mkdir(parents=True)
        return str(half)

    def write() -> list[Any]:
        parts = [part for name, x in leaves.items() for part in _parts(name, x)]
        shards = shard_files.write(half / _FILE.format(jax.process_index()), parts) if parts else []
        return [shard.row() for shard in shards]

    def finish(told: Sequence[list[Any]]) -> None:
        every = [Shard.of(row) for part in told for row in part]
        shard_files.check_sizes(half, every)
        shard_files.write_table(half, contents, every)
        shard_files.settle_folder(half)
        _refuse(path)
        half.rename(path)  # now the checkpoint is there, and whole; it fails where another one is
        shard_files.settle_folder(path.parent)
        for left in _halves(path):  # of jobs that were killed, or that will be told
            shutil.rmtree(left, ignore_errors=True)

    attempt = functools.partial(_attempt, path, half)
    try:
        half = Path(agree.first_does(f"{step}/begin", lambda: attempt(begin, "something already")))
        error, shards = None, []
        try:
            shards = attempt(write)
        except MultiMeshError as wrong:
            error = wrong
        agree.settle(step, error, shards, lambda told: attempt(lambda: finish(told)))
    except MultiMeshError:
        if jax.process_index() == 0:
            shutil.rmtree(half, ignore_errors=True)
        raise


def _refuse(path: Path) -> None:
    if path.exists():
        raise FileExistsError(errno.EEXIST, "", str(path))


def _halves(path: Path) -> list[Path]:
    """Checkpoints of this name that were not finished."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return [p for p in beside if p.name.endswith(HALF) and p.name.rpartition("@")[0] == path.name]


def _ended(half: Path) -> bool:
    """Whether the process that made this folder was one of this machine, and has ended."""
    host, pid = half.name.rpartition("@")[2].rsplit("-", 2)[:2]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False


def _parts(name: str, x: Any) -> list[Part]:
    """The parts of a leaf that this process writes: of every part of an array one process writes one copy."""
    x = jax.random.key_data(x) if is_key(x) else x
    if isinstance(x, jax.Array) and placed(x):
        dtype = np.dtype(x.dtype)
        own = [shard for shard in x.addressable_shards if shard.replica_id == 0]
        found = [
            Part(name, shard_files.bounds(shard.index, x.shape), dtype, functools.partial(np.asarray, shard.data))
            for shard in own
        ]
    else:
        host = np.asarray(x)
        whole = [Part(name, tuple((0, n) for n in host.shape), host.dtype, lambda: host)]
        found = whole if jax.process_index() == 0 else []
    return [part for part in found if part.size]


def _attempt(
    path: Path, half: Path, part: Callable[[], T], there: str = "a checkpoint of another job, which was faster"
) -> T:
    """Do a part of a save; raise any error as one of ours, which says what becomes of the checkpoint."""
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


def restore(path: Path, like: Any) -> Any:
    """See `multimesh.distributed.restore`."""
    wanted = named(like)
    kinds = {name: kind_of(name, x) for name, x in wanted.items()}
    step = f"restore {next(_numbers)}"
    several = [] if _is_checkpoint(path) else [str(folder) for folder in _checkpoints(path)]
    choice = [Path(folder) for folder in agree.first_says(f"{step}/choice", several)] or [path]
    for number, folder in enumerate(choice, 1):
        error: MultiMeshError | None = None
        try:
            found, keys = _read(folder, wanted, kinds)
        except MultiMeshError as wrong:
            error = wrong
        try:
            agree.settle(f"{step}/{number}", error)
            break
        except DamagedError as wrong:
            if number == len(choice):
                raise
            if jax.process_index() == 0:
                print(f"multimesh: {wrong}; going on from {choice[number]}", file=sys.stderr, flush=True)
    leaves = [_as(x, found[name], keys.get(name)) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def verify(path: Path) -> None:
    """See `multimesh.distributed.verify`."""
    error: MultiMeshError | None = None
    try:
        _, table = _table(path)
        every = [shard for own in table.values() for shard in own]
        shard_files.check_sizes(path, every)
        share = every[jax.process_index() :: jax.process_count()]
        with concurrent.futures.ThreadPoolExecutor(shard_files.THREADS) as pool:
            list(pool.map(functools.partial(shard_files.check, path), share))
    except MultiMeshError as wrong:
        error = wrong
    agree.settle(f"verify {next(_numbers)}", error)


def _is_checkpoint(folder: Path) -> bool:
    """Whether this is a checkpoint, or what is left of one."""
    return (folder / shard_files.TABLE).exists() or any(folder.glob(_FILE.format("*")))


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    inside = folder.iterdir() if folder.is_dir() else ()
    return sorted((p for p in inside if not p.name.endswith(HALF) and _is_checkpoint(p)), key=_order, reverse=True)


def _order(path: Path) -> tuple[int, str]:
    number = "".join(filter(str.isdigit, path.name))
    return int(number or 0), path.name


def _table(path: Path) -> tuple[dict[str, Any], dict[str, list[Shard]]]:
    if path.name.endswith(HALF):
        raise UsageError(f"{path} was half-written when its process ended; it can't be used")
    try:
        return shard_files.read_table(path)
    except FileNotFoundError:
        if _is_checkpoint(path):
            raise DamagedError(
                f"{path / shard_files.TABLE}: missing; copy the checkpoint again, or restore another"
            ) from None
        others = [p.name for p in _checkpoints(path.parent)[:8]]
        there = f"{path.parent} has {', '.join(reversed(others))}" if others else "nor is one beside it"
        raise UsageError(f"{path}: no checkpoint of mm.distributed.save is there; {there}") from None


def _read(folder: Path, wanted: Mapping[str, Any], kinds: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The leaves that this process is to hold, those of random keys as data; and the kinds of random keys."""
    contents, table = _table(folder)
    keys = contents["keys"]
    compare(folder, kinds, contents["leaves"])
    shard_files.check_sizes(folder, (shard for own in table.values() for shard in own))

    stored = {name: _stored(x, keys.get(name)) for name, x in wanted.items()}

    def parts(name: str) -> dict[shard_files.Bounds, np.ndarray]:
        like, (shape, dtype) = wanted[name], stored[name]
        if placed(like):
            wholes = {
                shard_files.bounds(i, shape) for i in like.sharding.addressable_devices_indices_map(shape).values()
            }
        else:
            wholes = {shard_files.bounds((slice(None),) * len(shape), shape)}
        return {whole: shard_files.read(folder, table[name], dtype, whole) for whole in wholes}

    with concurrent.futures.ThreadPoolExecutor(shard_files.THREADS) as pool:
        read = pool.map(parts, wanted)  # arrays are made in this thread, with its settings of JAX
        return {
            name: _array(x, *stored[name], each) for (name, x), each in zip(wanted.items(), read, strict=True)
        }, keys


def _stored(like: Any, key: str | None) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of what a checkpoint holds of a leaf: of random keys their data."""
    if key is None:
        return np.shape(like), np.dtype(getattr(like, "dtype", None) or np.asarray(like).dtype)
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=key)))
    return (*like.shape, *data.shape), np.dtype(data.dtype)


def _array(like: Any, shape: tuple[int, ...], dtype: Any, parts: Mapping[shard_files.Bounds, np.ndarray]) -> Any:
    """The leaf of its parts; NumPy's if it has no place."""
    if not placed(like):
        return next(iter(parts.values()))
    if not parts:
        return absent(like, like.sharding)
    return jax.make_array_from_callback(shape, like.sharding, lambda i: parts[shard_files.bounds(i, shape)], dtype)


def _as(like: Any, found: Any, key: str | None) -> Any:
    """Give what was read the type of the leaf ``like``."""
    if isinstance(like, NUMBERS) and not isinstance(like, np.generic):
        return type(like)(found.item())
    if key is not None and not (placed(like) and is_key(found)):
        wrap = functools.partial(jax.random.wrap_key_data, impl=key)
        return jax.jit(wrap, out_shardings=like.sharding)(found) if placed(like) else wrap(found)
    if isinstance(like, np.ndarray):
        return found
    if isinstance(like, np.generic):
        return found[()]
    return found if isinstance(found, jax.Array) else jnp.asarray(found)

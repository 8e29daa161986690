"""Checkpoints: finding, reading, verifying. Each process reads its own shards, and compares their checksums."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multimesh.checkpoints import background, file_sums, shard_files
from multimesh.checkpoints.leaves import NUMBERS, compare, has_sharding, kind_of, name_leaves
from multimesh.checkpoints.saving import FILE, HALF
from multimesh.checkpoints.shard_files import Shard
from multimesh.errors import DamagedError, MultiMeshError, NoRecordError, UsageError
from multimesh.processes import agree
from multimesh.processes.arrays import Bounds, absent, bounds, is_key

_OF_ORBAX = "_CHECKPOINT_METADATA"  # a file of each checkpoint of Orbax
_numbers = itertools.count(1)


def restore(path: Path, like: Any) -> Any:
    """See `multimesh.distributed.restore`."""
    background.finish()
    wanted = name_leaves(like)
    kinds = {name: kind_of(name, x) for name, x in wanted.items()}
    step = f"restore {next(_numbers)}"
    choice = agree.first_says(f"{step}/choice", _choice(path) if jax.process_index() == 0 else [])
    for number, (name, has_table) in enumerate(choice, 1):
        folder = Path(name)
        error: MultiMeshError | None = None
        try:
            if has_table:  # which another machine may see later
                with contextlib.suppress(FileNotFoundError):
                    shard_files.retry((folder / shard_files.TABLE).stat, folder.parent, FileNotFoundError)
            found, keys = _read(folder, wanted, kinds)
        except MultiMeshError as wrong:
            error = wrong
        try:
            agree.raise_together(f"{step}/{number}", error)
            break
        except DamagedError as wrong:
            if number == len(choice):
                raise
            if jax.process_index() == 0:
                print(f"multimesh: {wrong}; going on from {choice[number][0]}", file=sys.stderr, flush=True)
    leaves = [_as(x, found[name], keys.get(name)) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _choice(path: Path) -> list[tuple[str, bool]]:
    """Return the checkpoint, or those of the folder, the newest first, each with whether its table is there."""
    every = [] if _is_checkpoint(path) else _checkpoints(path)
    return [(str(folder), (folder / shard_files.TABLE).exists()) for folder in every or [path]]


def verify(path: Path) -> None:
    """See `multimesh.distributed.verify`."""
    background.finish()
    error: MultiMeshError | None = None
    share, shares = jax.process_index(), jax.process_count()
    try:
        if (path / _OF_ORBAX).exists() or any(path.glob(file_sums.RECORD.format("*", "*"))):
            _verify_files(path, share, shares)
        else:
            _verify_shards(path, share, shares)
    except MultiMeshError as wrong:
        error = wrong
    agree.raise_together(f"verify {next(_numbers)}", error)


def _verify_shards(path: Path, share: int, shares: int) -> None:
    _, table = _table(path)
    every = [shard for own in table.values() for shard in own]
    shard_files.check_sizes(path, every)
    with concurrent.futures.ThreadPoolExecutor(shard_files.THREADS) as pool:
        list(pool.map(functools.partial(shard_files.check, path), every[share::shares]))


def _verify_files(path: Path, share: int, shares: int) -> None:
    sums, whole = file_sums.read_record(path)
    file_sums.check_share(path, sums, share, shares)
    if not whole:
        raise NoRecordError(
            f"{path} has no checksums of {'some' if sums else 'its'} files: an older version wrote it, or its job was "
            "killed just after; mm.distributed.record(path) writes those of the bytes that it has now"
        )


def record(path: Path) -> None:
    """See `multimesh.distributed.record`."""
    if not path.is_dir():
        raise UsageError(f"{path}: no checkpoint is there")
    file_sums.write_record(path, jax.process_index(), jax.process_count())


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or the rest of one."""
    return (folder / shard_files.TABLE).exists() or any(folder.glob(FILE.format("*")))


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
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
    """Return the leaves for this process, random keys as data; and the kinds of random keys."""
    contents, table = _table(folder)
    keys = contents["keys"]
    compare(folder, kinds, contents["leaves"])
    shard_files.check_sizes(folder, (shard for own in table.values() for shard in own))

    stored = {name: _type_on_disk(x, keys.get(name)) for name, x in wanted.items()}

    def parts(name: str) -> dict[Bounds, np.ndarray]:
        like, (shape, dtype) = wanted[name], stored[name]
        if has_sharding(like):
            wholes = {bounds(i, shape) for i in like.sharding.addressable_devices_indices_map(shape).values()}
        else:
            wholes = {bounds((slice(None),) * len(shape), shape)}
        return {whole: shard_files.read(folder, table[name], dtype, whole) for whole in wholes}

    with concurrent.futures.ThreadPoolExecutor(shard_files.THREADS) as pool:
        read = pool.map(parts, wanted)  # arrays are made in this thread, with its settings of JAX
        return {
            name: _array(x, *stored[name], each) for (name, x), each in zip(wanted.items(), read, strict=True)
        }, keys


def _type_on_disk(like: Any, key: str | None) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype of a leaf in a checkpoint, which has the data of random keys."""
    if key is None:
        return np.shape(like), np.dtype(getattr(like, "dtype", None) or np.asarray(like).dtype)
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=key)))
    return (*like.shape, *data.shape), np.dtype(data.dtype)


def _array(like: Any, shape: tuple[int, ...], dtype: Any, parts: Mapping[Bounds, np.ndarray]) -> Any:
    """Return the leaf made of its parts; a NumPy array if it has no place."""
    if not has_sharding(like):
        return next(iter(parts.values()))
    if not parts:
        return absent(like, like.sharding)
    return jax.make_array_from_callback(shape, like.sharding, lambda i: parts[bounds(i, shape)], dtype)


def _as(like: Any, found: Any, key: str | None) -> Any:
    """Convert a leaf as read to the type of the leaf ``like``."""
    if isinstance(like, NUMBERS) and not isinstance(like, np.generic):
        return type(like)(found.item())
    if key is not None and not (has_sharding(like) and is_key(found)):
        wrap = functools.partial(jax.random.wrap_key_data, impl=key)
        return jax.jit(wrap, out_shardings=like.sharding)(found) if has_sharding(like) else wrap(found)
    if isinstance(like, np.ndarray):
        return found
    if isinstance(like, np.generic):
        return found[()]
    return found if isinstance(found, jax.Array) else jnp.asarray(found)

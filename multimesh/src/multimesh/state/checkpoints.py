"""Checkpoints are found, read and verified: each process reads its shards, and compares its share of the sums."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multimesh.errors import DamagedError, NoRecordError, UsageError
from multimesh.processes import agree
from multimesh.state import file_sums, saving
from multimesh.state.saving import HALF, has_sharding, kind_of, load_handlers, name_leaves

TREE = "_METADATA"
"""Orbax's description of a tree. `save` notes the types of all leaves in it."""

_MARKS = (TREE, "_CHECKPOINT_METADATA", file_sums.RECORD.format("*", "*"))
_numbers = itertools.count(1)


def restore(path: Path, like: Any, *, partial: bool = False) -> Any:
    """See `multimesh.distributed.restore`."""
    load_handlers("mm.distributed.restore")
    saving.wait_for_save()
    targets = name_leaves(like)
    kinds = {name: kind_of(x) for name, x in targets.items()}
    step = f"restore {next(_numbers)}"
    choice = [path] if _is_checkpoint(path) else _list_checkpoints(path) or [path]
    names = agree.first_says(f"{step}/choice", [*map(str, choice)])
    leaves = None
    while leaves is None:
        folder = Path(names.pop(0))
        try:
            agree.run_in_all(f"{step}/{folder.name}/check", functools.partial(_check, folder))
            leaves = agree.run_in_all(
                f"{step}/{folder.name}", functools.partial(_read, folder, targets, kinds, partial)
            )
        except DamagedError as wrong:
            if not names:
                raise
            if jax.process_index() == 0:
                print(f"multimesh: {wrong}; going on from {names[0]}", file=sys.stderr, flush=True)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def verify(path: Path) -> None:
    """See `multimesh.distributed.verify`."""
    saving.wait_for_save()
    agree.run_in_all(f"verify {next(_numbers)}", functools.partial(_check, path, strict=True))


def record(path: Path) -> None:
    """See `multimesh.distributed.record`."""
    if not path.is_dir():
        raise UsageError(f"{path}: no checkpoint is there")
    share, shares = jax.process_index(), jax.process_count()
    names = [name for name in file_sums.list_files(path) if zlib.crc32(name.encode()) % shares == share]
    file_sums.write_sums(path, file_sums.sum_files(path, names), share, shares)


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or a part of one."""
    return any(any(folder.glob(mark)) for mark in _MARKS)


def _list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    inside = folder.iterdir() if folder.is_dir() else ()
    checkpoints = [path for path in inside if not path.name.endswith(HALF) and _is_checkpoint(path)]
    return sorted(checkpoints, key=lambda path: (int("0" + re.sub(r"\D", "", path.name)), path.name), reverse=True)


def _read_contents(folder: Path) -> dict[str, Any]:
    """Return what `save` notes of a checkpoint; empty if another program wrote it."""
    file = folder / TREE
    try:
        tree = json.loads(file.read_bytes())
        return dict((tree.get("custom_metadata") or {}).get("multimesh") or {})
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"{file}: {error}; {file_sums.REMEDY}") from None


def _check(folder: Path, *, strict: bool = False) -> None:
    """Refuse what is no checkpoint that can be read, and compare this process's share of the checksums.

    Raises ``DamagedError`` if bytes or records are missing, and with ``strict`` ``NoRecordError`` where there are none.
    """
    if folder.name.endswith(HALF):
        raise UsageError(f"{folder} was half-written when its process ended; it can't be used")
    if not _is_checkpoint(folder):
        others = ", ".join(path.name for path in reversed(_list_checkpoints(folder.parent)[:8]))
        beside = f"{folder.parent} has {others}" if others else "nor is one beside it"
        raise UsageError(f"{folder}: no checkpoint of mm.distributed.save is there; {beside}")
    sums, complete = file_sums.read_sums(folder)
    file_sums.check_share(folder, sums, jax.process_index(), jax.process_count())
    if complete:
        return
    file_sums.read_sums(folder, _read_contents(folder).get("records"))  # names the one that is missing
    if strict:
        raise NoRecordError(
            f"{folder} has no checksums of {'some' if sums else 'its'} files: its job was killed just after it wrote "
            "it, or nobody called mm.distributed.record(path), which writes those of the bytes that it has now"
        )
    if not (folder / TREE).exists():
        raise DamagedError(f"{folder / TREE}: missing; {file_sums.REMEDY}")


def _read(folder: Path, like: Mapping[str, Any], kinds: Mapping[str, str], partial: bool) -> list[Any]:
    """Return the leaves for this process."""
    contents = _read_contents(folder)
    if not contents:
        raise UsageError(
            f"{folder} was not written by mm.distributed.save: restore it with Orbax and mm.distributed.orbax_handler()"
        )
    stored = contents["leaves"]
    for name in [*kinds, *(() if partial else stored)]:
        saved, target = stored.get(name, "nothing"), kinds.get(name, "nothing")
        if saved != target:
            raise UsageError(f"{folder} has {name} as {saved}, `like` as {target}; give a tree like the one saved")
    try:
        arrays = load_handlers("mm.distributed.restore").read(folder, like)
        return [_convert(x, arrays[name], contents["keys"].get(name)) for name, x in like.items()]
    except Exception as error:  # whatever the file system, Orbax and TensorStore raise
        raise DamagedError(f"{folder} can't be read: {saving.first_line(error)}; {file_sums.REMEDY}") from error


def _convert(like: Any, value: Any, key: str | None) -> Any:
    """Convert a leaf as read to the type of the leaf ``like``."""
    if key is not None:
        wrap = functools.partial(jax.random.wrap_key_data, impl=key)
        return jax.jit(wrap, out_shardings=like.sharding)(value) if has_sharding(like) else wrap(value)
    if not isinstance(like, np.ndarray) and not hasattr(like, "sharding"):
        return value[()] if isinstance(like, np.generic) else type(like)(value)
    return value if isinstance(like, np.ndarray) or isinstance(value, jax.Array) else jnp.asarray(value)

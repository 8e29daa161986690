"""Checkpoints are saved, found, read and verified: each process writes and reads its shards, and sums of its share.

A save writes to a folder of a name that no other writer has, and renames it: of two jobs that save to one path one is
told, and nothing is ever a mixture of both. Orbax's own checkpointer has one such name for all jobs, and its processes
wait for one that can't write until a barrier times out.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multimesh.errors import DamagedError, MissingPartError, MultiMeshError, NoRecordError, UsageError
from multimesh.processes import agree
from multimesh.processes.arrays import is_key
from multimesh.processes.liveness import leave
from multimesh.state import file_sums

OLDEST = (0, 12, 4)
"""Orbax before this fails where JAX's preemption service is off, as `initialize` leaves it."""

HALF = ".half-written"
"""Ending of the name of a checkpoint that is being written."""

TREE = "_METADATA"
"""Orbax's description of a tree. `save` notes the types of all leaves in it."""

_MARKS = (TREE, "_CHECKPOINT_METADATA", file_sums.RECORD.format("*", "*"))
_OF_TENSORSTORE = re.compile(r'local file "([^"]+)".*: ([^:\[]+) \[', re.DOTALL)
_numbers = itertools.count(1)
_thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="multimesh-save")
_last: concurrent.futures.Future[None] | None = None


def load_handlers(user: str) -> ModuleType:
    """Import our handlers of Orbax, for ``user``, a public name.

    Raises ``MissingPartError`` where Orbax is not installed, or is older than `OLDEST`.
    """
    try:
        version = metadata.version("orbax-checkpoint")
    except metadata.PackageNotFoundError:
        version = "none"
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        raise MissingPartError(
            f"{user} needs orbax-checkpoint {'.'.join(map(str, OLDEST))} or later, and {version} is installed: "
            "pip install 'multimesh-jax[checkpoints]'"
        )
    return importlib.import_module("multimesh.state.handlers")


def name_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves by their names, such as ``params/0/w``."""
    leaves: dict[str, Any] = {}
    folders: dict[str, str] = {}  # in which Orbax writes leaves, to their names
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "tree"
        other = folders.setdefault(name.replace("/", "."), name)
        if name in leaves or other != name or name in (".", ".."):
            raise UsageError(f"the tree has leaves that are called {name!r} and {other!r}: rename a key")
        leaves[name] = leaf
    for name in leaves:
        *above, _ = itertools.accumulate(name.split("/"), "{}/{}".format)
        for other in leaves.keys() & above:
            raise UsageError(f"the tree has leaves that are called {name!r} and {other!r}: rename a key")
    return leaves


def kind_of(x: Any) -> str:
    """Return the type of a leaf in words, such as ``float32[8,4]``."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__


def has_sharding(x: Any) -> bool:
    """Return whether a leaf has a sharding. Otherwise every process has it."""
    return bool(x.committed) if isinstance(x, jax.Array) else getattr(x, "sharding", None) is not None


def save(path: Path, tree: Any, *, background: bool = False) -> None:
    """See `multimesh.distributed.save`."""
    global _last
    handlers = load_handlers("mm.distributed.save")
    wait_for_save()
    leaves = name_leaves(tree)
    if not leaves:
        raise UsageError(f"mm.distributed.save to {path}: the tree has no leaves; give it an array or a number")
    kinds = {name: kind_of(x) for name, x in leaves.items()}
    arrays = {name: handlers.store(name, x) for name, x in leaves.items()}
    step = f"save {next(_numbers)}"
    places = {name: x.sharding if has_sharding(x) else "the host" for name, x in leaves.items()}
    agree.agree_on(step, [str(path), *(f"{name}: {kinds[name]} on {place}" for name, place in places.items())])

    def begin(_: Sequence[None]) -> str:
        writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        half = path.with_name(f"{path.name}@{writer}{HALF}")
        with _explain_errors(path, half):
            half.mkdir(parents=True)
        return half.name

    half = path.with_name(agree.run_in_all(step, lambda: None, begin))
    keys = {name: str(jax.random.key_impl(x)) for name, x in leaves.items() if is_key(x)}
    contents = {"records": jax.process_count(), "leaves": kinds, "keys": keys}
    written = handlers.begin_write(half, arrays, contents)
    if background:
        _last = _thread.submit(_finish, step, path, half, *written)
    else:
        _finish(step, path, half, *written)


def wait_for_save() -> None:
    """Wait until the save in the background is complete; raise its error, once. Ctrl-C ends the wait, not the save."""
    global _last
    if _last is not None:
        concurrent.futures.wait([_last])
        future, _last = _last, None
        future.result()


def _wait_at_end() -> None:
    """Wait as the process ends. Tell an error that nobody has heard of in one line, and end with its code."""
    try:
        wait_for_save()
    except Exception as error:  # noqa: BLE001 - whatever it is, no one else tells it
        sys.stderr.write(f"multimesh: {error}\n")
        leave(getattr(error, "exit_code", 1))


# Python calls these in reverse order before it ends: while it still starts threads, which Orbax needs.
threading._register_atexit(_wait_at_end)  # type: ignore[attr-defined]


def _finish(step: str, path: Path, half: Path, futures: Sequence[Any], files: Sequence[str]) -> None:
    """Wait until this process has written its files; when all have, let process 0 name the checkpoint."""
    sums: dict[str, file_sums.Sums] = {}

    def write() -> list[str]:
        with _explain_errors(path, half):
            for future in futures:
                future.result()
            sums.update(file_sums.sum_files(half, files))
            if jax.process_index():
                file_sums.write_sums(half, sums, jax.process_index(), jax.process_count())
        return [*files]

    def name(files_of_all: Sequence[Sequence[str]]) -> None:
        with _explain_errors(path, half):
            load_handlers("mm.distributed.save").finish_write(half)
            others = sorted({*file_sums.list_files(half)}.difference(*files_of_all))
            file_sums.write_sums(half, sums | file_sums.sum_files(half, others), 0, len(files_of_all))
            half.rename(path)  # which fails where another job was faster
        for remnant in path.parent.glob(f"*{HALF}"):  # of jobs that were killed, or that will be told
            if remnant.name.rpartition("@")[0] == path.name:
                shutil.rmtree(remnant, ignore_errors=True)

    try:
        agree.run_in_all(f"{step}/finish", write, name)
    except MultiMeshError:
        if jax.process_index() == 0:
            shutil.rmtree(half, ignore_errors=True)
        raise


@contextlib.contextmanager
def _explain_errors(path: Path, half: Path) -> Iterator[None]:
    """Refuse a path that exists; raise any error of a save as one of ours."""
    label = f"mm.distributed.save to {path}"
    try:
        if path.exists():
            raise FileExistsError
        yield
    except Exception as error:
        if path.exists():  # also where a job that was faster has removed what this one wrote
            raise UsageError(f"{label}: there is something already; give every checkpoint a path of its own") from error
        raise MultiMeshError(f"{label}: {first_line(error, half)}; there is no checkpoint of that name") from error


def first_line(error: Exception, place: Path | str = "") -> str:
    """Return what went wrong, in a line: of an error of the system its reason and the file, or the ``place``."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename or place}"
    elif writing := _OF_TENSORSTORE.search(text):
        text = f"{writing[2]}: {writing[1]}"
    return text.splitlines()[0][:300]


def restore(path: Path, like: Any, *, partial: bool = False) -> Any:
    """See `multimesh.distributed.restore`."""
    load_handlers("mm.distributed.restore")
    wait_for_save()
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
            read = functools.partial(_read, folder, targets, kinds, partial)
            leaves = agree.run_in_all(f"{step}/{folder.name}", read)
        except DamagedError as fault:
            if not names:
                raise
            if jax.process_index() == 0:
                print(f"multimesh: {fault}; going on from {names[0]}", file=sys.stderr, flush=True)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def verify(path: Path) -> None:
    """See `multimesh.distributed.verify`."""
    wait_for_save()
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
        hint = f"{folder.parent} has {others}" if others else "nor is one beside it"
        raise UsageError(f"{folder}: no checkpoint of mm.distributed.save is there; {hint}")
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
    leaves = contents["leaves"]
    for name in [*kinds, *(() if partial else leaves)]:
        saved, target = leaves.get(name, "nothing"), kinds.get(name, "nothing")
        if saved != target:
            raise UsageError(f"{folder} has {name} as {saved}, `like` as {target}; give a tree like the one saved")
    try:
        arrays = load_handlers("mm.distributed.restore").read(folder, like)
        return [_convert(x, arrays[name], contents["keys"].get(name)) for name, x in like.items()]
    except Exception as error:  # whatever the file system, Orbax and TensorStore raise
        raise DamagedError(f"{folder} can't be read: {first_line(error)}; {file_sums.REMEDY}") from error


def _convert(like: Any, value: Any, key: str | None) -> Any:
    """Convert a leaf as read to the type of the leaf ``like``."""
    if key is not None:
        wrap = functools.partial(jax.random.wrap_key_data, impl=key)
        return jax.jit(wrap, out_shardings=like.sharding)(value) if has_sharding(like) else wrap(value)
    if not isinstance(like, np.ndarray) and not hasattr(like, "sharding"):
        return value[()] if isinstance(like, np.generic) else type(like)(value)
    return value if isinstance(like, np.ndarray) or isinstance(value, jax.Array) else jnp.asarray(value)

"""Saving: each process writes its own shards, and when all have, process 0 gives the folder its name.

A save writes to a folder of a name that no other writer has, and renames it: of two jobs that save to one path one is
told, and nothing is ever a mixture of both. Orbax's own checkpointer has one such name for all jobs, and its processes
wait for one that can't write until a barrier times out.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import itertools
import os
import re
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from multimesh.errors import MissingPartError, MultiMeshError, UsageError
from multimesh.processes import agree
from multimesh.processes.arrays import is_key
from multimesh.state import file_sums

OLDEST = (0, 12, 4)
"""Orbax before this fails where JAX's preemption service is off, as `initialize` leaves it."""

HALF = ".half-written"
"""Ending of the name of a checkpoint that is being written."""

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
    if isinstance(x, jax.Array):
        return bool(x.committed)
    return getattr(x, "sharding", None) is not None


def save(path: Path, tree: Any, *, background: bool = False) -> None:
    """See `multimesh.distributed.save`."""
    global _last
    handlers = load_handlers("mm.distributed.save")
    wait_for_save()
    leaves = name_leaves(tree)
    if not leaves:
        raise UsageError(f"mm.distributed.save to {path}: the tree has no leaves; give it an array or a number")
    kinds = {name: kind_of(x) for name, x in leaves.items()}
    stored = {name: handlers.store(name, x) for name, x in leaves.items()}
    step = f"save {next(_numbers)}"
    places = {name: x.sharding if has_sharding(x) else "the host" for name, x in leaves.items()}
    agree.agree_on(step, [str(path), *(f"{name}: {kinds[name]} on {place}" for name, place in places.items())])
    writer = agree.first_says(step, f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
    half = path.with_name(f"{path.name}@{writer}{HALF}")

    def begin() -> None:
        if jax.process_index() == 0:
            with _explain_errors(path, half):
                half.mkdir(parents=True)

    agree.run_in_all(f"{step}/begin", begin)
    keys = {name: str(jax.random.key_impl(x)) for name, x in leaves.items() if is_key(x)}
    contents = {"records": jax.process_count(), "leaves": kinds, "keys": keys}
    written = handlers.begin_write(half, stored, contents)
    if background:
        _last = _thread.submit(_finish, step, path, half, *written)
    else:
        _finish(step, path, half, *written)


def wait_for_save() -> None:
    """Wait until the save in the background is complete; raise its error, once. Ctrl-C ends the wait, not the save."""
    global _last
    if _last is not None:
        concurrent.futures.wait([_last])
        done, _last = _last, None
        done.result()


def _wait_at_end() -> None:
    """Wait as the process ends. Tell an error that nobody has heard of in one line, and end with its code."""
    try:
        wait_for_save()
    except Exception as error:  # noqa: BLE001 - whatever it is, no one else tells it
        sys.stderr.write(f"multimesh: {error}\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(getattr(error, "exit_code", 1))


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
    begun = f"mm.distributed.save to {path}"
    try:
        if path.exists():
            raise FileExistsError
        yield
    except Exception as error:
        if path.exists():  # also where a job that was faster has removed what this one wrote
            raise UsageError(f"{begun}: there is something already; give every checkpoint a path of its own") from error
        raise MultiMeshError(f"{begun}: {first_line(error, half)}; there is no checkpoint of that name") from error


def first_line(error: Exception, place: Path | str = "") -> str:
    """Return what went wrong, in a line: of an error of the system its reason and the file, or the ``place``."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename or place}"
    elif writing := _OF_TENSORSTORE.search(text):
        text = f"{writing[2]}: {writing[1]}"
    return text.splitlines()[0][:300]

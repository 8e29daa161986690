"""Several processes that run one plan: the public functions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from multimesh.core import _compat, checks
from multimesh.errors import DamagedError, NoRecordError
from multimesh.processes.agree import agree_on, barrier
from multimesh.processes.arrays import gather
from multimesh.processes.initialize import Processes, fail, initialize, tell_at_loss
from multimesh.state import checkpoints

__all__ = [
    "DamagedError",
    "NoRecordError",
    "Processes",
    "agree_on",
    "barrier",
    "fail",
    "gather",
    "initialize",
    "orbax_handler",
    "orbax_state_handler",
    "record",
    "restore",
    "save",
    "tell_at_loss",
    "verify",
    "wait_for_save",
]


def save(path: str | os.PathLike[str], tree: Any, *, background: bool = False) -> None:
    """Write a tree to a new folder, in Orbax's format. All processes call it, in the same order.

    It needs ``pip install multimesh-jax[checkpoints]``. Each process writes the shards that it holds, each shard once,
    and checksums of its files. The folder appears under its name when all is written. If a process is killed, the
    folder is complete or not there, and earlier checkpoints stay as they are.

    With ``background=True`` the call blocks for three things only: a save before it that still goes on; the values of
    the tree, if they are not computed yet; and a copy of this process's shards to memory of the host. After that the
    arrays may be donated. Threads write the copy, agree with the other processes and rename the folder. Python waits
    for them at its end, also after Ctrl-C. An error of theirs is raised by the next `save`, `wait_for_save`, `restore`
    or `verify`, whichever comes first, which then does nothing else. If none comes, the process ends with a line and
    the exit code of the error.

    Parameters
    ----------
    path
        A folder that does not exist yet, on a file system of all processes: one for each checkpoint, ``"ck/100"``.
    tree
        A pytree of arrays, keys of ``jax.random.key``, numbers, and None. Committed arrays may lie on any devices, also
        without a shard in this process. All other leaves must be the same in all processes.
    background
        Whether to return before the checkpoint is written.

    Raises
    ------
    UsageError
        If ``path`` exists, also if another job has saved to it meanwhile. If a leaf can't be saved, or the trees of the
        processes differ.
    MultiMeshError
        In every process, if one can't write; names that process. Also if the save before it could not.
    """
    with _compat.without_mesh():
        checkpoints.save(_folder("save", path), tree, background=background)


def wait_for_save() -> None:
    """Wait until a `save` in the background is complete. Raises its error; Ctrl-C ends the wait, not the save."""
    checkpoints.wait_for_save()


def restore(path: str | os.PathLike[str], like: Any, *, partial: bool = False) -> Any:
    """Read a tree of `save`. All processes call it.

    The number of processes and the layouts may differ from those at the time of saving: each process reads the shards
    that it is to hold.

    Parameters
    ----------
    path
        The folder that `save` wrote, ``"ck/100"``. Or a folder of such folders, ``"ck"``: then the one with the largest
        number. If that is damaged, a line says so, and the one before it is read.
    like
        A tree like the saved one, of arrays or of ``jax.ShapeDtypeStruct``, whose shardings say where each array goes.
        Every process reads leaves that are not committed or have no sharding.
    partial
        Whether ``like`` may have fewer leaves than the checkpoint: ``{"params": like}``, or ``(like, None)`` of a pair,
        reads the parameters alone. The checksums of all files are compared anyway.

    Returns
    -------
    The tree. A leaf is a NumPy array or a Python number if it is one in ``like``.

    Raises
    ------
    UsageError
        If there is no complete checkpoint, or its names, shapes or dtypes differ; names the first difference.
    DamagedError
        In every process, if one of them reads other bytes than were saved; names the file and the shard.
    """
    with _compat.without_mesh():
        return checkpoints.restore(_folder("restore", path), like, partial=partial)


def verify(path: str | os.PathLike[str]) -> None:
    """Read a whole checkpoint and compare its checksums. Several processes all call it; each reads its share.

    It takes checkpoints of `save`, and those of Orbax and MaxText that have a `record`.

    Raises
    ------
    DamagedError
        If a byte is not the one that was saved, or one is missing; names the file and the shard, or arrays in it.
    NoRecordError
        If a checkpoint of Orbax has no record of all its files. Those that have one are as they were written.
    UsageError
        If there is no complete checkpoint.
    """
    checkpoints.verify(_folder("verify", path))


def record(path: str | os.PathLike[str]) -> None:
    """Write the checksums of all files of a checkpoint of Orbax into its folder, for `verify`.

    Call it in all processes when the checkpoint is complete. Each reads its share of the files; they do not
    communicate. ``maxtext/run.py`` does so by itself. Checkpoints of `save` have checksums without it.

    Raises
    ------
    UsageError
        If there is no checkpoint.
    """
    checkpoints.record(_folder("record", path))


def orbax_handler() -> Any:
    """Return Orbax's handler of ``jax.Array``, for arrays of which a process holds all shards or none.

    Orbax's own checkpointers and managers refuse such arrays. With this handler they save and restore them.

    Examples
    --------
    >>> ocp.type_handlers.register_type_handler(  # doctest: +SKIP
    ...     jax.Array, mm.distributed.orbax_handler(), override=True
    ... )
    """
    return checkpoints.load_handlers("mm.distributed.orbax_handler").ArrayHandler()


def orbax_state_handler() -> type:
    """Return a handler class for Orbax's new checkpointer: nested dictionaries of such arrays.

    The checkpointer is ``orbax.checkpoint.v1``.
    """
    state: type = checkpoints.load_handlers("mm.distributed.orbax_state_handler").StateHandler
    return state


def _folder(user: str, path: str | os.PathLike[str]) -> Path:
    return Path(checks.path(f"mm.distributed.{user}: path", path)).absolute()

"""Several processes that run one plan: the public functions."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from multimesh.core import _compat
from multimesh.errors import MissingPartError
from multimesh.processes import checkpoints
from multimesh.processes.agree import agree_on, barrier
from multimesh.processes.gather import gather
from multimesh.processes.initialize import Processes, fail, initialize

__all__ = [
    "Processes",
    "agree_on",
    "barrier",
    "fail",
    "gather",
    "initialize",
    "orbax_handler",
    "orbax_state_handler",
    "restore",
    "save",
    "verify",
]


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Write a tree to a new folder. All processes call it, in the same order, and wait until it is complete.

    Each process writes the shards that it holds, each shard once. The folder appears under its name when all is
    written. If a process is killed, the folder is complete or not there, and earlier checkpoints stay as they are.

    Parameters
    ----------
    path
        A folder that does not exist yet, on a file system of all processes: one for each checkpoint, ``"ck/100"``.
    tree
        A pytree of arrays of any dtype, keys of ``jax.random.key``, numbers, and None. Committed arrays may lie on any
        devices, also without a shard in this process. All other leaves must be the same in all processes.

    Raises
    ------
    UsageError
        If ``path`` exists, also if another job has saved to it meanwhile. If a leaf can't be saved, or the trees of the
        processes differ.
    MultiMeshError
        In every process, if one can't write; names that process.
    """
    with _compat.without_mesh():
        checkpoints.save(Path(path).absolute(), tree)


def restore(path: str | os.PathLike[str], like: Any) -> Any:
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

    Returns
    -------
    The tree. A leaf is a NumPy array or a Python number if it is one in ``like``.

    Raises
    ------
    UsageError
        If there is no complete checkpoint, or its names, shapes or dtypes differ; names the first difference.
    DamagedError
        In every process, if what one reads is not what was saved; names the file and the shard.
    """
    with _compat.without_mesh():
        return checkpoints.restore(Path(path).absolute(), like)


def verify(path: str | os.PathLike[str]) -> None:
    """Read a whole checkpoint of `save` and compare its checksums. Several processes all call it; each reads its share.

    Raises
    ------
    DamagedError
        If a byte is not the one that was saved, or one is missing; names the file and the shard.
    UsageError
        If there is no complete checkpoint.
    """
    checkpoints.verify(Path(path).absolute())


def orbax_handler() -> Any:
    """Orbax's handler of ``jax.Array``, for arrays of which a process holds all shards or none.

    Orbax's own checkpointers and managers refuse such arrays. With this handler they save and restore them.

    Examples
    --------
    >>> ocp.type_handlers.register_type_handler(  # doctest: +SKIP
    ...     jax.Array, mm.distributed.orbax_handler(), override=True
    ... )
    """
    return _orbax("orbax_handler", "orbax_arrays").ArrayHandler()


def orbax_state_handler() -> type:
    """A handler class for Orbax's new checkpointer (``orbax.checkpoint.v1``): nested dictionaries of such arrays."""
    state: type = _orbax("orbax_state_handler", "orbax_state").StateHandler
    return state


def _orbax(name: str, module: str) -> Any:
    try:
        return importlib.import_module(f"multimesh.processes.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("multimesh"):
            raise
        raise MissingPartError(f"mm.distributed.{name} needs a package: pip install orbax-checkpoint") from error

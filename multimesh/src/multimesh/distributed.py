"""Several processes that run one plan: the public functions."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from multimesh.core import _compat
from multimesh.errors import MissingPartError
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
]


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Write a tree to a new folder; all processes call it, in the same order, and wait until it is whole.

    Each process writes the shards that it holds, each shard once. The folder appears under its name when all is
    written: whenever a process is killed, it is there whole or not at all, and what was saved before stays as it is.

    Parameters
    ----------
    path
        A folder that does not exist yet, on a file system of all processes: one for each checkpoint, ``"ck/100"``.
    tree
        A pytree of arrays of any dtype, keys of ``jax.random.key``, numbers, and None. Committed arrays may lie on any
        devices, also with no shard in this process; all else is taken to be the same in all processes.

    Raises
    ------
    UsageError
        Where there is something at ``path``, or a leaf can't be saved; where the trees of the processes differ.
    MultiMeshError
        In every process, where one can't write.
    MissingPartError
        Without the package orbax-checkpoint.
    """
    with _compat.without_mesh():
        _checkpoints("save").save(Path(path).absolute(), tree)


def restore(path: str | os.PathLike[str], like: Any) -> Any:
    """Read a tree that `save` wrote; all processes call it.

    There may be other processes than those that saved it, and other layouts: each reads what it is to hold.

    Parameters
    ----------
    like
        A tree as the one saved, of arrays or of ``jax.ShapeDtypeStruct``: it says where each array is to lie. What has
        no sharding, or is not committed, is read by every process.

    Returns
    -------
    The tree, with a NumPy array or a Python number in the place of each such.

    Raises
    ------
    UsageError
        Where there is no whole checkpoint, or its names, shapes or dtypes are others: the first difference.
    MissingPartError
        Without the package orbax-checkpoint.
    """
    with _compat.without_mesh():
        return _checkpoints("restore").restore(Path(path).absolute(), like)


def orbax_handler() -> Any:
    """Orbax's handler of ``jax.Array``, for arrays of which a process holds all shards or none.

    With it Orbax's own checkpointers and managers save and restore such arrays, which they refuse else.

    Examples
    --------
    >>> ocp.type_handlers.register_type_handler(  # doctest: +SKIP
    ...     jax.Array, mm.distributed.orbax_handler(), override=True
    ... )
    """
    return _checkpoints("orbax_handler").ArrayHandler()


def orbax_state_handler() -> type:
    """Class of a handler for Orbax's new checkpointer (``orbax.checkpoint.v1``): nested dictionaries of such arrays."""
    state: type = _checkpoints("orbax_state_handler", "orbax_state").StateHandler
    return state


def _checkpoints(name: str, module: str = "checkpoints") -> Any:
    try:
        return importlib.import_module(f"multimesh.processes.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("multimesh"):
            raise
        raise MissingPartError(f"mm.distributed.{name} needs a package: pip install orbax-checkpoint") from error

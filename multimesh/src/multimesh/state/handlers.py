"""Orbax's handlers, with one of our own for arrays of which a process holds all shards or none.

Import this module with `multimesh.state.checkpoints.load_handlers`: it needs Orbax.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from jax.sharding import Sharding
from orbax.checkpoint._src import asyncio_utils  # runs a coroutine, also in a notebook
from orbax.checkpoint._src.metadata.array_metadata_store import Store  # keeps the kinds of random keys
from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import (
    AbstractShardedArray,
    ArrayLeafHandler,
)
from orbax.checkpoint.experimental.v1._src.serialization.registry import StandardLeafHandlerRegistry

from multimesh.core import _compat
from multimesh.errors import UsageError
from multimesh.processes import agree
from multimesh.processes.arrays import absent, is_here, is_key
from multimesh.state.checkpoints import has_sharding, kind_of

_KEY_KIND = "random_key_impl"  # Orbax's name


@dataclass(frozen=True)
class _LocalArray:
    """An array as Orbax sees it: with the shards of this process, or with one shard that nobody writes."""

    array: jax.Array

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array, name)

    @property
    def addressable_shards(self) -> Sequence[Any]:
        shape = self.array.sharding.shard_shape(self.array.shape)
        index = (slice(None),) * len(shape)
        none = SimpleNamespace(data=jax.ShapeDtypeStruct(shape, self.array.dtype), index=index, replica_id=-1)
        return self.array.addressable_shards or [none]


class ArrayHandler(ocp.type_handlers.ArrayHandler):
    """Orbax's handler of ``jax.Array``, also for arrays that one process holds alone, or that lie elsewhere.

    It writes the same files as Orbax's own handler in one process, so either reads those of the other.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Mapping[str, str]] = {}
        super().__init__(use_replica_parallel=False, array_metadata_store=Store())

    @property
    def _ext_metadata(self) -> Mapping[str, Mapping[str, str]]:
        """Kinds of random keys. Orbax notes them by itself only for keys, and it gets their data."""
        return self._kinds

    @_ext_metadata.setter
    def _ext_metadata(self, value: Any) -> None:
        del value

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Any:
        """Write the shards that this process holds."""
        keys = [(info, x) for info, x in zip(infos, values, strict=True) if is_key(x)]
        self._kinds = {info.name: {_KEY_KIND: str(jax.random.key_impl(x))} for info, x in keys}
        with _compat.without_mesh():
            data = [jax.random.key_data(x) if is_key(x) else x for x in values]
        return await super().serialize([_LocalArray(x) for x in data] if agree.several() else data, infos, args)

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """Read the shards that this process is to hold."""
        layouts = [getattr(arg, "sharding", None) for arg in args or ()]
        far = [i for i, at in enumerate(layouts) if isinstance(at, Sharding) and not is_here(at.device_set)]
        near = [i for i in range(len(infos)) if i not in far]
        arrays: dict[int, Any] = {}
        if near:
            arguments = args and [args[i] for i in near]
            arrays |= zip(near, await super().deserialize([infos[i] for i in near], arguments), strict=True)
        if far:
            types = await self._types([infos[i] for i in far], [args[i] for i in far])
            for i, like in zip(far, types, strict=True):
                arrays[i] = absent(like, layouts[i])
        return [arrays[i] for i in range(len(infos))]

    async def _types(self, infos: Sequence[Any], args: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Types of arrays in a checkpoint."""
        metadata = await self._array_metadata_store.read(checkpoint_dir=infos[0].parent_dir)
        noted = itertools.chain.from_iterable((metadata or {}).values())
        kinds = {metadata.param_name: metadata.ext_metadata[_KEY_KIND] for metadata in noted if metadata.ext_metadata}
        types = []
        for info, arg, saved in zip(infos, args, await self.metadata(infos), strict=True):
            if kind := kinds.get(info.name):
                data = jax.ShapeDtypeStruct(saved.shape, saved.dtype)
                types.append(jax.eval_shape(functools.partial(jax.random.wrap_key_data, impl=kind), data))
            else:
                types.append(jax.ShapeDtypeStruct(saved.shape, arg.dtype or saved.dtype))
        return types


class _Arrays(ArrayLeafHandler):
    """The handler of ``jax.Array`` of Orbax's new checkpointer, which writes and reads with ours."""

    def __init__(self, *, context: Any = None) -> None:
        super().__init__(context=context)
        self._handler_impl = ArrayHandler()


class StateHandler(ocp.v1.handlers.PyTreeHandler):
    """The handler of nested dictionaries of Orbax's new checkpointer, with our handler for arrays."""

    def __init__(self, *, context: Any = None) -> None:
        leaves = StandardLeafHandlerRegistry()
        leaves.add(jax.Array, AbstractShardedArray, _Arrays, override=True, secondary_typestrs=["jax.Array"])
        super().__init__(context=context, leaf_handler_registry=leaves)


@functools.cache
def tree_handler() -> ocp.PyTreeCheckpointHandler:
    """Return Orbax's handler of trees, which keeps each array in a folder of its own and compresses nothing.

    Weights hardly get smaller, and one database for all arrays (OCDBT) is slower, to write and to read.
    """
    quiet = ("_SignalingThread.run() raised", "Skipping merge of OCDBT")  # we raise the error; there is none to merge
    logging.getLogger("absl").addFilter(lambda record: not any(word in str(record.msg) for word in quiet))
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ArrayHandler()), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)


def store(name: str, x: Any) -> Any:
    """Return a leaf as it is stored: the array with its devices, or a copy of a host's value; of a key its data."""
    if isinstance(x, jax.Array) and not _compat.is_tracer(x) and x.is_deleted():
        raise UsageError(f"{name} was donated or deleted; use what the call it was given to returned")
    if not np.size(x):
        raise UsageError(f"{name} has no elements, which Orbax can't store; leave it out")
    try:
        data = jax.random.key_data(x) if is_key(x) else x
        data = data if has_sharding(x) and isinstance(data, jax.Array) else np.array(data)
        tensorstore.dtype(data.dtype.name)
    except Exception as error:
        raise UsageError(f"{name} is a {kind_of(x)}, which can't be saved ({str(error).splitlines()[0]})") from error
    return data


def begin_write(folder: Path, arrays: Mapping[str, Any], contents: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
    """Copy leaves to the host and begin to write them as nested dictionaries.

    Returns futures, of which one raises what went wrong, and the names of the files that this process writes.
    """
    args = ocp.args.PyTreeSave(_nest(arrays), custom_metadata={"multimesh": dict(contents)})
    try:
        futures = asyncio_utils.run_sync(tree_handler().async_save(epath.Path(folder), args=args)) or ()
    except Exception as error:  # noqa: BLE001 - the other processes have to hear of it
        futures = [concurrent.futures.Future()]
        futures[0].set_exception(error)
    return [*futures], [file for name, x in arrays.items() for file in _files(name, x)]


def _files(name: str, x: Any) -> list[str]:
    """The files with the shards of an array that this process writes: of every shard one process writes one copy."""
    folder = name.replace("/", ".")
    if not isinstance(x, jax.Array):
        return [] if jax.process_index() else [f"{folder}/{'.'.join('0' * np.ndim(x)) or '0'}"]
    size = x.sharding.shard_shape(x.shape)
    corners = [[cut.start or 0 for cut in shard.index] for shard in x.addressable_shards if shard.replica_id == 0]
    places = [[at // n for at, n in zip(corner, size, strict=True)] for corner in corners]
    return [f"{folder}/{'.'.join(map(str, place)) or '0'}" for place in places]


def finish_write(folder: Path) -> None:
    """Let Orbax complete a folder that all processes have written to, and mark it as a checkpoint of Orbax."""
    tree_handler().finalize(epath.Path(folder))
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": tree_handler().typestr()}))


def read(folder: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read some leaves of a checkpoint, as arrays on the devices of ``like``, else as NumPy arrays."""
    args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in like}
    for name, x in like.items():
        if has_sharding(x):
            args[name] = ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=None if is_key(x) else x.dtype)
    restore = ocp.args.PyTreeRestore(_nest(dict.fromkeys(like, 0)), restore_args=_nest(args), partial_restore=True)
    arrays: dict[str, Any] = ocp.tree.to_flat_dict(tree_handler().restore(epath.Path(folder), args=restore), sep="/")
    return arrays


def _nest(leaves: Mapping[str, Any]) -> Any:
    return ocp.tree.from_flat_dict(dict(leaves), sep="/")

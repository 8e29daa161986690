"""Orbax's handler of ``jax.Array``, also for arrays of which a process holds all shards or none.

`multimesh.distributed.orbax_handler` imports this module, and Orbax, when it is called.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, Sharding
from orbax.checkpoint._src.metadata.array_metadata_store import Store  # keeps the kinds of random keys

from multimesh.core import _compat
from multimesh.processes import agree
from multimesh.processes.arrays import absent, here, is_key

_KEY_KIND = "random_key_impl"  # Orbax's name


@dataclass(frozen=True)
class _Held:
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
        return await super().serialize([_Held(x) for x in data] if agree.several() else data, infos, args)

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """Read the shards that this process is to hold."""
        layouts = [_layout(arg) for arg in args or ()]
        far = [i for i, layout in enumerate(layouts) if layout is not None and not here(layout.device_set)]
        near = [i for i in range(len(infos)) if i not in far]
        found: dict[int, Any] = {}
        if near:
            given = args and [args[i] for i in near]
            found |= zip(near, await super().deserialize([infos[i] for i in near], given), strict=True)
        if far:
            types = await self._types([infos[i] for i in far], [args[i] for i in far])
            for i, like in zip(far, types, strict=True):
                found[i] = absent(like, layouts[i])
        return [found[i] for i in range(len(infos))]

    async def _types(self, infos: Sequence[Any], args: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Types of arrays in a checkpoint."""
        stored = await self._array_metadata_store.read(checkpoint_dir=infos[0].parent_dir)
        noted = itertools.chain.from_iterable((stored or {}).values())
        kinds = {each.param_name: each.ext_metadata[_KEY_KIND] for each in noted if each.ext_metadata}
        types = []
        for info, arg, found in zip(infos, args, await self.metadata(infos), strict=True):
            if kind := kinds.get(info.name):
                data = jax.ShapeDtypeStruct(found.shape, found.dtype)
                types.append(jax.eval_shape(functools.partial(jax.random.wrap_key_data, impl=kind), data))
            else:
                types.append(jax.ShapeDtypeStruct(found.shape, arg.dtype or found.dtype))
        return types


def _layout(arg: Any) -> Sharding | None:
    if getattr(arg, "mesh", None) is not None and arg.mesh_axes is not None:
        return NamedSharding(arg.mesh, arg.mesh_axes)
    layout = getattr(arg, "sharding", None)
    return layout if isinstance(layout, Sharding) else None

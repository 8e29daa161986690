"""Checkpoints of arrays on any devices: each process writes and reads its own shards, by Orbax.

`multimesh.distributed` has the public functions. They import this module, and Orbax, when one is called.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, Sharding
from orbax.checkpoint._src.metadata.array_metadata_store import Store  # keeps the kinds of random keys

from multimesh.core import _compat
from multimesh.errors import MultiMeshError, UsageError
from multimesh.processes import agree
from multimesh.processes.arrays import absent, here

HALF = ".orbax-checkpoint-tmp"
"""Ending of the name of a checkpoint that is being written."""

_CONTENTS = "multimesh.json"
_FORMAT = 1
_KEY_KIND = "random_key_impl"  # Orbax's name
_WIDER = {jnp.dtype(a): b for a, b in (("uint2", np.uint8), ("uint4", np.uint8), ("float8_e4m3", np.float16))}
"""Dtypes that Orbax does not know, and wider ones that hold their values."""

_NUMBERS = (bool, int, float, complex)
_saves = itertools.count(1)


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
        keys = [(info, x) for info, x in zip(infos, values, strict=True) if _is_key(x)]
        self._kinds = {info.name: {_KEY_KIND: str(jax.random.key_impl(x))} for info, x in keys}
        with _compat.without_mesh():
            data = [jax.random.key_data(x) if _is_key(x) else x for x in values]
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


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


@functools.cache
def _handler() -> ocp.PyTreeCheckpointHandler:
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler()), (jax.Array, ArrayHandler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def save(path: Path, tree: Any) -> None:
    """See `multimesh.distributed.save`."""
    leaves = _named(tree)
    kinds = {name: _kind(name, x) for name, x in leaves.items()}
    step, half = f"save {next(_saves)}", path.with_name(path.name + HALF)
    if agree.several():
        told = [f"{name}: {kinds[name]}{_place(x)}" for name, x in leaves.items()]
        agree.agree_on(step, [str(path), *told])
    arrays = {name: y for name, x in leaves.items() if (y := _stored(x)).size}
    contents = {
        "format": _FORMAT,
        "leaves": kinds,
        "keys": {name: str(jax.random.key_impl(x)) for name, x in leaves.items() if _is_key(x)},
    }
    first = jax.process_index() == 0

    def begin() -> None:
        if path.exists() and first:
            raise UsageError("there is something already; give every checkpoint a path of its own")
        if first:
            shutil.rmtree(half, ignore_errors=True)  # left by a process that was killed
            half.mkdir(parents=True)

    def write() -> None:
        if arrays:
            _handler().save(_epath(half), args=ocp.args.PyTreeSave(arrays))

    def finish() -> None:
        if first:
            if arrays:
                _handler().finalize(_epath(half))
            (half / _CONTENTS).write_text(json.dumps(contents, indent=1), encoding="utf-8")
            half.rename(path)  # now the checkpoint is there, and whole

    for name, part in (("begin", begin), ("write", write), ("finish", finish)):
        _together(f"{step}/{name}", path, part)


def _epath(path: Path) -> Any:
    return epath.Path(path)


def _together(name: str, path: Path, part: Callable[[], None]) -> None:
    """Do a part of the work in every process. If it fails in one, all raise its error."""
    error: MultiMeshError | None = None
    try:
        part()
    except UsageError as wrong:
        error = UsageError(f"mm.distributed.save to {path}: {wrong}")
    except Exception as wrong:  # noqa: BLE001 - whatever Orbax and the file system raise
        said = f"{wrong.strerror}: {wrong.filename}" if isinstance(wrong, OSError) and wrong.strerror else str(wrong)
        reason = (said.strip() or type(wrong).__name__).splitlines()[0]
        error = MultiMeshError(f"mm.distributed.save to {path}: {reason[:300]}; there is no checkpoint of that name")
    agree.settle(name, error)


def restore(path: Path, like: Any) -> Any:
    """See `multimesh.distributed.restore`."""
    wanted = _named(like)
    contents = _contents(path)
    kinds, keys = contents["leaves"], contents["keys"]
    _compare(path, {name: _kind(name, x) for name, x in wanted.items()}, kinds)
    args = {name: _restore_args(x) for name, x in wanted.items() if _size(x)}
    found: dict[str, Any] = {}
    if args:
        item = dict.fromkeys(args, 0)
        found = _handler().restore(_epath(path), args=ocp.args.PyTreeRestore(item, restore_args=args))
    leaves = [_as(x, found.get(name), keys.get(name)) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _contents(path: Path) -> Any:
    file = path / _CONTENTS
    try:
        if path.name.endswith(HALF):
            raise UsageError(f"{path} was half-written when its process ended; it can't be used")
        contents = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        others = sorted((p for p in beside if not p.name.endswith(HALF) and (p / _CONTENTS).exists()), key=_order)
        there = f"{path.parent} has {', '.join(p.name for p in others[-8:])}" if others else "nor is one beside it"
        raise UsageError(f"{path}: no checkpoint of mm.distributed.save is there; {there}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read ({error}); is the checkpoint a whole copy?") from error
    if contents["format"] != _FORMAT:
        raise UsageError(f"{path} is of a newer MultiMesh (format {contents['format']}); use that one")
    return contents


def _order(path: Path) -> tuple[int, str]:
    number = "".join(filter(str.isdigit, path.name))
    return int(number or 0), path.name


def _compare(path: Path, wanted: Mapping[str, str], kinds: Mapping[str, str]) -> None:
    for name, kind in wanted.items():
        if name not in kinds:
            raise UsageError(f"{path} has no {name} ({kind}), which `like` has; give a tree like the one saved")
        if kinds[name] != kind:
            raise UsageError(f"{path} has {name} as {kinds[name]}, `like` as {kind}; give a tree like the one saved")
    for name, kind in kinds.items():
        if name not in wanted:
            raise UsageError(f"{path} has {name} ({kind}), which `like` lacks; give a tree like the one saved")


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by their names, such as ``params/0/w``."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "tree"
        if name in leaves:
            raise UsageError(f"the tree has two leaves that are called {name!r}: rename a key")
        leaves[name] = leaf
    return leaves


def _kind(name: str, x: Any) -> str:
    """Type of a leaf in words, such as ``float32[8,4]``."""
    if isinstance(x, _NUMBERS) and not isinstance(x, np.generic):
        if isinstance(x, int) and not -(2**63) <= x < 2**63:
            raise UsageError(f"{name} is an int of more than 64 bits, which can't be saved")
        return type(x).__name__
    if _compat.is_tracer(x):
        raise UsageError(f"{name} has no value yet: call this outside of jax.jit and other transformations")
    foreign = isinstance(x, np.ndarray) and (x.dtype.kind in "OSUMm" or issubclass(x.dtype.type, np.void))
    if not hasattr(x, "dtype") or not hasattr(x, "shape") or foreign:
        kind = f"{type(x).__name__} of {x.dtype}" if hasattr(x, "dtype") else type(x).__name__
        raise UsageError(f"{name} is a {kind}; arrays, numbers and None can be saved")
    if isinstance(x, jax.Array) and x.is_deleted():
        raise UsageError(f"{name} was donated or deleted; use what the call it was given to returned")
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _size(x: Any) -> int:
    return int(np.prod(np.shape(x)))


def _placed(x: Any) -> bool:
    """Whether a leaf has a sharding. Otherwise every process has it."""
    if isinstance(x, jax.Array):
        return bool(x.committed)
    return getattr(x, "sharding", None) is not None


def _place(x: Any) -> str:
    """The devices of a leaf as text, alike in all processes."""
    return _parts(x.sharding, x.shape) if _placed(x) else ""


@functools.lru_cache(maxsize=4096)
def _parts(layout: Sharding, shape: tuple[int, ...]) -> str:
    parts = layout.devices_indices_map(shape).items()
    return f" on {', '.join(f'{device.id}: {index}' for device, index in parts)}"


def _stored(x: Any) -> Any:
    """The leaf that Orbax gets. The first process writes leaves without a sharding."""
    if _is_key(x):
        x = jax.random.key_data(x)
    elif getattr(x, "dtype", None) in _WIDER:
        x = x.astype(_WIDER[x.dtype])
    return x if isinstance(x, jax.Array) and _placed(x) else np.asarray(x)


def _restore_args(x: Any) -> Any:
    if not _placed(x):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=x.sharding)


def _as(like: Any, found: Any, kind: str | None) -> Any:
    """Give what was read the type of the leaf ``like``. Arrays without elements were not written."""
    if isinstance(like, _NUMBERS) and not isinstance(like, np.generic):
        return type(like)(found.item())
    if kind is not None:
        if found is None:
            found = np.zeros((*like.shape, *jax.random.key_data(jax.random.key(0, impl=kind)).shape), np.uint32)
        wrap = functools.partial(jax.random.wrap_key_data, impl=kind)
        return jax.jit(wrap, out_shardings=like.sharding)(found) if _placed(like) else wrap(found)
    if found is None:
        found = np.zeros(like.shape, like.dtype)
        if _placed(like):
            return jax.make_array_from_callback(like.shape, like.sharding, lambda index: found[index], like.dtype)
    if like.dtype in _WIDER:
        found = found.astype(like.dtype)
    if isinstance(like, np.ndarray | np.generic):
        return found
    return found if isinstance(found, jax.Array) else jnp.asarray(found)

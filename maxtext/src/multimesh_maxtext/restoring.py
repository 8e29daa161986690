"""Restores a checkpoint in the trainer's process, also one whose layers lie otherwise than the run's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from multimesh_maxtext.checkpoint import Checkpoints
from multimesh_maxtext.relayout import Relayout


def restore(manager: Any, step: int, items: Any, composite: Callable[..., Any], *, layers: int) -> Any:
    """Return what ``manager.restore`` would if the checkpoint had the layout of ``items.item``.

    Leaves of other layouts pass through the host's memory. Random keys of layers stay as the run made them.
    """
    kept = Checkpoints(Path(manager.directory), (step,), ()).paths()
    target, args = _flat(items.item), _flat(items.restore_args)
    wanted = {tuple(map(str, path)): path for path in target}
    relayout = Relayout(wanted, kept, layers)
    if all(sources == [path] for path, sources in relayout.sources.items()):
        return manager.restore(step, args=composite(items=items))
    moved = {name for name in relayout.sources if not _is_key(target[wanted[name]])}
    item = {path: target[path] for name, path in wanted.items() if name not in relayout.sources}
    given = {path: args[path] for path in item}
    for name in moved:
        for source in relayout.sources[name]:
            path = tuple(int(part) if part.isdigit() else part for part in source)
            item[path] = jax.ShapeDtypeStruct((), np.float32)  # NumPy arrays come in the shape and type they have
            given[path] = ocp.RestoreArgs(restore_type=np.ndarray)
    read = ocp.args.PyTreeRestore(item=_nested(item), restore_args=_nested(given), partial_restore=True)
    found = _flat(manager.restore(step, args=composite(items=read))["items"])
    arrays = {tuple(map(str, path)): leaf for path, leaf in found.items()}
    result = {}
    for name, path in wanted.items():
        leaf = target[path]
        if name in moved:
            array = relayout.leaf(name, leaf.shape, arrays)
            result[path] = jax.device_put(np.asarray(array, leaf.dtype), leaf.sharding)
        else:
            result[path] = found.get(path, leaf)
    return {"items": _nested(result)}


def _flat(tree: Any) -> dict[tuple[str | int, ...], Any]:
    """Leaves of nested dictionaries and lists by their paths; ``None`` is a leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
    return {tuple(key.idx if hasattr(key, "idx") else key.key for key in path): leaf for path, leaf in leaves}


def _nested(flat: Mapping[tuple[str | int, ...], Any]) -> Any:
    """The dictionaries and lists that `_flat` took apart."""
    if () in flat:
        return flat[()]
    groups: dict[Any, dict[Any, Any]] = {}
    for path, leaf in flat.items():
        groups.setdefault(path[0], {})[path[1:]] = leaf
    if all(isinstance(key, int) for key in groups):
        return [_nested(groups[i]) if i in groups else None for i in range(max(groups) + 1)]
    return {key: _nested(group) for key, group in groups.items()}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)

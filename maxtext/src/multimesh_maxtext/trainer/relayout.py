"""Restores a checkpoint in the trainer's process. Its layers may have another layout than the run's.

The names tell which layers an entry holds: ``layers_3`` that one, ``layers_0_3`` a stack of four, ``layers`` a stack of
all. MaxText stacks parameters and their moments along their second dimension, everything else along the first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from multimesh_maxtext.checkpoint_folder import layers_of, layout, leaf_paths, split_layer_name
from multimesh_maxtext.errors import CheckpointError
from multimesh_maxtext.trainer.placement import name_path
from multimesh_maxtext.trainer.processes import absent, has_device, place

Entry = tuple[str, ...]

Sources = Mapping[Entry, list[tuple[Entry, int | None]]]
"""For a leaf of the run its layers in the checkpoint: the entry of each, and the layer's number there if it is a stack.

Leaves that the checkpoint has under their own names are left out."""

_SECOND = ("params", "opt_state")  # stacked along the second dimension


def make_loader(checkpoints: Any, layers: int | None = None) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Return how Orbax's checkpointer loads a step, but for a checkpoint of another model, which is refused before.

    With the number of ``layers`` it loads a checkpoint of any layout in the run's layout: arrays of other layouts pass
    through the host's memory, and random keys of layers stay as the run made them.
    """
    load = checkpoints.load_checkpointables

    def load_step(step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        target = flat(abstract["items"])
        stored = leaf_paths(Path(checkpoints.directory) / str(step) / "items") if layers else ()
        sources = find_sources(target, stored, layers or 0)
        described = checkpoints.checkpointables_metadata(step).metadata.get("items")
        if described is not None:  # else it cannot be read, and to load it tells why
            check_same(target, flat(described), sources)
        if not sources:
            return load(step, abstract)
        item = {path: leaf for path, leaf in target.items() if path not in sources}
        for path, parts in sources.items():
            if has_device(target[path].sharding) and not _is_key(target[path]):
                item |= {source: np.ndarray for source, _ in parts}  # these come in the shape and type they have
        loaded = load(step, abstract | {"items": nest(item)})
        arrays = flat(loaded["items"])

        def make(path: Entry, leaf: Any) -> Any:
            if path not in sources:
                return arrays.get(path, leaf)
            if _is_key(leaf):
                return leaf
            if not has_device(leaf.sharding):
                return absent(leaf, leaf.sharding)
            array = join_layers(path, sources[path], arrays)
            if array.shape != leaf.shape:
                raise CheckpointError(
                    f"the checkpoint's {'/'.join(path)} gives {array.shape}, but the model has {leaf.shape}; use the "
                    "flags that it was written with, but for the parallelism"
                )
            return place(np.asarray(array, leaf.dtype), leaf.sharding)

        return loaded | {"items": nest({path: make(path, leaf) for path, leaf in target.items()})}

    return load_step


def check_same(model: Mapping[Entry, Any], stored: Mapping[Entry, Any], sources: Sources) -> None:
    """Raise ``CheckpointError`` where a checkpoint is of another model or optimizer, with the first leaf that differs.

    ``model``, ``stored``: leaves of the run, and of the checkpoint. Layers in another layout are checked when they are
    joined.
    """
    elsewhere = {*sources, *(source for parts in sources.values() for source, _ in parts)}
    for part in _SECOND:
        for path in sorted(path for path in {*model, *stored} - elsewhere if path[0] == part):
            there, here = (getattr(leaves.get(path), "shape", "not there") for leaves in (stored, model))
            if there != here:
                raise CheckpointError(
                    f"the checkpoint is of another model or optimizer: {'/'.join(path)} is {there} in it and {here} in "
                    "this run; use the flags that it was written with, but for the parallelism"
                )


def flat(tree: Any) -> dict[Entry, Any]:
    """Return the leaves of nested dictionaries and lists by their paths; ``None`` is a leaf."""
    return {name_path(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)}


def nest(leaves: Mapping[Entry, Any]) -> Any:
    """Return the dictionaries and lists that `flat` took apart; what numbers name is a list."""
    if () in leaves:
        return leaves[()]
    groups: dict[str, dict[Entry, Any]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(path[0], {})[path[1:]] = leaf
    if all(map(str.isdecimal, groups)):
        names = map(str, range(max(map(int, groups)) + 1))
        return [nest(groups[name]) if name in groups else None for name in names]
    return {name: nest(group) for name, group in groups.items()}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def layers_in(name: str, total: int) -> range:
    """Return the layers that an entry of the decoder holds; none for an entry of another kind."""
    kind, numbers = split_layer_name(name) or ("", ())
    if kind != "layers":
        return range(0)
    return range(numbers[0], numbers[-1] + 1) if numbers else range(total)


def is_stack(name: str) -> bool:
    """Say whether an entry is a stack of layers rather than one layer."""
    return name.count("_") != 1


def find_sources(targets: Iterable[Entry], stored: Collection[Entry], total: int) -> Sources:
    """Return where the leaves of a run lie in a checkpoint that has its layers under other names; see `Sources`.

    A leaf of which the checkpoint lacks a part is left out: layers may share a random generator.

    ``targets``, ``stored``: paths of the run's leaves, and of the checkpoint's.
    ``total``: number of layers.
    """
    homes: dict[int, tuple[str, int | None]] = {}
    for name in sorted({part for path in stored for part in _of(path)}):
        numbers = enumerate(layers_in(name, total))
        homes |= {layer: (name, number if is_stack(name) else None) for number, layer in numbers}
    sources = dict[Entry, list[tuple[Entry, int | None]]]()
    for path in targets:
        part = next(iter(_of(path)), "")
        layers = layers_in(part, total)
        if path in stored or not homes.keys() >= {*layers}:
            continue
        at = path.index(part) if part else 0
        parts = [((*path[:at], name, *path[at + 1 :]), number) for name, number in (homes[n] for n in layers)]
        if parts and all(source in stored for source, _ in parts):
            sources[path] = parts
    return sources


def join_layers(
    path: Entry, parts: Iterable[tuple[Entry, int | None]], arrays: Mapping[Entry, np.ndarray]
) -> np.ndarray:
    """Return a leaf of the run's state, cut from and joined of the checkpoint's."""
    axis = 1 if path[0] in _SECOND else 0
    layers = [arrays[name] if number is None else np.take(arrays[name], number, axis) for name, number in parts]
    return np.stack(layers, axis) if any(map(is_stack, _of(path))) else layers[0]


def _of(path: Entry) -> list[str]:
    """Names of layers in a path."""
    return [part for part in path if layers_in(part, 1)]


def export(folder: Path, step: int, target: Path, *, unrolled: bool = False) -> dict[str, Any]:
    """Write the parameters of a checkpoint to a new folder; return how its layers lie there, and how many bytes.

    The stacks of a pipeline's pieces (``layers_0_3``, ``layers_4_7``) become the one of a scan over all layers. Layers
    that are scanned stay so, unless they are to be ``unrolled``.

    Raises ``CheckpointError`` where layers that are not alike are scanned, and are to be unrolled.
    """
    paths = leaf_paths(folder / str(step) / "items")
    stored, names = [path for path in paths if path[0] == "params"], layers_of(paths)
    grouped = any(not layers_in(name, 1) for name in names) or any(len(_of(path)) > 1 for path in stored)
    if unrolled and grouped:
        raise CheckpointError(
            f"checkpoint {step} has its layers scanned in groups, which stay together; leave out --no-scan-layers"
        )
    context = ocp.Context()
    context.pytree.loading.partial_load = True  # without the optimizer's state
    with context:
        like = nest(dict.fromkeys(stored, np.ndarray))
        arrays = flat(ocp.load(folder / str(step), like, checkpointable_name="items"))
    stacks = {part: path for path in stored for part in _of(path) if is_stack(part)}
    layers = max((layers_in(name, arrays[path].shape[1]).stop for name, path in stacks.items()), default=0)
    new = [f"layers_{layer}" for layer in range(layers)] if unrolled and stacks else ["layers"]
    targets = {tuple(name if part in stacks else part for part in path) for path in stored for name in new}
    sources = find_sources(targets, stored, layers)
    leaves = {path: join_layers(path, sources[path], arrays) if path in sources else arrays[path] for path in targets}
    scanned = not unrolled and layout(names) != "unrolled"
    ocp.save(target, nest(leaves), checkpointable_name="items", custom_metadata={"scan_layers": scanned})
    return {"scan_layers": scanned, "bytes": sum(array.nbytes for array in leaves.values())}

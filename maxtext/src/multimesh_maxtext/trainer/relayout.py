"""Restores a checkpoint in the trainer's process. Its layers may have another layout than the run's.

The names tell which layers an entry holds: ``layers_3`` that one, ``layers_0_3`` a stack of four, ``layers`` a stack of
all. MaxText stacks parameters and their moments along their second dimension, everything else along the first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from multimesh_maxtext.checkpoint_folder import Checkpoints, layout, split_layer_name
from multimesh_maxtext.errors import CheckpointError
from multimesh_maxtext.trainer.processes import absent, has_device, place

Entry = tuple[str, ...]

_SECOND = ("params", "opt_state")  # stacked along the second dimension


def make_loader(checkpoints: Any, layers: int | None = None) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Return how Orbax's checkpointer loads a step, but for a checkpoint of another model, which is refused before.

    With the number of ``layers`` it loads a checkpoint of any layout in the run's layout: arrays of other layouts pass
    through the host's memory, and random keys of layers stay as the run made them.
    """
    load = checkpoints.load_checkpointables

    def load_step(step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        target = flat(abstract["items"])
        paths = {tuple(map(str, path)): path for path in target}
        stored = Checkpoints(Path(checkpoints.directory), (step,)).paths() if layers else ()
        relayout = Relayout(paths, stored, layers or 0)
        described = checkpoints.checkpointables_metadata(step).metadata.get("items")
        if described is not None:  # else it cannot be read, and to load it tells why
            check_same(_shapes(target), _shapes(flat(described)), relayout.sources)
        if all(sources == [path] for path, sources in relayout.sources.items()):
            return load(step, abstract)
        item = {path: target[path] for name, path in paths.items() if name not in relayout.sources}
        for name, sources in relayout.sources.items():
            leaf = target[paths[name]]
            if has_device(leaf.sharding) and not _is_key(leaf):
                # NumPy arrays come in the shape and type they have.
                item |= {tuple(int(key) if key.isdigit() else key for key in path): np.ndarray for path in sources}
        loaded = load(step, abstract | {"items": nest(item)})
        leaves = flat(loaded["items"])
        arrays = {tuple(map(str, path)): leaf for path, leaf in leaves.items()}

        def make(name: Entry, path: tuple[str | int, ...]) -> Any:
            leaf = target[path]
            if name not in relayout.sources or _is_key(leaf):
                return leaves.get(path, leaf)
            if not has_device(leaf.sharding):
                return absent(leaf, leaf.sharding)
            return place(np.asarray(relayout.leaf(name, leaf.shape, arrays), leaf.dtype), leaf.sharding)

        return loaded | {"items": nest({path: make(name, path) for name, path in paths.items()})}

    return load_step


def check_same(
    model: Mapping[Entry, tuple[int, ...]],
    stored: Mapping[Entry, tuple[int, ...]],
    sources: Mapping[Entry, Sequence[Entry]],
) -> None:
    """Raise ``CheckpointError`` where a checkpoint is of another model or optimizer, with the first leaf that differs.

    ``model``, ``stored``: shapes of the run's leaves, and of the checkpoint's.
    ``sources``: for a leaf of the run in another layout the leaves of the checkpoint that hold it. `Relayout.leaf`
    checks their shapes.
    """
    used = {source for entries in sources.values() for source in entries}
    for part in _SECOND:
        for path in sorted(path for path in {*model, *stored} if path[0] == part):
            direct = sources.get(path, [path]) == [path]
            ours = model.get(path)
            theirs = stored.get(path) if direct else ours
            if ours is None and path in used:
                continue
            if ours != theirs:
                there, here = ("not there" if shape is None else shape for shape in (theirs, ours))
                raise CheckpointError(
                    f"the checkpoint is of another model or optimizer: {'/'.join(path)} is {there} in it and {here} in "
                    "this run; use the flags that it was written with, but for the parallelism"
                )


def flat(tree: Any) -> dict[tuple[str | int, ...], Any]:
    """Return the leaves of nested dictionaries and lists by their paths; ``None`` is a leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
    return {tuple(key.idx if hasattr(key, "idx") else key.key for key in path): leaf for path, leaf in leaves}


def _shapes(leaves: Mapping[tuple[str | int, ...], Any]) -> dict[Entry, tuple[int, ...]]:
    return {tuple(map(str, path)): tuple(leaf.shape) for path, leaf in leaves.items() if leaf is not None}


def nest(flat: Mapping[Any, Any]) -> Any:
    """Return the dictionaries and lists that `flat` took apart."""
    if () in flat:
        return flat[()]
    groups: dict[Any, dict[Any, Any]] = {}
    for path, leaf in flat.items():
        groups.setdefault(path[0], {})[path[1:]] = leaf
    if all(isinstance(key, int) for key in groups):
        return [nest(groups[i]) if i in groups else None for i in range(max(groups) + 1)]
    return {key: nest(group) for key, group in groups.items()}


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


class Relayout:
    """Reads the leaves of a run's state from a checkpoint that holds its layers under other names.

    ``targets``, ``stored``: paths of the run's leaves, and of the checkpoint's.
    ``total``: number of layers.
    """

    def __init__(self, targets: Iterable[Entry], stored: Collection[Entry], total: int) -> None:
        self._stored = stored
        self._total = total
        names = sorted({part for path in stored for part in path if layers_in(part, total)})
        self._home = {layer: name for name in names for layer in layers_in(name, total)}
        self.sources = {path: sources for path in targets if (sources := self._sources(path))}

    def _at(self, path: Entry) -> int | None:
        return next((i for i, part in enumerate(path) if layers_in(part, self._total)), None)

    def _sources(self, path: Entry) -> list[Entry]:
        """Entries of the checkpoint that hold a leaf; none if it lacks a part (layers may share a random generator)."""
        at = self._at(path)
        if at is None:
            return []
        layers = layers_in(path[at], self._total)
        sources = [(*path[:at], self._home.get(layer, path[at]), *path[at + 1 :]) for layer in layers]
        return list(dict.fromkeys(sources)) if all(source in self._stored for source in sources) else []

    def leaf(self, path: Entry, shape: tuple[int, ...] | None, arrays: Mapping[Entry, np.ndarray]) -> np.ndarray:
        """Return a leaf of the run's state, cut from and joined of the checkpoint's.

        Raises ``CheckpointError`` where the run's has another ``shape``.
        """
        at = self._at(path) or 0
        axis = 1 if path[0] in _SECOND else 0
        single = []
        for layer in layers_in(path[at], self._total):
            name = self._home[layer]
            array = arrays[*path[:at], name, *path[at + 1 :]]
            first = layers_in(name, self._total)[0]
            single.append(np.take(array, layer - first, axis) if is_stack(name) else array)
        result = np.stack(single, axis) if is_stack(path[at]) else single[0]
        if shape not in (None, result.shape):
            raise CheckpointError(
                f"the checkpoint's {'/'.join(path)} gives {result.shape}, but the model has {shape}; use the flags "
                "that it was written with, but for the parallelism"
            )
        return result


def export(folder: Path, step: int, target: Path, *, unrolled: bool = False) -> dict[str, Any]:
    """Write the parameters of a checkpoint to a new folder; return how its layers lie there, and how many bytes.

    The stacks of a pipeline's pieces (``layers_0_3``, ``layers_4_7``) become the one of a scan over all layers. Layers
    that are scanned stay so, unless they are to be ``unrolled``.

    Raises ``CheckpointError`` where layers that are not alike are scanned, and are to be unrolled.
    """
    source = Checkpoints(folder, (step,))
    stored = [path for path in source.paths() if path[0] == "params"]
    grouped = any(not layers_in(name, 1) for name in source.layers()) or any(len(_of(path)) > 1 for path in stored)
    if unrolled and grouped:
        raise CheckpointError(
            f"checkpoint {step} has its layers scanned in groups, which stay together; leave out --no-scan-layers"
        )
    arrays = _load(folder / str(step), stored)
    stacks = {part: path for path in stored for part in _of(path) if is_stack(part)}
    layers = max((layers_in(name, arrays[path].shape[1]).stop for name, path in stacks.items()), default=0)
    targets: set[Entry] = set()
    for path in stored:
        stack = next((part for part in _of(path) if part in stacks), "")
        names = [f"layers_{layer}" for layer in layers_in(stack, layers)] if unrolled else ["layers"]
        targets |= {tuple(name if part == stack else part for part in path) for name in (names if stack else [""])}
    relayout = Relayout(targets, stored, layers)
    leaves = {path: arrays[path] if path in arrays else relayout.leaf(path, None, arrays) for path in sorted(targets)}
    scanned = not unrolled and layout(source.layers()) != "unrolled"
    ocp.save(target, nest(leaves), checkpointable_name="items", custom_metadata={"scan_layers": scanned})
    return {"scan_layers": scanned, "bytes": sum(array.nbytes for array in leaves.values())}


def _of(path: Entry) -> list[str]:
    """Names of layers in a path."""
    return [part for part in path if layers_in(part, 1)]


def _load(checkpoint: Path, paths: Collection[Entry]) -> dict[Entry, np.ndarray]:
    context = ocp.Context()
    context.pytree.loading.partial_load = True  # without the optimizer's state
    with context:
        items = ocp.load(checkpoint, nest(dict.fromkeys(paths, np.ndarray)), checkpointable_name="items")
    return {tuple(map(str, path)): array for path, array in flat(items).items()}

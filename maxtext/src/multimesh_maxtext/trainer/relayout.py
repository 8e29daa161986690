"""Restores a checkpoint in the trainer's process. Its layers may have another layout than the run's.

The names tell which layers an entry holds: ``layers_3`` that one, ``layers_0_3`` a stack of four, ``layers`` a stack of
all. MaxText stacks parameters and their moments along their second dimension, everything else along the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from multimesh_maxtext import layer_names
from multimesh_maxtext.checkpoint_folder import Checkpoints
from multimesh_maxtext.errors import CheckpointError
from multimesh_maxtext.trainer.processes import absent, has_device, place

Entry = tuple[str, ...]

_SECOND = ("params", "opt_state")  # stacked along the second dimension


def check_first(checkpoints: Any) -> Any:
    """Let Orbax's checkpointer of a run refuse a checkpoint of another model before it loads anything; return it."""
    load = checkpoints.load_checkpointables

    def checking(step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        _check_same(checkpoints, step, flat(abstract["items"]), {})
        return load(step, abstract)

    checkpoints.load_checkpointables = checking
    return checkpoints


def relaid(checkpoints: Any, layers: int) -> Any:
    """Let Orbax's checkpointer of a run load a checkpoint of any layout in the run's layout; return it."""
    load = checkpoints.load_checkpointables

    def relaying(step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        wanted = _Wanted(Path(checkpoints.directory), step, abstract["items"], layers)
        _check_same(checkpoints, step, wanted.target, wanted.relayout.sources)
        if wanted.direct:
            return load(step, abstract)
        found = load(step, abstract | {"items": wanted.stored()})
        return found | {"items": wanted.relaid(found["items"])}

    checkpoints.load_checkpointables = relaying
    return checkpoints


class _Wanted:
    """The state of a run, and the entries of a checkpoint that hold it.

    Leaves of other layouts pass through the host's memory. Random keys of layers stay as the run made them.

    Parameters
    ----------
    folder, step
        The checkpoint.
    items
        Types of the state, nested as MaxText writes it.
    layers
        Number of layers.
    """

    def __init__(self, folder: Path, step: int, items: Any, layers: int) -> None:
        self.target = flat(items)
        self._paths = {tuple(map(str, path)): path for path in self.target}
        self.relayout = Relayout(self._paths, Checkpoints(folder, (step,), ()).paths(), layers)
        leaves = {name: self.target[self._paths[name]] for name in self.relayout.sources}
        self._elsewhere = {name for name, leaf in leaves.items() if not has_device(leaf.sharding)}
        self._moved = {name for name, leaf in leaves.items() if not _is_key(leaf)} - self._elsewhere

    @property
    def direct(self) -> bool:
        """Whether the checkpoint has the layout of the run."""
        return all(sources == [path] for path, sources in self.relayout.sources.items())

    def stored(self) -> Any:
        """Return the types of the entries to load."""
        item = {path: self.target[path] for name, path in self._paths.items() if name not in self.relayout.sources}
        for source in itertools.chain.from_iterable(self.relayout.sources[name] for name in self._moved):
            # NumPy arrays come in the shape and type they have.
            item[tuple(int(part) if part.isdigit() else part for part in source)] = np.ndarray
        return nest(item)

    def relaid(self, items: Any) -> Any:
        """Return the state, made of the loaded entries."""
        found = flat(items)
        arrays = {tuple(map(str, path)): leaf for path, leaf in found.items()}
        result = {}
        for name, path in self._paths.items():
            leaf = self.target[path]
            if name in self._moved:
                array = self.relayout.leaf(name, leaf.shape, arrays)
                result[path] = place(np.asarray(array, leaf.dtype), leaf.sharding)
            elif name in self._elsewhere and not _is_key(leaf):
                result[path] = absent(leaf, leaf.sharding)
            else:
                result[path] = found.get(path, leaf)
        return nest(result)


def _check_same(checkpoints: Any, step: int, target: Mapping[tuple[str | int, ...], Any], sources: Any) -> None:
    stored = checkpoints.checkpointables_metadata(step).metadata.get("items")
    if stored is not None:  # else it cannot be read, and to load it tells why
        check_same(_shapes(target), _shapes(flat(stored)), sources)


def check_same(
    model: Mapping[Entry, tuple[int, ...]],
    kept: Mapping[Entry, tuple[int, ...]],
    sources: Mapping[Entry, Sequence[Entry]],
) -> None:
    """Raise where a checkpoint is of another model or optimizer.

    Parameters
    ----------
    model, kept
        Shapes of the run's leaves, and of the checkpoint's.
    sources
        For a leaf of the run in another layout: the leaves of the checkpoint that hold it. `Relayout.leaf` checks their
        shapes.

    Raises
    ------
    CheckpointError
        Naming the first parameter, else the first moment, that differs, with both shapes.
    """
    used = {source for found in sources.values() for source in found}
    for part in _SECOND:
        for path in sorted(path for path in {*model, *kept} if path[0] == part):
            direct = sources.get(path, [path]) == [path]
            ours = model.get(path)
            theirs = kept.get(path) if direct else ours
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
    kind, numbers = layer_names.split(name) or ("", ())
    if kind != "layers":
        return range(0)
    return range(numbers[0], numbers[-1] + 1) if numbers else range(total)


def is_stack(name: str) -> bool:
    """Say whether an entry is a stack of layers rather than one layer."""
    return name.count("_") != 1


class Relayout:
    """Reads the leaves of a run's state from a checkpoint that holds its layers under other names.

    Parameters
    ----------
    wanted
        Paths of the run's leaves.
    kept
        Paths of the checkpoint's leaves.
    total
        Number of layers.
    """

    def __init__(self, wanted: Iterable[Entry], kept: Collection[Entry], total: int) -> None:
        self._kept = kept
        self._total = total
        names = sorted({part for path in kept for part in path if layers_in(part, total)})
        self._home = {layer: name for name in names for layer in layers_in(name, total)}
        self.sources = {path: sources for path in wanted if (sources := self._sources(path))}

    def _at(self, path: Entry) -> int | None:
        return next((i for i, part in enumerate(path) if layers_in(part, self._total)), None)

    def _sources(self, path: Entry) -> list[Entry]:
        """Entries of the checkpoint that hold a leaf; none if it lacks a part (layers may share a random generator)."""
        at = self._at(path)
        if at is None:
            return []
        layers = layers_in(path[at], self._total)
        sources = [(*path[:at], self._home.get(layer, path[at]), *path[at + 1 :]) for layer in layers]
        return list(dict.fromkeys(sources)) if all(source in self._kept for source in sources) else []

    def leaf(self, path: Entry, shape: tuple[int, ...], arrays: Mapping[Entry, np.ndarray]) -> np.ndarray:
        """Return a leaf of the run's state, which has this shape.

        Raises ``CheckpointError`` where the checkpoint's has another.
        """
        result = self.joined(path, arrays)
        if result.shape != shape:
            raise CheckpointError(
                f"the checkpoint's {'/'.join(path)} gives {result.shape}, but the model has {shape}; use the flags "
                "that it was written with, but for the parallelism"
            )
        return result

    def joined(self, path: Entry, arrays: Mapping[Entry, np.ndarray]) -> np.ndarray:
        """Return a leaf of the run's state, cut from and joined of the checkpoint's."""
        at = self._at(path) or 0
        axis = 1 if path[0] in _SECOND else 0
        single = []
        for layer in layers_in(path[at], self._total):
            name = self._home[layer]
            array = arrays[*path[:at], name, *path[at + 1 :]]
            first = layers_in(name, self._total)[0]
            single.append(np.take(array, layer - first, axis) if is_stack(name) else array)
        return np.stack(single, axis) if is_stack(path[at]) else single[0]

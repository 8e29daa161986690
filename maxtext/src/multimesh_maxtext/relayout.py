"""Checkpoints whose layers lie otherwise than this run's: unrolled, in stacks, or in one stack of all.

The names tell which layers an entry holds: ``layers_3`` that one, ``layers_0_3`` a stack of four, ``layers`` a stack of
all. MaxText stacks parameters and their moments along their second dimension, everything else along the first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from multimesh.errors import CheckpointError

Path = tuple[str, ...]

_LAYER = re.compile(r"layers(?:_(\d+))?(?:_(\d+))?")
_SECOND = ("params", "opt_state")  # stacked along the second dimension


def held(name: str, total: int) -> range:
    """Return the layers that an entry of the decoder holds; none for an entry of another kind."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return range(0)
    first, last = found.groups()
    return range(total) if first is None else range(int(first), int(last or first) + 1)


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

    def __init__(self, wanted: Iterable[Path], kept: Collection[Path], total: int) -> None:
        self._kept = kept
        self._total = total
        names = sorted({part for path in kept for part in path if held(part, total)})
        self._home = {layer: name for name in names for layer in held(name, total)}
        self.sources = {path: sources for path in wanted if (sources := list(dict.fromkeys(self._sources(path))))}

    def _at(self, path: Path) -> int | None:
        return next((i for i, part in enumerate(path) if held(part, self._total)), None)

    def _sources(self, path: Path) -> Iterator[Path]:
        at = self._at(path)
        if at is None:
            return
        for layer in held(path[at], self._total):
            source = (*path[:at], self._home.get(layer, path[at]), *path[at + 1 :])
            if source in self._kept:
                yield source

    def leaf(self, path: Path, shape: tuple[int, ...], arrays: Mapping[Path, np.ndarray]) -> np.ndarray:
        """Return a leaf of the run's state, cut from and joined of the checkpoint's.

        Raises
        ------
        CheckpointError
            Where the shapes do not fit.
        """
        at = self._at(path) or 0
        axis = 1 if path[0] in _SECOND else 0
        single = []
        for layer in held(path[at], self._total):
            name = self._home[layer]
            array = arrays[*path[:at], name, *path[at + 1 :]]
            first = held(name, self._total)[0]
            single.append(np.take(array, layer - first, axis) if is_stack(name) else array)
        result = np.stack(single, axis) if is_stack(path[at]) else single[0]
        if result.shape != shape:
            raise CheckpointError(
                f"the checkpoint's {'/'.join(path)} gives {result.shape}, but the model has {shape}; use the flags "
                "that it was written with, but for the parallelism"
            )
        return result

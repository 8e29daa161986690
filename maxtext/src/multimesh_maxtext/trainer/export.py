"""Writes the parameters of a checkpoint as MaxText's own tools read them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from multimesh_maxtext.checkpoint_folder import Checkpoints, layout
from multimesh_maxtext.errors import CheckpointError
from multimesh_maxtext.trainer.relayout import Entry, Relayout, flat, is_stack, layers_in, nest


def export(folder: Path, step: int, target: Path, *, unrolled: bool = False) -> dict[str, Any]:
    """Write the parameters of a checkpoint to a new folder; return how its layers lie there, and how many bytes.

    The stacks of a pipeline's pieces (``layers_0_3``, ``layers_4_7``) become the one of a scan over all layers. Layers
    that are scanned stay so, unless they are to be ``unrolled``.

    Raises ``CheckpointError`` where layers that are not alike are scanned, and are to be unrolled.
    """
    source = Checkpoints(folder, (step,), ())
    kept = [path for path in source.paths() if path[0] == "params"]
    grouped = any(not layers_in(name, 1) for name in source.layers()) or any(len(_of(path)) > 1 for path in kept)
    if unrolled and grouped:
        raise CheckpointError(
            f"checkpoint {step} has its layers scanned in groups, which cannot be taken apart yet; leave out "
            "--no-scan-layers"
        )
    arrays = _load(folder / str(step), kept)
    stacks = {part: path for path in kept for part in _of(path) if is_stack(part)}
    layers = max((layers_in(name, arrays[path].shape[1]).stop for name, path in stacks.items()), default=0)
    wanted: set[Entry] = set()
    for path in kept:
        stack = next((part for part in _of(path) if part in stacks), "")
        names = [f"layers_{layer}" for layer in layers_in(stack, layers)] if unrolled else ["layers"]
        wanted |= {tuple(name if part == stack else part for part in path) for name in (names if stack else [""])}
    relayout = Relayout(wanted, kept, layers)
    made = {path: arrays[path] if path in arrays else relayout.joined(path, arrays) for path in sorted(wanted)}
    scanned = not unrolled and layout(source.layers()) != "unrolled"
    ocp.save(target, nest(made), checkpointable_name="items", custom_metadata={"scan_layers": scanned})
    return {"scan_layers": scanned, "bytes": sum(array.nbytes for array in made.values())}


def _of(path: Entry) -> list[str]:
    """Names of layers in a path."""
    return [part for part in path if layers_in(part, 1)]


def _load(checkpoint: Path, paths: Collection[Entry]) -> dict[Entry, np.ndarray]:
    context = ocp.Context()
    context.pytree.loading.partial_load = True  # without the optimizer's state
    with context:
        found = ocp.load(checkpoint, nest(dict.fromkeys(paths, np.ndarray)), checkpointable_name="items")
    return {tuple(map(str, path)): array for path, array in flat(found).items()}

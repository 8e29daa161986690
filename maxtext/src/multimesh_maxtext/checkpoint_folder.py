"""A folder of checkpoints as Orbax leaves it: its complete steps, and the layers in them.

Orbax writes checkpoint N, the state after step N counted from 0, to ``N.orbax-checkpoint-tmp`` and renames it to ``N``
when it is complete. So nothing that happens during the writing harms the earlier checkpoints, and a run that comes to
step N again writes over what is half-written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from multimesh_maxtext.errors import CheckpointError

COMPLETE = "commit_success.txt"
"""File that Orbax writes last."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
KINDS = ("layers", "dense_layers", "moe_layers", "scanned_blocks")


def look(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in order; refuse one whose newest was copied in part.

    The folder need not exist. An older one that is not complete was about to be removed, and does not count.
    """
    try:
        steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []
    except OSError as error:
        raise CheckpointError(f"--checkpoint {folder}: {error.strerror}; choose another folder") from error
    complete = [step for step in steps if (folder / str(step) / COMPLETE).exists()]
    if steps[-1:] != complete[-1:]:
        raise CheckpointError(
            f"{folder / str(steps[-1])} is no complete checkpoint (it has no {COMPLETE}); copy it again or remove it"
        )
    return complete


def leaf_paths(items: Path, name: str = "", remedy: str = "") -> frozenset[tuple[str, ...]]:
    """Return the path of every leaf of the ``items`` of a checkpoint, from Orbax's metadata.

    Raises ``CheckpointError`` where that cannot be read. By default it has the ``name`` of its file, and the ``remedy``
    is to remove the checkpoint.
    """
    try:
        leaves = json.loads((items / "_METADATA").read_text(encoding="utf-8"))["tree_metadata"].values()
        return frozenset(tuple(str(part["key"]) for part in leaf["key_metadata"]) for leaf in leaves)
    except UNREADABLE as error:
        place, remedy = name or f"{items}/_METADATA", remedy or f"remove {items.parent}"
        raise CheckpointError(f"{place}: cannot be read as a checkpoint of MaxText ({error}); {remedy}") from error


def layers_of(paths: Iterable[tuple[str, ...]]) -> set[str]:
    """Return the names of the decoder's layers among paths: ``layers_0``, ...; ``layers`` for a stack of all."""
    names = {path[3] for path in paths if path[:3] == ("params", "params", "decoder")}
    return set(filter(split_layer_name, names))


def aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that no run goes on from it."""
    others = (path.with_name(f"{path.name}.damaged{number}") for number in ("", *range(2, 1000)))
    path.rename(next(other for other in others if not other.exists()))


def state_line(folder: Path | None) -> str:
    """Return the state that a run that ended early has left in its folder, and the way to go on."""
    if folder is None:
        return "no checkpoint was written: --checkpoint DIR keeps the state"
    try:
        steps = look(folder)
    except CheckpointError:
        return f"--checkpoint {folder} cannot be read"
    if steps:
        return f"checkpoint {steps[-1]} is complete: start the same line with --resume"
    return "no checkpoint is complete: start the same line again"


def layout(layers: Iterable[str]) -> str:
    """Return the form of a checkpoint's layers: ``scanned``, ``unrolled``, or ``in stacks``."""
    numbers = {len(name[1]) for name in map(split_layer_name, layers) if name}
    return "scanned" if numbers == {0} else "unrolled" if numbers <= {1} else "in stacks"


def split_layer_name(name: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the kind of the layers and their numbers; ``None`` for a name of anything else.

    One layer has one number, a stack those of its first and its last layer, and a stack of all layers none.
    """
    kind, numbers = name, tuple[int, ...]()
    while (parts := kind.rpartition("_"))[2].isdecimal():
        kind, numbers = parts[0], (int(parts[2]), *numbers)
    return (kind, numbers) if kind in KINDS and len(numbers) <= 2 else None

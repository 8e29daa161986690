"""A folder of checkpoints as Orbax leaves it: its complete steps, and the layers in them.

Orbax writes checkpoint N, the state after step N counted from 0, to ``N.orbax-checkpoint-tmp`` and renames it to ``N``
when it is complete. So nothing that happens during the writing harms the earlier checkpoints, and a run that comes to
step N again writes over what is half-written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from multimesh_maxtext.errors import CheckpointError, DamagedCheckpointError

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)

COMPLETE = "commit_success.txt"
"""File that Orbax writes last."""

KINDS = ("layers", "dense_layers", "moe_layers", "scanned_blocks")

_ASIDE = ".damaged"


@dataclass(frozen=True)
class Checkpoints:
    """The complete checkpoints in a folder, by their steps in order. The folder need not exist."""

    folder: Path
    steps: tuple[int, ...]

    @property
    def next_step(self) -> int:
        """The step that training goes on with: 0 without a checkpoint."""
        return self.steps[-1] + 1 if self.steps else 0

    def layers(self) -> frozenset[str]:
        """Return the names of the decoder layers in a checkpoint: ``layers_0``, ...; ``layers`` for a stack of all."""
        return layers_of(self.paths())

    def paths(self) -> frozenset[tuple[str, ...]]:
        """Return the paths of the leaves of the newest checkpoint."""
        return leaf_paths(self.folder / str(self.steps[-1]) / "items")


def leaf_paths(items: Path, name: str = "", remedy: str = "") -> frozenset[tuple[str, ...]]:
    """Return the path of every leaf of a checkpoint, from Orbax's metadata.

    Raises ``CheckpointError`` where that cannot be read. By default it has the ``name`` of its file, and the ``remedy``
    is to remove the checkpoint.
    """
    try:
        leaves = json.loads((items / "_METADATA").read_text(encoding="utf-8"))["tree_metadata"].values()
        return frozenset(tuple(str(part["key"]) for part in leaf["key_metadata"]) for leaf in leaves)
    except UNREADABLE as error:
        place, remedy = name or f"{items}/_METADATA", remedy or f"remove {items.parent}"
        raise CheckpointError(f"{place}: cannot be read as a checkpoint of MaxText ({error}); {remedy}") from error


def layers_of(paths: Iterable[tuple[str, ...]]) -> frozenset[str]:
    """Return the names of the decoder's layers among paths of leaves."""
    params = [path[3] for path in paths if path[:3] == ("params", "params", "decoder")]
    return frozenset(name for name in params if split_layer_name(name))


def look(folder: Path) -> Checkpoints:
    """Return the checkpoints in a folder; refuse one with a checkpoint that was copied in part."""
    try:
        steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []
    except OSError as error:
        raise CheckpointError(f"--checkpoint {folder}: {error.strerror}; choose another folder") from error
    for step in steps:
        if not (folder / str(step) / COMPLETE).exists():
            raise CheckpointError(
                f"{folder / str(step)} is no complete checkpoint (it has no {COMPLETE}); copy it again or remove it"
            )
    return Checkpoints(folder, tuple(steps))


def aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that no run goes on from it."""
    others = (path.with_name(f"{path.name}{_ASIDE}{number}") for number in ("", *range(2, 1000)))
    path.rename(next(other for other in others if not other.exists()))


def going_back(error: DamagedCheckpointError, folder: Path) -> str:
    """Say from where a run goes on whose newest checkpoint was damaged and set aside; refuse to where none is left."""
    steps = look(folder).steps
    if not steps:
        raise CheckpointError(
            f"--checkpoint {folder}: {error}; no other checkpoint is there (it is set aside as *{_ASIDE}); "
            "copy it again, or leave out --resume to begin anew"
        )
    return f"{error}; it is set aside as *{_ASIDE}, going on from checkpoint {steps[-1]}"


def layout(layers: frozenset[str]) -> str:
    """Return how a checkpoint holds its layers: ``scanned``, ``unrolled``, or ``in stacks``."""
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

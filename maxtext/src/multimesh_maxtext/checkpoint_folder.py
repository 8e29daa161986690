"""A folder of checkpoints as Orbax leaves it: its complete steps, its half-written and its damaged ones.

Orbax writes checkpoint N, the state after step N counted from 0, to ``N.orbax-checkpoint-tmp`` and renames it to ``N``
when it is complete. So nothing that happens during the writing harms the earlier checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from multimesh_maxtext import layer_names
from multimesh_maxtext.errors import CheckpointError, DamagedCheckpointError

_LEAVES = "_METADATA"


UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


_HALF = ".orbax-checkpoint-tmp"


COMPLETE = "commit_success.txt"
"""File that Orbax writes last."""


_ASIDE = ".damaged"


RECORDS = "multimesh-sums.*-of-*.json"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a folder."""

    folder: Path  # it need not exist
    steps: tuple[int, ...]  # numbers of the complete ones, in order
    half_written: tuple[Path, ...]  # folders that a run was writing when it was ended

    @property
    def next_step(self) -> int:
        """The step that training goes on with: 0 without a checkpoint."""
        return self.steps[-1] + 1 if self.steps else 0

    def layers(self) -> frozenset[str]:
        """Return the names of the decoder layers in a checkpoint: ``layers_0``, ...; ``layers`` for a stack of all."""
        return layers_of(self.paths())

    def paths(self) -> frozenset[tuple[str, ...]]:
        """Return the paths of the leaves of the newest checkpoint.

        Raises ``CheckpointError`` where Orbax's description of the checkpoint cannot be read.
        """
        items = self.folder / str(self.steps[-1]) / "items"
        try:
            return leaf_paths(items)
        except UNREADABLE as error:
            raise CheckpointError(
                f"{items / _LEAVES}: cannot be read as a checkpoint of MaxText ({error}); remove {items.parent}"
            ) from error


def leaf_paths(items: Path) -> frozenset[tuple[str, ...]]:
    """Return the path of every leaf of a checkpoint, from Orbax's metadata."""
    leaves = json.loads((items / _LEAVES).read_text(encoding="utf-8"))["tree_metadata"].values()
    return frozenset(tuple(str(part["key"]) for part in leaf["key_metadata"]) for leaf in leaves)


def layers_of(paths: Iterable[tuple[str, ...]]) -> frozenset[str]:
    """Return the names of the decoder's layers among paths of leaves."""
    params = [path[3] for path in paths if path[:3] == ("params", "params", "decoder")]
    return frozenset(name for name in params if layer_names.split(name))


def look(folder: Path) -> Checkpoints:
    """Return the checkpoints in a folder.

    Raises ``CheckpointError`` for a folder that cannot be read, or one with a checkpoint that was copied in part.
    """
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise CheckpointError(f"--checkpoint {folder}: {error.strerror}; choose another folder") from error
    steps = sorted(int(name) for name in names if name.isdigit())
    for step in steps:
        if not (folder / str(step) / COMPLETE).exists():
            raise CheckpointError(
                f"{folder / str(step)} is no complete checkpoint (it has no {COMPLETE}); copy it again or remove it"
            )
    return Checkpoints(folder, tuple(steps), tuple(folder / name for name in names if _HALF in name))


def aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that no run goes on from it."""
    others = (path.with_name(f"{path.name}{_ASIDE}{number}") for number in ("", *range(2, 1000)))
    path.rename(next(other for other in others if not other.exists()))


def going_back(error: DamagedCheckpointError, folder: Path) -> str:
    """Say from where a run goes on whose newest checkpoint was damaged and set aside.

    Raises ``CheckpointError`` if no checkpoint is left.
    """
    steps = look(folder).steps
    if not steps:
        raise CheckpointError(
            f"--checkpoint {folder}: {error}; no other checkpoint is there (it is set aside as *{_ASIDE}); "
            "copy it again, or leave out --resume to begin anew"
        )
    return f"{error}; it is set aside as *{_ASIDE}, going on from checkpoint {steps[-1]}"


def clear_incomplete(found: Checkpoints) -> list[str]:
    """Remove checkpoints that were half-written; return a line for each. Call it while `writing`."""
    lines = []
    for path in found.half_written:
        shutil.rmtree(path, ignore_errors=True)
        step = path.name.split(_HALF)[0]
        lines.append(f"checkpoint {step} was half-written when its run ended; ignored and removed")
    return lines


def layout(layers: frozenset[str]) -> str:
    """Return how a checkpoint holds its layers: ``scanned``, ``unrolled``, or ``in stacks``."""
    numbers = {len(found[1]) for found in map(layer_names.split, layers) if found}
    return "scanned" if numbers == {0} else "unrolled" if numbers <= {1} else "in stacks"

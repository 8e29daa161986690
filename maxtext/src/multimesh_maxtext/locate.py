"""Find the MaxText that will train, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from multimesh.errors import MissingPartError


def find_maxtext(root: Path | None) -> Path:
    """Return the folder that holds MaxText's package ``maxtext``, to be put on ``PYTHONPATH``.

    Parameters
    ----------
    root
        The repository's folder, whose patched ``third_party/maxtext`` comes before an installed MaxText.

    Raises
    ------
    MissingPartError
        Where there is neither.
    """
    places = [str(root / "third_party/maxtext/src")] if root else []
    for place in [*places, *sys.path]:
        found = PathFinder.find_spec("maxtext", [place])
        # This repository's own folder maxtext/ has no __init__.py: a namespace, not the trainer.
        if found and found.origin:
            return Path(found.origin).parent.parent
    raise MissingPartError("MaxText is not here (third_party/maxtext is empty); run ./bootstrap.sh --group run")


def has_package(name: str) -> bool:
    """Say whether a top-level package can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None

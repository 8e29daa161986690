"""Names of `multimesh` that other distributions have."""

from __future__ import annotations

import importlib
from types import ModuleType

from multimesh.errors import MissingPartError


def load_extra(module: str, user: str) -> ModuleType:
    """Import a module of another distribution of this project, for ``user``, the name or command that needs it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        distribution = package.replace("_", "-")
        raise MissingPartError(
            f"{user}: is in another package, {distribution}; install it: pip install {distribution}"
        ) from None

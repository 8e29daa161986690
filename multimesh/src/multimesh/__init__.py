"""MultiMesh for JAX: parts of one jitted function on different submeshes, on the JAX that everyone has.

The names are those of `multimesh.api`, imported when the first of them is used. Until then JAX is not, so that commands
can check flags and schedules, and set the variables that JAX reads, before.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from multimesh.errors import MultiMeshError as MultiMeshError
from multimesh.errors import UsageError as UsageError

if TYPE_CHECKING:
    from multimesh.api import *  # noqa: F403
    from multimesh.api import __all__ as __all__

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "__all__":
        if name.startswith("__"):
            raise AttributeError(f"module 'multimesh' has no attribute {name!r}")
        if importlib.util.find_spec(f"multimesh.{name}") is not None:
            return importlib.import_module(f"multimesh.{name}")
    api = importlib.import_module("multimesh.api")
    globals().update({public: getattr(api, public) for public in api.__all__}, __all__=api.__all__)
    if name not in globals():
        raise AttributeError(f"module 'multimesh' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})

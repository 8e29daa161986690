"""Names of `multimesh` that other distributions have, and those of the last release that are gone.

The next release forgets what is gone.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from multimesh.errors import MissingPartError, UsageError

DISTRIBUTIONS = {"multimesh_numerics": "multimesh-numerics", "multimesh_planner": "multimesh-planner"}


def load_extra(module: str, user: str) -> ModuleType:
    """Import a module of another distribution of this project, for ``user``, the name or command that needs it.

    Raises ``MissingPartError`` where the distribution is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        distribution = DISTRIBUTIONS[package]
        raise MissingPartError(
            f"{user}: is in another package, {distribution}; install it: pip install {distribution}"
        ) from None


REMEDIES = {
    ("jit", "precompiled"): "kernels come from JAX's compilation cache, so set jax_compilation_cache_dir",
    ("microbatch", "interleave"): "the places of the tasks say how many stages each submesh has",
    ("microbatch", "num_stages"): "the tasks say how many stages there are; plan(...) prints them",
}
"""Arguments that changed no result."""

REPLACED = {
    ("microbatch", "custom_schedule"): "give the table as schedule=multimesh.schedules.custom(rows)",
    ("microbatch", "stack"): 'give reduce="stack", or a pytree prefix of the result with "stack" and other reductions',
    ("pipeline", "memory"): "memory_estimate() of the lowered step says what each submesh needs, before it is compiled",
    ("multimesh", "scope_nnx"): "write jax.named_scope around calls of children, or cut with multimesh.pipeline",
    ("multimesh", "suggest"): "multimesh.pipeline(fn, meshes).cuts(params, *batch) says how a function is cut",
    ("multimesh", "sequential"): "compose the layers in a function, and cut it with multimesh.pipeline",
}
"""Arguments and names that can't be ignored."""

RENAMED = {"MemoryForecast": "MemoryEstimate"}
"""Names of `multimesh` that only changed."""

CONTEXTS = (
    *("autoshard", "enable_fast_path", "enable_recomputation", "enable_task_fusion", "ignore_transforms"),
    "only_fuse_loop_tasks",
)
"""Options of `multimesh.context` that were functions of `multimesh` too."""


def warn_former(function: str, names: Iterable[str]) -> None:
    """Warn of each argument that is gone, or refuse it if results depend on it.

    Raises ``TypeError`` for a name that the function never had.
    """
    for name in names:
        if remedy := REPLACED.get((function, name)):
            raise UsageError(f"{function}: {name}= is gone; {remedy}")
        if (function, name) not in REMEDIES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        message = f"{function}: {name}= is gone and ignored; {REMEDIES[function, name]}"
        warnings.warn(message, DeprecationWarning, stacklevel=3)


class FormerName:
    """An attribute that has another name now: reading it warns, and gives that one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, owner: type, former: str) -> None:
        self._warning = f"{owner.__name__}.{former} is now {owner.__name__}.{self._name}"

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return getattr(owner, self._name)
        warnings.warn(self._warning, DeprecationWarning, stacklevel=2)
        return getattr(instance, self._name)


def find_former(name: str) -> Any:
    """Return what has another name now, or became an option of `multimesh.context`, with a warning.

    Raises ``AttributeError`` for any other name, with the remedy if there once was such a function.
    """
    if name in RENAMED:
        warnings.warn(f"multimesh.{name} is now multimesh.{RENAMED[name]}", DeprecationWarning, stacklevel=3)
        return getattr(importlib.import_module("multimesh"), RENAMED[name])
    if name not in CONTEXTS:
        remedy = REPLACED.get(("multimesh", name))
        raise AttributeError(f"module 'multimesh' has no attribute {name!r}{f'; {remedy}' if remedy else ''}")
    message = f"multimesh.{name} is gone; write multimesh.context({name}=True)"
    warnings.warn(message, DeprecationWarning, stacklevel=3)

    def opened(enable: bool | None = True) -> Any:
        return importlib.import_module("multimesh").context(**{name: enable})

    return opened

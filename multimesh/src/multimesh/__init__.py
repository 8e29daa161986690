"""MultiMesh for JAX: parts of one jitted function on different submeshes, on the JAX that everyone has.

Names are loaded on first use, so that ``maxtext/run.py`` can check its flags before JAX is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from multimesh.errors import MultiMeshError, UsageError

if TYPE_CHECKING:
    from multimesh import fft, linalg, schedules
    from multimesh.contexts import (
        autoshard,
        context,
        enable_fast_path,
        enable_recomputation,
        enable_task_fusion,
        ignore_transforms,
        only_fuse_loop_tasks,
    )
    from multimesh.jitted import Jitted, jit
    from multimesh.lowered import Compiled, Lowered
    from multimesh.marks import register_task
    from multimesh.memory import MemoryForecast
    from multimesh.microbatching import microbatch
    from multimesh.modules import scope_nnx
    from multimesh.parallelizing import parallelize
    from multimesh.plan import Instruction, Plan
    from multimesh.tasks import task, with_sharding_constraint

__version__ = "0.1.0"

_HOME = {
    "Compiled": "lowered",
    "Instruction": "plan",
    "Jitted": "jitted",
    "Lowered": "lowered",
    "MemoryForecast": "memory",
    "Plan": "plan",
    "autoshard": "contexts",
    "context": "contexts",
    "enable_fast_path": "contexts",
    "enable_recomputation": "contexts",
    "enable_task_fusion": "contexts",
    "ignore_transforms": "contexts",
    "jit": "jitted",
    "microbatch": "microbatching",
    "only_fuse_loop_tasks": "contexts",
    "parallelize": "parallelizing",
    "register_task": "marks",
    "scope_nnx": "modules",
    "task": "tasks",
    "with_sharding_constraint": "tasks",
}

__all__ = [
    "Compiled",
    "Instruction",
    "Jitted",
    "Lowered",
    "MemoryForecast",
    "MultiMeshError",
    "Plan",
    "UsageError",
    "autoshard",
    "context",
    "enable_fast_path",
    "enable_recomputation",
    "enable_task_fusion",
    "fft",
    "ignore_transforms",
    "jit",
    "linalg",
    "microbatch",
    "only_fuse_loop_tasks",
    "parallelize",
    "register_task",
    "schedules",
    "scope_nnx",
    "task",
    "with_sharding_constraint",
]


def __getattr__(name: str) -> Any:
    if name in ("fft", "linalg", "schedules"):
        return importlib.import_module(f"multimesh.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'multimesh' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"multimesh.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

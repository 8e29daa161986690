"""MultiMesh for JAX: parts of one jitted function on different submeshes.

Each public name is listed below with its module, which is imported when the name is first used. JAX is not imported
before that. So commands can first check flags and schedules, and set the variables that JAX reads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from multimesh.errors import MultiMeshError as MultiMeshError
from multimesh.errors import UsageError as UsageError

if TYPE_CHECKING:
    from multimesh import distributed as distributed
    from multimesh import fft as fft
    from multimesh import grids as grids
    from multimesh import launch as launch
    from multimesh import linalg as linalg
    from multimesh import planner as planner
    from multimesh import schedules as schedules
    from multimesh.calling.aot import Compiled as Compiled
    from multimesh.calling.aot import Lowered as Lowered
    from multimesh.calling.jitted import Jitted as Jitted
    from multimesh.calling.jitted import jit as jit
    from multimesh.calling.parallelize import parallelize as parallelize
    from multimesh.core.virtual import virtual_devices as virtual_devices
    from multimesh.marking.contexts import autoshard as autoshard
    from multimesh.marking.contexts import context as context
    from multimesh.marking.contexts import enable_fast_path as enable_fast_path
    from multimesh.marking.contexts import enable_recomputation as enable_recomputation
    from multimesh.marking.contexts import enable_task_fusion as enable_task_fusion
    from multimesh.marking.contexts import ignore_transforms as ignore_transforms
    from multimesh.marking.contexts import only_fuse_loop_tasks as only_fuse_loop_tasks
    from multimesh.marking.flax_modules import scope_nnx as scope_nnx
    from multimesh.marking.microbatching import microbatch as microbatch
    from multimesh.marking.registrations import register_task as register_task
    from multimesh.marking.result_reductions import Ratio as Ratio
    from multimesh.marking.result_reductions import Reduction as Reduction
    from multimesh.marking.tasks import task as task
    from multimesh.marking.tasks import with_sharding_constraint as with_sharding_constraint
    from multimesh.observe.memory import MemoryForecast as MemoryForecast
    from multimesh.plan.instructions import Instruction as Instruction
    from multimesh.plan.plan import Plan as Plan
    from multimesh.planner.of_functions import suggest as suggest
    from multimesh.stages.layers import sequential as sequential
    from multimesh.stages.pipelining import pipeline as pipeline

__version__ = "0.1.0"

_HOMES = {
    "core.virtual": ("virtual_devices",),
    "planner.of_functions": ("suggest",),
    "calling.jitted": ("Jitted", "jit"),
    "stages.layers": ("sequential",),
    "calling.aot": ("Compiled", "Lowered"),
    "calling.parallelize": ("parallelize",),
    "stages.pipelining": ("pipeline",),
    "marking.contexts": (
        "autoshard",
        "context",
        "enable_fast_path",
        "enable_recomputation",
        "enable_task_fusion",
        "ignore_transforms",
        "only_fuse_loop_tasks",
    ),
    "hardware.topologies": ("topology",),
    "marking.flax_modules": ("scope_nnx",),
    "marking.microbatching": ("microbatch",),
    "marking.result_reductions": ("Ratio", "Reduction"),
    "marking.registrations": ("register_task",),
    "marking.tasks": ("task", "with_sharding_constraint"),
    "observe.memory": ("MemoryForecast",),
    "plan.instructions": ("Instruction",),
    "plan.plan": ("Plan",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
_ROOMS = ("distributed", "fft", "grids", "launch", "linalg", "planner", "schedules")

__all__ = sorted(["MultiMeshError", "UsageError", *_ROOMS, *_MODULE_OF])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"multimesh.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'multimesh' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"multimesh.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

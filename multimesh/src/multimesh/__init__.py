"""MultiMesh for JAX: parts of one jitted function on different submeshes.

Each public name is listed below with its module, which is imported when the name is first used. JAX is not imported
before that. So commands can first check flags and schedules, and set the variables that JAX reads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from multimesh.core import names
from multimesh.errors import MultiMeshError as MultiMeshError
from multimesh.errors import UsageError as UsageError

if TYPE_CHECKING:
    import multimesh_planner as _planner
    from multimesh_numerics import fft as fft
    from multimesh_numerics import grids as grids
    from multimesh_numerics import linalg as linalg

    from multimesh import distributed as distributed
    from multimesh import launch as launch
    from multimesh import schedules as schedules
    from multimesh.calling.aot import Compiled as Compiled
    from multimesh.calling.aot import Lowered as Lowered
    from multimesh.calling.jitted import Jitted as Jitted
    from multimesh.calling.jitted import jit as jit
    from multimesh.calling.parallelize import parallelize as parallelize
    from multimesh.core.virtual import virtual_devices as virtual_devices
    from multimesh.marking.contexts import context as context
    from multimesh.marking.microbatching import microbatch as microbatch
    from multimesh.marking.registrations import register_task as register_task
    from multimesh.marking.result_reductions import Ratio as Ratio
    from multimesh.marking.result_reductions import Reduction as Reduction
    from multimesh.marking.tasks import task as task
    from multimesh.marking.tasks import with_sharding_constraint as with_sharding_constraint
    from multimesh.observe.kernel_text import count_costs as count_costs
    from multimesh.observe.memory import MemoryEstimate as MemoryEstimate
    from multimesh.plan.instructions import Instruction as Instruction
    from multimesh.plan.plan import Plan as Plan
    from multimesh.stages.pipelining import pipeline as pipeline

    planner = _planner

__version__ = "0.1.0"

_HOMES = {
    "core.virtual": ("virtual_devices",),
    "calling.jitted": ("Jitted", "jit"),
    "calling.aot": ("Compiled", "Lowered"),
    "calling.parallelize": ("parallelize",),
    "stages.pipelining": ("pipeline",),
    "marking.contexts": ("context",),
    "core.topologies": ("topology",),
    "marking.microbatching": ("microbatch",),
    "marking.result_reductions": ("Ratio", "Reduction"),
    "marking.registrations": ("register_task",),
    "marking.tasks": ("task", "with_sharding_constraint"),
    "observe.kernel_text": ("count_costs",),
    "observe.memory": ("MemoryEstimate",),
    "plan.instructions": ("Instruction",),
    "plan.plan": ("Plan",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("distributed", "launch", "schedules")
_EXTRAS = {
    "fft": "multimesh_numerics.fft",
    "grids": "multimesh_numerics.grids",
    "linalg": "multimesh_numerics.linalg",
    "planner": "multimesh_planner",
}
"""Names that other distributions of this project have, to the module: the name is this, or the function in it."""

__all__ = sorted(["MultiMeshError", "UsageError", *_MODULES, *_EXTRAS, *_MODULE_OF])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"multimesh.{name}")
    if name in _EXTRAS:
        module = names.load_extra(_EXTRAS[name], f"multimesh.{name}")
        value = getattr(module, name, module)
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f"multimesh.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'multimesh' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

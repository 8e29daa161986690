"""The public names of the library, each imported from where it is: ``import multimesh as mm`` has all of them."""

from multimesh import distributed, fft, linalg, schedules
from multimesh.errors import MultiMeshError, UsageError
from multimesh.frontend.jitted import Jitted, jit
from multimesh.frontend.layers import sequential
from multimesh.frontend.lowered import Compiled, Lowered
from multimesh.frontend.parallelize import parallelize
from multimesh.marking.contexts import (
    autoshard,
    context,
    enable_fast_path,
    enable_recomputation,
    enable_task_fusion,
    ignore_transforms,
    only_fuse_loop_tasks,
)
from multimesh.marking.flax_modules import scope_nnx
from multimesh.marking.marks import register_task
from multimesh.marking.microbatching import microbatch
from multimesh.marking.tasks import task, with_sharding_constraint
from multimesh.observe.memory import MemoryForecast
from multimesh.plan.plan import Instruction, Plan

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
    "distributed",
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
    "sequential",
    "task",
    "with_sharding_constraint",
]

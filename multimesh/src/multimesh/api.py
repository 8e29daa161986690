"""The public names of the library, each imported from where it is: ``import multimesh as mm`` has all of them."""

from multimesh import distributed, fft, linalg, schedules
from multimesh.contexts import (
    autoshard,
    context,
    enable_fast_path,
    enable_recomputation,
    enable_task_fusion,
    ignore_transforms,
    only_fuse_loop_tasks,
)
from multimesh.errors import MultiMeshError, UsageError
from multimesh.jitted import Jitted, jit
from multimesh.layers import sequential
from multimesh.lowered import Compiled, Lowered
from multimesh.marks import register_task
from multimesh.memory import MemoryForecast
from multimesh.microbatching import microbatch
from multimesh.modules import scope_nnx
from multimesh.parallelizing import parallelize
from multimesh.plan import Instruction, Plan
from multimesh.tasks import task, with_sharding_constraint

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

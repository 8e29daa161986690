"""Calls that only the original MultiMesh has, for ``multimesh.jax``."""

from multimesh.original.calls import clear_tasks, microbatch, register_task, task, tasks
from multimesh.original.meshes import MultiMesh, Task, TaskMesh
from multimesh.original.options import (
    Context,
    MeshWrapper,
    autoshard,
    compile_hlo_module,
    custom_partitioning,
    enable_fast_path,
    enable_recomputation,
    enable_task_fusion,
    no_op_custom_call,
    only_fuse_loop_tasks,
    recompute_from_arguments_if_cost_less_than,
    register_custom_call_target,
    replicate_parameters_smaller_than_num_elements,
    set_startup_config,
    shard_map,
    shutdown,
    slice_global_mesh,
)
from multimesh.original.shardings import mjit, with_sharding_constraint

__all__ = [
    "Context",
    "MeshWrapper",
    "MultiMesh",
    "Task",
    "TaskMesh",
    "autoshard",
    "clear_tasks",
    "compile_hlo_module",
    "custom_partitioning",
    "enable_fast_path",
    "enable_recomputation",
    "enable_task_fusion",
    "microbatch",
    "mjit",
    "no_op_custom_call",
    "only_fuse_loop_tasks",
    "recompute_from_arguments_if_cost_less_than",
    "register_custom_call_target",
    "register_task",
    "replicate_parameters_smaller_than_num_elements",
    "set_startup_config",
    "shard_map",
    "shutdown",
    "slice_global_mesh",
    "task",
    "tasks",
    "with_sharding_constraint",
]

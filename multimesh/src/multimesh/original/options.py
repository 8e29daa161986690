"""Compiler contexts with the original's defaults, and its names that configured a runtime there is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multimesh import contexts
from multimesh.errors import UsageError


def autoshard(autoshard: bool | None = True) -> contexts.Manager:
    """`multimesh.autoshard` under the original's name of the argument."""
    return contexts.autoshard(autoshard)


def enable_fast_path(enable: bool | None = None) -> contexts.Manager:
    """`multimesh.enable_fast_path`; without an argument it leaves the option as it is."""
    return contexts.enable_fast_path(enable)


def enable_task_fusion(enable: bool | None = None) -> contexts.Manager:
    """`multimesh.enable_task_fusion`; without an argument it leaves the option as it is."""
    return contexts.enable_task_fusion(enable)


def enable_recomputation(enable: bool | None = None) -> contexts.Manager:
    """`multimesh.enable_recomputation`; without an argument it leaves the option as it is."""
    return contexts.enable_recomputation(enable)


def only_fuse_loop_tasks(enable: bool | None = None) -> contexts.Manager:
    """`multimesh.only_fuse_loop_tasks`; without an argument it leaves the option as it is."""
    return contexts.only_fuse_loop_tasks(enable)


def shutdown() -> None:
    """Do nothing: there is no runtime to stop."""


def _absent(name: str, remedy: str) -> Callable[..., Any]:
    def absent(*_: Any, **__: Any) -> Any:
        raise UsageError(f"multimesh.jax.{name} has no meaning on stock JAX; {remedy}")

    absent.__name__ = absent.__qualname__ = name
    absent.__doc__ = f"Raise UsageError: {remedy}."
    return absent


_COMPILER = "it reached into the compiler of the original; drop the call"
_REMAT = "see enable_recomputation and jax.checkpoint"
_STARTUP = "JAX has jax_num_cpu_devices for CPU devices and XLA_PYTHON_CLIENT_MEM_FRACTION for GPU memory"

Context = _absent("Context", "use register_task in a with statement, or MultiMesh")
MeshWrapper = _absent("MeshWrapper", "give tasks a jax.sharding.Mesh")
compile_hlo_module = _absent("compile_hlo_module", _COMPILER)
custom_partitioning = _absent("custom_partitioning", "call jax.experimental.custom_partitioning inside a task")
no_op_custom_call = _absent("no_op_custom_call", _COMPILER)
recompute_from_arguments_if_cost_less_than = _absent("recompute_from_arguments_if_cost_less_than", _REMAT)
register_custom_call_target = _absent("register_custom_call_target", "use jax.ffi.register_ffi_target")
replicate_parameters_smaller_than_num_elements = _absent(
    "replicate_parameters_smaller_than_num_elements", "give in_shardings= or constrain the parameter to PartitionSpec()"
)
set_startup_config = _absent("set_startup_config", _STARTUP)
shard_map = _absent("shard_map", "call jax.shard_map with the task's mesh inside the task")
slice_global_mesh = _absent("slice_global_mesh", "use the slice method of MultiMesh")

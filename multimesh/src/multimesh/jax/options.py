"""Compiler contexts with the original's defaults, and original names that mean nothing on stock JAX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from multimesh.core._compat import executables
from multimesh.errors import UsageError
from multimesh.marking import contexts


def autoshard(autoshard: bool | None = True) -> contexts.Manager:
    """Call `multimesh.autoshard`, with the original's name of its argument."""
    return contexts.autoshard(autoshard)


def _unset(option: Callable[[bool | None], contexts.Manager]) -> Callable[..., contexts.Manager]:
    def opened(enable: bool | None = None) -> contexts.Manager:
        return option(enable)

    opened.__name__ = opened.__qualname__ = option.__name__
    opened.__doc__ = f"`multimesh.{option.__name__}`; without an argument it leaves the option as it is."
    return opened


enable_fast_path = _unset(contexts.enable_fast_path)
enable_task_fusion = _unset(contexts.enable_task_fusion)
enable_recomputation = _unset(contexts.enable_recomputation)
only_fuse_loop_tasks = _unset(contexts.only_fuse_loop_tasks)


def shutdown() -> None:
    """Do nothing: there is no runtime to stop."""


def compile_hlo_module(
    path: str | Path,
    num_partitions: int = 1,
    erase_sharding: bool = False,
    autoshard: bool = False,
    platform: str | None = None,
    device_mem_gb: float | None = None,
) -> Any:
    """Compile a file of HLO text, and return what XLA knows of its memory; nothing runs.

    Parameters
    ----------
    path
        HLO text as ``jax.jit(f).lower(...).compiler_ir("hlo").as_hlo_text()`` gives it.
    num_partitions
        Number of devices to compile for: the first of ``jax.devices(platform)``.
    erase_sharding, autoshard
        False only: shardings stay as the module has them.
    device_mem_gb
        Memory of a device, in 10^9 bytes.

    Returns
    -------
    Sizes in bytes on a device: ``argument_size_in_bytes``, ``output_size_in_bytes``, ``temp_size_in_bytes``, ...

    Raises
    ------
    UsageError
        If the file cannot be read or compiled, if there are too few devices, or if a device has less memory.
    """
    if erase_sharding or autoshard:
        raise UsageError(
            "compile_hlo_module: shardings stay as the module has them; drop erase_sharding= and autoshard="
        )
    devices = jax.devices(platform)
    if len(devices) < num_partitions:
        raise UsageError(f"compile_hlo_module: {num_partitions} partitions need as many devices, not {len(devices)}")
    try:
        found = executables.compile_hlo(Path(path).read_text(encoding="utf-8"), devices[:num_partitions])
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"compile_hlo_module: {path}: {str(error).splitlines()[0]}") from error
    needed = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    if device_mem_gb is not None and needed > device_mem_gb * 1e9:
        raise UsageError(f"compile_hlo_module: {path} needs {needed / 1e9:.3g} GB, a device has {device_mem_gb:g}")
    return found


def _absent(name: str, remedy: str) -> Callable[..., Any]:
    def absent(*_: Any, **__: Any) -> Any:
        raise UsageError(f"multimesh.jax.{name} has no meaning on stock JAX; {remedy}")

    absent.__name__ = absent.__qualname__ = name
    absent.__doc__ = f"Raise UsageError: {remedy}."
    return absent


Context = _absent("Context", "use register_task in a with statement, or MultiMesh")
MeshWrapper = _absent("MeshWrapper", "give tasks a jax.sharding.Mesh")
custom_partitioning = _absent("custom_partitioning", "call jax.experimental.custom_partitioning inside a task")
no_op_custom_call = _absent("no_op_custom_call", "it reached into the compiler of the original; drop the call")
recompute_from_arguments_if_cost_less_than = _absent(
    "recompute_from_arguments_if_cost_less_than", "see enable_recomputation and jax.checkpoint"
)
register_custom_call_target = _absent("register_custom_call_target", "use jax.ffi.register_ffi_target")
replicate_parameters_smaller_than_num_elements = _absent(
    "replicate_parameters_smaller_than_num_elements", "give in_shardings= or constrain the parameter to PartitionSpec()"
)
set_startup_config = _absent(
    "set_startup_config",
    "JAX has jax_num_cpu_devices for CPU devices and XLA_PYTHON_CLIENT_MEM_FRACTION for GPU memory",
)
shard_map = _absent("shard_map", "call jax.shard_map with the task's mesh inside the task")
slice_global_mesh = _absent("slice_global_mesh", "use the slice method of MultiMesh")

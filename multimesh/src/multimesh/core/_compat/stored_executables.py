"""Executables as bytes: written where a kernel was compiled, loaded where it was lowered again.

JAX's own `jax.experimental.serialize_executable` pickles the layouts and devices beside the executable. Here these come
from the kernel that was lowered again, so nothing is unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_compile_options
from jax.sharding import Mesh

from multimesh.core import _compat
from multimesh.core._compat import executables
from multimesh.core._compat.versions import private
from multimesh.core.stable import text
from multimesh.errors import UsageError

_Unloaded = private("interpreters.pxla.UnloadedMeshExecutable")


def program_key(program: tuple[Any, ...] | None, mesh: Mesh) -> str:
    """Return the SHA-256 of `executables.program_of` a kernel, the same in each process; empty if it has none.

    How the devices of its ``mesh`` are dealt to processes is a part of it, as code may depend on that.
    """
    if program is None:
        return ""
    code, free, *others = program
    owners = [device.process_index - mesh.devices.flat[0].process_index for device in mesh.devices.flat]
    lines = [code, *(kind.__name__ for kind in free), text([*others, owners])]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def to_bytes(compiled: Any) -> bytes:
    """Return the executable of a kernel as bytes. XLA must have compiled it: of one that it loaded it writes no code.

    Raises ``UsageError`` where XLA can't write it.
    """
    try:
        unloaded = compiled._executable._unloaded_executable
        executable = unloaded.xla_executable
        if hasattr(executable, "serialize"):  # of devices that are not there
            return bytes(executable.serialize())
        return bytes(unloaded.backend.serialize_executable(executable))
    except (AttributeError, jax.errors.JaxRuntimeError) as error:
        raise UsageError(
            f"save: jax {jax.__version__} can't write a compiled kernel ({_first_line(error)}); compile on the machine "
            "that runs it"
        ) from error


def from_bytes(code: bytes, lowered: Any, mesh: Mesh, options: Mapping[str, Any]) -> Any:
    """Return the executable of a kernel that was lowered for ``mesh``, from those bytes.

    Raises ``UsageError`` where JAX or XLA can't load it.
    """
    if _Unloaded is None or _compat.DeviceList is None:
        raise UsageError(
            f"loading compiled kernels needs private parts of JAX, which jax {jax.__version__} does not have or which "
            f"are not used here: use {_compat.SUPPORTED} without MULTIMESH_PUBLIC_JAX, or compile"
        )
    devices = list(mesh.devices.flat)
    if any(map(_compat.is_compile_only, devices)):
        raise UsageError("devices of multimesh.topology are not there, so nothing can be loaded for them")
    device_list = _compat.DeviceList(tuple(devices))
    try:
        lowering = lowered._lowering
        arguments = lowering.compile_args
        for_devices = get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.array(devices)[None],
            env_options_overrides=dict(options),
            backend=arguments["backend"],
        )
        inputs, outputs = arguments["global_in_avals"], arguments["global_out_avals"]
        unloaded = _Unloaded(
            xla_executable=arguments["backend"].deserialize_executable(code, device_list, for_devices),
            device_list=device_list,
            backend=arguments["backend"],
            input_avals=inputs,
            input_shardings=list(arguments["in_shardings"]),
            output_avals=outputs,
            output_shardings=list(arguments["out_shardings"]),
            committed=arguments["committed"],
            name=lowering._name,
            unordered_effects=[],
            ordered_effects=[],
            keepalive=(),
            host_callbacks=[],
            kept_var_idx=arguments["kept_var_idx"],
            mut=None,
            # Kernels ask for no layout in memory, so that of JAX holds.
            xla_in_layouts=[None] * len(inputs),
            dispatch_in_layouts=[None] * len(inputs),
            xla_out_layouts=[None] * len(outputs),
            all_args_info=arguments["all_args_info"],
            pgle_profiler=None,
        )
        return executables.load(unloaded, lowered)
    except (AttributeError, KeyError, TypeError, ValueError, jax.errors.JaxRuntimeError) as error:
        raise UsageError(
            f"jax {jax.__version__} can't load a compiled kernel here ({_first_line(error)}); compile on this machine"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

"""Flags that the original's Realm runtime could mean: what stock JAX makes of them, and which it cannot honour."""

from __future__ import annotations

from multimesh_maxtext.options import Options

GPU_ONLY = (
    "collective_matmul",
    "latency_hiding_scheduler",
    "xla_pipelining",
    "xla_loop_buffering",
    "xla_ar_threshold",
    "xla_ag_threshold",
    "xla_rs_threshold",
    "use_nccl_comm_split",
    "debug_nccl",
    "fbmem",
)


JAX_FRACTION = 0.75
"""Of a GPU's memory that JAX takes unless told otherwise."""


def memory_fraction(fbmem: int, device_memory: int) -> float:
    """Return JAX's memory fraction for ``--fbmem``; both in MiB. JAX takes at most the whole device."""
    return round(min(1.0, fbmem / device_memory), 4)


def warning(options: Options, *, gpu_memory: int | None) -> str | None:
    """Return one line that names the flags without an effect, or ``None``.

    Parameters
    ----------
    gpu_memory
        Memory of a visible GPU in MiB, ``None`` if unknown.
    """
    realm = [flag for flag in ("zcmem", "sysmem") if getattr(options, flag) is not None]
    if options.network not in (None, "none"):
        realm.append("network")
    if options.fbmem and options.gpus and gpu_memory is None:
        realm.append("fbmem")
    names = [f"--{name}" for name in realm] + sorted(set(options.eager))
    parts = [f"{', '.join(names)} (for the Realm runtime)"] if names else []
    if options.hoist_loop_convert:
        parts.append("--hoist-loop-convert (XLA has no such switch any more)")
    if options.platform == "cpu":
        unused = [f"--{name.replace('_', '-')}" for name in GPU_ONLY if options.has(name)]
        parts += [f"{', '.join(unused)} (for GPUs)"] if unused else []
    return f"without effect here: {'; '.join(parts)}" if parts else None

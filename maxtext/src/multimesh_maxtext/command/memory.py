"""How much memory a pipeline will need on the devices of each stage, and whether that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from multimesh_maxtext.command.checks import Job
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.command.translate import JAX_FRACTION, fbmem_mib, memory_fraction
from multimesh_maxtext.command.values import DEVICES
from multimesh_maxtext.errors import DoesNotFitError
from multimesh_maxtext.handoff import CompiledStages, Need


def limit(job: Job, gpu_memory: int | None) -> int | None:
    """Memory of a device in bytes: the user's number, or the part of the smallest GPU that JAX takes."""
    o = job.options
    if o.device_memory is None and not ((o.device or o.gpus) and o.staged):
        return None
    return usable(o, gpu_memory)


def usable(o: Options, gpu_memory: int | None = None) -> int | None:
    """Return the bytes of a GPU that JAX may use: the user's, or JAX's part of the named or the smallest GPU."""
    if o.device_memory is not None:
        return o.device_memory
    if o.device:
        gpu_memory = DEVICES[o.device]
    if gpu_memory is None:
        return fbmem_mib(o.fbmem) * 2**20 if o.fbmem else None
    fraction = memory_fraction(o.fbmem, gpu_memory) if o.fbmem is not None else JAX_FRACTION
    return int(gpu_memory * 2**20 * fraction)


def show_size(size: float) -> str:
    """Return a size with three digits: ``1.25 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def memory_table(needs: Sequence[Need]) -> Table:
    """Return the needs of all stages, and which is the largest."""
    result = Table(box=None, pad_edge=False)
    names = ("parameters", "optimizer", "batch", "gradients", "activations", "workspace", "total")
    for name in ("stage", "params", "optimizer", "batch", "gradients", "live", "workspace", "total"):
        result.add_column(name, justify="right")
    for stage, need in enumerate(needs):
        result.add_row(str(stage), *(show_size(getattr(need, name)) for name in names))
    return result


def tabulate_stages(needs: Sequence[Need], stages: CompiledStages, limit: int | None) -> Table:
    """Return the memory of all stages as XLA compiled them, beside their forecast, and whether each fits."""
    result = Table(box=None, pad_edge=False)
    for name in ("stage", "gradients", "live", "workspace", "total", "forecast", "off"):
        result.add_column(name, justify="right")
    result.add_column("fits" if limit is not None else "")
    result.add_column("largest")
    names = ("gradients", "activations", "workspace", "total")
    for stage, (forecast, need) in enumerate(zip(needs, stages.needs, strict=True)):
        largest = max(asdict(need).items(), key=lambda item: item[1])[0]
        result.add_row(
            str(stage),
            *(show_size(getattr(need, name)) for name in names),
            show_size(forecast.total),
            f"{100 * (forecast.total / need.total - 1):+.1f} %",
            "" if limit is None else "yes" if need.total <= limit else "no",
            largest,
        )
    return result


def check_fits(needs: Sequence[Need], limit: int) -> None:
    """Raise where a stage needs more than a device has.

    Raises ``DoesNotFitError`` with the numbers of the stage that needs most, and a remedy.
    """
    stage = max(range(len(needs)), key=lambda i: needs[i].total)
    need = needs[stage]
    if need.total <= limit:
        return
    parts = sorted(((size, name) for name, size in asdict(need).items()), reverse=True)
    most = ", ".join(f"{name} {show_size(size)}" for size, name in parts[:3])
    remedy = {
        "parameters": "more --pp, --tp or --fsdp",
        "optimizer": "more --pp, --tp or --fsdp",
        "gradients": "more --pp, --tp or --fsdp",
        "activations": "--remat full, a smaller --microbatch-size or --schedule 1f1b",
    }.get(parts[0][1], "a smaller --microbatch-size or more --tp")
    raise DoesNotFitError(
        f"stage {stage} needs {show_size(need.total)} on each device ({most}), but a device has {show_size(limit)}; "
        f"use {remedy}"
    )

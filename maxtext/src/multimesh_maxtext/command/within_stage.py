"""Finds what is wrong within a stage: sequences and experts that are split over devices, and quantization."""

from __future__ import annotations

import math
from collections.abc import Iterator

from multimesh_maxtext.command.flags import Flags
from multimesh_maxtext.command.job import Job, Model, interprets_experts
from multimesh_maxtext.command.settings import has_package
from multimesh_maxtext.errors import FlagError, LauncherError, MissingPartError, UnsupportedError

QWIX = ("int8", "int4", "fp4", "fp8_e4m3", "fp8_e5m2", "fp8_nanoo", "fp8_full")
"""Kinds of quantization by Qwix, ``use_qwix_quantization=true``, that pipelines were compared with."""

AQT = ("int8",)
"""Kinds of quantization by AQT that pipelines were compared with, without experts."""


def find_wrong_context(o: Flags, model: Model) -> Iterator[LauncherError]:
    """Yield what of ``--cp`` the model, the attention or the devices cannot honour, and MaxText would not say."""
    if o.cp == 1:
        return
    balanced, kernel = model.resolved.get("context_parallel_load_balance", True), "cudnn_flash_te"
    parts = o.cp * (2 if balanced else 1)
    if o.sequence_length % parts:
        yield FlagError(
            f"--cp {o.cp} cuts a sequence into {parts} parts, and {o.sequence_length} tokens are no multiple of them; "
            f"use --sequence-length {max(1, round(o.sequence_length / parts)) * parts}"
        )
    if not o.gpus or o.forecast:
        return
    if o.attention not in (kernel, "dot_product"):
        yield UnsupportedError(
            f"--attention {o.attention} attends within the part of a sequence that a device has; with --cp {o.cp} use "
            f"--attention {kernel} or dot_product"
        )
    elif not has_package("transformer_engine") and (balanced or o.attention == kernel):
        yield MissingPartError(
            f"--cp {o.cp} on GPUs needs TransformerEngine, which orders the parts of sequences; install it, or use "
            "--attention dot_product context_parallel_load_balance=false"
        )


def find_wrong_experts(o: Flags, model: Model) -> Iterator[LauncherError]:
    """Yield how experts cannot exchange tokens on these devices."""
    settings = model.resolved
    if o.ep == 1 or not settings.get("sparse_matmul"):
        return
    ring = settings.get("use_ring_of_experts")
    if ring and not (settings.get("megablox") or settings.get("use_tokamax_gmm")):
        yield UnsupportedError(
            f"--ep {o.ep}: MaxText's ring of experts multiplies by all groups, which lax.ragged_dot refuses for the "
            "experts of one device; leave out megablox=false"
        )
    if o.platform == "cpu" and not ring:
        yield UnsupportedError(
            f"--ep {o.ep}: with sparse_matmul=True experts exchange tokens by an operation that XLA lacks on CPU "
            "devices; add use_ring_of_experts=true, which gathers them, or sparse_matmul=false"
        )


def describe_experts(o: Flags, model: Model) -> Iterator[str]:
    """Yield how experts are multiplied on GPUs, where that is not MaxText's default."""
    if interprets_experts(o, model.resolved):
        yield (
            "experts are multiplied by MaxText's kernel for TPUs (megablox), which Pallas interprets on GPUs, tile by "
            "tile; leave out megablox=true and use_ring_of_experts=true"
        )
    elif "megablox" in model.settings:
        yield (
            "experts are multiplied by lax.ragged_dot: MaxText's own kernel (megablox) is for TPUs. XLA multiplies all "
            f"tokens by each of the {model.experts // o.ep} experts of a device: sparse_matmul=false "
            "capacity_factor=1.25 needs less but drops tokens, a larger --ep drops none"
        )


def quantizing_devices(job: Job) -> int:
    """Return how many devices of a stage a process has: by these MaxText cuts a microbatch that it quantizes."""
    return max(1, job.mesh_devices // max(1, job.flags.nodes // job.flags.pp))


def find_wrong_quantization(job: Job) -> Iterator[LauncherError]:
    """Yield why a pipeline cannot train with a quantization, and which it can train with."""
    o, settings = job.flags, job.model.resolved
    kind, by_qwix = str(settings.get("quantization") or ""), bool(settings.get("use_qwix_quantization"))
    by_aqt = kind in AQT and not by_qwix
    rows, parts = o.domains * o.microbatch_size, quantizing_devices(job)
    if by_aqt and rows % parts:
        yield FlagError(
            f"quantization={kind}: AQT cuts the rows of a microbatch, {rows}, by {parts} devices; use "
            f"--microbatch-size {math.lcm(rows, parts) // o.domains} or use_qwix_quantization=true"
        )
    if kind and not (kind in QWIX and by_qwix) and not (by_aqt and job.model.experts == 1):
        remedy = "add" if kind in QWIX else "use quantization=fp8_full, fp8_e4m3 or int8 with"
        yield UnsupportedError(
            f"--backend multimesh cannot train with quantization={kind} yet: no pipeline was compared with one program "
            f"there; {remedy} use_qwix_quantization=true"
        )

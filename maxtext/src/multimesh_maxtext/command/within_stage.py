"""Finds what is wrong within a stage: sequences and experts that are split over devices, and quantization."""

from __future__ import annotations

import math
from collections.abc import Iterator

from multimesh_maxtext.command.model import Model, has_package, interprets_experts
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.errors import LauncherError, MissingPartError, UnsupportedError, UsageError

_TPU_ONLY = ("ulysses", "usp")

QWIX = ("int8", "int4", "fp4", "fp8_e4m3", "fp8_e5m2", "fp8_nanoo", "fp8_full")
"""Kinds of quantization by Qwix, ``use_qwix_quantization=true``, that pipelines were compared with."""

AQT = ("int8",)
"""Kinds of quantization by AQT that pipelines were compared with."""

_DELAYED = ("fp8", "nanoo_fp8", "fp8_gpu", "te_fp8_delayedscaling")
"""Kinds that MaxText refuses where gradients are accumulated: most scale by what earlier steps have seen."""


def find_wrong_context(o: Options, model: Model) -> Iterator[LauncherError]:
    """Yield what of ``--cp`` the model, the attention or the devices cannot honour."""
    if o.cp == 1:
        return
    settings = model.resolved
    balanced, strategy = settings["context_parallel_load_balance"], settings["context_parallel_strategy"]
    parts = o.cp * (2 if balanced else 1)
    if o.sequence_length % parts:
        yield UsageError(
            f"--cp {o.cp} cuts a sequence into {parts} parts, and {o.sequence_length} tokens are no multiple of them; "
            f"use --sequence-length {max(1, round(o.sequence_length / parts)) * parts}"
        )
    if model.embedding % (o.fsdp * o.cp):
        yield UsageError(
            f"--cp {o.cp} shards parameters as --fsdp does, and fsdp x cp = {o.fsdp * o.cp} does not divide the model "
            f"dims ({model.embedding}); change --cp or --model-dims"
        )
    if strategy in _TPU_ONLY:
        yield UnsupportedError(
            f"context_parallel_strategy={strategy}: MaxText has it for TPUs only; use all_gather, or ring on GPUs"
        )
    kernel = "cudnn_flash_te"
    if strategy == "ring" and o.attention != kernel:
        yield UnsupportedError(
            f"context_parallel_strategy=ring: MaxText has it in TransformerEngine's attention alone; use all_gather, "
            f"or --attention {kernel} on GPUs"
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


def find_wrong_experts(o: Options, model: Model) -> Iterator[LauncherError]:
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


def describe_experts(o: Options, model: Model) -> Iterator[str]:
    """Yield how experts are multiplied on GPUs, where that is not MaxText's default."""
    if interprets_experts(o, model.resolved):
        yield (
            "experts are multiplied by MaxText's kernel for TPUs (megablox), which Pallas interprets on GPUs, tile by "
            "tile; leave out megablox=true and use_ring_of_experts=true"
        )
    elif "megablox" in model.settings:
        several, each = "", model.experts // o.ep
        if each > 1:
            several = (
                f". XLA multiplies all tokens by each of the {each} experts of a device, and keeps as many copies: "
                "sparse_matmul=false capacity_factor=1.25 needs less but drops tokens, a larger --ep drops none"
            )
        yield f"experts are multiplied by lax.ragged_dot: MaxText's own kernel (megablox) is for TPUs{several}"


def _quantization(model: Model) -> tuple[str, bool]:
    """Return the kind of quantization, empty for none, and whether the library Qwix does it."""
    settings = model.resolved
    return str(settings.get("quantization") or ""), bool(settings.get("use_qwix_quantization"))


def find_wrong_quantization(model: Model) -> Iterator[LauncherError]:
    """Yield why a pipeline cannot train with a quantization, and which it can train with."""
    kind, by_qwix = _quantization(model)
    by_aqt_in_experts = kind in AQT and not by_qwix and model.experts > 1
    if not kind or (kind in (QWIX if by_qwix else AQT) and not by_aqt_in_experts):
        return
    remedy = "use quantization=fp8_full, fp8_e4m3 or int8 with use_qwix_quantization=true"
    if kind in _DELAYED:
        reason = "MaxText has it without gradient accumulation alone, and a pipeline accumulates over its microbatches"
    elif by_qwix:
        reason = "with use_qwix_quantization=true MaxText quantizes nothing, and says nothing"
    elif by_aqt_in_experts:
        reason, remedy = "MaxText cannot make experts with AQT", "add use_qwix_quantization=true"
    elif kind in QWIX:
        reason, remedy = "MaxText has it by Qwix alone", "add use_qwix_quantization=true"
    elif kind == "intmp":
        reason = "MaxText looks for the names of Linen modules, and its layers have none"
    elif kind.startswith("te_"):
        reason = "its kernels are TransformerEngine's for GPUs, and no pipeline was compared with one program there"
    else:
        reason = "its parameters have 8 bits, and MaxText has it for inference alone"
    yield UnsupportedError(f"--backend multimesh cannot train with quantization={kind} yet: {reason}; {remedy}")


def quantizing_devices(o: Options, mesh_devices: int) -> int:
    """Return how many devices of a stage a process has: by these MaxText cuts a microbatch that it quantizes."""
    return max(1, mesh_devices // max(1, o.nodes // o.pp))


def find_uneven_quantization(o: Options, model: Model, mesh_devices: int) -> Iterator[LauncherError]:
    """Yield that AQT cannot cut the rows of a microbatch by the devices of a stage."""
    kind, by_qwix = _quantization(model)
    rows, parts = o.domains * o.microbatch_size, quantizing_devices(o, mesh_devices)
    if kind in AQT and not by_qwix and rows % parts:
        yield UsageError(
            f"quantization={kind}: AQT cuts the rows of a microbatch, {rows}, by {parts} devices; use "
            f"--microbatch-size {math.lcm(rows, parts) // o.domains} or use_qwix_quantization=true"
        )


def find_wrong_adapters(model: Model) -> Iterator[LauncherError]:
    """Yield that MaxText's trainer has no adapters: its optimizer would find nothing to train, and say nothing."""
    lora = model.resolved.get("lora")
    if isinstance(lora, dict) and lora.get("enable_lora"):
        yield UnsupportedError(
            "lora: MaxText makes adapters in maxtext.trainers.post_train.sft.train_sft alone, which needs tunix; its "
            "trainer here would train nothing; leave lora= out"
        )

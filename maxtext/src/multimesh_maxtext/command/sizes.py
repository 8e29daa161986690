"""A command line as the planner of `multimesh.planner` reads it: the model as sizes, the job as a configuration."""

from __future__ import annotations

from typing import Any

from multimesh import UsageError, schedules
from multimesh.planner import Configuration, Step, Transformer, band, forecast
from multimesh_maxtext.command.checks import Job, schedule_name
from multimesh_maxtext.command.model import Model

_FORECAST = ("save_dot_except_mlp", "save_out_proj", "save_qkv_proj", "full")  # policies that the planner knows by name


def transformer(model: Model) -> Transformer:
    """Return the model's sizes. Layers that differ from each other count as equal ones, but dense ones at the start."""
    found = model.resolved
    experts = model.experts if model.experts > 1 else 0
    gates = len(found.get("mlp_activations") or ["silu"])

    def number(name: str) -> int:
        return int(found.get(name) or 0)

    latent = found.get("attention_type") == "mla"
    expert = max(0, number("base_moe_mlp_dim")) or model.mlp  # -1: as the MLP
    return Transformer(
        name=model.name or "this model",
        layers=model.layers,
        hidden=model.embedding,
        ffn=model.mlp,
        heads=model.query_heads,
        kv_heads=model.query_heads if latent else model.kv_heads,
        vocabulary=model.vocabulary,
        head=number("qk_nope_head_dim") + number("qk_rope_head_dim") if latent else number("head_dim"),
        gated=gates > 1,
        experts=experts,
        active=max(1, number("num_experts_per_tok")) if experts else 0,
        tied=bool(found.get("logits_via_embedding")),
        expert_ffn=expert if experts else 0,
        shared_ffn=expert * number("shared_experts") if experts else 0,
        dense_layers=min(model.layers, number("first_num_dense_layers")) if experts else 0,
        value_head=number("v_head_dim") if latent else 0,
        query_rank=number("q_lora_rank") if latent else 0,
        kv_rank=number("kv_lora_rank") if latent else 0,
        rope_head=number("qk_rope_head_dim") if latent else 0,
        predicted=number("mtp_num_layers"),
    )


def precision(model: Model) -> str:
    """Return the precision of products: that of ``quantization``."""
    return "fp8" if "fp8" in str(model.resolved.get("quantization") or "") else "bf16"


def planner_configuration(job: Job) -> Configuration:
    """Return the planner's configuration of a job. A searched schedule counts as a published one of its shape.

    Raises ``UsageError`` where a device would have a part of a sequence of a microbatch, which the planner does not
    cost.
    """
    o = job.options
    groups = o.dp * o.fsdp * o.ep
    microbatch, rest = divmod(job.batch, job.microbatches * groups)
    if rest or not microbatch:
        raise UsageError(f"microbatches of {job.batch // job.microbatches} are not whole on {groups} groups of devices")
    name = schedule_name(o)
    if name not in schedules.names() or name == "auto":
        name = "interleaved" if o.interleave > 1 else "1f1b"
    return Configuration(
        batch=job.batch,
        sequence=o.sequence_length,
        microbatch=microbatch,
        dp=o.dp * o.ep,
        fsdp=o.fsdp,
        tp=o.tp,
        pp=o.pp,
        cp=o.cp,
        ep=o.ep,
        interleave=o.interleave,
        schedule=name,
        sequence_parallel=bool(o.sequence_parallel),
        sharded="optimizer" if o.zero else "none",
        gather_once=bool(o.gather_once),
        recompute=recompute(o.remat),
        precision=precision(job.model),
        layers=job.pieces if o.pp > 1 else (),
    )


def recompute(policy: str | None) -> str:
    """Return the planner's name of a policy of MaxText: ``minimal`` for those that it does not know."""
    if policy in (None, "none"):  # MaxText recomputes everything then
        return "full"
    if policy in ("save_dot_except_mlpwi", "save_dot_with_context_except_mlp"):
        return "save_dot_except_mlp"
    return policy if policy in _FORECAST else "minimal"


def forecast_step(job: Job) -> Step | None:
    """Return the forecast of a step on ``--device``; None where the planner has no forecast of such a job."""
    if not job.options.device:
        return None
    try:
        return forecast(transformer(job.model), planner_configuration(job), job.options.device, "maxtext")
    except UsageError:
        return None


def step_json(step: Step) -> dict[str, Any]:
    """Return the forecast of a step, as data. ``band`` is the half of its width, as a share."""
    return {
        "seconds": step.seconds,
        "band": band(step),
        "tokens_per_second": step.tokens_per_second * step.how.devices,
        "utilization": step.utilization,
        "waiting": step.bubble,
        "bound": step.bound,
    }


def step_text(step: Step) -> str:
    """Return the forecast of a step, in words."""
    tokens = step.tokens_per_second * step.how.devices
    return (
        f"forecast, not a measurement: a step of {step.seconds:.2f} s on {step.how.devices} {step.device.name}, within "
        f"{100 * band(step):.0f} %; {tokens:,.0f} tokens/s, {100 * step.utilization:.0f} % of the peak (MFU), bubble "
        f"{100 * step.bubble:.0f} % with the head, most time in {step.bound} (docs/forecasts.md)"
    )

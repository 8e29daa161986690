"""Forecasts of a job: seconds by the planner; memory by a process that ends before it trains, held against a device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from multimesh import UsageError, schedules
from multimesh_maxtext.command.check_flags import find_wrong_sizes
from multimesh_maxtext.command.environment import memory_limit
from multimesh_maxtext.command.job import Job, Model, Paths, make_job
from multimesh_maxtext.command.report import make_table, schedule_choice
from multimesh_maxtext.command.steps import reference_job
from multimesh_maxtext.command.training import StopRequest, log_tail, receiving, trainer
from multimesh_maxtext.command.translate import Launch, forecasting
from multimesh_maxtext.command.values import DEVICES
from multimesh_maxtext.errors import DoesNotFitError, TrainerFailedError
from multimesh_maxtext.handoff import CompiledStages, Forecast, HostCalls, Need, read_forecast
from multimesh_maxtext.outcome import read as read_outcome
from multimesh_planner import Configuration, Step, Transformer, band, step_time

_FORECAST = ("save_dot_except_mlp", "save_out_proj", "save_qkv_proj", "full")  # policies that the planner knows by name


def transformer(model: Model) -> Transformer:
    """Return the model's sizes. Layers that differ from each other count as equal ones, but dense ones at the start."""
    settings = model.resolved
    experts = model.experts if model.experts > 1 else 0
    gates = len(settings.get("mlp_activations") or ["silu"])

    def number(name: str) -> int:
        return int(settings.get(name) or 0)

    latent = settings.get("attention_type") == "mla"
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
        tied=bool(settings.get("logits_via_embedding")),
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
    o = job.flags
    groups = o.dp * o.fsdp * o.ep
    microbatch, remainder = divmod(job.batch, job.microbatches * groups)
    if remainder or not microbatch:
        raise UsageError(f"microbatches of {job.batch // job.microbatches} are not whole on {groups} groups of devices")
    name = job.schedule
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
    if not job.flags.device:
        return None
    try:
        return step_time(transformer(job.model), planner_configuration(job), job.flags.device, "maxtext")
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
        f"{100 * step.bubble:.0f} % with the head, most time in {step.bound} (planner/README.md)"
    )


Costs = Mapping[str, float]
"""What XLA makes of a step, as `multimesh.count_costs`; ``peak`` bytes of a device, ``seconds`` of compilation."""

_ALONE = ("peak", "seconds")
_OTHERS = {"flops", "bytes accessed", "copies", "bytes copied", *_ALONE}  # than bytes of collectives

_COMPILING = re.compile(r"compiling kernels: [^\n]+")  # the library's lines on progress

DROPPING = "sparse_matmul=false capacity_factor=1.25 (which drops tokens)"
"""Settings by which experts are multiplied without `ragged_dot`."""


def check_memory(job: Job, paths: Paths, console: Console, gpu_memory: int | None) -> None:
    """Show the memory that a pipeline will need, where a flag asks or a limit is known; refuse what exceeds that.

    Raises ``DoesNotFitError`` with the numbers of the stage that needs most, and a remedy.
    """
    programs: dict[str, Costs] = {}
    if job.flags.forecast and not job.flags.staged:
        job = make_job(replace(job.flags, backend="multimesh"), job.model)
        programs = compile_programs(job, paths, console, gpu_memory)
        if job.flags.pp == 1:
            _show_programs(job, console, programs)
            return
    flags, limit = job.flags, memory_limit(job.flags, gpu_memory)
    if not flags.forecast and limit is None:
        return
    try:
        forecast = _forecast(job, paths, console, gpu_memory)
    except TrainerFailedError as error:
        if flags.forecast or flags.device_memory:
            raise
        print(f"warning: memory was not checked: {error}", file=sys.stderr)
        return
    if forecast.stages:
        peak = max(need.total for need in forecast.stages.needs)
        ours = sum_costs(forecast.stages.costs) | {"peak": peak, "seconds": forecast.stages.seconds}
        programs = {"multimesh": ours, **programs}
    if flags.json and flags.forecast:
        print(json.dumps(_forecast_json(job, paths, forecast, limit) | {"programs": programs}))
    elif not flags.json:
        _show_forecast(job, paths, console, forecast, limit)
        _show_programs(job, console, programs)
    if limit is not None:
        check_fits((forecast.stages or forecast).needs, limit, job)


def compile_programs(job: Job, paths: Paths, console: Console, gpu_memory: int | None) -> dict[str, Costs]:
    """Return what XLA makes of MaxText's own programs of a job, of which each copy of the model is on as many devices.

    ``program`` has no stages, and runs on the devices of one; ``pipeline`` is MaxText's own, where it takes the job.
    """
    one, flags = reference_job(job), job.flags
    if flags.gpus == 1:  # with a process each, as in the job
        one = replace(one, flags=replace(one.flags, gpus=1, nodes=one.devices))
    programs = {"program": one}
    usual: dict[str, Any] = dict.fromkeys(("schedule", "custom_schedule_path", "partition", "scan_layers"))
    circular = make_job(replace(flags, backend="spmd", zero=0, **usual), job.model)
    if flags.pp > 1 and not any(find_wrong_sizes(circular)):
        programs["pipeline"] = circular
    costs: dict[str, Costs] = {}
    for name, program in programs.items():
        beside = paths.below(name)
        beside.output.mkdir(parents=True, exist_ok=True)
        start = forecasting(program, beside, inherited=os.environ, gpu_memory=gpu_memory)
        with console.status(f"compiling MaxText's own {name}"):
            inspect(start, beside)
        costs[name] = sum_costs([json.loads(beside.forecast.read_bytes())] * program.flags.pp)
    return costs


def sum_costs(devices: Sequence[Costs]) -> dict[str, float]:
    """Return the costs of the devices of one copy of the model together; of peak and seconds the largest."""
    names = dict.fromkeys(name for costs in devices for name in costs)
    return {name: (max if name in _ALONE else sum)(costs.get(name, 0) for costs in devices) for name in names}


def _forecast(job: Job, paths: Paths, console: Console, gpu_memory: int | None) -> Forecast:
    """Run the process that forecasts, and show how far it is."""
    text = f"forecasting: tracing a step of {job.model.layers} layers"
    start = forecasting(job, paths, inherited=os.environ, gpu_memory=gpu_memory)
    with console.status(text) as status:

        def tell(line: str) -> None:
            status.update(line)
            if not job.flags.json and not console.is_terminal:
                console.print(line)

        tell(text)
        return run_forecast(start, paths, tell)


def run_forecast(start: Launch, paths: Paths, tell: Callable[[str], object] = lambda _: None) -> Forecast:
    """Run the process that forecasts; return its forecast. ``tell`` gets its lines on compilation."""
    paths.forecast.unlink(missing_ok=True)
    inspect(start, paths, tell)
    return read_forecast(paths.forecast)


def inspect(start: Launch, paths: Paths, tell: Callable[[str], object] = lambda _: None) -> None:
    """Run a process that ends before it trains. ``tell`` gets the newest line on compilation, about once a second.

    Raises ``FlagError`` where MaxText refuses its settings, and ``TrainerFailedError`` where it fails otherwise.
    """
    newest, stop = "", StopRequest()
    with receiving(stop), trainer(start, paths) as process:
        while process.poll() is None and not stop.count:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            lines = _COMPILING.findall(paths.log.read_text(encoding="utf-8", errors="replace"))
            if lines and lines[-1] != newest:
                newest = lines[-1]
                tell(newest)
    if stop.count:
        raise KeyboardInterrupt
    if process.returncode:
        error = outcome.error() if (outcome := read_outcome(paths.outcome)) else None
        if error and not isinstance(error, TrainerFailedError):
            raise error
        print(log_tail(paths.log), file=sys.stderr)
        raise TrainerFailedError(f"the trainer failed with exit code {process.returncode}; see {paths.log}")


def _show_forecast(job: Job, paths: Paths, console: Console, forecast: Forecast, limit: int | None) -> None:
    flags, step = job.flags, forecast_step(job)
    console.print("memory on each device of a stage at the peak of a step (forecast)")
    console.print(memory_table(forecast.needs))
    if not flags.forecast:
        return
    if stages := forecast.stages:
        effort = f"{stages.kernels} kernels, {stages.compiled} of them unlike, in {stages.seconds:.0f} s"
        console.print(f"the same as XLA compiled it for {flags.device} ({effort})")
        console.print(tabulate_stages(forecast.needs, stages, limit))
    if limit is not None:
        console.print(f"of {show_size(limit)} that JAX may use of a device")
    if schedule := schedule_choice(paths.schedule):
        console.print(schedule["schedule"]["text"], markup=False)
    console.print(
        f"devices wait {100 * forecast.bubble:.1f} % of a step, by operations of their kernels, transfers take no "
        f"time: see {paths.forecast.with_suffix('.svg')}"
    )
    console.print(_host_text(forecast.host, step.seconds if step else None))
    if step:
        console.print(step_text(step))
        if stages and (least := least_seconds(stages, step)) > step.seconds:
            console.print(f"but kernels as XLA compiled them need {least:.2f} s at the device's peaks, or more")
    elif flags.device:
        console.print("no forecast of seconds: microbatches are not whole sequences on each device")


def least_seconds(stages: CompiledStages, step: Step) -> float:
    """Return the time of a step in which the busiest stage's compiled kernels run at the peaks of its device."""
    peak, bandwidth = step.device.bf16, step.device.bandwidth
    return max(max(costs["flops"] / peak, costs["bytes accessed"] / bandwidth) for costs in stages.costs)


def _host_text(host: Sequence[HostCalls], step: float | None) -> str:
    """Return how much the main thread of the busiest process does in a step of so many seconds, in words."""
    most = max(host, key=lambda calls: calls.seconds)
    share = f", {100 * most.seconds / step:.1f} % of the step" if step else ""
    return (
        f"the busiest process starts {most.kernels:,} kernels a step with {most.arrays:,} arrays, and "
        f"{most.transfers:,} arrays are sent or received: about {1e3 * most.seconds:,.0f} ms of its main thread{share}"
    )


def _forecast_json(job: Job, paths: Paths, forecast: Forecast, limit: int | None) -> dict[str, object]:
    stages, step = forecast.stages, forecast_step(job)
    values: dict[str, Any] = {"forecast": _with_totals(forecast.needs), "bubble": forecast.bubble, "limit": limit}
    values["host"] = [asdict(calls) | {"seconds": calls.seconds} for calls in forecast.host]
    if stages:
        values |= {"compiled": _with_totals(stages.needs), "calls": stages.calls, "costs": stages.costs}
        values["compilation"] = {name: getattr(stages, name) for name in ("kernels", "compiled", "seconds")}
    values |= step_json(step) if step else {}
    if stages and step and (slower := least_seconds(stages, step) / step.seconds) > 1:
        rates = {name: values[name] / slower for name in ("tokens_per_second", "utilization")}
        values |= {"seconds": slower * step.seconds, **rates, "bound": "kernels as compiled"}
    return values | schedule_choice(paths.schedule)


def _show_programs(job: Job, console: Console, programs: Mapping[str, Costs]) -> None:
    """Show what XLA's compiler makes of a step: of ours, and of MaxText's own programs beside it."""
    if job.flags.json and job.flags.pp == 1:
        print(json.dumps({"programs": programs}))
    elif programs:
        console.print("a step on the devices of one copy of the model, as XLA compiled it")
        console.print(tabulate_programs(programs))


_SIZES: dict[str, Callable[[Costs], str]] = {
    "operations of products": lambda costs: f"{costs['flops']:.4g}",
    "results of collectives": lambda costs: show_size(sum(costs[name] for name in costs.keys() - _OTHERS)),
    "accessed by kernels": lambda costs: show_size(costs["bytes accessed"]),
    "by copies, transposes": lambda costs: f"{show_size(costs['bytes copied'])} in {costs['copies']:,.0f}",
    "peak of a device": lambda costs: show_size(costs["peak"]),
    "compiled in": lambda costs: f"{costs['seconds']:.0f} s",
}


def tabulate_programs(programs: Mapping[str, Costs]) -> Table:
    """Return a column for each program: sums over the devices of one copy of the model, and the peak of a device."""
    return make_table(("", *programs), [(name, *map(size, programs.values())) for name, size in _SIZES.items()])


def _with_totals(needs: Sequence[Need]) -> list[dict[str, int]]:
    return [{**asdict(need), "total": need.total} for need in needs]


def show_size(size: float) -> str:
    """Return a size with three digits: ``1.25 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def memory_table(needs: Sequence[Need]) -> Table:
    """Return the needs of all stages."""
    names = ("parameters", "optimizer", "batch", "gradients", "activations", "workspace", "total")
    rows = [(str(n), *(show_size(getattr(need, name)) for name in names)) for n, need in enumerate(needs)]
    return make_table(("stage", "params", "optimizer", "batch", "gradients", "live", "workspace", "total"), rows)


def tabulate_stages(needs: Sequence[Need], stages: CompiledStages, limit: int | None) -> Table:
    """Return the memory of all stages as XLA compiled them, beside their forecast, and whether each fits."""
    names = ("gradients", "activations", "workspace", "total")
    rows = []
    for number, (estimate, need) in enumerate(zip(needs, stages.needs, strict=True)):
        sizes = [show_size(getattr(need, name)) for name in names]
        difference = f"{100 * (estimate.total / need.total - 1):+.1f} %"
        fits = "" if limit is None else "yes" if need.total <= limit else "no"
        most = max(asdict(need).items(), key=lambda item: item[1])[0]
        rows.append((str(number), *sizes, show_size(estimate.total), difference, fits, most))
    fits = "fits" if limit is not None else ""
    return make_table(("stage", "gradients", "live", "workspace", "total", "forecast", "off", fits, "largest"), rows)


def check_fits(needs: Sequence[Need], limit: int, job: Job) -> None:
    """Raise ``DoesNotFitError`` where a stage needs more than a device has."""
    stage = max(range(len(needs)), key=lambda i: needs[i].total)
    need = needs[stage]
    if need.total <= limit:
        return
    parts = sorted(((size, name) for name, size in asdict(need).items()), reverse=True)
    most = ", ".join(f"{name} {show_size(size)}" for size, name in parts[:3])
    raise DoesNotFitError(
        f"stage {stage} needs {show_size(need.total)} on each device ({most}), but a device has {show_size(limit)}; "
        f"use {' or '.join(_list_remedies(job, need.total, parts[0][1]))}"
    )


def _list_remedies(job: Job, needed: int, part: str) -> Iterator[str]:
    """Yield what the command line has not, and what makes the largest part of the memory smaller."""
    flags, is_state = job.flags, part in ("parameters", "optimizer", "gradients")
    if not is_state and masks_groups(job.model):
        yield DROPPING
    if part == "activations" and flags.remat != "full":
        yield "--remat full"
    if not is_state and flags.microbatch_size > 1:
        yield "a smaller --microbatch-size"
    if part == "activations" and flags.interleave == 1 and job.schedule != "1f1b":
        yield "--schedule 1f1b"
    if part == "optimizer" and flags.dp > 1 and not flags.zero:
        yield "--zero 2"
    yield "more --pp, --tp or --fsdp" if is_state else "more --tp"
    if flags.device and flags.device_memory is None and needed <= 0.95 * 2**20 * DEVICES[flags.device]:
        yield f"--fbmem {-(-needed // 2**20) + 1} (MiB)"


def masks_groups(model: Model) -> bool:
    """Return whether XLA multiplies experts by `ragged_dot`, for which it copies all rows for each of them."""
    settings = model.resolved
    kernel = settings.get("megablox") or settings.get("use_tokamax_gmm")
    return bool(model.experts > 1 and settings.get("sparse_matmul") and not kernel)

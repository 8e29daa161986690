"""Forecasts of a job: seconds by the planner; memory by a process that ends before it trains, held against a device."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from multimesh import UsageError, schedules
from multimesh_maxtext.command.check_flags import find_wrong_sizes
from multimesh_maxtext.command.environment import memory_limit
from multimesh_maxtext.command.flags import DEVICES, GRID_AXES, Flags
from multimesh_maxtext.command.job import Job, Model, Paths, make_job, transformer
from multimesh_maxtext.command.report import make_table, print_tail, progress, schedule_choice
from multimesh_maxtext.command.steps import reference_job, tail
from multimesh_maxtext.command.training import Start, StopRequest, run_trainers
from multimesh_maxtext.command.translate import forecasting
from multimesh_maxtext.errors import DoesNotFitError, TrainerFailedError
from multimesh_planner import Configuration, band, step_time

_POLICIES = {
    **{name: name for name in ("save_dot_except_mlp", "save_out_proj", "save_qkv_proj", "full")},
    **dict.fromkeys(("save_dot_except_mlpwi", "save_dot_with_context_except_mlp"), "save_dot_except_mlp"),
}
"""The planner's name of each policy of MaxText that it knows; others are like ``minimal``."""

FIELDS = {
    **{name: name for name in (*GRID_AXES, "schedule", "sequence_parallel", "gather_once")},
    **{"microbatch_size": "microbatch", "remat": "recompute", "partition": "layers", "zero": "sharded"},
}
"""The field of `Configuration` that a flag fixes, or that decides the flag where it is not given."""


def planner_fields(flags: Flags, model: Model, names: Iterable[str] = FIELDS) -> dict[str, Any]:
    """Return the fields of `Configuration` that flags of these names fix, and the precision of products."""
    values = vars(flags) | {
        "remat": _POLICIES.get(flags.remat, "minimal"),
        "zero": "optimizer" if flags.zero else "none",
    }
    values |= {name: bool(values[name]) for name in ("sequence_parallel", "gather_once")}
    precision = "fp8" if "fp8" in str(model.resolved.get("quantization") or "") else "bf16"
    return {FIELDS[name]: values[name] for name in names} | {"precision": precision}


def planner_configuration(job: Job) -> Configuration:
    """Return the planner's configuration of a job. A searched schedule counts as a published one of its shape.

    Raises ``UsageError`` where a device would have a part of a sequence of a microbatch, which the planner does not
    cost.
    """
    o = job.flags
    microbatch, remainder = divmod(job.batch, job.microbatches * o.domains)
    if remainder or not microbatch:
        rows = job.batch // job.microbatches
        raise UsageError(f"microbatches of {rows} are not whole on {o.domains} groups of devices")
    name = job.schedule
    if name not in schedules.names() or name == "auto":
        name = "interleaved" if o.interleave > 1 else "1f1b"
    fields = planner_fields(o, job.model) | {"dp": o.dp * o.ep, "microbatch": microbatch, "schedule": name}
    fields["layers"] = job.pieces if o.pp > 1 else ()
    return Configuration(job.batch, o.sequence_length, **fields)


def forecast_step(job: Job, costs: Sequence[Costs] = ()) -> dict[str, Any]:
    """Return the forecast of a pipeline's step on ``--device``, as data; nothing where the planner has none.

    ``band`` is the half of its width, as a share. Where the kernels of the stages were compiled, with these ``costs``
    on a device, the busiest stage takes at least the time of its kernels at the device's peaks.
    """
    if not job.flags.device or not job.flags.staged:
        return {}
    try:
        step = step_time(transformer(job.model), planner_configuration(job), job.flags.device, "maxtext")
    except UsageError:
        return {}
    values: dict[str, Any] = {
        "seconds": step.seconds,
        "band": band(step),
        "tokens_per_second": step.tokens_per_second * step.how.devices,
        "utilization": step.utilization,
        "waiting": step.bubble,
        "bound": step.bound,
    }
    peak, bandwidth = step.device.bf16, step.device.bandwidth
    least = max((max(cost["flops"] / peak, cost["bytes accessed"] / bandwidth) for cost in costs), default=0.0)
    if (slower := least / step.seconds) > 1:
        rates = {name: values[name] / slower for name in ("tokens_per_second", "utilization")}
        values |= {"seconds": least, **rates, "bound": "kernels as compiled"}
    return values


Costs = Mapping[str, float]
"""What XLA makes of a step, as `multimesh.count_costs`; ``peak`` bytes of a device, ``seconds`` of compilation."""

_ALONE = ("peak", "seconds")
_OTHERS = {"flops", "bytes accessed", "copies", "bytes copied", *_ALONE}  # than bytes of collectives

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
    flags, limit = job.flags, memory_limit(job.flags, gpu_memory)
    if not flags.forecast and limit is None:
        return
    values: dict[str, Any] = {}
    if flags.staged:
        text = f"forecasting: tracing a step of {job.model.layers} layers"
        try:
            values = run_forecast(job, paths, gpu_memory, console, text)
        except TrainerFailedError as error:
            if flags.forecast or flags.device_memory:
                raise
            print(f"warning: memory was not checked: {error}", file=sys.stderr)
            return
        values |= {"limit": limit} | schedule_choice(paths.schedule) | forecast_step(job, values.get("costs", ()))
    if compiled := values.get("compiled"):
        peak, seconds = max(need["total"] for need in compiled), values["compilation"]["seconds"]
        programs = {"multimesh": sum_costs(values["costs"]) | {"peak": peak, "seconds": seconds}, **programs}
    values["programs"] = programs
    if not flags.json:
        for shown in _describe_forecast(job, paths, values):
            console.print(shown)
    elif flags.forecast:
        print(json.dumps(values))
    if flags.staged and limit is not None:
        check_fits(compiled or values["forecast"], limit, job)


def compile_programs(job: Job, paths: Paths, console: Console, gpu_memory: int | None) -> dict[str, Costs]:
    """Compile MaxText's own programs of a job; return their costs. Each copy of the model is on as many devices.

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
        text = f"compiling MaxText's own {name}"
        costs[name] = sum_costs(
            [run_forecast(program, paths.below(name), gpu_memory, console, text)] * program.flags.pp
        )
    return costs


def sum_costs(devices: Sequence[Costs]) -> dict[str, float]:
    """Return the costs of the devices of one copy of the model together; of peak and seconds the largest."""
    names = dict.fromkeys(name for costs in devices for name in costs)
    return {name: (max if name in _ALONE else sum)(costs.get(name, 0) for costs in devices) for name in names}


def run_forecast(job: Job, paths: Paths, gpu_memory: int | None, console: Console, text: str) -> dict[str, Any]:
    """Run the process that forecasts a job, and show how far it is, first a text; return what it writes."""
    paths.output.mkdir(parents=True, exist_ok=True)
    paths.forecast.unlink(missing_ok=True)
    with progress(console, text) as tell:
        inspect([(forecasting(job, paths, inherited=os.environ, gpu_memory=gpu_memory), paths)], tell)
    return json.loads(paths.forecast.read_bytes())


def inspect(starts: Sequence[Start], tell: Callable[[str], object] = lambda _: None) -> None:
    """Run processes that end before they train. ``tell`` gets the newest line on compilation.

    Raises the error of the first that fails.
    """
    log = tail(starts[0][1].log)

    def look_on() -> bool:
        if lines := [line for line in next(log) if line.startswith("compiling kernels: ")]:
            tell(lines[-1])
        return False

    for error in filter(None, run_trainers(starts, look_on, StopRequest())):
        print_tail(error)
        raise error


def _describe_forecast(job: Job, paths: Paths, values: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yield the parts of `check_memory`'s JSON: a pipeline's forecast, and MaxText's own programs."""
    device, limit = job.flags.device, values.get("limit")
    if needs := values.get("forecast"):
        yield "memory on each device of a stage at the peak of a step (forecast)"
        yield tabulate_needs(needs)
    if needs and job.flags.forecast:
        if compiled := values.get("compiled"):
            effort = "{kernels} kernels, {compiled} of them unlike, in {seconds:.0f} s".format(**values["compilation"])
            yield f"the same as XLA compiled it for {device} ({effort})"
            yield tabulate_needs(compiled, needs, limit)
        if limit is not None:
            yield f"of {show_size(limit)} that JAX may use of a device"
        if schedule := values.get("schedule"):
            yield schedule["text"]
        yield (
            f"devices wait {100 * values['bubble']:.1f} % of a step, by operations of their kernels, transfers take no "
            f"time: see {paths.forecast.with_suffix('.svg')}"
        )
        most, step = max(values["host"], key=lambda calls: calls["seconds"]), values.get("seconds")
        share = f", {100 * most['seconds'] / step:.1f} % of the step" if step else ""
        yield (
            f"the busiest process starts {most['kernels']:,} kernels a step with {most['arrays']:,} arrays; "
            f"{most['transfers']:,} are sent or received: {1e3 * most['seconds']:,.0f} ms of its main thread{share}"
        )
        if step:
            yield (
                f"forecast, not a measurement: a step of {step:.2f} s on {job.devices} {device}, within "
                f"{100 * values['band']:.0f} %; {values['tokens_per_second']:,.0f} tokens/s, "
                f"{100 * values['utilization']:.0f} % of the peak (MFU), bubble {100 * values['waiting']:.0f} % with "
                f"the head, most time in {values['bound']} (planner/README.md)"
            )
        elif device:
            yield "no forecast of seconds: microbatches are not whole sequences on each device"
    if values["programs"]:
        yield "a step on the devices of one copy of the model, as XLA compiled it"
        yield tabulate_programs(values["programs"])


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


def show_size(size: float) -> str:
    """Return a size with three digits: ``1.25 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


_AT_PEAK = ("gradients", "activations", "workspace", "total")

Need = Mapping[str, int]
"""Bytes on each device of a stage, by their use, and their ``total``: see `trainer.foresight.needs`."""


def tabulate_needs(needs: Sequence[Need], forecast: Sequence[Need] = (), limit: int | None = None) -> Table:
    """Return the needs of all stages; as XLA compiled them, beside their ``forecast``, and whether each fits."""
    parts = _AT_PEAK if forecast else ("parameters", "optimizer", "batch", *_AT_PEAK)
    rows = [[str(number), *(show_size(need[part]) for part in parts)] for number, need in enumerate(needs)]
    for row, need, estimate in zip(rows, needs, forecast, strict=False):
        fits = "" if limit is None else "yes" if need["total"] <= limit else "no"
        off = f"{100 * (estimate['total'] / need['total'] - 1):+.1f} %"
        row += [show_size(estimate["total"]), off, fits, _rank_parts(need)[0]]
    others = ("forecast", "off", "fits" if limit is not None else "", "largest") if forecast else ()
    return make_table(("stage", *parts, *others), rows)


def _rank_parts(need: Need) -> list[str]:
    """Return the uses of memory, the largest first."""
    return sorted((name for name in need if name != "total"), key=need.__getitem__, reverse=True)


def check_fits(needs: Sequence[Need], limit: int, job: Job) -> None:
    """Raise ``DoesNotFitError`` where a stage needs more than a device has."""
    stage, need = max(enumerate(needs), key=lambda item: item[1]["total"])
    if need["total"] <= limit:
        return
    parts = _rank_parts(need)
    most = ", ".join(f"{name} {show_size(need[name])}" for name in parts[:3])
    raise DoesNotFitError(
        f"stage {stage} needs {show_size(need['total'])} on each device ({most}), but a device has {show_size(limit)}; "
        f"use {' or '.join(_list_remedies(job, need['total'], parts[0]))}"
    )


def _list_remedies(job: Job, needed: int, part: str) -> Iterator[str]:
    """Yield flags that the command line lacks and that make the largest part of the memory smaller."""
    flags, is_state = job.flags, part in ("parameters", "optimizer", "gradients")
    if not is_state and job.model.product == "ragged_dot":
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

"""Memory of MaxText pipelines on GPUs: the forecast beside XLA's buffer assignment, without a GPU.

``compiled.py NAME ...`` compiles jobs of `JOBS` and configurations of `SMALL` for GPUs that are not here, each in a
process of its own, and with ``--keep`` replaces their rows in ``runs/compiled.json``; with ``--forecast`` it compiles
nothing, and forecasts again beside what XLA said. ``--page`` prints the tables of docs/forecasts.md from that file. It
needs ``./bootstrap.sh --group compile-gpu``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from trainers import ROOT

from multimesh import schedules
from multimesh.planner import products, stage_layers, traffic
from multimesh_maxtext.command.options import read
from multimesh_maxtext.command.settle import settle
from multimesh_maxtext.command.sizes import forecast_step, planner_configuration, transformer

sys.path.append(str(ROOT / "maxtext"))
import jobs

MAXTEXT = ROOT / "third_party/maxtext/src/maxtext"
KEPT = Path(__file__).parent / "runs" / "compiled.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A job of ``run.py``.

    Attributes
    ----------
    what
        For people: the parallelism, the schedule, what is recomputed.
    flags
        For ``run.py``.
    device
        One of `multimesh.topology`.
    """

    what: str
    flags: str
    device: str = "h100"


_PIECES = "--xla-ag-threshold 268435456"


def _of_folder(name: str) -> str:
    """Return the flags of a job that has a folder, without its number of steps."""
    job = jobs.find(name)
    return f"--nodes {job.processes} --gpus 1 {job.flags.partition(' --num-steps')[0]}"


_LLAMA3_8B = f"--nodes 16 --gpus 1 {jobs.LLAMA3_8B}"  # --fbmem is of one device

JOBS = {
    "llama3-70b": Case("dp 2, pp 4 x 5, tp 8", _of_folder("llama3-70b-64gpus")),
    "gpt3-175b": Case("pp 8 x 6, tp 8", _of_folder("gpt3-175b-64gpus")),
    "mixtral-8x7b": Case(
        "pp 8 x 2, ep 8",
        f"--nodes 64 --gpus 1 --ep 8 --pp 8 --interleave 2 --schedule interleaved {_PIECES} --model-name "
        "mixtral-8x7b --num-layers 32 --sequence-length 4096 --batch-size 256 --microbatch-size 1 "
        "--attention cudnn_flash_te --remat minimal --fbmem 78",
    ),
    "deepseek2-16b": Case(
        "pp 2 x 7, ep 8",
        f"--nodes 16 --gpus 1 --ep 8 --pp 2 --interleave 7 --schedule interleaved {_PIECES} --xla-ar-threshold "
        "268435456 --xla-rs-threshold 268435456 --model-name deepseek2-16b --sequence-length 4096 --batch-size 64 "
        "--microbatch-size 1 --attention dot_product --remat full --fbmem 78 sparse_matmul=false capacity_factor=1.25",
    ),
    "llama3-8b, B200": Case("dp 2, pp 2 x 8, tp 4", _LLAMA3_8B, "b200"),
    "llama3-8b, A100": Case("dp 2, pp 2 x 8, tp 4", _LLAMA3_8B, "a100"),
}

_MODEL = "--model-dims 8192 --mlp-dims 28672 --num-heads 64 --num-kv-heads 8 --head-dim 128 --vocab-size 32000 "
_MODEL += "--sequence-length 4096 --nodes 16 --gpus 1 --fbmem 78 --xla-ag-threshold 33554432 "
_MODEL += "--xla-ar-threshold 33554432 --xla-rs-threshold 51200"

_SMALL = {
    "1f1b": Case(
        "dp 2, tp 2, pp 4; minimal; cuDNN",
        "--dp 2 --tp 2 --pp 4 --schedule 1f1b --remat minimal --attention cudnn_flash_te --batch-size 32 "
        "--microbatch-size 2",
    ),
    "gpipe": Case(
        "dp 2, tp 4, pp 2; full; cuDNN",
        "--dp 2 --tp 4 --pp 2 --schedule gpipe --remat full --attention cudnn_flash_te --batch-size 64 "
        "--microbatch-size 4",
    ),
    "interleaved": Case(
        "fsdp 8, pp 2 x 2; minimal; cuDNN",
        "--fsdp 8 --pp 2 --interleave 2 --schedule interleaved --remat minimal --attention cudnn_flash_te "
        "--batch-size 64 --microbatch-size 1",
    ),
    "zb-h1": Case(
        "tp 4, pp 4, sequence-parallel; minimal_with_context; cuDNN",
        "--tp 4 --pp 4 --sequence-parallel --schedule zb-h1 --remat minimal_with_context --attention cudnn_flash_te "
        "--batch-size 32 --microbatch-size 2",
    ),
    "wavefront": Case(
        "dp 4, pp 4; full; cuDNN",
        "--dp 4 --pp 4 --schedule wavefront --remat full --attention cudnn_flash_te --batch-size 64 "
        "--microbatch-size 1",
    ),
    "prefetch-wavefront": Case(
        "fsdp 2, tp 4, pp 2 x 2; save_qkv_proj; dot_product",
        "--fsdp 2 --tp 4 --pp 2 --interleave 2 --schedule prefetch-wavefront --remat save_qkv_proj "
        "--attention dot_product --batch-size 32 --microbatch-size 1",
    ),
    "cp": Case(
        "dp 2, cp 4, pp 2; full; dot_product",
        "--dp 2 --cp 4 --pp 2 --schedule 1f1b --remat full --attention dot_product --batch-size 32 "
        "--microbatch-size 1 context_parallel_load_balance=false",
    ),
    "zb-v": Case(
        "fsdp 2, tp 2, pp 4 x 2; save_dot_except_mlp; cuDNN",
        "--fsdp 2 --tp 2 --pp 4 --interleave 2 --schedule zb-v --remat save_dot_except_mlp --attention cudnn_flash_te "
        "--batch-size 32 --microbatch-size 1",
    ),
    "experts": Case(
        "ep 4, dp 2, pp 2, 8 experts of 7168; full; cuDNN",
        "--ep 4 --dp 2 --pp 2 --schedule 1f1b --remat full --attention cudnn_flash_te --batch-size 64 "
        "--microbatch-size 1 --mlp-dims 7168 num_experts=8 num_experts_per_tok=2 decoder_block=mixtral "
        "base_moe_mlp_dim=7168 megablox=false sparse_matmul=false capacity_factor=1.25",
    ),
    "zero": Case(
        "dp 8, pp 2, --zero 2; save_out_proj; cuDNN",
        "--dp 8 --pp 2 --zero 2 --schedule eager-1f1b --remat save_out_proj --attention cudnn_flash_te "
        "--batch-size 64 --microbatch-size 1",
    ),
}

SMALL = {name: replace(case, flags=f"{_MODEL} {case.flags}") for name, case in _SMALL.items()}


def compile_case(case: Case) -> Row:
    """Compile a case; return bytes by forecast and by XLA of each stage, and the effort of the process."""
    begin = time.monotonic()
    said, used = _ask(case, "--compile")
    return {
        "device": case.device,
        "flags": case.flags,
        **{"kernels": said["compilation"]["kernels"], "unlike": said["compilation"]["compiled"]},
        "seconds": round(time.monotonic() - begin),
        "cpu seconds": round(used.ru_utime + used.ru_stime),
        "GB": round(used.ru_maxrss * 1024 / 1e9, 2),
        "limit": said["limit"],
        "costs": said["costs"],
        "stages": _compare(said["forecast"], said["compiled"]),
        "planner": plan_case(case),
    }


def forecast_case(case: Case, row: Row) -> Row:
    """Return a kept row with the forecast of today, by the plan and by the planner."""
    said, _ = _ask(case)
    compiled = [stage["xla"] for stage in row["stages"]]
    return row | {"stages": _compare(said["forecast"], compiled), "planner": plan_case(case)}


def _ask(case: Case, *flags: str) -> tuple[Row, Any]:
    """Return the forecast that ``run.py`` makes of a case, and the resources that its process used."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "forecast.json"
        line = [sys.executable, str(ROOT / "maxtext/run.py"), "--forecast", *flags, "--device", case.device]
        line += ["--json", "--output", folder, *case.flags.split()]
        with out.open("w") as to:
            process = subprocess.Popen(line, stdout=to, env={**os.environ, "JAX_PLATFORMS": "cpu"})
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        text = out.read_text()
        if '"forecast"' not in text:
            raise SystemExit(f"{text.strip()}\nexit code {process.returncode}: {' '.join(line)}")
        return json.loads(text), used


def _compare(forecast: list[Row], compiled: list[Row]) -> list[Row]:
    """Return the bytes of each stage by forecast and by XLA, and how far the forecast is off."""
    return [
        {"forecast": a, "xla": b, "error %": round(100 * (a["total"] / b["total"] - 1), 2)}
        for a, b in zip(forecast, compiled, strict=True)
    ]


def plan_case(case: Case) -> Row:
    """Return the planner's figures: memory of each stage, and costs of a layer on a device for a microbatch."""
    job = settle(read(["--forecast", "--device", case.device, *case.flags.split()]), MAXTEXT).job
    model, how, step = transformer(job.model), planner_configuration(job), forecast_step(job)
    route = schedules.get(how.schedule).placement(how.pp)
    sizes = stage_layers.layers(model, how)
    rows = stage_layers.placement(how, route)
    bytes_of = {"tensor": traffic.tensor_arrays(model, how), "context": traffic.context_arrays(model, how)}
    bytes_of |= {"expert": traffic.expert_arrays(model, how)} if model.experts else {}
    ways = {"tensor": how.tp, "context": how.cp, "expert": how.ep}
    return {
        "layers": [sum(n for n, on in zip(sizes, rows, strict=True) if on == row) for row in range(how.pp)],
        "microbatches": how.microbatches,
        "flops": products.operations(model, how),
        "bytes": {name: arrays.total for name, arrays in bytes_of.items() if ways[name] > 1},
        "ways": {name: n for name, n in ways.items() if n > 1},
        "stages": [vars(held) for held in step.memory] if step else [],
    }


def costs_of_layer(row: Row) -> tuple[float, dict[str, float]]:
    """Return what a layer takes on a device for a microbatch, as XLA compiled a stage with layers alone.

    Operations of products, and by axis bytes of whole arrays that are gathered, scattered or exchanged: a sum over all
    devices counts as a scatter and a gather. Of two stages it is the first, whose embedding multiplies nothing.
    """
    planner = row["planner"]
    stage = (len(planner["layers"]) - 1) // 2
    each = planner["layers"][stage] * planner["microbatches"]
    found = dict.fromkeys(planner["ways"], 0.0)
    for name, size in row["costs"][stage].items():
        kind, *axes = name.replace("tensor_sequence", "tensor").split()  # MaxText's axis of --sequence-parallel
        if len(axes) == 1 and axes[0] in found:
            whole = {"all-reduce": 2, "reduce-scatter": planner["ways"][axes[0]]}.get(kind, 1)
            found[axes[0]] += whole * size / each
    return row["costs"][stage]["flops"] / each, found


def _fullest(row: Mapping[str, Any], by: str) -> int:
    return max(int(stage[by]["total"]) for stage in row["stages"])


def page(kept: Mapping[str, Row]) -> Iterator[str]:
    """Yield the lines of the tables of docs/forecasts.md: jobs, configurations, and the planner beside XLA."""
    jobs = {name: (case, kept[name]) for name, case in JOBS.items() if name in kept}
    small = {name: (case, kept[name]) for name, case in SMALL.items() if name in kept}
    yield "| job | on | kernels | unlike | seconds | of CPU | GB of the process | by the plan | by XLA | limit |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, (case, row) in jobs.items():
        sizes = [_fullest(row, "forecast"), _fullest(row, "xla"), row["limit"]]
        gpus = case.flags.split()[case.flags.split().index("--nodes") + 1]
        cells = [f"{name.partition(',')[0]}, {case.what}", f"{gpus} {case.device.upper()}"]
        cells += [str(row[key]) for key in ("kernels", "unlike", "seconds", "cpu seconds")]
        yield _line(*cells, f"{row['GB']:.1f}", *(f"{size / 1e9:.1f}e9" for size in sizes))
    yield ""
    yield "| schedule | configuration | fullest GPU, by the plan | by XLA | off, each stage |"
    yield "|---|---|---|---|---|"
    for case, row in small.values():
        off = ", ".join(f"{stage['error %']:+.1f}" for stage in row["stages"])
        schedule = case.flags.split()[case.flags.split().index("--schedule") + 1]
        sizes = [_fullest(row, "forecast"), _fullest(row, "xla")]
        yield _line(schedule, case.what, *(f"{size / 1e9:.2f}e9" for size in sizes), f"{off} %")
    off = [abs(stage["error %"]) for row in kept.values() for stage in row["stages"]]
    yield ""
    yield f"median of {len(off)} stages {median(off):.1f} %, largest {max(off):.1f} %"
    yield ""
    yield (
        "| layer of | operations, by the planner | by XLA | bytes along | by the planner | by XLA "
        "| fullest GPU, by the planner | by XLA |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, (case, row) in {**jobs, **small}.items():
        planner, (operations, passed) = row["planner"], costs_of_layer(row)
        axes = planner["bytes"]
        sides = [", ".join(f"{of[axis] / 1e6:.0f}e6" for axis in axes) for of in (axes, passed)]
        shown = name.partition(",")[0] if name in jobs else case.what
        held = [max(sum(stage.values()) for stage in planner["stages"]), _fullest(row, "xla")]
        cells = [shown, f"{planner['flops']:.3g}", f"{operations:.3g}", ", ".join(axes), *sides]
        yield _line(*cells, *(f"{size / 1e9:.1f}e9" for size in held))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Compile the named cases and show them, or print the tables of what is kept."""
    import report

    cases = {**JOBS, **SMALL}
    parser = report.parser(__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *cases], metavar="NAME", help=", ".join(cases))
    parser.add_argument("--keep", action="store_true", help=f"replace their rows in {KEPT.relative_to(ROOT)}")
    parser.add_argument("--forecast", action="store_true", help="forecast again beside what XLA said, and keep that")
    parser.add_argument("--page", action="store_true", help="print the tables of docs/forecasts.md, and end")
    args = parser.parse_args()
    kept = json.loads(KEPT.read_text())["cases"]
    if args.page:
        print("\n".join(page(kept)))
        return
    found = {}
    for name in args.names or (kept if args.forecast else cases):
        found[name] = forecast_case(cases[name], kept[name]) if args.forecast else _date(compile_case(cases[name]))
        if args.keep or args.forecast:
            _keep(name, found[name])
    rows = {name: [_flat(number, stage) for number, stage in enumerate(row["stages"])] for name, row in found.items()}
    report.show(rows, args.json)


def _flat(number: int, stage: Row) -> Row:
    parts = ("parameters", "optimizer", "batch", "gradients", "activations", "workspace", "total")
    pairs = {part: f"{stage['forecast'][part] / 1e6:.0f} {stage['xla'][part] / 1e6:.0f}" for part in parts}
    return {"stage": number, **pairs, "error %": stage["error %"]}


def _date(row: Row) -> Row:
    """Return a row with the day and the version of JAX before it."""
    return {"date": datetime.now(UTC).date().isoformat(), "jax": importlib.metadata.version("jax"), **row}


def _keep(name: str, row: Row) -> None:
    """Replace the row of one case in the file."""
    kept = json.loads(KEPT.read_text())
    KEPT.write_text(json.dumps({"cases": {**kept["cases"], name: row}}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""MaxText on 8 CPU devices: a pipeline of MultiMesh in every schedule, MaxText's own pipeline, and no pipeline at all.

CPU time of a step and of the first call (compilation included), and the peak memory of the process. Every trainer is a
process of its own, with the same model, batch and number of microbatches; the calls of its train step are measured.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainers import ROOT, TRAINER, environment, run_trainer

BATCH, MICROBATCHES, TP = 16, 4, 2
WARM_UP = 3  # steps that are not counted


class Measured:
    """A train step with the CPU time of each call, of all threads, until its result is there."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.ahead = 0.0
        self.calls: list[float] = []

    def __call__(self, *args: Any) -> Any:
        import jax

        start = time.process_time()
        result = jax.block_until_ready(self._step(*args))
        self.calls.append(time.process_time() - start)
        return result

    def lower(self, *args: Any) -> Measured:
        start = time.process_time()
        self._lowered = self._step.lower(*args)
        self.ahead += time.process_time() - start
        return self

    def compile(self, **options: Any) -> Any:
        start = time.process_time()
        compiled = self._lowered.compile(**options)
        self.ahead += time.process_time() - start
        return compiled


def trainer(out: Path, arguments: Sequence[str]) -> None:
    """Run MaxText in this process and write what its steps cost."""
    from maxtext.utils import train_utils  # the real one: this process was started with -P

    steps: list[Measured] = []
    jit_train_step = train_utils.jit_train_step

    def measured(*args: Any, **options: Any) -> Measured:
        steps.append(Measured(jit_train_step(*args, **options)))
        return steps[-1]

    train_utils.jit_train_step = measured
    run_trainer(arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    out.write_text(json.dumps({"ahead": steps[0].ahead, "calls": steps[0].calls, "peak": peak}))


def measure(flags: Sequence[str], size: Sequence[str], steps: int) -> dict[str, Any]:
    """Train with some flags of run.py; what `trainer` wrote, and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cost.json"
        line = [str(ROOT / "maxtext/run.py"), *size, *flags, "--num-steps", str(steps), "--output", folder]
        printed = subprocess.run(
            [sys.executable, *line, "--dry-run", "--json"], check=True, capture_output=True, text=True
        )
        plan = json.loads(printed.stdout)
        command = plan["command"]
        arguments = command[command.index(TRAINER) + 1 :]
        done = subprocess.run(
            [sys.executable, "-P", __file__, "--trainer", str(out), *arguments],
            env=environment(plan),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{' '.join(flags)}: the trainer failed\n{done.stderr[-2000:]}")
        metrics = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        return json.loads(out.read_text()) | {"losses": [json.loads(line)["learning/loss"] for line in metrics]}


def main() -> None:
    import report

    from multimesh import schedules

    options = report.parser(__doc__)
    options.add_argument("--steps", type=int, default=20, help="steps that are counted (default 20)")
    options.add_argument("--pp", type=int, choices=(2, 4), default=2, help="pipeline stages (default 2)")
    options.add_argument("--layers", type=int, default=4, help="decoder layers (default 4)")
    options.add_argument("--width", type=int, default=128, help="model and mlp dims (default 128)")
    args = options.parse_args()
    size = ["dtype=float32", "--cpus", "8", "--num-layers", str(args.layers), "--model-dims", str(args.width)]
    size += ["--mlp-dims", str(args.width), "--batch-size", str(BATCH), "--attention", "dot_product"]
    dp = 8 // (TP * args.pp)
    staged = ["--dp", str(dp), "--tp", str(TP), "--pp", str(args.pp)]
    staged += ["--microbatch-size", str(BATCH // MICROBATCHES // dp)]
    flat = ["--backend", "spmd", "--dp", str(8 // TP), "--tp", str(TP)]
    flat += ["--microbatch-size", str(BATCH // MICROBATCHES // (8 // TP))]
    rows = []
    pipelines = [
        (f"MultiMesh, {name}", [*staged, "--schedule", name, *(["--interleave", "2"] if name == "interleaved" else [])])
        for name in schedules.names()
        if name != "fill-drain"  # gpipe by another name
    ]
    for name, flags in (
        *pipelines,
        ("MaxText's own pipeline", ["--backend", "spmd", *staged]),
        ("dp x tp, layers scanned", flat),
        ("dp x tp, layers unrolled", [*flat, "--no-scan-layers"]),
    ):
        found = measure(flags, size, WARM_UP + args.steps)
        rows.append(
            {
                "trainer": name,
                "step CPU ms": 1e3 * statistics.median(found["calls"][WARM_UP:]),
                "first call CPU s": found["ahead"] + found["calls"][0],
                "peak RSS MB": found["peak"] / 1e6,
                "last loss": found["losses"][-1],
            }
        )
    title = f"MaxText, 8 CPU devices, tp {TP}, pp {args.pp}, {args.layers} layers, d {args.width}"
    report.show({f"{title}, {MICROBATCHES} microbatches": rows}, args.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trainer"]:
        trainer(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()

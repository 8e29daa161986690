"""Memory of a MaxText pipeline: ``run.py --forecast`` against a real run on 8 CPU devices.

Held and alive: the live arrays of a device at the calls that a running step makes. Workspace: what XLA says its
programs need for themselves, the largest of a stage.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainers import ROOT, TRAINER, environment, run_trainer

CASES = {
    "1f1b, remat minimal": (),
    "gpipe, remat minimal": ("--schedule", "gpipe"),
    "1f1b, remat full": ("--remat", "full"),
    "1f1b, dp 4": ("--dp", "4", "--tp", "1"),
    "1f1b, fsdp 2, tp 2": ("--dp", "1", "--fsdp", "2"),
    "1f1b, pp 4": ("--pp", "4", "--dp", "1"),
}
SIZE = ("--cpus", "8", "--dp", "2", "--tp", "2", "--pp", "2", "--num-layers", "8", "--model-dims", "256")
SIZE += ("--mlp-dims", "1024", "--batch-size", "32", "--microbatch-size", "2", "--sequence-length", "256")
SIZE += ("--attention", "dot_product", "--num-steps", "3", "dtype=float32")


def trainer(out: Path, arguments: Sequence[str]) -> None:
    """Train in this process; write live bytes of every device at the peak of the last step, and XLA's workspace."""
    import jax
    import measure

    from multimesh_maxtext.trainer import hooks

    calls = 0
    run = hooks.StepFunction.__call__

    def measured(step: Any, state: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            return run(step, state, batch)
        compiled = step._jitted.lower(state, batch).compile()
        plan = compiled.plan
        scratch = [
            stats["scratch"] // mesh.size
            for stats, mesh in zip(compiled.memory_analysis(), plan.submeshes, strict=True)
        ]
        held = {d.id: size for d, size in measure.device_bytes().items()}
        results = []
        peak = measure.peak_bytes(lambda: results.append(jax.block_until_ready(run(step, state, batch))), every=20)
        live = [max(held[d.id] + peak[d] for d in mesh.devices.flat) for mesh in plan.submeshes]
        out.write_text(json.dumps({"live": live, "workspace": scratch}))
        return results[0]

    hooks.StepFunction.__call__ = measured
    run_trainer(arguments)


def case(flags: Sequence[str]) -> list[dict[str, Any]]:
    """Forecast and measurement of every stage."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        line = [sys.executable, str(ROOT / "maxtext/run.py"), *SIZE, *flags, "--output", folder]
        said = subprocess.run([*line, "--forecast", "--json"], check=True, capture_output=True, text=True).stdout
        plan = json.loads(
            subprocess.run([*line, "--dry-run", "--json"], check=True, capture_output=True, text=True).stdout
        )
        arguments = plan["command"][plan["command"].index(TRAINER) + 1 :]
        command = [sys.executable, "-P", __file__, "--trainer", str(out), *arguments]
        subprocess.run(command, env=environment(plan), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        measured = json.loads(out.read_text())
    rows = []
    for stage, need in enumerate(json.loads(said)["forecast"]):
        live, workspace = measured["live"][stage], measured["workspace"][stage]
        forecast = need["total"] - need["workspace"]
        rows.append(
            {
                "stage": stage,
                "forecast MB": forecast / 1e6,
                "measured MB": live / 1e6,
                "error %": 100 * (forecast / live - 1),
                "workspace MB": need["workspace"] / 1e6,
                "XLA MB": workspace / 1e6,
                "total error %": 100 * (need["total"] / (live + workspace) - 1),
            }
        )
    return rows


def main() -> None:
    """Show every case."""
    import report

    args = report.parser(__doc__).parse_args()
    report.show({name: case(flags) for name, flags in CASES.items()}, args.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trainer"]:
        trainer(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()

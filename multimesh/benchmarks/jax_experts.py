"""Forecasts of two runs of a JAX stack with experts, which no constant was fitted to.

    python multimesh/benchmarks/jax_experts.py [--json]

The model has 67 billion parameters, of which a token passes 2.3; 64 H100 ran it (marin-community/marin, issue 7024, by
its description of July 2026): as a pipeline of DualPipeV, and with FSDP and expert parallelism. Both take a batch of
256 sequences of 8,192 tokens. That the FSDP run recomputed all, and took its batch at once, is not stated.
"""

from __future__ import annotations

import report
from multimesh.planner.bands import band
from multimesh.planner.configuration import Configuration
from multimesh.planner.step import forecast
from multimesh.planner.transformer import Transformer

MODEL = Transformer(
    "grug-67b", 26, 2560, 1280, 20, 5, 128256, experts=256, active=4, shared_ffn=2560, window=2048, windowed=1.0
)
_BATCH, _SEQUENCE = 256, 8192
_PIPELINE = Configuration(
    batch=_BATCH, sequence=_SEQUENCE, microbatch=1, dp=8, ep=8, pp=8, interleave=2, schedule="zb-v", recompute="full"
)
_FSDP = Configuration(batch=_BATCH, sequence=_SEQUENCE, microbatch=4, fsdp=64, ep=8, recompute="full")
RUNS = (
    ("DualPipeV of 16 stages", _PIPELINE, 3.476, 59.2),
    ("FSDP and experts", _FSDP, _BATCH * _SEQUENCE / 271405, None),
)
"""Name, configuration (zb-v places stages as DualPipeV does), seconds of a step, GB of a device."""


def compare(name: str, how: Configuration, seconds: float, memory: float | None) -> report.Row:
    """Return a run beside its forecast."""
    step = forecast(MODEL, how, "h100", "maxtext")
    return {
        "run": name,
        "as": how.shown(),
        "measured s": seconds,
        "forecast s": step.seconds,
        "error %": 100 * (step.seconds / seconds - 1),
        "band %": 100 * band(step),
        "measured GB": memory or "-",
        "forecast GB": step.bytes / 1e9,
    }


def main() -> None:
    """Forecast and print."""
    args = report.parser(__doc__).parse_args()
    report.show({"Experts in JAX, 64 H100": [compare(*run) for run in RUNS]}, as_json=args.json)


if __name__ == "__main__":
    main()

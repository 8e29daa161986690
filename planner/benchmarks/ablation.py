"""How near and how well ranked the planner's forecasts are beside those of a model of twelve constants.

    python planner/benchmarks/ablation.py [--json]

The small model has a roofline for a layer's products and attention, alpha-beta collectives, and the bubble of the
schedule; nothing hides a collective. Both are asked for the same runs. Errors of the planner are those of sources that
the fit had not seen (``runs/held_out.json``); the twelve constants are round numbers.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable

import held_out
import published
import report
import rows

_MATMUL = {"bf16": 0.6, "fp8": 0.5, "fp4": 0.4}  # of the peak: three constants
_ATTENTION, _MEMORY, _LINK, _NETWORK = 0.4, 0.7, 0.6, 0.6  # of the peak and of the bandwidths
_ALPHA, _PASSES, _STEP = 10e-6, 40.0, 0.05  # seconds of a collective; arrays of a layer; seconds of a step
_BACKWARD, _EXPOSED = 2.0, 0.3  # times the forward; share of collectives


def estimate(run: rows.Run) -> float:
    """Return the seconds of a step by roofline, alpha-beta collectives and bubble."""
    model, how, on = run.model, run.how, run.device
    tokens, rate = how.tokens, on.peak(how.precision) * _MATMUL[how.precision]
    layer = 2 * tokens * (model.active_parameters - 2 * model.embedding_parameters) / model.layers / how.tp / rate
    layer += tokens * how.sequence * (model.queries + model.values) / how.tp / (on.bf16 * _ATTENTION)
    layer += tokens * _PASSES * model.hidden / how.tp / (on.bandwidth * _MEMORY)

    def collective(size: float, ranks: float, inner: float) -> float:
        speed = on.link * _LINK if ranks * inner <= on.domain else on.network * _NETWORK * max(1, on.domain // inner)
        return 0.0 if ranks <= 1 else (ranks - 1) / ranks * size / speed + _ALPHA

    rounds = 4 if not model.experts or model.shared_ffn else 2  # arrays of tensor parallelism, each way
    array = 2 * tokens * model.hidden
    traffic = (2 * rounds + how.sequence_parallel) / 3 * collective(array, how.tp, 1)
    traffic += collective(2 * tokens * model.keys_and_values / how.tp * how.cp, how.cp, how.tp)
    if model.experts:
        traffic += 4 / 3 * collective(array / how.tp * model.active * how.load, how.ep, how.expert_tp)
    size = sum(model.split_parameters(how.tp, how.ep * how.tp, sparse=1.0))
    traffic += collective(2.0 * size, how.shards, how.tp)
    forward = layer + _EXPOSED * traffic
    again = 1.0 if how.recompute in ("full", "alternate") else 0.0
    head = 2 * tokens * model.embedding_parameters / how.tp / rate
    micro = (1 + _BACKWARD + again) * forward * model.layers / how.pp + (1 + _BACKWARD) * head / how.pp
    bubble = (how.pp - 1) / how.interleave * micro
    gradients = _EXPOSED * collective(6.0 * size * model.layers / how.pp, how.dp, how.tp) if how.dp > 1 else 0.0
    return how.microbatches * micro + bubble + gradients + _STEP


GROUPS: tuple[tuple[str, Callable[[rows.Run], bool]], ...] = (
    ("dense", lambda run: not run.model.experts and run.software.fused_attention),
    ("experts", lambda run: bool(run.model.experts)),
    ("dense, round 5", lambda run: rows.prefix(run) in ("kf", "yafsdp")),
    ("before fused attention", lambda run: not run.software.fused_attention),
)


def main() -> None:
    """Compare and print."""
    args = report.parser(__doc__).parse_args()
    runs, _ = rows.read(*rows.FILES)
    errors = json.loads(held_out.HELD_OUT.read_text(encoding="utf-8"))["errors"]
    table: list[report.Row] = []
    for name, keep in GROUPS:
        recomputed = [run for run in runs if keep(run) and run.id in errors]
        small = [abs(estimate(run) / run.seconds - 1) for run in recomputed]
        planner = [abs(math.expm1(errors[run.id])) for run in recomputed]
        table.append(
            {
                "runs": name,
                "number": len(recomputed),
                "planner, median %": 100 * statistics.median(planner),
                "12 constants, median %": 100 * statistics.median(small),
            }
        )
    full, small_ranks = (published.rankings(runs, seconds) for seconds in (published.forecast_seconds, estimate))
    ranking = [
        {
            "group": one.name,
            "number": one.number,
            "planner, Spearman": one.spearman,
            "its best is behind %": 100 * one.behind,
            "12 constants, Spearman": other.spearman,
            "its best is behind % ": 100 * other.behind,
        }
        for one, other in zip(full, small_ranks, strict=True)
    ]
    columns = ("planner, Spearman", "12 constants, Spearman", "its best is behind %", "its best is behind % ")
    mean = {"group": "mean", "number": sum(one.number for one in full)}
    ranking.append(
        {key: statistics.mean(r[key] for r in ranking) if key in columns else mean[key] for key in ranking[0]}
    )
    report.show({"Median errors": table, "Ranking": ranking}, as_json=args.json)


if __name__ == "__main__":
    main()

"""How far forecasts are from what was measured, by class; docs/forecasts.md has the tables."""

from __future__ import annotations

from multimesh.planner.step import Step

VALIDATED = 0.10
"""Nine in ten runs of dense models on a100, h100 and h200 that have tensor or pipeline parallelism are nearer."""
BLACKWELL = 0.20
"""Of few published runs, whose constants were fitted to them."""
UNKNOWN = 0.30
"""Of what no validated run has, such as experts; no measurement says how far it is."""


def band(step: Step) -> float:
    """Half of the width of a forecast's band, as a share of it."""
    if step.model.experts or step.how.precision == "fp4":
        return UNKNOWN
    return VALIDATED if step.device.name in ("a100", "a100-40gb", "h100", "h200") else BLACKWELL

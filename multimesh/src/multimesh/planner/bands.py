"""How far forecasts are from what was measured, by class; docs/forecasts.md has the tables."""

from __future__ import annotations

from multimesh.planner.step import Step

VALIDATED = 0.10
"""Nine in ten published runs of dense models on a100 and h100 that have tensor or pipeline parallelism are nearer."""
BLACKWELL = 0.20
"""Of few published runs, whose constants were fitted to them."""
UNKNOWN = 0.30
"""Of what no published run has: experts, fp4, h200, one GPU alone. One of ours, alone on an h200, took 18 % less."""


def band(step: Step) -> float:
    """Half of the width of a forecast's band, as a share of it."""
    if step.model.experts or step.how.precision == "fp4" or step.how.devices == 1 or step.device.name == "h200":
        return UNKNOWN
    return VALIDATED if step.device.name in ("a100", "a100-40gb", "h100") else BLACKWELL

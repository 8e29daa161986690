"""Forecasts of training steps, and the search for the best configuration.

`suggest` finds the fastest ways to spread the training of a `Transformer` over a cluster; `step_time` says how long one
of them takes. Nothing here imports JAX.
"""

from __future__ import annotations

from multimesh.core.targets import target_names as targets

from multimesh_planner.bands import UNKNOWN, band
from multimesh_planner.configuration import Configuration
from multimesh_planner.hardware.devices import Device, device
from multimesh_planner.hardware.devices import device_names as devices
from multimesh_planner.hardware.software import Software, software
from multimesh_planner.models import model
from multimesh_planner.search import suggest
from multimesh_planner.space import Training
from multimesh_planner.step import Step, step_time
from multimesh_planner.suggestions import Option, Suggestions
from multimesh_planner.transformer import Transformer

__all__ = [
    "UNKNOWN",
    "Configuration",
    "Device",
    "Option",
    "Software",
    "Step",
    "Suggestions",
    "Training",
    "Transformer",
    "band",
    "device",
    "devices",
    "model",
    "software",
    "step_time",
    "suggest",
    "targets",
]

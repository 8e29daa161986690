"""Forecasts of training steps, and the search for the best configuration.

`suggest` finds the fastest ways to spread the training of a `Transformer` over a cluster; `forecast` says how long one
of them takes. Nothing here imports JAX.
"""

from __future__ import annotations

from multimesh.hardware.devices import Device, device
from multimesh.hardware.devices import device_names as devices
from multimesh.hardware.software import Stack, stack
from multimesh.hardware.targets import names as targets
from multimesh.planner.bands import UNKNOWN, band
from multimesh.planner.best_first import Option
from multimesh.planner.configuration import Configuration
from multimesh.planner.models import model
from multimesh.planner.step import Step, forecast
from multimesh.planner.suggesting import Training, fewest, suggest
from multimesh.planner.suggestions import Suggestions
from multimesh.planner.transformer import Transformer

__all__ = [
    "UNKNOWN",
    "Configuration",
    "Device",
    "Option",
    "Stack",
    "Step",
    "Suggestions",
    "Training",
    "Transformer",
    "band",
    "device",
    "devices",
    "fewest",
    "forecast",
    "model",
    "stack",
    "suggest",
    "targets",
]

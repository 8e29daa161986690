"""Flags of XLA with which programs of tests compile fast, as far as the XLA that is installed knows them.

XLA ends a process that names a flag which it does not know.
"""

from __future__ import annotations

import os

from jaxlib import version  # neither jax nor XLA: a conftest sets flags before they are imported

EMITTERS = "--xla_cpu_use_fusion_emitters" if version.__version_info__ < (0, 11) else None
"""What turns XLA's fusion emitters off, which took three quarters of the time; later XLA is nothing without them."""

QUICK = ("--xla_backend_optimization_level=0", *([f"{EMITTERS}=false"] if EMITTERS else ()))


def add_flags(*flags: str) -> None:
    """Add flags to ``XLA_FLAGS``, but for those that it has."""
    for flag in flags:
        if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

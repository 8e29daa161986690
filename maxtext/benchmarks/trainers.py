"""MaxText's trainer in a process of a benchmark; `report` and `measure` come from the library's benchmarks."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HELPERS = (str(Path(__file__).parent), str(ROOT / "multimesh" / "benchmarks"))
sys.path += HELPERS
TRAINER = "maxtext.trainers.pre_train.train"


def environment(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment that ``run.py --dry-run --json`` asks for, with the benchmarks' modules in reach."""
    found = {**os.environ, **plan["environment"]}
    return found | {"PYTHONPATH": f"{found['PYTHONPATH']}:{':'.join(HELPERS)}"}


def run_trainer(arguments: Sequence[str]) -> None:
    """Run MaxText in this process."""
    sys.argv = [TRAINER, *arguments]
    try:
        runpy.run_module(TRAINER, run_name="__main__")
    except SystemExit as end:  # how MaxText ends, also when all is well
        if end.code:
            raise

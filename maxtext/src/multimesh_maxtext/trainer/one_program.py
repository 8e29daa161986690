"""MaxText's own program of a step, compiled for GPUs that need not be here: what a pipeline is compared with."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import jax

import multimesh
from multimesh_maxtext.handoff import Target
from multimesh_maxtext.trainer.placement import lay_out


def compile_step(target: Target, file: Path) -> None:
    """Make this process, which is to be MaxText's trainer, end with the costs of its step in a file.

    MaxText builds its mesh of the devices of ``target``. Nothing is allocated on these, and no data is read.
    """
    from maxtext.utils import multimesh_hooks as hooks

    devices = multimesh.topology(**asdict(target))

    hooks.stage_devices = lambda _devices=None: devices
    hooks.first_device = lambda _mesh: SimpleNamespace(platform="gpu")
    hooks.everywhere = lambda _x: 0  # the number of the first step
    hooks.batches = lambda _config, _mesh: (iter(()), None)
    hooks.init_state = lambda fn, *, out_shardings, **_: lambda: lay_out(jax.eval_shape(fn), out_shardings)
    hooks.jit = lambda fn, **options: SimpleNamespace(lower=partial(_write_costs, jax.jit(fn, **options), file))


def _write_costs(step: Any, file: Path, *arguments: Any) -> NoReturn:
    """Compile a step for its arguments, and end."""
    begin = time.perf_counter()
    compiled = step.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    costs = {"peak": peak - memory.alias_size_in_bytes, "seconds": time.perf_counter() - begin}
    file.write_text(json.dumps(multimesh.count_costs(compiled.as_text()) | costs))
    sys.exit()

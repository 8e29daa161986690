"""Start what the command asks for: MaxText's trainer, alone or as one of several, its forecast, or a small service."""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from multimesh_maxtext.errors import CheckpointError
from multimesh_maxtext.handoff import TRAINER


def write_export(folder: str, step: str, target: str, *unrolled: str) -> None:
    """Write the parameters of a checkpoint for MaxText's tools; print their size and layout as JSON."""
    from multimesh_maxtext.trainer.export import export

    try:
        print(json.dumps(export(Path(folder), int(step), Path(target), unrolled=bool(unrolled))))
    except CheckpointError as error:
        sys.exit(f"error: {error}")


def compile_module(file: str) -> None:
    """Compile HLO text for all devices; print the memory of a device as JSON, or end with a line that says why not."""
    import jax

    import multimesh.jax

    try:
        found = multimesh.jax.compile_hlo_module(file, num_partitions=jax.device_count())
    except multimesh.MultiMeshError as error:
        sys.exit(f"error: {error}")
    names = ("argument", "output", "temp")
    print(json.dumps({name: getattr(found, f"{name}_size_in_bytes") for name in names}))


def join(arguments: Sequence[str]) -> None:
    """Be MaxText's trainer as one of several processes, in this one.

    Variables tell its rank. It finds the first by those of srun or mpirun, or by JAX_COORDINATOR_ADDRESS.
    """
    # Only here: the command that starts the trainers never imports JAX.
    from orbax.checkpoint import v1 as ocp

    from multimesh import distributed

    rank, size = (os.environ.get(f"MULTIMESH_MAXTEXT_{name}") for name in ("RANK", "SIZE"))
    # Each command names another folder.
    distributed.initialize(
        num_processes=int(size) if size else None, process_id=int(rank) if rank else None, same_command=False
    )
    ocp.handlers.register_handler(distributed.orbax_state_handler(), checkpointable_name="items")  # the train state
    _be_trainer(arguments)


def foresee(arguments: Sequence[str]) -> None:
    """Be MaxText's trainer, in this process, until it has forecast its step. It frees no memory before its end."""
    gc.disable()
    _be_trainer(arguments)


def _be_trainer(arguments: Sequence[str]) -> None:
    sys.argv = [TRAINER, *arguments]
    runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)

"""``python -m multimesh_maxtext``: the command of ``maxtext/run.py`` where there is no repository.

The command starts this program with other words. ``train CONFIG KEY=VALUE...`` is MaxText's trainer, alone or as one of
several processes, or until it has forecast its step; ``export DIR STEP TARGET`` writes parameters for MaxText's tools.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from pathlib import Path

from multimesh_maxtext.errors import CheckpointError
from multimesh_maxtext.handoff import TRAINER, TrainerConfig, receive


def run_trainer(*arguments: str) -> None:
    """Be MaxText's trainer in this process, and write why it ended."""
    from multimesh_maxtext.trainer import ending

    config = receive(os.environ)
    if config.forecast:
        gc.disable()  # it frees no memory before its end
    with ending.telling(config):
        if config.count > 1:
            _join_others(config)
        if config.target and config.stages == 1:
            from multimesh_maxtext.trainer.foresight import compile_program

            compile_program(config.target, Path(config.forecast))
        sys.argv = [TRAINER, *arguments]
        runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)


def _join_others(config: TrainerConfig) -> None:
    """Meet the other processes. Variables tell where the first is: of srun, of mpirun, or JAX's own."""
    from orbax.checkpoint import v1 as ocp

    from multimesh import distributed
    from multimesh_maxtext.trainer import checkpointer, ending

    # Each command names another folder.
    distributed.initialize(num_processes=config.count, process_id=config.rank, same_command=False)
    distributed.tell_at_loss(lambda text, code: ending.write_loss(text, code, config))
    handler = distributed.orbax_state_handler()
    handler = checkpointer.ending_failed_saves(handler, lambda error: ending.end_process(error, config))
    ocp.handlers.register_handler(handler, checkpointable_name="items")  # the train state


def export(folder: str, step: str, target: str, *unrolled: str) -> None:
    """Write the parameters of a checkpoint for MaxText's tools; print their size and layout as JSON."""
    from multimesh_maxtext.trainer.checkpointer import export as write_parameters

    try:
        print(json.dumps(write_parameters(Path(folder), int(step), Path(target), unrolled=bool(unrolled))))
    except CheckpointError as error:
        sys.exit(f"error: {error}")


def main(words: list[str]) -> None:
    """Do what the first word says, or be the command, which never imports JAX."""
    if words[:1] == ["export"]:
        export(*words[1:])
    elif words[:1] == ["train"]:
        run_trainer(*words[1:])
    else:
        from multimesh_maxtext.command.cli import command

        command(words)


if __name__ == "__main__":
    main(sys.argv[1:])

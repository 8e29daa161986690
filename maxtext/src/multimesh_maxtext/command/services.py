"""Services of the command in place of training: compile a module, export parameters, show the plan or the command."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from multimesh_maxtext.checkpoint_folder import look
from multimesh_maxtext.command import memory, report
from multimesh_maxtext.command.inspecting import inspect
from multimesh_maxtext.command.launch import Launch, in_place
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.command.translate import Paths
from multimesh_maxtext.errors import CheckpointError, FileError, TrainerFailedError


def compile_text(start: Launch, o: Options) -> int:
    """Compile ``--hlo``, and print its time and memory."""
    began = time.monotonic()
    found = _run_json(start)
    if o.json:
        print(json.dumps({"hlo": str(o.hlo), "bytes": found}))
    else:
        parts = ", ".join(f"{name} {memory.show_size(size)}" for name, size in found.items())
        print(f"compiled {o.hlo} in {time.monotonic() - began:.1f} s; each device needs {parts}")
    return 0


def export_parameters(start: Launch, o: Options, target: Path) -> int:
    """Write the parameters of the newest checkpoint for MaxText's tools, and say where they are."""
    folder = o.checkpoint or Path()
    steps = look(folder).steps
    if not steps:
        raise CheckpointError(f"--checkpoint {folder}: there is no checkpoint to export; train first")
    if target.exists():
        raise FileError(f"--export {target}: it is there already; choose another folder")
    words = str(folder.resolve()), str(steps[-1]), str(target.resolve()), *["unrolled"] * (o.scan_layers is False)
    found = _run_json(in_place(start, "export", *words))
    if o.json:
        print(json.dumps({"export": str(target / "items"), "checkpoint": steps[-1], **found}))
    else:
        size, scanned = memory.show_size(found["bytes"]), str(found["scan_layers"]).lower()
        print(f"checkpoint {steps[-1]}: {size} of parameters")
        print(f"for MaxText: load_parameters_path={target / 'items'} scan_layers={scanned}")
    return 0


def _run_json(start: Launch) -> Any:
    """Run a process that prints JSON; return that."""
    environment = {**os.environ, **start.environment}
    done = subprocess.run(start.command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrainerFailedError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
    return json.loads(done.stdout)


def write_dump(start: Launch, paths: Paths, o: Options, *, quiet: bool) -> None:
    """Compile the step and write its plan, for ``--dump-only``."""
    inspect(start, paths)
    if not quiet:
        print(json.dumps({"dump": str(o.dump)}) if o.json else f"compiled; the plan is in {o.dump}")


def show_command(start: Launch, *, as_json: bool) -> int:
    """Print what ``--dry-run`` would start."""
    if as_json:
        print(
            json.dumps({name: getattr(start, name) for name in ("command", "environment", "configuration")}, indent=1)
        )
    else:
        print(report.plan_text(start.command, start.environment, start.configuration))
    return 0

"""``--check``: `python -m multimesh check --quick` as the processes of this job, before they train."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from multimesh.launch import process_variables
from multimesh_maxtext.command.launch import Launch
from multimesh_maxtext.command.member import Member, is_numbered_by_us
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.errors import FileError, ProcessLostError, UnfitError

HOLD = 5.0
"""Seconds that the others wait for the first process, which tells: Slurm ends all as soon as one ends with an error."""

UNFIT = "unfit-nodes"
"""File in the output folder: the nodes that the check found at fault, one a line. The batch scripts leave these out."""


def check_processes(start: Launch, o: Options, output: Path, this: Member) -> None:
    """Let all processes of the job check their devices and the way between them; the table goes to stderr.

    ``output``: the output folder of the first process.

    Raises ``ProcessLostError`` if a process does not answer, and ``UnfitError`` if another step fails.
    """
    shared = (o.checkpoint or o.output or Path()).absolute()
    unfit = output / UNFIT
    try:
        for folder in (shared, output):
            folder.mkdir(parents=True, exist_ok=True)
        if not this.rank:
            unfit.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{error.filename}: {error.strerror}; choose another --output or --checkpoint") from error
    stages = o.pp if o.staged else 1
    words = ("check", "--quick", f"--stages={stages}", f"--folder={shared}", f"--unfit={unfit}")
    own = process_variables(this.rank, this.count) if is_numbered_by_us(os.environ) else {}
    command = [*start.command[:3], "multimesh", *words]
    code = subprocess.run(command, env={**os.environ, **start.environment, **own}, stdout=2, check=False).returncode
    if code == ProcessLostError.exit_code or code < 0:
        raise ProcessLostError("--check: a process or a transfer did not answer; the table above says which")
    if code:
        if this.rank:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(HOLD)
        nodes = unfit.read_text().split() if unfit.exists() else []
        which = f"; at fault: {', '.join(nodes)}" if nodes else ""
        raise UnfitError(f"--check: these processes cannot run pipelines{which}; the table above says why")

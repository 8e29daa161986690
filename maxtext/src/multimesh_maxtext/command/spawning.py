"""``--spawn`` starts all processes of a job here; ``--check`` lets them check devices and links before they train."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from multimesh.launch import job_variables, process_variables, run_together
from multimesh_maxtext import outcome
from multimesh_maxtext.command.flags import Flags
from multimesh_maxtext.command.member import Member
from multimesh_maxtext.command.training import SIGNALS, SPAWNED, state_line
from multimesh_maxtext.command.translate import Launch
from multimesh_maxtext.errors import FileError, InterruptedRunError, ProcessLostError, UnfitError

UNFIT = "unfit-nodes"
"""File in the output folder: the nodes that the check found at fault, one a line, for ``sbatch --exclude``."""


def spawn(argv: Sequence[str], options: Flags, root: Path | None) -> int:
    """Start the command of every process and wait for them; the first that fails ends all.

    Returns the exit code of the process whose outcome is no echo of another's, and says in the last line why it ended.
    """
    words, folder = [word for word in argv if word != "--spawn"], options.output
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="multimesh-maxtext-"))
        words += ["--output", str(folder)]
    door = [str(root / "maxtext/run.py")] if root else ["-P", "-m", "multimesh_maxtext"]
    shared, count, begun = job_variables() | {SPAWNED: "1"}, options.nodes, time.time()
    variables = [shared | process_variables(rank, count) for rank in range(count)]
    code = run_together([[sys.executable, *door, *words]] * count, variables, passed_on=SIGNALS)
    if code == 0:
        return 0
    state, killed = state_line(options.checkpoint), code < 0
    if killed:  # and its trainer with it: by us before it could listen, or by somebody else
        code = (InterruptedRunError if -code in SIGNALS else ProcessLostError).exit_code
    first = outcome.find_first(folder, count, begun, code)
    if first and (first.exit_code == code or not first.doubt):
        print(f"error: {first}; {state} ({first.who})", file=sys.stderr)
        return first.exit_code
    if code == InterruptedRunError.exit_code:
        print(f"interrupted before it trained; {state}", file=sys.stderr)
    elif killed:
        print(f"error: a process was killed; {state}", file=sys.stderr)
    return code


def check_processes(start: Launch, o: Flags, output: Path, this: Member) -> None:
    """Let all processes check their devices and the way between them; the table goes to stderr."""
    shared, unfit = (o.checkpoint or o.output or Path()).absolute(), output / UNFIT
    try:
        for folder in (shared, output):
            folder.mkdir(parents=True, exist_ok=True)
        if not this.rank:
            unfit.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{error.filename}: {error.strerror}; choose another --output or --checkpoint") from error
    stages = o.pp if o.staged else 1
    words = ("check", "--quick", f"--stages={stages}", f"--folder={shared}", f"--unfit={unfit}")
    code = subprocess.call([*start.command[:3], "multimesh", *words], env={**os.environ, **start.environment}, stdout=2)
    if code == ProcessLostError.exit_code or code < 0:
        raise ProcessLostError("--check: a process or a transfer did not answer; the table above says which")
    if code:
        nodes = unfit.read_text().split() if unfit.exists() else []
        which = f"; at fault: {', '.join(nodes)}" if nodes else ""
        raise UnfitError(f"--check: these processes cannot run pipelines{which}; the table above says why")

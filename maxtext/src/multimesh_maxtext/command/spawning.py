"""``--spawn``: all processes of a job on this machine, each the same command as one of several.

With ``--max-restarts`` all start again from the last checkpoint when one of them is lost. With ``--fallback`` they
start in smaller numbers when as many cannot be had.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from multimesh.launch import job_variables, run_together
from multimesh_maxtext.command import restarts
from multimesh_maxtext.command.fallback import Grid, choose
from multimesh_maxtext.command.launch import visible_gpu_memory
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.command.training import SIGNALS
from multimesh_maxtext.command.translate import Paths
from multimesh_maxtext.errors import ProcessLostError

SPAWNED = "MULTIMESH_MAXTEXT_SPAWNED"
"""Environment variable of the processes of ``--spawn``."""


def spawn(argv: Sequence[str], options: Options, root: Path | None, grids: Sequence[Grid]) -> int:
    """Start the command of every process and wait for them; the first that fails ends all, with its exit code.

    ``grids``: those that the job may have, the first of them at first.
    """
    words = [word for word in argv if word != "--spawn"]
    output = options.output or Path(tempfile.mkdtemp(prefix="multimesh-maxtext-"))
    words += [] if options.output else ["--output", str(output)]
    paths = Paths("", Path(), output, options.metrics_file or output / "metrics.jsonl")
    left = options.nodes
    for number in range(1 + (options.max_restarts or 0)):
        grid = choose(grids, min(left, _room(options)))
        if grid is None:
            print(f"error: no grid of --fallback can do with the processes that are left, {left}", file=sys.stderr)
            break
        again = ["--resume"] if number else []
        count, saves = number if options.max_restarts else None, bool(options.checkpoint)
        code = _run([*words, *grid.words, *again], grid.processes, root, count, saves=saves)
        if code != ProcessLostError.exit_code:
            return code
        last = restarts.close_attempt(options, paths, number)
        if options.fallback and not (last and last.done > last.first):  # it did not come to train
            left = grid.processes - 1
    return ProcessLostError.exit_code


def _room(options: Options) -> int:
    """Return how many processes the GPUs of this machine suffice for; CPU devices are virtual."""
    return len(visible_gpu_memory() or ()) // options.gpus if options.gpus else options.nodes


def _run(words: Sequence[str], processes: int, root: Path | None, number: int | None, *, saves: bool) -> int:
    """Run the job once; its exit code.

    ``number``: how often it was started again; none for a job that is not.
    ``saves``: whether a signal that ends the job is handed on to the processes, which write a checkpoint first.
    """
    door = [str(root / "maxtext/run.py")] if root else ["-P", "-m", "multimesh_maxtext"]
    shared = job_variables() | {"MULTIMESH_MAXTEXT_SIZE": str(processes), SPAWNED: "1"}
    shared |= {} if number is None else {restarts.VARIABLE: str(number)}
    each = [{f"MULTIMESH_MAXTEXT_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")} for rank in range(processes)]
    commands, signals = [[sys.executable, *door, *words]] * processes, SIGNALS if saves else ()
    code = run_together(commands, [shared | own for own in each], passed_on=signals)
    return code if code >= 0 else ProcessLostError.exit_code  # killed, and its trainer with it

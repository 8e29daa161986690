"""Whether a validation job can run here at all, asked before an hour is spent on the image."""

from __future__ import annotations

import shutil

from workflows import errors, proc

_SLURM_JOB = "maxtext/llama3-8b-16gpus"


def check_means(job: str) -> None:
    """Raise ``UsageError`` for a job that needs what is not here: a GPU for ``medium``, Slurm for ``large``."""
    if job == "medium" and not _gpus():
        raise errors.UsageError(
            "--validate medium: nvidia-smi lists no GPU here; run it on a machine with one, or take --validate small"
        )
    if job == "large":
        missing = [program for program in ("sbatch", "squeue") if shutil.which(program) is None]
        if missing:
            raise errors.UsageError(
                f"--validate large: no {missing[0]} here; run it where Slurm is, or take --validate small"
            )
        raise errors.UsageError(f"--validate large: {_SLURM_JOB} has no job for an image; take --validate small")


def _gpus() -> int:
    try:
        told = proc.run(["nvidia-smi", "--list-gpus"], check=False)
    except errors.ToolError:
        return 0
    return sum(line.startswith("GPU ") for line in told.text.splitlines())

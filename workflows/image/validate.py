"""Whether a validation job can run here at all, asked before an hour is spent on the image."""

from __future__ import annotations

from workflows import errors, proc


def check_means(job: str) -> None:
    """Raise ``UsageError`` for a job that needs what is not here: a GPU for ``medium``, Slurm for ``large``."""
    if job == "medium" and not _gpus():
        raise errors.UsageError(
            "--validate medium: nvidia-smi lists no GPU here; run it on a machine with one, or take --validate small"
        )
    if job == "large":
        from workflows.image import large

        large.check_means()


def _gpus() -> int:
    try:
        told = proc.run(["nvidia-smi", "--list-gpus"], check=False)
    except errors.ToolError:
        return 0
    return sum(line.startswith("GPU ") for line in told.text.splitlines())

"""``--validate large``: the llama3-8b job on 16 GPUs under Slurm, with the image that is to be checked."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from workflows import complaints, console, errors, proc
from workflows.image import slurm
from workflows.image.engine import Engine

JOB = Path("maxtext/llama3-8b-16gpus/job.sbatch")
PLACE = Path("build/image/large")
LOG = PLACE / "job.log"
OPTIONS_VARIABLE, FLAGS_VARIABLE = "MULTIMESH_SLURM_OPTIONS", "MULTIMESH_SLURM_FLAGS"
_VERDICT = re.compile(r"ok: \d+ steps, loss \S+ -> \S+")
_CAUSE = re.compile(r"(\d+: )?(error|Error|srun: error|slurmstepd: error|.*: error)\b.*")


@dataclass(frozen=True)
class Wishes:
    """What a user wants otherwise than the folder of the job has it.

    Attributes
    ----------
    options
        For sbatch: the partition, the account, fewer tasks.
    flags
        For ``run.py``: they come last, so they win.
    """

    options: tuple[str, ...]
    flags: tuple[str, ...]


def wishes(environment: Mapping[str, str]) -> Wishes:
    """Return what the environment wants otherwise."""
    try:
        options, flags = (tuple(shlex.split(environment.get(name, ""))) for name in (OPTIONS_VARIABLE, FLAGS_VARIABLE))
    except ValueError as error:
        raise errors.UsageError(f"{OPTIONS_VARIABLE}, {FLAGS_VARIABLE}: {error}; quote as for a shell") from error
    return Wishes(options, flags)


def check_means() -> None:
    """Raise ``UsageError`` where the job cannot be submitted."""
    wishes(os.environ)
    if (fault := slurm.missing()) is not None:
        raise errors.UsageError(f"--validate large: {fault}; run it where Slurm is, or take --validate small")
    if slurm.runs_containers() and shutil.which("enroot") is None:
        raise errors.UsageError("--validate large: srun takes images from enroot (pyxis); install that here")


def check_engine(engine: Engine) -> None:
    """Raise ``UsageError`` where no container of this engine's image would run in the job."""
    if engine.kind != "docker" and not slurm.runs_containers():
        raise errors.UsageError(
            f"--validate large: srun has no --container-image (pyxis), and nodes load no image of {engine.kind}; "
            "install pyxis or docker, or take --validate small"
        )


def argv(wanted: Wishes) -> list[str]:
    """Return the command that submits the job, to be run in the repository."""
    job_options = ["--parsable", f"--output={LOG}", "--export=ALL", *wanted.options]
    return ["sbatch", *job_options, str(JOB), *wanted.flags]


def bring(engine: Engine, image: str, folder: Path, *, pyxis: bool) -> tuple[list[str], dict[str, str]]:
    """Return the command that writes an image where nodes see it, and what the job is told."""
    if pyxis:
        squashed, scheme = folder / "image.sqsh", {"docker": "dockerd", "podman": "podman"}[engine.kind]
        return ["enroot", "import", "--output", str(squashed), f"{scheme}://{image}"], {"IMAGE": str(squashed)}
    archive = folder / "image.tar"
    return [*engine.cli, "save", "--output", str(archive), image], {"IMAGE": image, "IMAGE_ARCHIVE": str(archive)}


def planned(engine: Engine, image: str) -> list[list[str]]:
    """Return the commands of the job; nothing is asked of Slurm where it is not here."""
    pyxis = shutil.which("srun") is not None and slurm.runs_containers()
    command, _ = bring(engine, image, PLACE, pyxis=pyxis)
    return [command, argv(wishes(os.environ))]


def run(root: Path, engine: Engine, image: str) -> str:
    """Run the job with an image; return its verdict, with what was wanted otherwise.

    Raises
    ------
    SmokeError
        The job was not taken, failed, or did not end with a loss that fell.
    """
    wanted = wishes(os.environ)
    log = root / LOG
    with _folder(root / PLACE) as folder:
        log.unlink(missing_ok=True)
        command, told = bring(engine, image, folder, pyxis=slurm.runs_containers())
        console.note("writing the image where the nodes see it")
        proc.run(command)
        job = slurm.submit(argv(wanted), os.environ | told, cwd=root)
        console.note(f"job {job} of Slurm, its output in {LOG}")
        lines = list[str]()

        def show(line: str) -> None:
            lines.append(line)
            print(f"       |  {line}", file=sys.stderr, flush=True)

        end = slurm.follow(job, log, show, lambda now: console.note(f"job {job}: {now.line}"))
    return judge(job, end, lines, wanted)


def judge(job: str, end: slurm.State, lines: list[str], wanted: Wishes) -> str:
    """Return the verdict of a job that ended, from its exit state and its last words."""
    verdict = next((line for line in reversed(lines) if _VERDICT.match(line)), None)
    if end.word != "COMPLETED" or end.exit_code:
        cause = next((line for line in lines if _CAUSE.match(line)), (lines or ["it wrote nothing"])[-1])
        raise errors.SmokeError(
            f"the validation job 'large' failed: job {job} of Slurm is {end.word}, exit code {end.exit_code} "
            f"({complaints.shortened(cause.strip())}); no tag was moved. Its output: {LOG}"
        )
    if verdict is None:
        raise errors.SmokeError(f"job {job} of Slurm ended without a verdict on its loss; no tag was moved")
    otherwise = shlex.join([*wanted.options, *wanted.flags])
    return f"{verdict}; the llama3-8b job of Slurm" + (f" with other settings: {otherwise}" if otherwise else "")


@contextmanager
def _folder(place: Path) -> Iterator[Path]:
    """Have a folder for the image below the repository, which a cluster's nodes are taken to see."""
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="image-", dir=place) as folder:
        yield Path(folder)

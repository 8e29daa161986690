"""The check of an image before it gets its name: what it holds, then the CPU validation job in a container."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from workflows import complaints, console, errors, files, proc
from workflows.image.engine import Engine
from workflows.image.spec import Built

_CONTENTS = "docker/scripts/contents.sh"
_KEPT = 20
_CHECKED = Path("build/image/checked.json")
_GPUS = ("nvidia-smi", "--list-gpus")
_JOBS = {"small": "validate-cpu.sh", "medium": "validate-gpu.sh"}


@dataclass(frozen=True)
class Check:
    """A check that an image passed: which job, how long it took and its last line."""

    job: str
    seconds: float
    verdict: str


def check(root: Path, engine: Engine, built: Built, job: str) -> Check:
    """Check an image in a container, or return what is known from the last time: its bytes decide.

    Parameters
    ----------
    job
        ``small``: MaxText on 8 virtual CPU devices, without network or GPU; ``medium``: on the GPUs of this machine;
        ``large``: llama3-8b under Slurm, every time it is asked for.

    Raises
    ------
    SmokeError
        What the image lacks or holds, or the last line of the job that failed in it.
    """
    if job != "large" and (before := _recall(root, built.content, job)) is not None:
        return before
    started = time.monotonic()
    contents(root, engine, built)
    verdict = "its tools are there"
    if built.spec.target != "devcontainer":
        verdict = run_job(root, engine, built.image_id, job)
    passed = Check(job, round(time.monotonic() - started, 1), verdict)
    _remember(root, built.content, passed)
    return passed


def check_means(job: str) -> None:
    """Raise ``UsageError``, before an hour is spent on an image, for a job that needs what is not here."""
    if job == "medium" and not (shutil.which("nvidia-smi") and "GPU " in proc.run(_GPUS, check=False).text):
        raise errors.UsageError(
            "--validate medium: nvidia-smi lists no GPU here; run it on a machine with one, or take --validate small"
        )
    if job == "large":
        from workflows.image import large

        large.check_means()


def contents(root: Path, engine: Engine, built: Built) -> None:
    """Hold what lies in an image against what its target promises."""
    user = str(((engine.inspect(built.image_id) or {}).get("Config") or {}).get("User") or "root")
    if user.partition(":")[0] in ("root", "0"):
        raise errors.SmokeError(f"{built.image_id}: runs as root; the last USER of its stage must be another")
    script = (root / _CONTENTS).read_bytes()
    options = ["--rm", "--interactive", "--network", "none", "--user", "0", "--entrypoint", "/bin/sh"]
    argv = [*engine.cli, "run", *options, built.image_id, "-s", built.spec.target]
    result = proc.run(argv, stdin=script, check=False)
    if result.returncode:
        faults = [line.removeprefix("fault: ") for line in result.text.splitlines() if line.startswith("fault: ")]
        raise errors.SmokeError(f"{built.image_id}: holds {'; '.join(faults) or result.complaint}")


def planned(engine: Engine, image: str, job: str) -> list[list[str]]:
    """Return the commands of a check's job."""
    if job == "large":
        from workflows.image import large

        return large.planned(engine, image)
    return [job_argv(engine, image, job, "multimesh-check")]


def job_argv(engine: Engine, image: str, job: str, name: str) -> list[str]:
    """Return the command that runs a validation job in a container, as a user would."""
    means = ["--gpus", "all"] if job == "medium" else ["--network", "none"]
    # Docker brings the program that --init starts; Podman wants a package of its own, and the job reaps what it starts.
    init = ["--init"] if engine.kind == "docker" else []
    options = ["--rm", *init, "--name", name, *means, "--entrypoint", "/opt/entrypoint.sh", "--workdir", "/tmp"]  # noqa: S108
    script = f"/opt/maxtext/{_JOBS[job]}"
    return [*engine.cli, "run", *options, image, script]


def run_job(root: Path, engine: Engine, image: str, job: str) -> str:
    """Run a validation job, showing its lines; return its verdict."""
    if job == "large":
        from workflows.image import large

        return large.run(root, engine, image)
    return run_container(engine, image, job)


def run_container(engine: Engine, image: str, job: str) -> str:
    """Run a validation job in a container, showing its lines; return the last of them."""
    name = f"multimesh-check-{os.getpid()}-{secrets.token_hex(4)}"
    lines = list[str]()

    def show(line: str) -> None:
        if line.strip():
            lines.append(line.rstrip())
            print(f"       |  {line.rstrip()}", file=sys.stderr, flush=True)

    try:
        result = proc.run(job_argv(engine, image, job, name), check=False, on_line=show)
    except BaseException:
        # Ending docker's client does not end the container.
        subprocess.run([*engine.cli, "rm", "--force", name], capture_output=True, check=False)
        raise
    if result.returncode:
        said = next((line for line in reversed(lines) if re.match(r"(error|Error)", line)), (lines or ["nothing"])[-1])
        raise errors.SmokeError(
            f"the validation job '{job}' failed in {image[:19]} ({complaints.shortened(said)}); no tag was moved. "
            f"To look: {proc.quoted([*engine.cli[:1], 'run', '-it', '--entrypoint', '/bin/bash', image])}"
        )
    return lines[-1] if lines else ""


def _recall(root: Path, content: str, job: str) -> Check | None:
    """Return the check that these bytes passed before, if any."""
    try:
        entry = json.loads((root / _CHECKED).read_text(encoding="utf-8"))[content]
        found = Check(**entry)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.job == job else None


def _remember(root: Path, content: str, passed: Check) -> None:
    """Note a passed check; a note that cannot be written costs only time."""
    path = root / _CHECKED
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        recent: Sequence[tuple[str, object]] = list(known.items())[-_KEPT:]
        files.write_json(path, dict(recent) | {content: asdict(passed)})
    except (OSError, ValueError, AttributeError) as error:
        console.note(f"{_CHECKED}: cannot note that the image passed ({error}); the next run checks it again")

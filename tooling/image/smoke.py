"""The check of an image before it gets its name: its content, then a validation job in a container."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tooling.core import console, errors, files, proc
from tooling.image.buildx import LABEL
from tooling.image.engine import Engine
from tooling.image.request import Built

_CHECKED = Path("build/image/checked.json")
_KEPT = 20
_JOBS = {"small": "validate-cpu.sh", "medium": "validate-gpu.sh"}


class Check(NamedTuple):
    """A passed check of an image: the job, its seconds and its last line."""

    job: str
    seconds: float
    verdict: str


def check_means(job: str) -> None:
    """Raise ``UsageError``, before an hour is spent on an image, for a job that this machine cannot run."""
    asked = ("nvidia-smi", "--list-gpus")
    if job == "medium" and not (shutil.which(asked[0]) and "GPU " in proc.run(asked, check=False).text):
        raise errors.UsageError(
            "--validate medium: nvidia-smi lists no GPU here; run it on a machine with one, or take --validate small"
        )


def check(root: Path, engine: Engine, built: Built, job: str) -> Check:
    """Check an image in a container, or return the verdict of the last check of the same bytes.

    The job ``small`` is MaxText on 8 virtual CPU devices, without network or GPU; ``medium`` runs on the GPUs of this
    machine; with ``none`` only the content is looked at. ``SmokeError`` says what the image lacks or holds, or the last
    line of the job that failed in it.
    """
    passed_before = files.read_object(root / _CHECKED)
    with contextlib.suppress(KeyError, TypeError):
        if (before := Check(**passed_before[built.content])).job == job:
            return before
    started = time.monotonic()
    _check_contents(root, engine, built)
    verdict = "its content is as promised; no job ran"
    if built.spec.target != "devcontainer" and job != "none":
        verdict = _run(engine, built.image_id, job)
    passed = Check(job, round(time.monotonic() - started, 1), verdict)
    try:
        (root / _CHECKED).parent.mkdir(parents=True, exist_ok=True)
        recent = dict(list(passed_before.items())[-_KEPT:])
        files.write_json(root / _CHECKED, recent | {built.content: passed._asdict()})
    except OSError as error:
        console.note(f"{_CHECKED}: cannot note that the image passed ({error}); the next run checks it again")
    return passed


def _check_contents(root: Path, engine: Engine, built: Built) -> None:
    """Compare the content of an image with the promise of its target."""
    user = str(((engine.inspect(built.image_id) or {}).get("Config") or {}).get("User") or "root")
    if user.partition(":")[0] in ("root", "0"):
        raise errors.SmokeError(f"{built.image_id}: runs as root; the last USER of its stage must be another")
    options = ["--rm", "--interactive", "--network", "none", "--user", "0", "--entrypoint", "/bin/sh"]
    accelerator = built.labels.get(f"{LABEL}.accelerator", "cpu").split()[0]
    words = [*engine.cli, "run", *options, built.image_id, "-s", built.spec.target, accelerator]
    result = proc.run(words, stdin=(root / "docker/scripts/contents.sh").read_bytes(), check=False)
    if result.returncode:
        faults = [line.removeprefix("fault: ") for line in result.text.splitlines() if line.startswith("fault: ")]
        raise errors.SmokeError(f"{built.image_id}: holds {'; '.join(faults) or result.complaint}")


def argv(engine: Engine, image: str, job: str, name: str) -> list[str]:
    """Return the command that runs a validation job in a container, as a user would."""
    means = ["--gpus", "all"] if job == "medium" else ["--network", "none"]
    options = ["--rm", "--init", "--name", name, *means, "--entrypoint", "/opt/entrypoint.sh", "--workdir", "/tmp"]  # noqa: S108
    return [*engine.cli, "run", *options, image, f"/opt/maxtext/{_JOBS[job]}"]


def _run(engine: Engine, image: str, job: str) -> str:
    """Run a validation job in a container, showing its lines; return the last of them."""
    name = f"multimesh-check-{os.getpid()}-{os.urandom(4).hex()}"
    lines = list[str]()

    def show(line: str) -> None:
        if line.strip():
            lines.append(line.rstrip())
            print(f"       |  {line.rstrip()}", file=sys.stderr, flush=True)

    try:
        result = proc.run(argv(engine, image, job, name), check=False, on_line=show)
    except BaseException:
        # Ending docker's client does not end the container.
        subprocess.run([*engine.cli, "rm", "--force", name], capture_output=True, check=False)
        raise
    if result.returncode:
        said = next((line for line in reversed(lines) if re.match(r"(error|Error)", line)), (lines or ["nothing"])[-1])
        raise errors.SmokeError(
            f"the validation job '{job}' failed in {image[:19]} ({proc.shorten(said)}); no tag was moved. "
            f"To look: {proc.quote([*engine.cli[:1], 'run', '-it', '--entrypoint', '/bin/bash', image])}"
        )
    return lines[-1] if lines else ""

"""The Docker engine, by the docker SDK: a client, its images, a push, and the check that an image gets its name for."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from docker.errors import DockerException, ImageNotFound
from docker.models.images import Image
from requests import RequestException

import docker
from docker import DockerClient
from tooling.core import console, errors, files, proc
from tooling.image.reference import LABEL, Reference, split

_PATIENCE_S = 5
_WAITS_S = (1, 4, 16)
_CHECKED, _RECENT = Path("build/image/checked.json"), 20
_JOBS = {"small": "validate-cpu.sh", "medium": "validate-gpu.sh"}


@contextmanager
def connect() -> Iterator[DockerClient]:
    """Have a client of the engine. ``EngineError``: none answers within seconds, or what the SDK raises meanwhile."""
    place = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    try:
        client = docker.from_env(timeout=_PATIENCE_S)
        client.ping()
    except (DockerException, RequestException, ValueError) as error:
        said = f"within {_PATIENCE_S} s" if "timed out" in str(error) else f"({error})"
        raise errors.EngineError(
            f"no engine answers at {place} {said}; start one, or install docker.io and docker-buildx, and be in its "
            "group docker. Without an engine maxtext/validate-cpu.sh runs the same check on this machine"
        ) from None
    client.api.timeout = None  # type: ignore[assignment]  # a push or a job is silent for minutes
    try:
        yield client
    except (DockerException, RequestException) as error:
        raise errors.EngineError(f"the engine: {getattr(error, 'explanation', None) or error}") from error


def find_image(client: DockerClient, *names: str) -> Image:
    """Return the image that the engine has under one of these names."""
    for name in names:
        with suppress(ImageNotFound):
            return client.images.get(name)
    raise errors.EngineError(f"{' or '.join(names)}: the engine has no such image; build it first")


def push(client: DockerClient, name: Reference) -> None:
    """Push a tag, again after a fault: the right to push was asked before. ``EngineError``: not at the last attempt."""
    for wait in (*_WAITS_S, None):
        events = client.api.push(name.repository, name.tag, stream=True, decode=True)
        fault = next((str(event["error"]) for event in events if "error" in event), "")
        if not fault:
            return
        if wait is None:
            host = split(name.repository)[0] or "docker.io"
            raise errors.EngineError(
                f"{name}: not pushed ({proc.shorten(fault)}); log in with `docker login {host}`, and check --repo"
            )
        console.note(f"{name}: {fault}; pushing it again in {wait} s")
        time.sleep(wait)


def check_means(job: str) -> None:
    """Raise ``OptionError``, before an hour is spent on an image, for a job that this machine cannot run."""
    question = ("nvidia-smi", "--list-gpus")
    if job == "medium" and not (shutil.which(question[0]) and "GPU " in proc.run(question, check=False).text):
        raise errors.OptionError(
            "--validate medium: nvidia-smi lists no GPU here; run it on a machine with one, or take --validate small"
        )


def check(root: Path, image: Image, target: str, job: str) -> dict[str, Any]:
    """Check an image in a container; return job, seconds and verdict, or those of its last check.

    The job ``small`` is MaxText on 8 virtual CPU devices, without network or GPU; ``medium`` runs on the GPUs of this
    machine; with ``none`` only the content is looked at. ``SmokeError`` says what the image lacks or holds, or the last
    line of the job that failed in it.
    """
    recent = files.read_object(root / _CHECKED)
    if (before := recent.get(str(image.id), {})).get("job") == job:
        return dict(before)
    started, verdict = time.monotonic(), "its content is as promised; no job ran"
    _check_contents(root, image, target)
    if target != "devcontainer" and job != "none":
        verdict = _run_job(str(image.id), job)
    passed = {"job": job, "seconds": round(time.monotonic() - started, 1), "verdict": verdict}
    (root / _CHECKED).parent.mkdir(parents=True, exist_ok=True)
    files.write_json(root / _CHECKED, dict([*recent.items()][-_RECENT:]) | {image.id: passed})
    return passed


def _check_contents(root: Path, image: Image, target: str) -> None:
    """Compare the content of an image with the promise of its target."""
    if (image.attrs["Config"].get("User") or "").partition(":")[0] in ("", "root", "0"):
        raise errors.SmokeError(f"{image.id}: runs as root; the last USER of its stage must be another")
    script, labels = (root / "docker/scripts/contents.sh").read_text(encoding="utf-8"), image.labels
    words = [target, labels.get(f"{LABEL}.accelerator", "cpu").split()[0], labels.get(f"{LABEL}.python", "")]
    command = [str(image.id), "-c", script, "contents.sh", *words]
    failed, lines = _run(["--network=none", "--user=0", "--entrypoint=/bin/sh", *command])
    if failed:
        faults = [line.removeprefix("fault: ") for line in lines if line.startswith("fault: ")]
        raise errors.SmokeError(f"{image.id}: holds {'; '.join(faults) or ' '.join(lines[-3:])}")


def _run_job(image: str, job: str) -> str:
    """Run a validation job in a container, as a user would, with its lines shown; return the last of them."""
    words = ["--gpus=all" if job == "medium" else "--network=none", "--entrypoint=/opt/entrypoint.sh", "--workdir=/tmp"]
    failed, lines = _run([*words, image, f"/opt/maxtext/{_JOBS[job]}"])
    if failed:
        reason = next((line for line in reversed(lines) if re.match("[Ee]rror", line)), (lines or ["no output"])[-1])
        raise errors.SmokeError(
            f"the validation job '{job}' failed in {image[:19]} ({proc.shorten(reason)}); no tag was moved. "
            f"To look: docker run -it --entrypoint /bin/bash {image}"
        )
    return lines[-1] if lines else ""


def _run(words: Sequence[str]) -> tuple[int, list[str]]:
    """Run a container, showing its lines; the engine removes it whatever happens here. Return exit status and lines."""
    command = ["docker", "run", "--rm", "--init", *words]
    done = proc.run(command, check=False, on_line=lambda line: console.note(f"       |  {line}"))
    if done.returncode == 125:  # not the container's own
        raise errors.EngineError(f"docker run: {done.complaint}")
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    return done.returncode, [line.rstrip() for line in lines if line.strip()]

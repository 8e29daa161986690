"""The check of an image before it gets its name: its content, then a validation job in a container."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tooling.core import errors, files, proc
from tooling.image.buildx import LABEL

if TYPE_CHECKING:
    from docker.models.images import Image

    from docker import DockerClient

_CHECKED, _RECENT = Path("build/image/checked.json"), 20
JOBS = {"small": "validate-cpu.sh", "medium": "validate-gpu.sh"}


class Check(NamedTuple):
    """A passed check of an image: the job, its seconds and its last line."""

    job: str
    seconds: float
    verdict: str


def check_means(job: str) -> None:
    """Raise ``OptionError``, before an hour is spent on an image, for a job that this machine cannot run."""
    question = ("nvidia-smi", "--list-gpus")
    if job == "medium" and not (shutil.which(question[0]) and "GPU " in proc.run(question, check=False).text):
        raise errors.OptionError(
            "--validate medium: nvidia-smi lists no GPU here; run it on a machine with one, or take --validate small"
        )


def check(root: Path, client: DockerClient, image: Image, target: str, job: str) -> Check:
    """Check an image in a container, or return the verdict of its last check.

    The job ``small`` is MaxText on 8 virtual CPU devices, without network or GPU; ``medium`` runs on the GPUs of this
    machine; with ``none`` only the content is looked at. ``SmokeError`` says what the image lacks or holds, or the last
    line of the job that failed in it.
    """
    recent = files.read_object(root / _CHECKED)
    if (before := recent.get(str(image.id), {})).get("job") == job:
        return Check(**before)
    started, verdict = time.monotonic(), "its content is as promised; no job ran"
    _check_contents(root, client, image, target)
    if target != "devcontainer" and job != "none":
        verdict = _run_job(client, str(image.id), job)
    passed = Check(job, round(time.monotonic() - started, 1), verdict)
    (root / _CHECKED).parent.mkdir(parents=True, exist_ok=True)
    files.write_json(root / _CHECKED, dict([*recent.items()][-_RECENT:]) | {image.id: passed._asdict()})
    return passed


def _check_contents(root: Path, client: DockerClient, image: Image, target: str) -> None:
    """Compare the content of an image with the promise of its target."""
    if (image.attrs["Config"].get("User") or "").partition(":")[0] in ("", "root", "0"):
        raise errors.SmokeError(f"{image.id}: runs as root; the last USER of its stage must be another")
    script, labels = (root / "docker/scripts/contents.sh").read_text(encoding="utf-8"), image.labels
    words = [target, labels.get(f"{LABEL}.accelerator", "cpu").split()[0], labels.get(f"{LABEL}.python", "")]
    entry = ["/bin/sh", "-c", script, "contents.sh"]
    status, lines = _run(client, str(image.id), words, network_mode="none", user="0", entrypoint=entry)
    if status:
        faults = [line.removeprefix("fault: ") for line in lines if line.startswith("fault: ")]
        raise errors.SmokeError(f"{image.id}: holds {'; '.join(faults) or ' '.join(lines[-3:])}")


def _run_job(client: DockerClient, image: str, job: str) -> str:
    """Run a validation job in a container, as a user would, with its lines shown; return the last of them."""
    from docker.types import DeviceRequest

    options: dict[str, Any] = {"entrypoint": ["/opt/entrypoint.sh"], "working_dir": "/tmp", "init": True}  # noqa: S108
    gpus = {"device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])]}
    options |= gpus if job == "medium" else {"network_mode": "none"}
    status, lines = _run(client, image, [f"/opt/maxtext/{JOBS[job]}"], _show, **options)
    if status:
        reason = next((line for line in reversed(lines) if re.match("[Ee]rror", line)), (lines or ["no output"])[-1])
        raise errors.SmokeError(
            f"the validation job '{job}' failed in {image[:19]} ({proc.shorten(reason)}); no tag was moved. "
            f"To look: docker run -it --entrypoint /bin/bash {image}"
        )
    return lines[-1] if lines else ""


def _show(line: str) -> None:
    print(f"       |  {line}", file=sys.stderr, flush=True)


def _run(
    client: DockerClient,
    image: str,
    command: list[str],
    show: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> tuple[int, list[str]]:
    """Run a container to its end, and remove it whatever happens; return its exit status and its lines."""
    container, text, lines = client.containers.create(image, command, **options), b"", list[str]()
    try:
        container.start()
        for chunk in container.logs(stream=True, follow=True):
            *complete, text = (text + chunk).split(b"\n")
            for line in complete:
                lines.append(line.decode("utf-8", "replace").rstrip())
                show(lines[-1])
        lines += [text.decode("utf-8", "replace")]
        return int(container.wait()["StatusCode"]), [line for line in lines if line]
    finally:
        container.remove(force=True)

"""From what a builder said to one line: which step failed, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workflows import complaints, errors
from workflows.image.progress import Steps

# Where a builder looks for a base: a step of its own, or, in Podman, the first of a stage.
_BASE = re.compile(r"\[internal\] load metadata|\S+ \d+/\d+: FROM ")
_TOLD = re.compile(r"(?!error: [a-z-]+$)([A-Za-z]*(error|ERROR|Error|Exception)|E|fatal|curl)(: | \()")
_NOISE = ("------", "WARNING", "View build details", "> [", ">>>", "time=")


def explain(steps: Steps, returncode: int, base: str) -> errors.WorkflowsError:
    """Return the error for a build that failed."""
    step = steps.failed
    said = [line for line in step.said if not line.startswith(_NOISE)] if step else []
    error = [step.error] if step and step.error else []
    text = "\n".join([*said, *error] if step else steps.rest)
    where = f"step `{step.title}`" if step else "the build"
    # Podman's own line says more than a step that complained of nothing; BuildKit's only repeats the command.
    podmans = [line for line in error if line.startswith("Error: ")]
    last = (
        _telling([*said, *podmans])
        or _telling(error)
        or _telling(steps.rest)
        or f"exit status {returncode}, no message"
    )
    if complaints.disk_full(text):
        return errors.DiskError(
            f"{where}: the engine's disk is full; free some space (`docker system df`) and run again"
        )
    if complaints.OTHER_FILES.search(text):
        return errors.IntegrityError(
            f"{where}: the package index offers other files than the locked ones; do not use them"
        )
    if "exec format error" in text.lower():
        return errors.EngineError(
            f"{where}: the engine's machine cannot run programs of this platform; register QEMU there "
            "(Debian and Ubuntu: qemu-user-static, binfmt-support), or leave out --platform"
        )
    if step and _BASE.match(step.title):
        last = _telling(error) or last
        return errors.NetworkError(
            f"{base}: the base image cannot be fetched ({last}); log in to its registry or give another --base-image"
        )
    if complaints.network_failed(text):
        return errors.NetworkError(
            f"{where}: cannot reach what it needs ({last}); check --pip-config, --ca-bundle and --network"
        )
    return errors.BuildError(f"{where} failed: {last}")


def _telling(lines: Iterable[str]) -> str | None:
    """Return the line that says most: a program's own error, else the last one; of a long one, both ends."""
    kept = [line for line in lines if line and not line.startswith(_NOISE)]
    own = [line for line in kept if _TOLD.match(line)]
    if not kept:
        return None
    # apt and pip say what is wrong first, then what that means.
    text = re.sub(r"^(error|ERROR|Error): ", "", own[-3:][0] if own else kept[-1])
    return complaints.shortened(text)

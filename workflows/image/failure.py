"""From what a builder said to one line: which step failed, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workflows import errors
from workflows.image.progress import Steps

_FULL = ("no space left on device", "disk quota exceeded")
_AWAY = (
    "temporary failure in name resolution",
    "temporary failure resolving",
    "failed to establish a new connection",
    "connection refused",
    "connection timed out",
    "network is unreachable",
    "max retries exceeded",
    "could not connect",
    "could not resolve",
    "i/o timeout",
    "no such host",
    "tls: failed to verify",
    "certificate verify failed",
)
_HASHES = "do not match the hashes"
_FOREIGN = "exec format error"
_BASE = re.compile(
    r"(failed to resolve source metadata|pull access denied|failed to load cache key|manifest unknown|"
    r"failed to copy|unable to copy from source|error resolving|load metadata for|creating build container)",
    re.IGNORECASE,
)


def explain(steps: Steps, returncode: int, base: str) -> errors.WorkflowsError:
    """Return the error for a build that failed."""
    step = steps.failed
    said = list(step.said) if step else []
    everything = [*said, *steps.rest, *([step.error] if step and step.error else [])]
    text = "\n".join([step.title if step else "", *everything]).lower()
    where = f"step `{step.title}`" if step else "the build"
    last = _telling(said) or _telling(steps.rest) or f"exit status {returncode}, no message"
    if any(phrase in text for phrase in _FULL):
        return errors.DiskError(
            f"{where}: the engine's disk is full; free some space (`docker system df`) and run again"
        )
    if _HASHES in text:
        return errors.IntegrityError(
            f"{where}: the package index offers other files than the locked ones; do not use them"
        )
    if _FOREIGN in text:
        return errors.EngineError(
            f"{where}: the engine's machine cannot run programs of this platform; register QEMU there "
            "(Debian and Ubuntu: qemu-user-static, binfmt-support), or leave out --platform"
        )
    away = any(phrase in text for phrase in _AWAY)
    if _BASE.search(text) and not said:
        return errors.NetworkError(
            f"{base}: the base image cannot be fetched ({last}); log in to its registry or give another --base-image"
        )
    if away:
        return errors.NetworkError(
            f"{where}: cannot reach what it needs ({last}); check --pip-config, --ca-bundle and --network"
        )
    return errors.BuildError(f"{where} failed: {last}")


def _telling(lines: Iterable[str]) -> str | None:
    """Return the line that says most: a script's own error, else the last one."""
    kept = [line for line in lines if line and not line.startswith(("------", "WARNING", "View build details"))]
    own = [line for line in kept if re.match(r"(error|ERROR|E):", line)]
    chosen = own or kept
    return chosen[-1].removeprefix("error: ").removeprefix("ERROR: ")[:300] if chosen else None

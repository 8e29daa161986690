"""Reads BuildKit's own plain display: how many steps came from the cache; and the step that failed, with the reason."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tooling.core import errors, proc

_STEP = re.compile(r"^#(\d+) \[(?:linux/\S+ )?[\w.-]+ +\d+/\d+\] (?!FROM )", re.MULTILINE)
_CACHED = re.compile(r"^#(\d+) CACHED$", re.MULTILINE)
# Its summary of the step that broke a build, not of those that were stopped for that, with its last lines.
_FAILED = re.compile(r"^------\n > (.*):\n((?:.*\n)*?)------$", re.MULTILINE)
_REASON = re.compile(r"^ERROR: (?:failed to (?:build|solve): )*(.*)", re.MULTILINE)
# Where a builder looks for a base: a step of its own, or the first of a stage.
_BASE = re.compile(r"\[internal\] load metadata|\[.* \d+/\d+\] FROM ")
_TOLD = re.compile(r"(?!error: [a-z-]+$)([A-Za-z]*(error|ERROR|Error|Exception)|E|fatal|curl)(: | \()")


def counted(result: proc.Result) -> tuple[int, int]:
    """Return how many steps of the Dockerfile came from the cache, and of how many."""
    said = result.stderr.decode("utf-8", "replace")
    own = set(_STEP.findall(said))
    return len(own.intersection(_CACHED.findall(said))), len(own)


def explain(result: proc.Result, base: str) -> errors.ToolingError:
    """Return the error for a build that failed: the step, the reason, and the remedy."""
    said = result.stderr.decode("utf-8", "replace")
    step, output = found.groups() if (found := _FAILED.search(said)) else ("", "")
    lines = [re.sub(r"^\d+\.\d+ ", "", line).strip() for line in output.splitlines()]
    fault = (_REASON.findall(said) or [result.complaint])[-1]
    title = " ".join(word for word in step.split() if not word.startswith(("--mount=", "--from=", "--chown=")))
    where = f"step `{title if len(title) <= 100 else title[:97] + '...'}`" if step else "the build"
    text, last = "\n".join([*lines, fault]), _telling(lines) or proc.shortened(fault)
    if proc.disk_full(text):
        return errors.DiskError(
            f"{where}: the engine's disk is full; free some space (`docker system df`) and run again"
        )
    if proc.OTHER_FILES.search(text):
        return errors.IntegrityError(
            f"{where}: the package index offers other files than the locked ones; do not use them"
        )
    if "exec format error" in text.lower():
        return errors.EngineError(
            f"{where}: the engine's machine cannot run programs of this platform; register QEMU there "
            "(Debian and Ubuntu: qemu-user-static, binfmt-support), or leave out --platform"
        )
    if _BASE.match(step):
        return errors.NetworkError(
            f"{base}: the base image cannot be fetched ({proc.shortened(fault)}); log in to its registry or give "
            "another --base-image"
        )
    if proc.network_failed(text):
        return errors.NetworkError(
            f"{where}: cannot reach what it needs ({last}); check --pip-config, --ca-bundle and --network"
        )
    return errors.BuildError(f"{where} failed: {last}")


def _telling(lines: Sequence[str]) -> str:
    """Return the line that says most: a program's own error, else the last one; of a long one, both ends."""
    own = [line for line in lines if _TOLD.match(line)]
    # apt and pip first say the fault, then its consequence.
    best = own[-3:][:1] or [line for line in lines if line][-1:]
    return proc.shortened(re.sub(r"^(error|ERROR|Error): ", "", best[0])) if best else ""

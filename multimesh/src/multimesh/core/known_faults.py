"""Versions and flags of XLA and NCCL that pipelines over several processes need, each with its reason and report.

Nothing here was tried on several GPUs by MultiMesh: it is the public record of those who did.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class VersionFault:
    """A flag of ``XLA_FLAGS``, or a version of a component, with which pipelines over several processes hang."""

    name: str
    hangs: str  # pattern of the values that are known to hang, in small letters
    why: str  # the fault with such a value
    report: str  # who reported it
    remedy: str = "leave it out"


AUTOTUNING = VersionFault(
    "xla_gpu_shard_autotuning",
    r"(?!(false|0)$).*",
    "XLA deals out the tuning of a program to all processes and waits for all to compile the same one. Stages compile "
    "different ones, so all wait for ever, which looks like a slow compilation",
    "marin-community/marin issue 7024",
)
COMMAND_BUFFERS = VersionFault(
    "xla_gpu_enable_command_buffer",
    r"(.*[,+])?collectives.*",
    "runs on B200 hung after a CUDA graph could not be destroyed; with COLLECTIVES among the captured commands a run "
    "of 16 processes hung at step 838, with XLA's default set three runs of 1,000 steps did not",
    "marin-community/marin issue 5675 and pull request 8277",
)
FLAGS = (AUTOTUNING, COMMAND_BUFFERS)

VERSIONS = (
    VersionFault(
        "NCCL",
        r"2\.(30\.([7-9]|\d\d)|31\.[01])\b.*",
        "transfers beside collectives that devices start themselves hang with 2.30.7 and pass with 2.31.2",
        "NVIDIA/jaxpp issue 11",
        "install 2.31.2 or later",
    ),
)


def find_overrides(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each flag that the environment sets to what hangs pipelines of several processes."""
    flags = {}
    for word in environ.get("XLA_FLAGS", "").split():
        name, equals, value = word.removeprefix("--").partition("=")
        flags[name] = value.strip("'\"") if equals else "true"
    return [f"XLA_FLAGS has --{name}={text}" for name, text in _find(FLAGS, flags)]


def find_bad_versions(versions: Mapping[str, str]) -> list[str]:
    """Return a sentence for each component whose version is known to hang pipelines."""
    return [f"{name} {text}" for name, text in _find(VERSIONS, versions)]


def _find(faults: Iterable[VersionFault], values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each fault, and the value that has it with reason, report and remedy."""
    for fault in faults:
        value = values.get(fault.name)
        if value is not None and re.fullmatch(fault.hangs, value.lower()):
            yield fault.name, f"{value}: {fault.why} ({fault.report}); {fault.remedy}"

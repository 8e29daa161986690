"""Versions and flags of XLA and NCCL that pipelines over several processes need, each with its reason and report.

Nothing here was tried on several GPUs by MultiMesh: it is the public record of those who did.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """A flag of ``XLA_FLAGS`` on which a pipeline over several processes depends."""

    name: str
    hangs: str  # pattern of the values that are known to hang, in small letters
    why: str  # the fault with such a value
    report: str  # who reported it


@dataclass(frozen=True)
class BadVersion:
    """Versions of a component from ``first`` to before ``mended`` that hang pipelines."""

    component: str
    first: tuple[int, ...]
    mended: tuple[int, ...]
    why: str
    report: str


AUTOTUNING = Flag(
    "xla_gpu_shard_autotuning",
    r"(?!(false|0)$).*",
    "XLA deals out the tuning of a program to all processes and waits for all to compile the same one. Stages compile "
    "different ones, so all wait for ever, which looks like a slow compilation",
    "marin-community/marin issue 7024",
)
COMMAND_BUFFERS = Flag(
    "xla_gpu_enable_command_buffer",
    r"(.*[,+])?collectives.*",
    "runs on B200 hung after a CUDA graph could not be destroyed; with COLLECTIVES among the captured commands a run "
    "of 16 processes hung at step 838, with XLA's default set three runs of 1,000 steps did not",
    "marin-community/marin issue 5675 and pull request 8277",
)
FLAGS = (AUTOTUNING, COMMAND_BUFFERS)

BAD_VERSIONS = (
    BadVersion(
        "NCCL",
        (2, 30, 7),
        (2, 31, 2),
        "transfers beside collectives that devices start themselves hang with 2.30.7 and pass with 2.31.2",
        "NVIDIA/jaxpp issue 11",
    ),
)


def parse_flags(text: str) -> dict[str, str]:
    """Return the flags of a text like ``XLA_FLAGS``, without their dashes; one without a value is "true"."""
    flags = {}
    for word in text.split():
        name, equals, value = word.removeprefix("--").partition("=")
        flags[name] = value.strip("'\"") if equals else "true"
    return flags


def find_overrides(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each flag that the environment sets to what hangs pipelines of several processes."""
    flags = parse_flags(environ.get("XLA_FLAGS", ""))
    said = []
    for flag in FLAGS:
        value = flags.get(flag.name)
        if value is not None and re.fullmatch(flag.hangs, value.lower()):
            said.append(f"XLA_FLAGS has --{flag.name}={value}: {flag.why} ({flag.report}); leave it out")
    return said


def find_bad_versions(versions: Mapping[str, str]) -> list[str]:
    """Return a sentence for each component whose version is known to hang pipelines."""
    said = []
    for bad in BAD_VERSIONS:
        version = tuple(map(int, re.findall(r"\d+", versions.get(bad.component, ""))[:3]))
        if version and bad.first <= version < bad.mended:
            mended = ".".join(map(str, bad.mended))
            said.append(
                f"{bad.component} {versions[bad.component]}: {bad.why} ({bad.report}); install {mended} or later"
            )
    return said

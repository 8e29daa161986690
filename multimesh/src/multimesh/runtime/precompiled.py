"""Compiled kernels in a folder: one machine writes them, another loads them and compiles nothing.

A folder has a file for each program, named by the SHA-256 of its bytes, and a manifest, which says for which JAX,
devices and flags they were compiled, and which file has the program of which kernel. A kernel is found by its program:
the text that XLA would compile. So a kernel of another function, shape or layout is never loaded in its place.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from multimesh.core._compat import stored_executables
from multimesh.errors import UsageError
from multimesh.plan.plan import Plan
from multimesh.runtime.compile_options import flags_of_code

MANIFEST = "manifest.json"
_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
_AGAIN = "precompile again with the JAX, devices and flags of this job"


def write(
    plan: Plan, programs: Sequence[str], executables: Mapping[str, Any], options: Mapping[str, Any], folder: Path
) -> None:
    """Write the executables of a plan to a folder, and the manifest last.

    ``programs`` has the `stored_executables.program_key` of each kernel, and ``executables`` one for each of these.
    Raises ``UsageError`` where the folder can't be written, or holds kernels already.
    """
    if (folder / MANIFEST).exists():
        raise UsageError(f"save: {folder} holds kernels already; choose another folder, or remove it")
    files: dict[str, str] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for program, executable in executables.items():
            code = stored_executables.to_bytes(executable)
            files[program] = hashlib.sha256(code).hexdigest()
            (folder / files[program]).write_bytes(code)
        manifest = {
            **_here(plan, options),
            "plan": plan.fingerprint(),
            "kernels": [[kernel.name, program] for kernel, program in zip(plan.kernels, programs, strict=True)],
            "files": files,
        }
        unfinished = folder / f"{MANIFEST}.unfinished"
        unfinished.write_text(json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1))
        unfinished.replace(folder / MANIFEST)
    except OSError as error:
        raise UsageError(f"save: {error.filename or folder}: {error.strerror}; choose another folder") from error


@dataclass(frozen=True)
class Precompiled:
    """The executables of a folder that was compiled for the JAX, devices and flags of a plan."""

    folder: Path
    files: Mapping[str, str]  # program of a kernel to the name of its file
    plan: str  # fingerprint of the plan that was compiled

    def read(self, name: str, program: str) -> bytes:
        """Return the executable of a kernel.

        Raises ``UsageError`` if the folder has none with this ``program``, or not the bytes that were written.
        """
        file = self.files.get(program) if program else None
        if file is None:
            raise UsageError(
                f"precompiled: {self.folder} has no kernel {name!r} of this plan, but those of plan {self.plan[:12]}; "
                "precompile again with this function, these shapes, layouts and schedule"
            )
        path = self.folder / file
        try:
            code = path.read_bytes()
        except OSError as error:
            raise UsageError(
                f"precompiled: {path}, kernel {name!r}: {error.strerror}; copy the folder again, whole, or precompile "
                "again"
            ) from error
        if hashlib.sha256(code).hexdigest() != file:
            raise UsageError(
                f"precompiled: {path}, kernel {name!r}, does not hold the bytes that were written; copy it again, or "
                "precompile again"
            )
        return code


def open_folder(folder: Path, plan: Plan, options: Mapping[str, Any]) -> Precompiled:
    """Return the executables of a folder, after its manifest was held against this process and the plan's devices.

    Raises ``UsageError`` where they were compiled for another JAX, other devices or other flags.
    """
    file = folder / MANIFEST
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.pop("sha256") != _digest(found):
            raise ValueError("its checksum is another")
    except OSError as error:
        raise UsageError(
            f"precompiled: {file}: {error.strerror}; name a folder that Compiled.save has written"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"precompiled: {file} is damaged ({error}); copy the folder again, whole, or precompile again"
        ) from error
    for name, here in _here(plan, options).items():
        if found[name] != here:
            raise UsageError(f"precompiled: {folder} was compiled for {_DIFFERENT[name](found[name], here)}; {_AGAIN}")
    return Precompiled(folder, found["files"], found["plan"])


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _here(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that must be the same where kernels are compiled and where they are loaded."""
    devices = sorted({d for mesh in plan.submeshes for d in mesh.devices.flat}, key=lambda d: (d.platform, d.id))
    cpu = all(device.platform == "cpu" for device in devices)
    counts: dict[int, int] = {}
    for device in devices:
        counts[device.process_index] = counts.get(device.process_index, 0) + 1
    return {
        "devices": sorted(set(map(_describe, devices))),
        "versions": {name: _version(name) for name in (_PACKAGES[:2] if cpu else _PACKAGES)},
        "processes": list(counts.values()),
        "flags": flags_of_code(os.environ.get("XLA_FLAGS", ""), options, cpu=cpu),
    }


def _describe(device: jax.Device) -> str:
    """Return the kind of a device, with all that decides which code it runs."""
    if device.platform == "cpu":
        return f"CPU {_processor()}"
    return f"{device.device_kind} {getattr(device, 'compute_capability', '')}".strip()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _processor() -> str:
    """Return the kind of this machine's processor, and a digest of its instruction sets where Linux tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    sets = next((line.partition(":")[2] for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {hashlib.sha256(' '.join(sorted(sets.split())).encode()).hexdigest()[:12]}"


def _versions(there: Any, here: Any) -> str:
    name = next(name for name in _PACKAGES if there.get(name) != here.get(name))  # a CPU's have no plugin
    return f"{name} {there.get(name) or 'not installed'}, and here is {here.get(name) or 'none'}"


def _devices(there: Any, here: Any) -> str:
    return f"{' and '.join(there)}, and the plan's devices are {' and '.join(here)}"


def _processes(there: Any, here: Any) -> str:
    return f"processes with {_counts(there)} devices, and the plan's have {_counts(here)}"


def _counts(found: Any) -> str:
    many = len(found) > 8 and len(set(found)) == 1
    return f"{len(found)} times {found[0]}" if many else ", ".join(map(str, found))


def _flags(there: Any, here: Any) -> str:
    more, less = ([flag for flag in one if flag not in other] for one, other in ((there, here), (here, there)))
    return f"XLA's {' '.join(more) or 'defaults'}, and here is {' '.join(less) or 'none of these'}"


_DIFFERENT = {"versions": _versions, "devices": _devices, "processes": _processes, "flags": _flags}

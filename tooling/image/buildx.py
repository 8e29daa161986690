"""The bases, arguments and labels of an image: pure functions of a request."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from tooling.core import files
from tooling.image.digests import ImageLock, ImagePin
from tooling.image.request import Request
from tooling.image.snapshot import Snapshot
from tooling.sources import manifest, pins

DOCKERFILE = "docker/Dockerfile"
LOCKS = ("sources.lock", "docker/images.lock", "requirements/run.txt", "requirements/cuda12.txt")
LABEL, OCI = "io.github.multimesh-jax", "org.opencontainers.image"
# No time of a file or of an image is later, so that two builds of a commit have one digest: 2026-01-01.
EPOCH = 1767225600
_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


class Bases(NamedTuple):
    """The images that the Dockerfile starts from: one for the tools, one for the result."""

    build: ImagePin
    runtime: ImagePin

    @property
    def unpinned(self) -> tuple[str, ...]:
        """Return those whose bytes are not known."""
        return tuple(dict.fromkeys(pin.reference for pin in self if "@sha256:" not in pin.exact))


def bases(request: Request, lock: ImageLock) -> Bases:
    """Return the base images of a request, by digest where the lock has it: of CUDA's, for the locked version alone."""

    def cuda(name: str) -> ImagePin:
        pin = lock.images[name]
        reference = re.sub(r"(?<=/cuda:)[0-9.]+", request.cuda_version, pin.reference)
        return pin if reference == pin.reference else ImagePin(reference, None)

    if request.base_image:
        return Bases(ImagePin(request.base_image, None), ImagePin(request.base_image, None))
    if request.accelerator == "cpu":
        return Bases(lock.images["ubuntu"], lock.images["ubuntu"])
    return Bases(cuda("cuda-devel"), cuda("cuda-base"))


def labels(
    root: Path, request: Request, base: Bases, snapshot: Snapshot, *, python: str, source: str | None = None
) -> dict[str, str]:
    """Return the labels of an image, in a fixed order; none of them changes when nothing else does.

    ``root`` has the files that the build reads; ``source`` is the address of this repository; ``python`` says which
    Python the image has.
    """

    def first(pattern: str, name: str) -> str:
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        return match.group(1) if match else "unknown"

    # The installed versions: the locked wheels bring CUDA with them, whatever the base image has.
    wheels = first(r"^nvidia-cuda-runtime-cu12==(\S+)", "requirements/cuda12.txt")
    cuda = request.cuda_version if request.jaxlib == "source" else wheels
    pin = base.build if request.target != "runtime" else base.runtime
    maxtext = manifest.load_lock(root / "sources.lock")["maxtext"]
    return {
        f"{OCI}.title": "MultiMesh for JAX",
        f"{OCI}.description": f"MaxText in pipelines on stock JAX: {request.target}, {request.accelerator}",
        f"{OCI}.licenses": "Apache-2.0",
        **({f"{OCI}.source": source} if source else {}),
        f"{OCI}.version": first(r'^version = "([^"]+)"', "multimesh/pyproject.toml"),
        f"{OCI}.revision": snapshot.revision,
        f"{OCI}.base.name": pin.reference.partition("@")[0],
        f"{OCI}.base.digest": pin.exact.partition("@")[2] or "unpinned",
        f"{LABEL}.target": request.target,
        f"{LABEL}.accelerator": {"cpu": "cpu", "cuda12": f"cuda12 {cuda}"}[request.accelerator],
        f"{LABEL}.jaxlib": f"{request.jaxlib} {request.build_type}" if request.jaxlib == "source" else "wheel",
        f"{LABEL}.jax": pins.find_newest(root, "jax")[0],
        f"{LABEL}.maxtext": maxtext.version,
        f"{LABEL}.maxtext.revision": snapshot.maxtext,
        f"{LABEL}.python": python,
        f"{LABEL}.lock": digest_locks(root),
    }


def digest_locks(root: Path) -> str:
    """Return one sha256 over the locks of ``LOCKS``. (Packages of the distribution are locked nowhere.)"""
    sums = "".join(files.sha256(root / name) for name in LOCKS)
    return f"sha256:{hashlib.sha256(sums.encode()).hexdigest()}"


def make_arguments(request: Request, lock: ImageLock, base: Bases) -> dict[str, str]:
    """Return the build arguments. Without a Bazel cache, Bazel reads nothing that another build left."""
    platform = request.platform or _PLATFORMS.get(os.uname().machine, "linux/amd64")
    python, bazel = lock.files[f"python {platform}"], lock.files[f"bazel {platform}"]
    arguments = {
        "BASE_IMAGE": base.build.exact,
        "RUNTIME_BASE_IMAGE": base.runtime.exact,
        "ACCELERATOR": request.accelerator,
        "JAXLIB": request.jaxlib,
        "PYTHON_URL": python.url,
        "PYTHON_SHA256": python.sha256 or "",
    }
    if request.python_archive is not None:
        arguments |= {"PYTHON_URL": "", "PYTHON_SHA256": files.sha256(request.python_archive)}
    if request.jaxlib == "source":
        arguments |= {
            "CUDA_VERSION": request.cuda_version,
            "CUDNN_VERSION": request.cudnn_version or "",
            "BUILD_TYPE": request.build_type,
            "BAZEL_CACHE": "kept" if request.use_bazel_cache else "none",
            "BAZEL_URL": bazel.url,
            "BAZEL_SHA256": bazel.sha256 or "",
        }
    return arguments

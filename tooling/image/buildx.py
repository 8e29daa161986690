"""The exact command that builds an image: pure functions from a request to argv."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tooling.core import files
from tooling.environment import find_python
from tooling.image.digests import ImageLock, ImagePin
from tooling.image.engine import Engine
from tooling.image.request import ImageSpec, Means
from tooling.sources import manifest

DOCKERFILE = "docker/Dockerfile"
LOCKS = ("sources.lock", "docker/images.lock", "requirements/run.txt", "requirements/cuda12.txt")
PYTHON = (3, 12)  # an image has this one or a newer one; all get the same JAX
LABEL, OCI = "io.github.multimesh-jax", "org.opencontainers.image"


class Bases(NamedTuple):
    """The images that the Dockerfile starts from: one for the tools, one for the result."""

    build: ImagePin
    runtime: ImagePin

    @property
    def unpinned(self) -> tuple[str, ...]:
        """Return those whose bytes are not known."""
        return tuple(dict.fromkeys(pin.reference for pin in (self.build, self.runtime) if "@sha256:" not in pin.exact))


def bases(spec: ImageSpec, lock: ImageLock) -> Bases:
    """Return the base images of a spec, by digest where the lock has it: of CUDA's, for the locked version alone."""

    def cuda(name: str) -> ImagePin:
        pin = lock.images[name]
        reference = re.sub(r"(?<=/cuda:)[0-9.]+", spec.cuda_version, pin.reference)
        return pin if reference == pin.reference else ImagePin(reference, None)

    if spec.base_image:
        return Bases(ImagePin(spec.base_image, None), ImagePin(spec.base_image, None))
    if spec.accelerator == "cpu":
        return Bases(lock.images["ubuntu"], lock.images["ubuntu"])
    return Bases(cuda("cuda-devel"), cuda("cuda-base"))


def labels(
    root: Path,
    spec: ImageSpec,
    base: Bases,
    revision: str | None,
    maxtext: str,
    source: str | None = None,
    python: str | None = None,
) -> dict[str, str]:
    """Return the labels of an image, in a fixed order; none of them changes when nothing else does.

    ``revision`` and ``maxtext`` are commits, with ``-dirty`` where their tree differs; ``source`` the address of this
    repository; ``python`` the sha256 of the standalone Python that a base with an old one gets.
    """

    def first(pattern: str, name: str) -> str:
        found = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        return found.group(1) if found else "unknown"

    # The installed versions: the locked wheels bring CUDA with them, whatever the base image has.
    wheels = first(r"^nvidia-cuda-runtime-cu12==(\S+)", "requirements/cuda12.txt")
    cuda = spec.cuda_version if spec.jaxlib == "source" else wheels
    found = base.build if spec.target != "runtime" else base.runtime
    return {
        f"{OCI}.title": "MultiMesh for JAX",
        f"{OCI}.description": f"MaxText in pipelines on stock JAX: {spec.target}, {spec.accelerator}",
        f"{OCI}.licenses": "Apache-2.0",
        **({f"{OCI}.source": source} if source else {}),
        f"{OCI}.version": first(r'^version = "([^"]+)"', "multimesh/pyproject.toml"),
        f"{OCI}.revision": revision or "unknown",
        f"{OCI}.base.name": found.reference.partition("@")[0],
        f"{OCI}.base.digest": found.exact.partition("@")[2] or "unpinned",
        f"{LABEL}.target": spec.target,
        f"{LABEL}.accelerator": {"cpu": "cpu", "cuda12": f"cuda12 {cuda}"}[spec.accelerator],
        f"{LABEL}.jaxlib": f"{spec.jaxlib} {spec.build_type}" if spec.jaxlib == "source" else "wheel",
        f"{LABEL}.jax": jax(root),
        f"{LABEL}.maxtext": manifest.read_pin(root / "sources.lock", "maxtext", "version") or "unknown",
        f"{LABEL}.maxtext.revision": maxtext,
        f"{LABEL}.python": python or "unpinned",
        f"{LABEL}.lock": lock_digest(root),
    }


def jax(root: Path) -> str:
    """Return the JAX that an image gets from its packages."""
    return find_python.jax_for(str(root / "requirements" / "run.txt"), PYTHON)


def lock_digest(root: Path) -> str:
    """Return one sha256 over the locks of ``LOCKS``. (Packages of the distribution are locked nowhere.)"""
    sums = (hashlib.sha256((root / name).read_bytes()).digest() for name in LOCKS)
    return f"sha256:{hashlib.sha256(b''.join(sums)).hexdigest()}"


def make_arguments(
    spec: ImageSpec, lock: ImageLock, base: Bases, *, machine: str, multimesh: str, cached: bool = True
) -> dict[str, str]:
    """Return the build arguments, for an engine of the platform ``machine`` and the library in folder ``multimesh``.

    Without ``cached`` Bazel reads nothing that another build left.
    """
    platform = spec.platform or machine
    python, bazel = lock.files[f"python {platform}"], lock.files[f"bazel {platform}"]
    chosen = {
        "BASE_IMAGE": base.build.exact,
        "RUNTIME_BASE_IMAGE": base.runtime.exact,
        "ACCELERATOR": spec.accelerator,
        "JAXLIB": spec.jaxlib,
        "MULTIMESH": multimesh,
        "PYTHON_URL": python.url,
        "PYTHON_SHA256": python.sha256 or "",
    }
    if spec.python_archive is not None:
        chosen |= {"PYTHON_URL": "", "PYTHON_SHA256": files.sha256(spec.python_archive)}
    if spec.jaxlib == "source":
        chosen |= {
            "CUDA_VERSION": spec.cuda_version,
            "CUDNN_VERSION": spec.cudnn_version or "",
            "BUILD_TYPE": spec.build_type,
            "BAZEL_CACHE": "kept" if cached else "none",
            "BAZEL_URL": bazel.url,
            "BAZEL_SHA256": bazel.sha256 or "",
        }
    return chosen


def build_argv(
    engine: Engine,
    spec: ImageSpec,
    means: Means,
    *,
    build_args: Mapping[str, str],
    labels: Mapping[str, str],
    access: Sequence[str],
    result: Path,
) -> list[str]:
    """Return the command, to be run in the repository. Buildx writes what it made to ``result``."""
    argv = [*engine.buildx, "build", "--progress=plain", "--file", DOCKERFILE, "--target", spec.target]
    argv += ["--platform", spec.platform] if spec.platform else []
    argv += ["--network", means.network] if means.network != "default" else []
    argv += [] if means.layer_cache else ["--no-cache"]
    argv += [word for each in build_args.items() for word in ("--build-arg", "=".join(each))]
    argv += [word for each in labels.items() for word in ("--label", "=".join(each))]
    argv += access
    # A separate builder keeps its image, unless it is told to hand it over.
    return [*argv, "--load", "--metadata-file", str(result), "."]

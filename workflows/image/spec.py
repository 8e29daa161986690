"""The wanted image and its way from there: plain data, checked once. Fields are options of ``flags``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workflows.image.reference import Reference


@dataclass(frozen=True)
class ImageSpec:
    """All that decides the bytes of an image. It gets ``reference``, its public name, when it has passed its check.

    None for ``platform`` is the engine's own; for the others, what is pinned.
    """

    reference: Reference
    target: str
    accelerator: str
    jaxlib: str
    cuda_version: str
    cudnn_version: str | None
    build_type: str
    base_image: str | None
    platform: str | None
    python_archive: Path | None


@dataclass(frozen=True)
class Means:
    """How the build reaches packages and sources. Nothing of this stays in the image."""

    pip_config: Path | None
    ca_bundle: Path | None
    network: str
    layer_cache: bool
    use_bazel_cache: bool
    bazel_cache: str | None
    bazel_cache_write: bool


@dataclass(frozen=True)
class Actions:
    """The steps after the build."""

    build: bool = True
    validate: str = "small"
    upload: bool = False
    allow_dirty: bool = False
    latest: bool = False
    promote: bool = True
    release: str | None = None
    release_file: Path | None = None
    remote: str | None = None
    save_remote: bool = False
    skip_save: bool = False
    dry_run: bool = False
    json: bool = False


@dataclass(frozen=True)
class Request:
    """All that one command line asks for."""

    spec: ImageSpec
    means: Means
    actions: Actions


@dataclass(frozen=True)
class Built:
    """An image in the engine that built it; it gets its public name when it passed its check."""

    spec: ImageSpec
    image_id: str  # of the engine; a registry gives a manifest digest when it is pushed
    bytes: int
    labels: dict[str, str]
    content: str  # a digest of layers and configuration, without labels, which every commit changes
    names: tuple[str, ...] = ()  # what the engine calls it already
    seconds: float = 0.0
    cached: int = 0  # so many of the Dockerfile's steps came from the cache
    steps: int = 0

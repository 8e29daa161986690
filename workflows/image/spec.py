"""What image is wanted and what is to become of it: plain data, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workflows.image.reference import Reference

TARGETS = ("devcontainer", "dev", "runtime")
ACCELERATORS = ("cuda12", "cpu")
BUILD_TYPES = ("Release", "Debug", "RelWithDebInfo")
PLATFORMS = ("linux/amd64", "linux/arm64")
VALIDATIONS = ("small", "medium", "large")
ATTESTATIONS = ("none", "provenance", "sbom")


@dataclass(frozen=True)
class ImageSpec:
    """What decides the bytes of an image.

    Attributes
    ----------
    reference
        Its public name, given when it passed its check.
    target
        Stage of the Dockerfile, one of ``TARGETS``.
    base_image
        What takes the place of the pinned bases; None for those.
    cuda_version
        Which of NVIDIA's bases; also that of a jaxlib built from source.
    cudnn_version
        That of a jaxlib built from source; None for the pinned one.
    platform
        None for the engine's own.
    python_archive
        A standalone Python for bases whose own is too old; None to fetch the pinned one.
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
    """How the build reaches what it needs; nothing of this stays in the image.

    Attributes
    ----------
    pip_config, ca_bundle
        Files that the build reads as secrets; None where nothing is to be said.
    network
        Of the build's steps: ``default`` or ``host``.
    layer_cache
        Use layers of earlier builds.
    use_bazel_cache, bazel_cache, bazel_cache_write
        Whether ``--jaxlib source`` looks for a remote Bazel cache; where (``HOST:PORT``), None for that of
        ``start-cache.sh``; whether it may store results there.
    """

    pip_config: Path | None
    ca_bundle: Path | None
    network: str
    layer_cache: bool
    use_bazel_cache: bool
    bazel_cache: str | None
    bazel_cache_write: bool


@dataclass(frozen=True)
class Actions:
    """What is done with the image.

    Attributes
    ----------
    build
        False to take the image that the local engine has under the public name.
    commit
        A running devcontainer to make the image of, in place of a build.
    validate
        Which job checks the image, one of ``VALIDATIONS``.
    upload, latest
        Push under the public name; also move ``latest``.
    promote
        False to push under the staging tag only; ``python -m workflows promote`` moves the public tags later.
    release
        A version to release as, e.g. ``v0.3.0``; None for a push that is no release.
    attest
        What is attached to a pushed image, one of ``ATTESTATIONS``; None for all that the builder can.
    scanner
        The image that makes an SBOM for BuildKit, in place of the pinned one.
    sign_key
        The private key that cosign signs with, a file or ``env://NAME``.
    release_file
        Where to write what was pushed; None for ``build/image/release.json``.
    remote
        A docker context whose engine builds; ``save_remote`` leaves the image there.
    skip_save
        Build into the cache only.
    """

    build: bool = True
    commit: str | None = None
    validate: str = "small"
    upload: bool = False
    latest: bool = False
    promote: bool = True
    release: str | None = None
    attest: str | None = None
    scanner: str | None = None
    sign_key: str | None = None
    release_file: Path | None = None
    remote: str | None = None
    save_remote: bool = False
    skip_save: bool = False
    dry_run: bool = False
    json: bool = False


@dataclass(frozen=True)
class Layer:
    """One layer of an image: the instruction that made it and its size."""

    step: str
    bytes: int


@dataclass(frozen=True)
class Built:
    """An image in the engine that built it; it gets its public name when it passed its check.

    Attributes
    ----------
    image_id
        Of the engine; a registry gives a manifest digest when it is pushed.
    cached, steps
        How many steps of the Dockerfile came from the cache, and of how many.
    content
        A digest of its layers and configuration, without labels and attestations, which every commit changes.
    names
        What the engine calls it already.
    """

    spec: ImageSpec
    image_id: str
    seconds: float
    cached: int
    steps: int
    bytes: int
    labels: dict[str, str]
    content: str
    names: tuple[str, ...] = ()

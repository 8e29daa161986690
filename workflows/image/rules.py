"""Which options of ``docker/build.py`` go together, and which values may reach an engine; every refusal says why."""

from __future__ import annotations

import argparse
import re

from workflows import errors
from workflows.image import network, reference

_VERSION = re.compile(r"\d{1,3}(\.\d{1,3}){1,3}")
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_CACHE = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,251}|\[[0-9A-Fa-f:]+\]):\d{1,5}")


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be meant, before anything happens."""
    refusals = [
        (
            args.jaxlib == "wheel" and args.cudnn_version,
            "--cudnn-version: cuDNN comes with the locked wheels; add --jaxlib source",
        ),
        (
            args.jaxlib == "wheel" and args.build_type != "Release",
            f"--build-type {args.build_type}: the locked wheels are Release builds; add --jaxlib source",
        ),
        (
            args.jaxlib == "wheel" and (args.bazel_cache or args.cache or args.bazel_cache_write),
            "a Bazel cache serves --jaxlib source only; add it, or leave the cache out",
        ),
        (args.cache is False and args.bazel_cache, "--no-cache and --bazel-cache contradict each other; give one"),
        (
            args.accelerator == "cpu" and args.cuda_version,
            "--cuda-version: an image for the CPU has no CUDA; leave it out, or take --accelerator cuda12",
        ),
        (
            args.base_image and args.cuda_version and args.jaxlib == "wheel",
            "--cuda-version chooses the base image, and --base-image replaces it; give one",
        ),
        (args.upload and not args.repo, "--upload: where to? Add --repo, e.g. --repo ghcr.io/OWNER/multimesh-jax"),
        (args.latest and not args.repo, "--latest marks an image in a registry; add --repo"),
        (args.release and args.commit, "--release: a container is not made from pins alone; leave out --commit"),
        (args.release and not args.upload, "--release releases what is pushed; add --upload"),
        (args.sign_key and not args.upload, "--sign-key signs what is pushed; add --upload"),
        (
            args.attest in ("provenance", "sbom") and not args.upload,
            f"--attest {args.attest} attaches to what is pushed; add --upload",
        ),
        (
            args.attest in ("provenance", "sbom") and (args.commit or args.remote or not args.build),
            f"--attest {args.attest}: attestations come with a build that is pushed from its own engine; "
            "leave out --commit, --remote and --no-build",
        ),
        (
            args.scanner and args.attest in ("none", "provenance"),
            f"--sbom-scanner makes an SBOM and --attest {args.attest} says not to; give one",
        ),
        (args.scanner and not args.upload, "--sbom-scanner looks at what is pushed; add --upload"),
        (not args.promote and not args.upload, "--no-promote pushes without moving tags; add --upload"),
        (
            not args.promote and (args.latest or args.release),
            "--no-promote moves no tag, --latest and --release do; give them to `python -m workflows promote`",
        ),
        (args.save_remote and not args.remote, "--save-remote: there is no remote engine; add --remote NAME"),
        (
            args.skip_save and (args.upload or args.latest or args.save_remote),
            "--skip-save leaves no image to push, tag or save; give one",
        ),
        (args.skip_save and args.commit, "--skip-save builds into the cache, and --commit builds nothing; give one"),
        (
            args.save_remote and args.upload,
            "--save-remote and --upload contradict each other: an image is pushed from here; give one",
        ),
        (args.commit and not args.build, "--commit makes an image and --no-build says not to; give one"),
        (not args.build and args.skip_save, "--no-build and --skip-save leave nothing to do"),
    ]
    for refused, reason in refusals:
        if refused:
            raise errors.UsageError(reason)
    _check_pattern("--cuda-version", args.cuda_version, _VERSION, "numbers with dots, e.g. 12.8.1")
    _check_pattern("--cudnn-version", args.cudnn_version, _VERSION, "numbers with dots, e.g. 9.8.0")
    for flag, image in (("--base-image", args.base_image), ("--sbom-scanner", args.scanner)):
        if image is not None:
            try:
                reference.check_image(image)
            except errors.UsageError as error:
                shown = image.rpartition("@")[2] if "@" in image else image
                raise errors.UsageError(f"{flag} {shown[:80]!r}: not the name of an image ({error})") from None
    _check_pattern("--commit", args.commit, _CONTAINER, "the name or id of a container")
    _check_pattern("--remote", args.remote, _CONTAINER, "the name of a docker context; `docker context ls` shows them")
    _check_pattern("--bazel-cache", args.bazel_cache, _CACHE, "HOST:PORT, e.g. 127.0.0.1:9090")
    for flag, path in (
        ("--pip-config", args.pip_config),
        ("--ca-bundle", args.ca_bundle),
        ("--python-archive", args.python_archive),
    ):
        if path is not None and not path.is_file():
            raise errors.UsageError(f"{flag} {path}: there is no such file")
        if path is not None and not network.fits_an_option(path):
            raise errors.UsageError(f"{flag} {path}: the engine cannot take a path with a comma or a quote; rename it")


def _check_pattern(flag: str, value: str | None, pattern: re.Pattern[str], wanted: str) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise errors.UsageError(f"{flag} {value[:80]!r}: not {wanted}")

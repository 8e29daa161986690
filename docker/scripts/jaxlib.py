"""Build jax and jaxlib wheels from ``third_party/`` with jax's own build program; runs inside the image's build.

Uses the standard library only: the Dockerfile mounts this one file. jax's program
hands its options to a shell, so every value is checked against a strict pattern first.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

_COMPILATION = {
    "Release": (),
    "RelWithDebInfo": ("--copt=-g1", "--strip=never"),
    "Debug": ("--compilation_mode=dbg", "--strip=never"),
}
# Beside a remote cache, if any: in the folder that the engine keeps from one build to the next.
_OWN_CACHE = (f"--disk_cache={Path.home() / '.cache/bazel/disk'}", "--experimental_disk_cache_gc_max_size=50G")


class Refused(Exception):
    """A value that may not reach the build, or a Bazel that is not the pinned one."""


def command(
    environ: Mapping[str, str], *, bazel: str, bazelrc: str, xla: str, output: str, python_version: str
) -> list[str]:
    """Return the arguments for jax's ``build/build.py``; raise ``Refused`` for a value that is not plain.

    ``environ`` has the build arguments of the Dockerfile; ``bazelrc`` says where a remote cache is, or is empty.
    """
    accelerator, build_type = environ.get("ACCELERATOR", ""), environ.get("BUILD_TYPE", "Release")
    if accelerator not in ("cpu", "cuda12"):
        raise Refused(f"accelerator {accelerator!r}: choose cpu or cuda12")
    if build_type not in _COMPILATION:
        raise Refused(f"build type {build_type!r}: choose one of {', '.join(_COMPILATION)}")
    versions = {name: environ.get(f"{name.upper()}_VERSION", "") for name in ("cuda", "cudnn")}
    for name, version in versions.items():
        if version and not re.fullmatch(r"\d+(\.\d+){1,3}", version):
            raise Refused(f"{name} version {version!r}: numbers with dots, e.g. 12.8.1")
    cuda = accelerator == "cuda12"
    wheels = ["jax", "jaxlib", *(["jax-cuda-plugin", "jax-cuda-pjrt"] if cuda else [])]
    # A release reads nothing that another build left, perhaps one of a branch.
    cacheless = environ.get("BAZEL_CACHE") == "none"
    options = ["--repo_env=ML_WHEEL_TYPE=release", *_COMPILATION[build_type], *([] if cacheless else _OWN_CACHE)]
    return [
        "build",
        f"--wheels={','.join(wheels)}",
        f"--bazel_path={bazel}",
        # Where the cache is, with its password: in a file, not in a command line.
        *([f"--bazel_startup_options=--bazelrc={bazelrc}"] if bazelrc else []),
        *(["--bazel_startup_options=--output_user_root=/tmp/bazel"] if cacheless else []),
        f"--python_version={python_version}",
        f"--local_xla_path={xla}",
        f"--output_path={output}",
        *(f"--{name}_version={version}" for name, version in versions.items() if cuda and version),
        *(f"--bazel_options={option}" for option in options),
    ]


def fetch_bazel(url: str, sha256: str, version: str, path: Path, ca: Path) -> None:
    """Download Bazel and hold it against its pin, which is of the version that jax wants."""
    if f"/{version}/" not in url:
        raise Refused(f"third_party/jax wants Bazel {version}, docker/images.lock has {url}; write its own there")
    if not url.startswith("https://"):
        raise Refused(f"Bazel's address {url!r} is not https")
    if not sha256:
        raise Refused("Bazel is not pinned; write its checksum into docker/images.lock")
    context = ssl.create_default_context(cafile=str(ca) if ca.is_file() and ca.stat().st_size else None)
    with urllib.request.urlopen(url, context=context, timeout=60) as answer:  # noqa: S310
        content = answer.read()
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise Refused(f"Bazel has sha256 {digest}, images.lock pins {sha256}; do not use it")
    path.write_bytes(content)
    path.chmod(0o755)


def main() -> int:
    """Fetch Bazel, then become jax's build program."""
    parser = argparse.ArgumentParser(description="Build jax and jaxlib wheels from third_party/.")
    parser.add_argument("--sources", type=Path, required=True, help="third_party/")
    parser.add_argument("--output", type=Path, required=True, help="folder for the wheels")
    args = parser.parse_args()
    bazel, secrets = Path("/usr/local/bin/bazel"), Path("/run/secrets")
    places = {
        "bazel": str(bazel),
        "bazelrc": str(secrets / "bazelrc") if (secrets / "bazelrc").is_file() else "",
        "xla": str(args.sources / "xla"),
        "output": str(args.output),
    }
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    program = args.sources / "jax" / "build" / "build.py"
    try:
        arguments = command(os.environ, **places, python_version=python)
        if not program.is_file():
            raise Refused("third_party/jax is not there; run ./bootstrap.sh --group source")
        version = (args.sources / "jax" / ".bazelversion").read_text(encoding="utf-8").strip()
        fetch_bazel(os.environ["BAZEL_URL"], os.environ.get("BAZEL_SHA256", ""), version, bazel, secrets / "ca.pem")
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    process = subprocess.run([sys.executable, str(program), *arguments], cwd=args.sources / "jax", check=False)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())

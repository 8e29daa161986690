"""Signs a digest with cosign, where that is installed and a key is given; checks the signature at once."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from workflows import errors, proc
from workflows.image.reference import Reference

_VARIABLE = re.compile(r"env://[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Signature:
    """A signature that lies in the registry beside its image, and was verified with this public key."""

    tool: str
    public_key: str


def check_key(key: str) -> None:
    """Raise unless a private key can be had: a file, or ``env://NAME``; its password is in ``COSIGN_PASSWORD``.

    Raises
    ------
    UsageError
        There is no such file or variable.
    ToolError
        Cosign is not installed.
    """
    if key.startswith("env://"):
        if not _VARIABLE.fullmatch(key) or not os.environ.get(key.removeprefix("env://")):
            raise errors.UsageError("--sign-key: the variable after env:// is not set; export the private key in it")
    elif not Path(key).is_file():
        raise errors.UsageError(f"--sign-key {key}: no such file; `cosign generate-key-pair` makes one")
    if shutil.which("cosign") is None:
        raise errors.ToolError("cosign: not found; install it (Debian 13: cosign), or leave out --sign-key")
    if "COSIGN_PASSWORD" not in os.environ:
        raise errors.UsageError("--sign-key: put the password of the key into COSIGN_PASSWORD (empty if it has none)")


def sign(reference: Reference, digest: str, key: str, *, plain_http: bool) -> Signature:
    """Sign and verify. Only the digest is signed, so moving tags changes nothing.

    Parameters
    ----------
    plain_http
        The registry is on this machine and speaks no TLS.
    """
    image = reference.at(digest)
    reach = ["--allow-http-registry"] if plain_http else []
    public_key = proc.run(["cosign", "public-key", "--key", key]).text
    # The public log would name the image and its registry to everybody; a key pair needs no log.
    proc.run(["cosign", "sign", "--yes", "--key", key, "--tlog-upload=false", *reach, image])
    verify(image, public_key, plain_http=plain_http)
    version = re.search(r"GitVersion:\s*(\S+)", proc.run(["cosign", "version"]).text)
    return Signature(f"cosign {version[1] if version else 'unknown'}", public_key)


def verify(image: str, public_key: str, *, plain_http: bool) -> None:
    """Raise ``IntegrityError`` unless a signature of this key lies beside the image."""
    reach = ["--allow-http-registry"] if plain_http else []
    argv = ["cosign", "verify", "--key", "env://MULTIMESH_PUBLIC_KEY", "--insecure-ignore-tlog=true", *reach, image]
    result = proc.run(argv, env=os.environ | {"MULTIMESH_PUBLIC_KEY": public_key}, check=False)
    if result.returncode:
        raise errors.IntegrityError(f"{image}: has no signature of this key ({result.complaint})")

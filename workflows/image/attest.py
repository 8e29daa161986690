"""Attestations beside a pushed image, which its builder makes, and cosign's signature of its digest."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workflows import errors, proc
from workflows.image import network
from workflows.image.digests import ImageLock, ImagePin
from workflows.image.engine import Engine
from workflows.image.reference import Reference
from workflows.image.spec import Request

if TYPE_CHECKING:
    from workflows.image.registry import Manifest, Registry

_INSIDE = "the SBOM inside the image (/opt/inventory) is all there is"
Attestation = dict[str, Any]  # digest, the image that it is about, kinds
_PREDICATES = {"https://slsa.dev/provenance/": "provenance", "https://spdx.dev/Document": "sbom"}


@dataclass(frozen=True)
class Attesting:
    """How a push gets attestations, and a line that says so.

    ``through`` is ``engine``: the build attaches them and the engine pushes them with the image; or ``builder``: it
    pushes the image again from its cache, with them.
    """

    through: str | None
    said: str
    options: tuple[str, ...] = ()  # of the build that makes them
    kinds: tuple[str, ...] = ()  # which must lie in the registry in the end
    unpinned: tuple[str, ...] = ()  # the scanner, where its bytes are not known

    def options_for(self, through: str) -> tuple[str, ...]:
        """Return the options of a build, or none where attestations take another way."""
        return self.options if self.through == through else ()


NOTHING = Attesting(None, "none: nothing is pushed, or there is no engine to ask")


def decide(engine: Engine, request: Request, pins: ImageLock, environ: Mapping[str, str] = os.environ) -> Attesting:
    """Return how a push gets attestations; ``EngineError`` if options ask for them and the builder makes none."""
    actions = request.actions
    if actions.attest == "none":
        return Attesting(None, "none: --attest none")
    if not actions.build or actions.commit or actions.remote:
        return Attesting(None, f"none made: they come with a build that is pushed from its own engine; {_INSIDE}")
    through = engine.attests()
    if through is None:
        why = f"this engine keeps no image index ({engine.kind} {engine.version}, {engine.builder})"
        if actions.attest is not None:
            raise errors.EngineError(
                f"--attest {actions.attest}: {why}; turn on docker's containerd image store, or make a builder "
                "with `docker buildx create --use`"
            )
        return Attesting(None, f"none: {why}; {_INSIDE}")
    # The long form holds the values of build arguments: the addresses of proxies, and passwords in them.
    mode = "min" if network.proxies(environ) else "max"
    builder = ""
    if environ.get("GITHUB_ACTIONS") == "true":  # a person's machine has no address that says who builds
        run = "/".join(environ[name] for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
        builder = f",builder-id={run}/actions/runs/{environ['GITHUB_RUN_ID']}/attempts/{environ['GITHUB_RUN_ATTEMPT']}"
    options, kinds = [f"--attest=type=provenance,mode={mode}{builder}"], ["provenance"]
    told = f"SLSA provenance, mode={mode}" + (" (max would publish your proxies)" if mode == "min" else "")
    unpinned: tuple[str, ...] = ()
    if actions.attest != "provenance":
        scanner = ImagePin(actions.scanner, None) if actions.scanner else pins.images["sbom-scanner"]
        options.append(f"--attest=type=sbom,generator={scanner.exact}")
        kinds.append("sbom")
        told += f"; SPDX SBOM by {scanner.exact}"
        unpinned = () if "@sha256:" in scanner.exact else (scanner.reference,)
    if through == "engine":
        # Without a name an attestation says of no image that it is about it.
        options.append(f"--tag={request.spec.reference.staging}")
    return Attesting(through, told, tuple(options), tuple(kinds), unpinned)


def read(registry: Registry, manifest: Manifest) -> list[Attestation]:
    """Return the attestation manifests that an image has in the registry; kinds of no name here keep their own."""
    found = list[Attestation]()
    for entry in manifest.listed(attestations=True):
        layers = registry.get(entry["digest"]).document["layers"]
        types = [str((layer.get("annotations") or {}).get("in-toto.io/predicate-type")) for layer in layers]
        kinds = [next((_PREDICATES[start] for start in _PREDICATES if each.startswith(start)), each) for each in types]
        about = entry["annotations"]["vnd.docker.reference.digest"]
        found.append({"digest": entry["digest"], "image": about, "kinds": kinds})
    return found


def check(found: list[Attestation], wanted: Attesting, label: str) -> None:
    """Raise ``IntegrityError`` unless the registry holds all that was to be attached."""
    if missing := set(wanted.kinds) - {kind for each in found for kind in each["kinds"]}:
        raise errors.IntegrityError(
            f"{label}: was pushed without its attestations ({', '.join(sorted(missing))}); no tag was moved. "
            "Give --attest none to push without"
        )


def summary(found: list[Attestation]) -> str:
    """Return one line that says which attestations there are."""
    return ", ".join(f"{each['digest']} ({', '.join(each['kinds'])})" for each in found) or "none"


def check_key(key: str) -> None:
    """Raise unless cosign is here and a private key can be had: a file, or ``env://NAME``, and its password."""
    if key.startswith("env://"):
        if not re.fullmatch(r"env://[A-Za-z_][A-Za-z0-9_]*", key) or not os.environ.get(key.removeprefix("env://")):
            raise errors.UsageError("--sign-key: the variable after env:// is not set; export the private key in it")
    elif not Path(key).is_file():
        raise errors.UsageError(f"--sign-key {key}: no such file; `cosign generate-key-pair` makes one")
    if shutil.which("cosign") is None:
        raise errors.ToolError("cosign: not found; install it (Debian 13: cosign), or leave out --sign-key")
    if "COSIGN_PASSWORD" not in os.environ:
        raise errors.UsageError("--sign-key: put the password of the key into COSIGN_PASSWORD (empty if it has none)")


def sign(reference: Reference, digest: str, key: str, plain_http: bool) -> dict[str, str]:
    """Sign a digest, so that tags may move, and verify it; return which tool signed, and the public key.

    ``plain_http``: the registry speaks no TLS.
    """
    image, reach = reference.at(digest), ["--allow-http-registry"] if plain_http else []
    public_key = proc.run(["cosign", "public-key", "--key", key]).text
    # The public log would name the image and its registry to everybody; a key pair needs no log.
    proc.run(["cosign", "sign", "--yes", "--key", key, "--tlog-upload=false", *reach, image])
    verify(image, public_key, plain_http=plain_http)
    version = re.search(r"GitVersion:\s*(\S+)", proc.run(["cosign", "version"]).text)
    return {"tool": f"cosign {version[1] if version else 'unknown'}", "public_key": public_key}


def verify(image: str, public_key: str, *, plain_http: bool) -> None:
    """Raise ``IntegrityError`` unless a signature of this key lies beside the image."""
    reach = ["--allow-http-registry"] if plain_http else []
    argv = ["cosign", "verify", "--key", "env://MULTIMESH_PUBLIC_KEY", "--insecure-ignore-tlog=true", *reach, image]
    result = proc.run(argv, env=os.environ | {"MULTIMESH_PUBLIC_KEY": public_key}, check=False)
    if result.returncode:
        raise errors.IntegrityError(f"{image}: has no signature of this key ({result.complaint})")

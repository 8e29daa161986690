"""Attestations of what is pushed: who makes them, with which options, and which lie in the registry in the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workflows import errors
from workflows.image import network
from workflows.image.digests import ImageLock, ImagePin
from workflows.image.engine import Engine
from workflows.image.flags import Request

if TYPE_CHECKING:
    from workflows.image.registry import Manifest, Registry

_INSIDE = "the SBOM inside the image (/opt/inventory) is all there is"
_PREDICATES = {"https://slsa.dev/provenance/": "provenance", "https://spdx.dev/Document": "sbom"}


@dataclass(frozen=True)
class Attesting:
    """What a push does about attestations.

    Attributes
    ----------
    through
        ``engine``: the build attaches them and the engine pushes them with the image; ``builder``: it pushes the image
        again from its cache, with them; None: there are none.
    said
        One line for people.
    options
        For the build that makes them.
    kinds
        Which must lie in the registry in the end.
    unpinned
        The scanner, where its bytes are not known.
    """

    through: str | None
    said: str
    options: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    unpinned: tuple[str, ...] = ()

    def options_for(self, through: str) -> tuple[str, ...]:
        """Return the options of a build, or none where attestations take another way."""
        return self.options if self.through == through else ()


NOTHING = Attesting(None, "none: nothing is pushed, or there is no engine to ask")


@dataclass(frozen=True)
class Attestation:
    """An attestation manifest in the registry: its digest, that of the image it is about, and what it states."""

    digest: str
    image: str
    kinds: tuple[str, ...]


def decide(engine: Engine, request: Request, pins: ImageLock, environ: Mapping[str, str] = os.environ) -> Attesting:
    """Return what is done about attestations.

    Raises
    ------
    EngineError
        They were asked for, and this engine and its builder make none.
    """
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
    options, kinds = [f"--attest=type=provenance,mode={mode}{_builder_id(environ)}"], ["provenance"]
    told = f"SLSA provenance, mode={mode}" + (" (max would publish your proxies)" if mode == "min" else "")
    scanner = ImagePin(actions.scanner, None) if actions.scanner else pins.images["sbom-scanner"]
    unpinned: tuple[str, ...] = ()
    if actions.attest != "provenance":
        options.append(f"--attest=type=sbom,generator={scanner.exact}")
        kinds.append("sbom")
        told += f"; SPDX SBOM by {scanner.exact}"
        unpinned = () if "@sha256:" in scanner.exact else (scanner.reference,)
    if through == "engine":
        # Without a name an attestation says of no image that it is about it.
        options.append(f"--tag={request.spec.reference.staging}")
    return Attesting(through, told, tuple(options), tuple(kinds), unpinned)


def _builder_id(environ: Mapping[str, str]) -> str:
    """Return the option that says who builds: the run of a GitHub workflow. A person's machine has no such address."""
    if environ.get("GITHUB_ACTIONS") != "true":
        return ""
    run = "/".join(environ[name] for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
    return f",builder-id={run}/actions/runs/{environ['GITHUB_RUN_ID']}/attempts/{environ['GITHUB_RUN_ATTEMPT']}"


def read(registry: Registry, manifest: Manifest) -> tuple[Attestation, ...]:
    """Return the attestations that an image has in the registry."""
    found = list[Attestation]()
    for entry in registry.listed(manifest, attestations=True):
        layers = registry.get(entry["digest"]).document["layers"]
        types = [str((layer.get("annotations") or {}).get("in-toto.io/predicate-type")) for layer in layers]
        about = entry["annotations"]["vnd.docker.reference.digest"]
        found.append(Attestation(entry["digest"], about, tuple(_kind(each) for each in types)))
    return tuple(found)


def _kind(predicate: str) -> str:
    """Return what a type of statement is called here, or the type itself."""
    return next((kind for start, kind in _PREDICATES.items() if predicate.startswith(start)), predicate)


def check(found: tuple[Attestation, ...], wanted: Attesting, label: str) -> None:
    """Raise ``IntegrityError`` unless the registry holds all that was to be attached."""
    missing = set(wanted.kinds) - {kind for each in found for kind in each.kinds}
    if missing:
        raise errors.IntegrityError(
            f"{label}: was pushed without its attestations ({', '.join(sorted(missing))}); no tag was moved. "
            "Give --attest none to push without"
        )


def summary(found: tuple[Attestation, ...]) -> str:
    """Return one line that says which attestations there are."""
    return ", ".join(f"{each.digest} ({', '.join(each.kinds)})" for each in found) or "none"

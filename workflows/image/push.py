"""Pushes an image through the engine, again after faults that pass, and makes sure that the registry has just that."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from workflows import console, errors, proc
from workflows.image import retry
from workflows.image.engine import Engine
from workflows.image.reference import Reference
from workflows.image.registry import Manifest, Registry
from workflows.image.retry import Policy, Transient

_DIGEST = re.compile(r"\bdigest: (sha256:[0-9a-f]{64})\b")
_LAYER = re.compile(r"([0-9a-f]{12}): (.+)")
_OVER = re.compile(r"Pushed|Layer already exists|Mounted from .*")
# What engines make of a registry's answer. Order counts: a 503 may come with words that sound final.
_PASSING = re.compile(
    r"toomanyrequests|too many requests|\b429\b|\b50[0234]\b|server error|unavailable|\bEOF\b|reset by peer|"
    r"connection refused|broken pipe|time(d )?out|deadline exceeded|no such host|temporary failure|"
    r"blob upload (unknown|invalid)",
    re.IGNORECASE,
)
_FINAL = re.compile(
    r"unauthorized|denied|authentication required|no basic auth|insufficient.scope|forbidden|name unknown|"
    r"not found|does not exist|\b40[0134]\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Pushed:
    """What lies in the registry now.

    Attributes
    ----------
    reference
        The name that it was pushed under.
    attempts
        How often the engine had to be started; finished layers are not sent again.
    """

    reference: Reference
    manifest: Manifest
    attempts: int
    seconds: float

    @property
    def digest(self) -> str:
        """Of the manifest: what pulls exactly these bytes."""
        return self.manifest.digest


def push(engine: Engine, image_id: str, staging: Reference, policy: Policy, reporter: console.Reporter) -> Pushed:
    """Push a staging tag of the engine and read back what came of it; see ``deliver``."""
    return deliver(lambda: _once(engine, staging, reporter), image_id, staging, policy, reporter)


def deliver(
    send: Callable[[], str], image_id: str, staging: Reference, policy: Policy, reporter: console.Reporter
) -> Pushed:
    """Have an image sent to a staging tag, again after faults that pass, and read back what came of it.

    Parameters
    ----------
    send
        Sends it and returns the digest, or raises what ``fault`` makes of a complaint.
    image_id
        The image that was checked, as the engine names it; the registry must end up with no other.

    Raises
    ------
    RegistryError
        The registry refuses (at once), or cannot be reached (after the last attempt).
    IntegrityError
        The tag was moved to another image between the check and the push.
    """
    started, attempts = time.monotonic(), 0

    def attempt() -> str:
        nonlocal attempts
        attempts += 1
        try:
            return send()
        except Transient as passing:
            # An engine keeps to itself how long the registry wants to be left alone.
            with Registry(staging) as registry:
                raise Transient(str(passing), registry.quiet_s()) from passing

    reporter.phase("push", str(staging))
    digest = retry.call(attempt, policy, str(staging.repository))
    with Registry(staging, policy) as registry:
        manifest = registry.get(digest)
        _same_image(registry, manifest, image_id)
    reporter.done("push", digest)
    return Pushed(staging, manifest, attempts, time.monotonic() - started)


def push_argv(engine: Engine, staging: Reference) -> list[str]:
    """Return the command; Podman has to be told that a registry on this machine speaks no TLS, Docker finds out."""
    reach: list[str] = []
    if engine.kind == "podman":
        with Registry(staging) as registry:
            reach = ["--tls-verify=false"] if registry.plain_http else []
    return [*engine.cli, "push", *reach, str(staging)]


def fault(said: str, label: str) -> Exception:
    """Return what an engine's complaint means: try again, or over."""
    line = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no message")[:300]
    if _PASSING.search(line):
        return Transient(line)
    if _FINAL.search(line):
        return errors.RegistryError(f"{label}: refused ({line}); log in to the registry, and check --repo and --name")
    return errors.RegistryError(f"{label}: the engine cannot push it ({line})")


def _once(engine: Engine, staging: Reference, reporter: console.Reporter) -> str:
    """Let the engine push and return the digest that it says."""
    layers: set[str] = set()
    over: set[str] = set()

    def line(text: str) -> None:
        if match := _LAYER.match(text):
            layers.add(match[1])
            if _OVER.match(match[2]):
                over.add(match[1])
            reporter.advance("push", len(over), len(layers))

    result = proc.run(push_argv(engine, staging), check=False, on_line=line)
    said = result.stderr.decode("utf-8", "replace")
    if result.returncode:
        raise fault(said or result.text, str(staging))
    found = _DIGEST.findall(result.text)
    if not found:
        # Podman says no digest; the registry does.
        with Registry(staging) as registry:
            return registry.get(staging.tag).digest
    return str(found[-1])


def _same_image(registry: Registry, manifest: Manifest, image_id: str) -> None:
    """Raise unless a manifest is of an image that the engine knows under this id."""
    known = {manifest.digest}
    if manifest.is_index:
        listed = [each["digest"] for each in registry.listed(manifest)]
        known |= {*listed, *(registry.get(each).document["config"]["digest"] for each in listed)}
    else:
        known.add(manifest.document["config"]["digest"])
    if not any(each.removeprefix("sha256:") == image_id.removeprefix("sha256:") for each in known):
        raise errors.IntegrityError(
            f"{registry.place}: holds another image than the one that was checked ({image_id[:19]}); "
            "another build took its staging tag: build again"
        )

"""Pushes an image through the engine, again after faults that pass, and makes sure that the registry has just that."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from workflows import complaints, console, errors, proc
from workflows.image import retry
from workflows.image.engine import Engine
from workflows.image.reference import Reference
from workflows.image.registry import Manifest, Registry
from workflows.image.retry import Policy, Transient

_LAYER = re.compile(r"([0-9a-f]{12}): (.+)")
_OVER = re.compile(r"Pushed|Layer already exists|Mounted from .*")


@dataclass(frozen=True)
class Pushed:
    """What lies in the registry now, under which name; ``attempts`` says how often the engine had to be started."""

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
    send: Callable[[], None], image_id: str, staging: Reference, policy: Policy, reporter: console.Reporter
) -> Pushed:
    """Have an image sent to a staging tag, again after faults that pass, and read back what came of it.

    Parameters
    ----------
    send
        Sends it, or raises what ``fault`` makes of a complaint.
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

    def attempt() -> None:
        nonlocal attempts
        attempts += 1
        try:
            send()
        except Transient as passing:
            # An engine keeps to itself how long the registry wants to be left alone.
            with Registry(staging) as registry:
                raise Transient(str(passing), registry.quiet_s()) from passing

    reporter.phase("push", str(staging))
    retry.call(attempt, policy, str(staging.repository))
    with Registry(staging, policy) as registry:
        manifest = registry.get(staging.tag)
        _same_image(registry, manifest, image_id)
    reporter.done("push", manifest.digest)
    return Pushed(staging, manifest, attempts, time.monotonic() - started)


def fault(said: str, label: str) -> Exception:
    """Return what an engine's complaint means: try again, or over."""
    line = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no message")
    if complaints.network_failed(line):
        return Transient(complaints.shortened(line))
    return errors.RegistryError(
        f"{label}: refused ({complaints.shortened(line)}); log in to the registry, and check --repo and --name"
    )


def _once(engine: Engine, staging: Reference, reporter: console.Reporter) -> None:
    """Let the engine push."""
    layers: dict[str, bool] = {}

    def line(text: str) -> None:
        if match := _LAYER.match(text):
            layers[match[1]] = bool(_OVER.match(match[2]))
            reporter.advance("push", sum(layers.values()), len(layers))

    reach: list[str] = []
    if engine.kind == "podman":
        # It has to be told that a registry on this machine speaks no TLS; Docker finds out.
        with Registry(staging) as registry:
            reach = ["--tls-verify=false"] if registry.plain_http else []
    result = proc.run([*engine.cli, "push", *reach, str(staging)], check=False, on_line=line)
    if result.returncode:
        raise fault(result.stderr.decode("utf-8", "replace") or result.text, str(staging))


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

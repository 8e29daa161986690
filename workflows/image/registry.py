"""A registry, spoken to directly (its HTTP API v2): who may push, which digest a tag has, and tags that move.

The engine pushes layers; this client decides and verifies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from workflows import errors
from workflows.image import credentials, retry
from workflows.image.reference import Reference
from workflows.image.retry import Policy
from workflows.image.transport import Transport

T = TypeVar("T")
_KIND = "vnd.docker.reference.type"
_MAX_MANIFEST = 4 << 20
_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_TYPES = (
    *_INDEX_TYPES,
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


@dataclass(frozen=True)
class Manifest:
    """A manifest or an index, byte for byte: its digest is the hash of these bytes."""

    media_type: str
    content: bytes

    @property
    def digest(self) -> str:
        """``sha256:...`` of the bytes."""
        return "sha256:" + hashlib.sha256(self.content).hexdigest()

    @property
    def document(self) -> dict[str, Any]:
        """What it says."""
        return dict(json.loads(self.content))

    @property
    def is_index(self) -> bool:
        """Say whether it lists manifests (of platforms, of attestations) in place of layers."""
        return self.media_type in _INDEX_TYPES


class Registry:
    """The repository of a reference in its registry; the tag of the reference does not matter.

    Parameters
    ----------
    policy
        What happens after network faults, 429 and 5xx. Everything else ends at once.
    """

    def __init__(self, reference: Reference, policy: Policy | None = None) -> None:
        host, path = reference.host, reference.path
        if host is None:
            # As every engine reads it: a name without a host is Docker Hub's.
            host, path = "docker.io", path if "/" in path else f"library/{path}"
        self.place = f"{host}/{path}"
        self._policy = policy or Policy()
        self._transport = Transport(host, path, credentials.find(host, path))

    def __enter__(self) -> Registry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    @property
    def plain_http(self) -> bool:
        """Say whether it is on this machine and speaks no TLS."""
        return self._transport.origin().startswith("http://")

    def check_push(self) -> None:
        """Raise ``RegistryError`` unless this login may push here; leaves nothing behind."""

        def begin() -> None:
            answer = self._transport.send("POST", "blobs/uploads/", scope="pull,push")
            place = urlsplit(urljoin(answer.url, answer.headers.get("Location", "")))
            if place.netloc == urlsplit(answer.url).netloc:
                path = f"{place.path}?{place.query}"
                self._transport.send("DELETE", path, scope="pull,push", fine=range(200, 500))

        self._retrying(begin)

    def quiet_s(self) -> float | None:
        """Return for how many seconds the registry wants to be left alone, if it says so."""
        try:
            self._transport.send("GET", "/v2/", scope="pull")
        except retry.Transient as fault:
            return fault.after_s
        except errors.RegistryError:
            pass
        return None

    def digest(self, tag: str) -> str | None:
        """Return the digest that a tag has now, or None if there is no such tag."""
        manifest = self._ask(tag)
        return None if manifest is None else manifest.digest

    def get(self, reference: str) -> Manifest:
        """Return the manifest of a tag or digest.

        Raises
        ------
        RegistryError
            There is none.
        IntegrityError
            The registry sent other bytes than the digest says.
        """
        manifest = self._ask(reference)
        if manifest is None:
            raise errors.RegistryError(f"{self.place}: has no {reference}; push it first")
        if reference.startswith("sha256:") and manifest.digest != reference:
            raise errors.IntegrityError(
                f"{self.place}: sent a manifest {manifest.digest} for {reference}; do not use this registry"
            )
        return manifest

    def put(self, tag: str, manifest: Manifest) -> None:
        """Give a tag to a manifest whose layers are there already; a single request, so it moves whole or not."""
        headers = {"Content-Type": manifest.media_type}
        self._retrying(
            lambda: self._transport.send(
                "PUT", f"manifests/{tag}", scope="pull,push", body=manifest.content, headers=headers
            )
        )

    def listed(self, manifest: Manifest, *, attestations: bool = False) -> list[dict[str, Any]]:
        """Return what an index lists: images, or the attestations about them; nothing of a plain manifest."""
        return [
            each
            for each in (manifest.document["manifests"] if manifest.is_index else [])
            if ((each.get("annotations") or {}).get(_KIND) == "attestation-manifest") == attestations
        ]

    def labels(self, manifest: Manifest) -> dict[str, str]:
        """Return the labels of an image; of the first platform where there are several."""
        document = manifest.document
        if manifest.is_index:
            return self.labels(self.get(self.listed(manifest)[0]["digest"]))
        digest = document["config"]["digest"]
        answer = self._retrying(lambda: self._transport.send("GET", f"blobs/{digest}", scope="pull"))
        if Manifest("", answer.content).digest != digest:
            raise errors.IntegrityError(f"{self.place}: sent other bytes for {digest}; do not use this registry")
        return dict(answer.json().get("config", {}).get("Labels") or {})

    def bytes_to_pull(self, manifest: Manifest) -> int:
        """Return what configuration and layers take on the wire, in bytes: of all platforms where there are several."""
        document = manifest.document
        if manifest.is_index:
            return sum(self.bytes_to_pull(self.get(each["digest"])) for each in self.listed(manifest))
        return int(document["config"]["size"]) + sum(int(layer["size"]) for layer in document["layers"])

    def _ask(self, reference: str) -> Manifest | None:
        def ask() -> Manifest | None:
            answer = self._transport.send(
                "GET", f"manifests/{reference}", scope="pull", headers={"Accept": ", ".join(_TYPES)}, fine=(200, 404)
            )
            if answer.status_code == 404:
                return None
            if len(answer.content) > _MAX_MANIFEST:
                raise errors.IntegrityError(
                    f"{self.place}: sent {len(answer.content)} bytes as the manifest {reference}"
                )
            return Manifest(answer.headers.get("Content-Type", "").partition(";")[0], answer.content)

        return self._retrying(ask)

    def _retrying(self, action: Callable[[], T]) -> T:
        return retry.call(action, self._policy, self.place)

"""A registry, spoken to directly (its HTTP API v2): who may push, which digest a tag has, and tags that move or go.

The engine pushes layers; this client decides and verifies. Docker's SDK finds the login.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import requests
from requests.auth import HTTPBasicAuth

from workflows import errors
from workflows.image import retry
from workflows.image.reference import Reference
from workflows.image.retry import Policy, Transient

T = TypeVar("T")
_TIMEOUT_S = (10, 60)
_HUB = "registry-1.docker.io"
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
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


@dataclass(frozen=True)
class Login:
    """A user and a password, or an identity token; neither is part of ``repr``."""

    user: str = field(repr=False)
    secret: str = field(repr=False)
    identity: bool = False


def find_login(host: str, path: str) -> Login | None:
    """Return what ``docker login`` or ``podman login`` left for a repository, in a file or with a helper.

    Raises
    ------
    RegistryError
        A configuration cannot be read, or names a helper that is not here. What a helper says is not repeated.
    """
    from docker.errors import DockerException

    from docker import auth

    runtime, helper = os.environ.get("XDG_RUNTIME_DIR"), "HELPER"
    podman = f"{runtime}/containers/auth.json"
    parts = path.split("/")
    try:
        for file in (None, podman) if runtime and Path(podman).is_file() else (None,):
            config = auth.load_config(file)
            helper = config.get_credential_store(host) or helper
            # Podman keeps logins of single repositories, too.
            own = (config.auths.get("/".join((host, *parts[:n]))) for n in range(len(parts), 0, -1))
            with warnings.catch_warnings(action="ignore"):
                found = next(filter(None, own), None) or config.resolve_authconfig(host)
            if found and (token := found.get("IdentityToken")):
                return Login("", token, identity=True)
            if found:
                named = {key.lower(): value for key, value in found.items()}
                return Login(named["username"], named["password"].rstrip("\0"))
    except DockerException:
        raise errors.RegistryError(
            f"{host}: docker-credential-{helper} is not here or failed, and Docker's config.json names it; "
            "install it or log in again"
        ) from None
    except (ValueError, KeyError):
        raise errors.RegistryError(f"{host}: the login in Docker's config.json cannot be read; log in again") from None
    return None


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
        self._host, self._path, self._login = host, path, find_login(host, path)
        self._server = _HUB if host == "docker.io" else host
        self._policy = policy or Policy()
        self._session = requests.Session()
        # Without this, requests would put a login from ~/.netrc in place of ours.
        self._session.auth = _as_it_is
        self._session.trust_env = not _is_loopback(self._server)
        authority = Path("/etc/docker/certs.d") / self._server / "ca.crt"  # where Docker looks
        self._session.verify = str(authority) if authority.is_file() else True
        self._tokens: dict[str, str] = {}
        self._origin: str | None = None

    def __enter__(self) -> Registry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()

    @property
    def plain_http(self) -> bool:
        """Say whether it is on this machine and speaks no TLS."""
        return self._address().startswith("http://")

    def check_push(self) -> None:
        """Raise ``RegistryError`` unless this login may push here; leaves nothing behind."""

        def begin() -> None:
            answer = self._send("POST", "blobs/uploads/", fine=(202,))
            place = urlsplit(urljoin(answer.url, answer.headers.get("Location", "")))
            if place.netloc == urlsplit(answer.url).netloc:
                self._send("DELETE", f"{place.path}?{place.query}", fine=range(200, 500))

        self._retrying(begin)

    def quiet_s(self) -> float | None:
        """Return for how many seconds the registry wants to be left alone, if it says so."""
        try:
            self._send("GET", "/v2/")
        except Transient as fault:
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
            lambda: self._send("PUT", f"manifests/{tag}", body=manifest.content, headers=headers, fine=(201,))
        )

    def remove(self, tag: str) -> bool:
        """Take a tag away, and nothing else; return False where this registry removes none.

        Registries delete by digest, and with it all tags of that digest. So the tag first moves to a manifest of the
        same layers with a mark of its own, and that goes.
        """
        held = self._ask(tag)
        if held is None:
            return True
        marked = held.document | {"annotations": {"io.github.multimesh-jax.removed": tag}}
        placeholder = Manifest(held.media_type, json.dumps(marked).encode())
        self.put(tag, placeholder)
        try:
            self._retrying(lambda: self._send("DELETE", f"manifests/{placeholder.digest}", fine=(200, 202)))
        except errors.RegistryError:
            self.put(tag, held)
            return False
        return True

    def listed(self, manifest: Manifest, *, attestations: bool = False) -> list[dict[str, Any]]:
        """Return what an index lists: images, or the attestations about them; nothing of a plain manifest."""
        return [
            each
            for each in (manifest.document["manifests"] if manifest.is_index else [])
            if ((each.get("annotations") or {}).get(_KIND) == "attestation-manifest") == attestations
        ]

    def labels(self, manifest: Manifest) -> dict[str, str]:
        """Return the labels of an image; of the first platform where there are several."""
        if manifest.is_index:
            return self.labels(self.get(self.listed(manifest)[0]["digest"]))
        digest = manifest.document["config"]["digest"]
        answer = self._retrying(lambda: self._send("GET", f"blobs/{digest}"))
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
            accept = {"Accept": ", ".join(_TYPES)}
            answer = self._send("GET", f"manifests/{reference}", headers=accept, fine=(200, 404))
            if answer.status_code == 404:
                return None
            kind = answer.headers.get("Content-Type", "").partition(";")[0]
            if len(answer.content) > _MAX_MANIFEST or kind not in _TYPES:
                raise errors.IntegrityError(
                    f"{self.place}: sent {len(answer.content)} bytes of {kind or 'no type'} as the manifest "
                    f"{reference}; check that this is a registry, and no login page before it"
                )
            return Manifest(kind, answer.content)

        return self._retrying(ask)

    def _retrying(self, action: Callable[[], T]) -> T:
        return retry.call(action, self._policy, self.place)

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        fine: Collection[int] = range(200, 400),
    ) -> requests.Response:
        """Send one request, with a login where the registry asks for it.

        Parameters
        ----------
        path
            Below the repository, or an absolute path of the registry.
        fine
            Statuses that are an answer; all others raise ``Transient`` or ``RegistryError``.
        """
        url = self._address() + (path if path.startswith("/") else f"/v2/{self._path}/{path}")
        # A token of a smaller scope may be answered with 403, which would look like a refusal.
        scope = "pull" if method == "GET" else "pull,push,delete" if "manifests/sha256" in path else "pull,push"
        for first in (True, False):
            known = {"Authorization": self._tokens[scope]} if scope in self._tokens else {}
            answer = self._exchange(method, url, data=body, headers={**(headers or {}), **known})
            if answer.status_code != 401 or not first:
                break
            self._tokens.pop(scope, None)
            if (token := self._authorize(answer, scope)) is None:
                break
            self._tokens[scope] = token
        if answer.status_code not in fine:
            raise self._fault(answer, method)
        return answer

    def _address(self) -> str:
        """Return the registry's address; plain HTTP only on this machine, and only where it does not speak TLS."""
        if self._origin is None:
            self._origin = f"https://{self._server}"
            if _is_loopback(self._server):
                try:
                    self._session.get(f"{self._origin}/v2/", timeout=_TIMEOUT_S)
                except requests.RequestException:
                    self._origin = f"http://{self._server}"
        return self._origin

    def _exchange(self, method: str, url: str, **more: Any) -> requests.Response:
        try:
            return self._session.request(method, url, timeout=_TIMEOUT_S, allow_redirects=method == "GET", **more)
        except requests.exceptions.SSLError as error:
            raise errors.RegistryError(f"{self._host}: its certificate is not valid here; check the name") from error
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise Transient(f"no answer ({type(error).__name__})") from error

    def _authorize(self, answer: requests.Response, scope: str) -> str | None:
        """Answer the registry's question who we are; None if we have nothing to answer."""
        kind, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
        login = self._login
        basic = HTTPBasicAuth(login.user, login.secret) if login and not login.identity else None
        if kind.lower() == "basic" and basic:
            return str(basic(requests.Request("GET", answer.url).prepare()).headers["Authorization"])
        parameters = dict(_PARAMETER.findall(rest))
        realm = parameters.get("realm", "")
        if kind.lower() != "bearer" or not realm:
            return None
        if urlsplit(realm).scheme != "https" and not _is_loopback(urlsplit(realm).netloc):
            raise errors.RegistryError(f"{self._host}: wants our login sent to {realm} in the open; it was not sent")
        asked = {"service": parameters.get("service", ""), "scope": f"repository:{self._path}:{scope}"}
        if login and login.identity:
            form = {"grant_type": "refresh_token", "refresh_token": login.secret, "client_id": "multimesh"}
            told = self._exchange("POST", realm, data=asked | form)
        else:
            told = self._exchange("GET", realm, params=asked, auth=basic or _as_it_is)
        if told.status_code != 200:
            raise self._fault(told, "a token")
        try:
            said = told.json()
            token = said.get("token") or said.get("access_token")
        except (ValueError, AttributeError) as error:
            raise errors.RegistryError(f"{self._host}: its token service does not answer in JSON") from error
        return f"Bearer {token}" if token else None

    def _fault(self, answer: requests.Response, method: str) -> Exception:
        """Return what an answer means: try again, or over. Its body is not repeated: it may say what we sent."""
        status = answer.status_code
        if status == 429 or status >= 500:
            return Transient(f"answer {status}", retry.retry_after(answer.headers.get("Retry-After")))
        who = "the login for it is not accepted" if self._login else "nobody is logged in"
        told = {
            401: f"{who} (401); run `docker login {self._host}`",
            403: "this login may not do that (403); ask its owner for access",
            404: "does not exist (404); create it or correct --repo and --name",
        }
        what = told.get(status, f"refuses {method} (answer {status}); check that it is a registry, and no login page")
        return errors.RegistryError(f"{self.place}: {what}")


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _is_loopback(netloc: str) -> bool:
    host = urlsplit(f"//{netloc}").hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""A registry, spoken to directly (its HTTP API v2): who may push, which digest a tag has, and tags that move or go.

The engine pushes layers; this client decides and verifies. Docker's SDK finds the login. What may succeed later is
tried again, and nothing else: network faults, 429 and 5xx.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import requests
from requests.auth import HTTPBasicAuth
from urllib3.exceptions import InvalidHeader
from urllib3.util.retry import Retry

from workflows import console, errors
from workflows.image.reference import Reference

T = TypeVar("T")
_TIMEOUT_S = (10, 60)
_HUB = "registry-1.docker.io"
_MAX_MANIFEST = 4 << 20
_ATTESTS = "attestation-manifest"
_OCI, _DOCKER = "application/vnd.oci.image", "application/vnd.docker.distribution.manifest"
_INDEX_TYPES = (f"{_OCI}.index.v1+json", f"{_DOCKER}.list.v2+json")
_TYPES = (*_INDEX_TYPES, f"{_OCI}.manifest.v1+json", f"{_DOCKER}.v2+json")
_IDENTITY = "<token>"  # Docker's name for a user with a token in place of a password


class Transient(Exception):
    """Something that may be gone the next time; ``after_s`` is how long the server asked to wait, if it said."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


@dataclass(frozen=True)
class Policy:
    """How often to try, and how long to wait in between: each time twice as long, but no longer than ``most_s``.

    A server that wants more quiet than ``longest_order_s`` ends it.
    """

    attempts: int = 6
    first_s: float = 1.0
    most_s: float = 60.0
    longest_order_s: float = 600.0

    def wait_s(self, attempt: int, order_s: float | None) -> float:
        """Return how long to wait after the failure of an attempt, counted from 1."""
        # Many clients that failed together do not come back together.
        backoff: float = min(self.most_s, self.first_s * 2 ** (attempt - 1)) * random.uniform(2 / 3, 1)  # noqa: S311
        return max(order_s or 0.0, backoff)


def retrying(action: Callable[[], T], policy: Policy, label: str, sleep: Callable[[float], None] = time.sleep) -> T:
    """Return the result of an action. Try again after each ``Transient``; raise ``RegistryError`` after the last."""
    attempt = 1
    while True:
        try:
            return action()
        except Transient as fault:
            if attempt == policy.attempts:
                raise errors.RegistryError(f"{label}: {fault}, {attempt} times; try again later") from fault
            if (fault.after_s or 0) > policy.longest_order_s:
                raise errors.RegistryError(
                    f"{label}: {fault}; the server wants {fault.after_s:.0f} s of quiet; try again after that"
                ) from fault
            wait = policy.wait_s(attempt, fault.after_s)
            attempt += 1
            console.note(f"{label}: {fault}; attempt {attempt} of {policy.attempts} in {wait:.1f} s")
            sleep(wait)


def retry_after(header: str | None) -> float | None:
    """Read a ``Retry-After`` header: seconds, or a date; None if there is none that can be read."""
    try:
        return None if header is None else float(Retry().parse_retry_after(header))
    except InvalidHeader:
        return None


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
        """Its content."""
        return dict(json.loads(self.content))

    @property
    def is_index(self) -> bool:
        """Say whether it lists manifests (of platforms, of attestations) in place of layers."""
        return self.media_type in _INDEX_TYPES

    def listed(self, *, attestations: bool = False) -> list[dict[str, Any]]:
        """Return the entries of an index: images, or the attestations about them; none of a plain manifest."""
        found = self.document["manifests"] if self.is_index else []
        kinds = [(each.get("annotations") or {}).get("vnd.docker.reference.type") for each in found]
        return [each for each, kind in zip(found, kinds, strict=True) if (kind == _ATTESTS) == attestations]


def find_login(host: str, path: str) -> HTTPBasicAuth | None:
    """Return the login that ``docker login`` or ``podman login`` left for a repository, in a file or with a helper.

    What a helper says is not repeated: it may be the password.
    """
    from docker.errors import DockerException

    from docker import auth

    podman, helper = f"{os.environ.get('XDG_RUNTIME_DIR')}/containers/auth.json", "HELPER"
    parts = path.split("/")
    try:
        for file in (None, podman) if Path(podman).is_file() else (None,):
            config = auth.load_config(file)
            helper = config.get_credential_store(host) or helper
            # Podman keeps logins of single repositories, too.
            own = (config.auths.get("/".join((host, *parts[:n]))) for n in range(len(parts), 0, -1))
            with warnings.catch_warnings(action="ignore"):
                found = next(filter(None, own), None) or config.resolve_authconfig(host)
            if found and (token := found.get("IdentityToken")):
                return HTTPBasicAuth(_IDENTITY, token)
            if found:
                named = {key.lower(): value for key, value in found.items()}
                return HTTPBasicAuth(named["username"], named["password"].rstrip("\0"))
    except DockerException:
        raise errors.RegistryError(
            f"{host}: docker-credential-{helper} is not here or failed, and Docker's config.json names it; "
            "install it or log in again"
        ) from None
    except (ValueError, KeyError):
        raise errors.RegistryError(f"{host}: the login in Docker's config.json cannot be read; log in again") from None
    return None


class Registry:
    """The repository of a reference in its registry; the tag of the reference does not matter."""

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

    def __exit__(self, *exception: object) -> None:
        self._session.close()

    @property
    def plain_http(self) -> bool:
        """Say whether it is on this machine and speaks no TLS."""
        return self._address().startswith("http://")

    def check_push(self) -> None:
        """Raise ``RegistryError`` unless this login may push here; leaves nothing behind."""
        answer = self._call("POST", "blobs/uploads/", fine=(202,))
        place = urlsplit(urljoin(answer.url, answer.headers.get("Location", "")))
        if place.netloc == urlsplit(answer.url).netloc:
            self._call("DELETE", f"{place.path}?{place.query}", fine=range(200, 500))

    def quiet_s(self) -> float | None:
        """Return for how many seconds the registry wants to be left alone, if it says so."""
        try:
            self._once("GET", "/v2/")
        except Transient as fault:
            return fault.after_s
        except errors.RegistryError:
            pass
        return None

    def tags(self) -> list[str]:
        """Return every tag of the repository."""
        path, found = "tags/list?n=1000", list[str]()
        while path:
            answer = self._call("GET", path)
            found += answer.json().get("tags") or []
            place = urlsplit(urljoin(answer.url, answer.links.get("next", {}).get("url", "")))
            path = f"{place.path}?{place.query}" if "next" in answer.links else ""
        return found

    def digest(self, tag: str) -> str | None:
        """Return the digest that a tag has now, or None if there is no such tag."""
        manifest = self._ask(tag)
        return None if manifest is None else manifest.digest

    def get(self, reference: str) -> Manifest:
        """Return the manifest of a tag or digest, or raise where there is none or the bytes are others."""
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
        self._call("PUT", f"manifests/{tag}", data=manifest.content, headers=headers, fine=(201,))

    def remove(self, tag: str) -> bool:
        """Take a tag away, and nothing else; return False where this registry removes none.

        Registries delete by digest, and with it all tags of that digest. So the tag first moves to a manifest of the
        same layers with a mark of its own, and that goes; not where a registry, as ghcr.io, would keep the latter.
        """
        if (held := self._ask(tag)) is None:
            return True
        marked = held.document | {"annotations": {"io.github.multimesh-jax.removed": tag}}
        placeholder = Manifest(held.media_type, json.dumps(marked).encode())
        place = f"manifests/{placeholder.digest}"
        try:
            self._call("DELETE", place, fine=(200, 202, 404))  # of nothing yet
            self.put(tag, placeholder)
            self._call("DELETE", place, fine=(200, 202))
        except errors.RegistryError:
            return False
        return True

    def labels(self, manifest: Manifest) -> dict[str, str]:
        """Return the labels of an image; of the first platform where there are several."""
        if manifest.is_index:
            return self.labels(self.get(manifest.listed()[0]["digest"]))
        digest = manifest.document["config"]["digest"]
        answer = self._call("GET", f"blobs/{digest}")
        if Manifest("", answer.content).digest != digest:
            raise errors.IntegrityError(f"{self.place}: sent other bytes for {digest}; do not use this registry")
        return dict(answer.json().get("config", {}).get("Labels") or {})

    def bytes_to_pull(self, manifest: Manifest) -> int:
        """Return the bytes of configuration and layers on the wire, of all platforms where there are several."""
        if manifest.is_index:
            return sum(self.bytes_to_pull(self.get(each["digest"])) for each in manifest.listed())
        return sum(int(each["size"]) for each in (manifest.document["config"], *manifest.document["layers"]))

    def _ask(self, reference: str) -> Manifest | None:
        accept = {"Accept": ", ".join(_TYPES)}
        answer = self._call("GET", f"manifests/{reference}", headers=accept, fine=(200, 404))
        if answer.status_code == 404:
            return None
        kind = answer.headers.get("Content-Type", "").partition(";")[0]
        if len(answer.content) > _MAX_MANIFEST or kind not in _TYPES:
            raise errors.IntegrityError(
                f"{self.place}: sent {len(answer.content)} bytes of {kind or 'no type'} as the manifest "
                f"{reference}; check that this is a registry, and no login page before it"
            )
        return Manifest(kind, answer.content)

    def _call(self, method: str, path: str, **more: Any) -> requests.Response:
        return retrying(lambda: self._once(method, path, **more), self._policy, self.place)

    def _once(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        fine: Collection[int] = range(200, 400),
        **more: Any,
    ) -> requests.Response:
        """Send one request, with a login where the registry asks for it.

        ``path`` is below the repository or absolute; a status that is not ``fine`` is ``Transient`` or an error.
        """
        url = self._address() + (path if path.startswith("/") else f"/v2/{self._path}/{path}")
        # A registry may answer a token of a smaller scope with 403, as it answers a refused push.
        scope = "pull" if method == "GET" else "pull,push,delete" if "manifests/sha256" in path else "pull,push"
        for first in (True, False):
            known = {"Authorization": self._tokens[scope]} if scope in self._tokens else {}
            answer = self._exchange(method, url, headers={**(headers or {}), **known}, **more)
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
        identity = login is not None and login.username == _IDENTITY
        if kind.lower() == "basic" and login and not identity:
            return str(login(requests.Request("GET", answer.url).prepare()).headers["Authorization"])
        parameters = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        realm = urlsplit(parameters.get("realm", ""))
        if kind.lower() != "bearer" or not realm.geturl():
            return None
        if realm.scheme != "https" and not _is_loopback(realm.netloc):
            raise errors.RegistryError(
                f"{self._host}: wants our login sent to {realm.geturl()} in the open; it was not sent"
            )
        asked = {"service": parameters.get("service", ""), "scope": f"repository:{self._path}:{scope}"}
        if login and identity:
            form = {"grant_type": "refresh_token", "refresh_token": login.password, "client_id": "multimesh"}
            told = self._exchange("POST", realm.geturl(), data=asked | form)
        else:
            told = self._exchange("GET", realm.geturl(), params=asked, auth=login or _as_it_is)
        if told.status_code != 200:
            raise self._fault(told, "a token")
        try:
            said = told.json()
            token = said.get("token") or said.get("access_token")
        except (ValueError, AttributeError) as error:
            raise errors.RegistryError(f"{self._host}: its token service does not answer in JSON") from error
        return f"Bearer {token}" if token else None

    def _fault(self, answer: requests.Response, method: str) -> Exception:
        """Return the error for an answer: try again, or over. It leaves out the body, which may repeat our request."""
        status = answer.status_code
        if status == 429 or status >= 500:
            return Transient(f"answer {status}", retry_after(answer.headers.get("Retry-After")))
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

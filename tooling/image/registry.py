"""A repository in its registry, by requests: manifests, labels, and whether this login may push.

Docker's configuration gives the login. urllib3 tries faults that pass again; refusals, plain HTTP and unknown
certificates are final.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from tooling.core import errors
from tooling.image import reference

if TYPE_CHECKING:
    import requests

_ATTEMPTS, _TIMEOUT_S = 6, 60
_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
_MANIFESTS = ("oci.image.index.v1", "oci.image.manifest.v1")
_DOCKERS = ("docker.distribution.manifest.list.v2", "docker.distribution.manifest.v2")
_KINDS = ", ".join(f"application/vnd.{kind}+json" for kind in (*_MANIFESTS, *_DOCKERS))


class Manifest(NamedTuple):
    """A manifest or an index, byte for byte: its digest is the hash of these bytes."""

    content: bytes

    @property
    def digest(self) -> str:
        """``sha256:...`` of the bytes, which pulls exactly these."""
        return "sha256:" + hashlib.sha256(self.content).hexdigest()

    @property
    def document(self) -> dict[str, Any]:
        """Its content."""
        return dict(json.loads(self.content))

    @property
    def bytes(self) -> int:
        """The size of configuration and layers, as they are sent."""
        return sum(int(part["size"]) for part in (self.document["config"], *self.document["layers"]))


class Registry:
    """One repository of a registry, with the login that Docker's configuration has for it."""

    def __init__(self, repository: str) -> None:
        import requests

        host, path = reference.split(repository)
        self.repository, self.host = repository, host or "docker.io"
        self._path = path if host or "/" in path else f"library/{path}"
        self._server, self._session = "", requests.Session()
        self._session.auth = lambda request: request  # ~/.netrc is none of Docker's logins
        self._session.trust_env = not _LOOPBACK.fullmatch(self.host)
        company = Path("/etc/docker/certs.d", self.host, "ca.crt")  # where the engine looks too
        if company.is_file() or "REQUESTS_CA_BUNDLE" not in os.environ:
            self._session.verify = str(company) if company.is_file() else os.environ.get("SSL_CERT_FILE") or True

    def find(self, name: str) -> Manifest | None:
        """Return the manifest of a tag or a digest; None where there is none. ``SourceError``: of other bytes."""
        answer = self._ask("GET", f"manifests/{name}", absent=404, headers={"Accept": _KINDS})
        if answer.status_code == 404:
            return None
        manifest = Manifest(answer.content)
        if name.startswith("sha256:") and name != manifest.digest:
            raise errors.SourceError(f"{self.repository}@{name}: its registry sent {manifest.digest}; do not use it")
        return manifest

    def get(self, name: str) -> Manifest:
        """Return the manifest of a tag or a digest, or raise where there is none."""
        if (manifest := self.find(name)) is None:
            raise errors.EngineError(f"{self.repository}: {name} is not in its registry; push it first")
        return manifest

    def digest(self, tag: str) -> str | None:
        """Return the digest that a tag has now; None where there is no such tag."""
        manifest = self.find(tag)
        return manifest and manifest.digest

    def images(self, manifest: Manifest) -> list[Manifest]:
        """Return the images of an index, or the image itself."""
        entries = manifest.document.get("manifests")
        return [manifest] if entries is None else [self.get(entry["digest"]) for entry in entries]

    def labels(self, manifest: Manifest) -> dict[str, str]:
        """Return the labels of an image; of the first platform where there are several."""
        config = self.images(manifest)[0].document["config"]["digest"]
        return dict((self._ask("GET", f"blobs/{config}").json().get("config") or {}).get("Labels") or {})

    def put(self, tag: str, manifest: Manifest) -> None:
        """Give a tag to a manifest that the repository holds; nothing is sent besides."""
        kind = str(manifest.document.get("mediaType", "application/vnd.oci.image.manifest.v1+json"))
        self._ask("PUT", f"manifests/{tag}", data=manifest.content, headers={"Content-Type": kind})

    def check_push(self) -> None:
        """Raise ``EngineError`` unless this login may push: begin an upload, and take it back. Nothing stays."""
        begun = self._ask("POST", "blobs/uploads/")
        location = urljoin(begun.url, begun.headers.get("Location", ""))
        if urlsplit(location).netloc == urlsplit(begun.url).netloc:
            self._session.delete(location, timeout=_TIMEOUT_S)  # a registry that cannot forgets it by itself

    def _ask(self, method: str, path: str, absent: int = 0, **options: Any) -> requests.Response:
        """Return an answer that is good, or says ``absent``."""
        import requests

        try:
            self._server = self._server or self._log_in()
            url = f"{self._server}/v2/{self._path}/{path}"
            answer = self._session.request(method, url, timeout=_TIMEOUT_S, **options)
        except requests.RequestException as error:
            raise errors.EngineError(f"{self.repository}: cannot be reached ({error}); try again later") from error
        return self._check(answer, absent)

    def _check(self, answer: requests.Response, absent: int = 0) -> requests.Response:
        if answer.ok or answer.status_code == absent:
            return answer
        raise errors.EngineError(
            f"{self.repository}: refused ({answer.status_code} {answer.reason}); log in with "
            f"`docker login {self.host}`, and check --repo and --name"
        )

    def _log_in(self) -> str:
        """Take up the challenge of a registry; return its address. Engines speak plain HTTP with this machine alone."""
        from requests.adapters import HTTPAdapter
        from requests.exceptions import SSLError
        from urllib3 import Retry

        # other=0: what fails for TLS stays so.
        codes = (429, 500, 502, 503, 504)
        again = Retry(_ATTEMPTS - 1, other=0, backoff_factor=0.5, backoff_jitter=0.5, status_forcelist=codes,
                      allowed_methods=None, raise_on_status=False)  # fmt: skip
        for scheme in ("https://", "http://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=again))
        server = "https://" + ("registry-1.docker.io" if self.host == "docker.io" else self.host)
        try:
            answer = self._session.get(f"{server}/v2/", timeout=_TIMEOUT_S)
        except SSLError as error:
            if not _LOOPBACK.fullmatch(self.host):
                raise errors.EngineError(
                    f"{self.repository}: its registry speaks plain HTTP, or its certificate cannot be verified "
                    f"({str(error)[-200:]}); put the authority's into /etc/docker/certs.d/{self.host}/ca.crt"
                ) from error
            server = server.replace("https:", "http:")
            answer = self._session.get(f"{server}/v2/", timeout=_TIMEOUT_S)
        login, (kind, _, fields) = _read_login(self.host), answer.headers.get("WWW-Authenticate", "").partition(" ")
        pair = base64.b64encode(f"{login.get('username')}:{login.get('password')}".encode()).decode()
        basic = {"Authorization": f"Basic {pair}"} if login.get("username") else {}
        words = dict(re.findall(r'(\w+)="([^"]*)"', fields))
        if kind.lower() == "basic":
            self._session.headers.update(basic)
        elif kind.lower() == "bearer" and words.get("realm", "").startswith(("https://", "http://")):
            scope = f"repository:{self._path}:pull{',push' if login else ''}"
            form = {"service": words.get("service", ""), "scope": scope}
            if token := login.get("identitytoken"):
                form |= {"grant_type": "refresh_token", "refresh_token": token, "client_id": "multimesh"}
                answer = self._session.post(words["realm"], data=form, timeout=_TIMEOUT_S)
            else:
                answer = self._session.get(words["realm"], params=form, headers=basic, timeout=_TIMEOUT_S)
            tokens = self._check(answer).json()
            self._session.headers["Authorization"] = f"Bearer {tokens.get('token') or tokens.get('access_token')}"
        return server


def _read_login(host: str) -> dict[str, str]:
    """Return the login that Docker's configuration, or its credential helper, has for a registry."""
    import docker.auth
    from docker.errors import DockerException

    try:
        login = docker.auth.load_config().resolve_authconfig(host) or {}
    except (DockerException, ValueError) as error:
        raise errors.EngineError(f"{host}: its login cannot be read ({error}); run `docker login {host}`") from error
    return {name.lower(): value for name, value in login.items() if value}

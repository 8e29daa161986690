"""A repository in its registry, by requests: manifests, labels, the right to push, and moves of tags by digest.

Docker's configuration gives the login. urllib3 tries faults that pass again; refusals, plain HTTP and unknown
certificates are final.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import docker.auth
import requests
from docker.errors import DockerException
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from tooling.core import console, errors
from tooling.image import reference
from tooling.image.reference import OCI

_ATTEMPTS, _TIMEOUT_S = 6, 60
_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
_MANIFESTS = ("oci.image.index.v1", "oci.image.manifest.v1")
_DOCKERS = ("docker.distribution.manifest.list.v2", "docker.distribution.manifest.v2")
_KINDS = ", ".join(f"application/vnd.{kind}+json" for kind in (*_MANIFESTS, *_DOCKERS))


class Manifest(NamedTuple):
    """A manifest or an index: its bytes, the hash that pulls exactly these, and what they say."""

    content: bytes
    digest: str
    document: dict[str, Any]


class Registry:
    """One repository of a registry, with the login that Docker's configuration has for it."""

    def __init__(self, repository: str) -> None:
        host, path = reference.split(repository)
        self.repository, self.host = repository, host or "docker.io"
        self._path = path if host or "/" in path else f"library/{path}"
        self._session = requests.Session()
        self._session.auth = lambda request: request  # ~/.netrc is none of Docker's logins
        self._session.trust_env = not _LOOPBACK.fullmatch(self.host)
        company = Path("/etc/docker/certs.d", self.host, "ca.crt")  # where the engine looks too
        if company.is_file() or "REQUESTS_CA_BUNDLE" not in os.environ:
            self._session.verify = str(company) if company.is_file() else os.environ.get("SSL_CERT_FILE") or True
        # other=0: what fails for TLS stays so.
        again = Retry(_ATTEMPTS - 1, other=0, backoff_factor=0.5, backoff_jitter=0.5, allowed_methods=None,
                      status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)  # fmt: skip
        self._session.adapters = dict.fromkeys(("https://", "http://"), HTTPAdapter(max_retries=again))

    def find(self, name: str) -> Manifest | None:
        """Return the manifest of a tag or a digest; None where there is none. ``SourceError``: of other bytes."""
        answer = self._ask("GET", f"{self._address}/manifests/{name}", absent=404, headers={"Accept": _KINDS})
        if answer.status_code == 404:
            return None
        digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
        if name.startswith("sha256:") and name != digest:
            raise errors.SourceError(f"{self.repository}@{name}: its registry sent {digest}; do not use it")
        return Manifest(answer.content, digest, answer.json())

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
        settings = self._ask("GET", f"{self._address}/blobs/{config}").json().get("config") or {}
        return dict(settings.get("Labels") or {})

    def ids(self, manifest: Manifest) -> list[str]:
        """Return by which ids engines know an image: of its manifest, of its configuration, or of their index."""
        parts = [(image.document["config"]["digest"], image.digest) for image in self.images(manifest)]
        return [manifest.digest, *(name for part in parts for name in part)]

    def check_push(self) -> None:
        """Raise ``EngineError`` unless this login may push: begin an upload, and take it back. Nothing stays."""
        begun = self._ask("POST", f"{self._address}/blobs/uploads/")
        location = urljoin(begun.url, begun.headers.get("Location", ""))
        if urlsplit(location).netloc == urlsplit(begun.url).netloc:
            self._session.delete(location, timeout=_TIMEOUT_S)  # a registry that cannot forgets it by itself

    def check_pushed_here(self, digest: str) -> dict[str, str]:
        """Return the labels of an image that ``docker/build.py`` checked and pushed; ``EngineError`` for any other."""
        name, manifest = f"{self.repository}@{digest}", self.get(digest)
        labels = self.labels(manifest)
        tags = [reference.name_candidate(labels, image_id, checked=True) for image_id in self.ids(manifest)]
        if digest not in map(self.digest, dict.fromkeys(tags)):
            raise errors.EngineError(
                f"{name}: is not under {tags[-1]}, so it passed no check; push it with docker/build.py, without "
                "--validate none"
            )
        return labels

    def check_free(self, tags: Sequence[str], digest: str = "") -> None:
        """Raise ``EngineError`` where a tag that never moves is another image than this, or any image."""
        for tag in filter(reference.FIXED.fullmatch, tags):
            if self.digest(tag) not in (None, digest):
                raise errors.EngineError(
                    f"{self.repository}:{tag}: is another image already; take the next version, for none ever moves "
                    "(on GitHub: run the failed jobs again, not all of them, which build another image)"
                )

    def promote(self, digest: str, tags: Sequence[str]) -> list[dict[str, str | None]]:
        """Move tags to a digest that the repository holds, in order, and read each of them back.

        Return for each the ``tag``, its ``digest``, and the one ``before``, None for a new tag. One that moves with
        each correction stays where the image of a newer release has it. ``EngineError`` where the digest is not there,
        or a tag cannot be moved; those before have moved.
        """
        moved: list[dict[str, str | None]] = []
        manifest, release = self.get(digest), max(map(reference.read_version, tags))
        self.check_free(tags, digest)
        for tag in tags:
            before = self.find(tag)
            if reference.LINE.fullmatch(tag):
                if not release:
                    raise errors.OptionError(f"{tag}: a release alone moves it; give its version too")
                version = self.labels(before).get(f"{OCI}.version", "") if before else ""
                if reference.read_version(version) > release:
                    console.note(f"{self.repository}: {tag} stays with a newer release, {version}")
                    continue
            self.check_free([tag], digest)  # again: somebody may have given it since
            if before != manifest:
                kind = str(manifest.document.get("mediaType", "application/vnd.oci.image.manifest.v1+json"))
                url, headers = f"{self._address}/manifests/{tag}", {"Content-Type": kind}
                self._ask("PUT", url, data=manifest.content, headers=headers)
            if (now := self.digest(tag)) != digest:
                raise errors.EngineError(f"{self.repository}:{tag}: has {now}, not {digest}: somebody else moves it")
            moved.append({"tag": tag, "before": before and before.digest, "digest": digest})
            console.note(f"{self.repository}:{tag}: {digest} (before: {moved[-1]['before'] or 'no such tag'})")
        return moved

    def _ask(self, method: str, url: str, absent: int = 0, **options: Any) -> requests.Response:
        """Return an answer that is good, or says ``absent``."""
        try:
            answer = self._session.request(method, url, timeout=_TIMEOUT_S, **options)
        except requests.RequestException as error:
            remedy = "try again later"
            if isinstance(error, requests.exceptions.SSLError):
                remedy = "it speaks plain HTTP, or its certificate cannot be verified; put that of its authority into "
                remedy += f"/etc/docker/certs.d/{self.host}/ca.crt"
            raise errors.EngineError(f"{self.repository}: cannot be reached ({str(error)[-300:]}); {remedy}") from error
        if answer.ok or answer.status_code == absent:
            return answer
        raise errors.EngineError(
            f"{self.repository}: refused ({answer.status_code} {answer.reason}); log in with "
            f"`docker login {self.host}`, and check --repo and --name"
        )

    @functools.cached_property
    def _address(self) -> str:
        """Where the repository is, after a login. Engines speak plain HTTP with this machine alone."""
        server = "https://" + ("registry-1.docker.io" if self.host == "docker.io" else self.host)
        try:
            answer = self._ask("GET", f"{server}/v2/", absent=401)
        except errors.EngineError:
            if not _LOOPBACK.fullmatch(self.host):
                raise
            server = server.replace("https:", "http:")
            answer = self._ask("GET", f"{server}/v2/", absent=401)
        login, (kind, _, fields) = _read_login(self.host), answer.headers.get("WWW-Authenticate", "").partition(" ")
        user, secret = (login.get(key, "").encode().decode("latin-1") for key in ("username", "password"))  # as UTF-8
        basic = (user, secret) if user else None
        words = dict(re.findall(r'(\w+)="([^"]*)"', fields))
        if kind.lower() == "basic":
            self._session.auth = basic or self._session.auth
        elif kind.lower() == "bearer" and words.get("realm", "").startswith(("https://", "http://")):
            scope = f"repository:{self._path}:pull{',push' if login else ''}"
            form = {"service": words.get("service", ""), "scope": scope}
            if token := login.get("identitytoken"):
                form |= {"grant_type": "refresh_token", "refresh_token": token, "client_id": "multimesh"}
                answer = self._ask("POST", words["realm"], data=form)
            else:
                answer = self._ask("GET", words["realm"], params=form, auth=basic)
            tokens = answer.json()
            self._session.headers["Authorization"] = f"Bearer {tokens.get('token') or tokens.get('access_token')}"
        return f"{server}/v2/{self._path}"


def _read_login(host: str) -> dict[str, str]:
    """Return the login that Docker's configuration, or its credential helper, has for a registry."""
    try:
        login = docker.auth.load_config().resolve_authconfig(host) or {}
    except (DockerException, ValueError) as error:
        raise errors.EngineError(f"{host}: its login cannot be read ({error}); run `docker login {host}`") from error
    return {name.lower(): value for name, value in login.items() if value}

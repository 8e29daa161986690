"""What no engine answers before a build: whether this login may push, and which tags a repository has.

Manifests are read and tags are moved by ``docker buildx imagetools``. Docker's SDK finds the login; urllib3 tries again
after network faults, 429 and 5xx, as long as the server asks for.
"""

from __future__ import annotations

import ipaddress
import re
import warnings
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth
from urllib3.util.retry import Retry

from tooling.core import errors
from tooling.image.reference import Reference

_TIMEOUT_S = (10, 60)
_HUB = "registry-1.docker.io"
_IDENTITY = "<token>"  # Docker's name for a user with a token in place of a password
_AGAIN = Retry(
    total=5, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=None,
    raise_on_status=False,
)  # fmt: skip


def find_login(host: str) -> HTTPBasicAuth | None:
    """Return the login that ``docker login`` left for a registry, in a file or with a helper.

    What a helper says is not repeated: it may be the password.
    """
    from docker.errors import DockerException

    from docker import auth

    helper = "HELPER"
    try:
        config = auth.load_config(None)
        helper = config.get_credential_store(host) or helper
        with warnings.catch_warnings(action="ignore"):
            found = {key.lower(): value for key, value in (config.resolve_authconfig(host) or {}).items()}
        if token := found.get("identitytoken"):
            return HTTPBasicAuth(_IDENTITY, token)
        return HTTPBasicAuth(found["username"], found["password"].rstrip("\0")) if found else None
    except DockerException:
        raise errors.RegistryError(
            f"{host}: docker-credential-{helper} is not here or failed, and Docker's config.json names it; "
            "install it or log in again"
        ) from None
    except (ValueError, KeyError):
        raise errors.RegistryError(f"{host}: the login in Docker's config.json cannot be read; log in again") from None


class Registry:
    """The repository of a reference in its registry; the tag of the reference does not matter."""

    def __init__(self, reference: Reference) -> None:
        host, path = reference.host, reference.path
        if host is None:
            # As every engine reads it: a name without a host is Docker Hub's.
            host, path = "docker.io", path if "/" in path else f"library/{path}"
        self.place = f"{host}/{path}"
        self._host, self._path, self._login = host, path, find_login(host)
        self._server = _HUB if host == "docker.io" else host
        self._session = requests.Session()
        for scheme in ("https://", "http://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=_AGAIN))
        # Without this, requests would put a login from ~/.netrc in place of ours.
        self._session.auth = _as_it_is
        self._session.trust_env = not _is_loopback(self._server)
        authority = Path("/etc/docker/certs.d") / self._server / "ca.crt"  # where Docker looks
        self._session.verify = str(authority) if authority.is_file() else True

    def check_push(self) -> None:
        """Raise ``RegistryError`` unless this login may push here; leaves nothing behind."""
        answer = self._call("POST", "blobs/uploads/", fine=(202,))
        place = urlsplit(urljoin(answer.url, answer.headers.get("Location", "")))
        if place.netloc == urlsplit(answer.url).netloc:
            self._call("DELETE", f"{place.path}?{place.query}", fine=range(200, 500))

    def tags(self) -> list[str]:
        """Return every tag of the repository; none where it does not exist yet."""
        path, found = "tags/list?n=1000", list[str]()
        while path:
            answer = self._call("GET", path, fine=(200, 404))
            found += (answer.json().get("tags") or []) if answer.ok else []
            place = urlsplit(urljoin(answer.url, answer.links.get("next", {}).get("url", "")))
            path = f"{place.path}?{place.query}" if "next" in answer.links else ""
        return found

    def _call(self, method: str, path: str, fine: Collection[int]) -> requests.Response:
        """Send one request, with a login where the registry asks for it; another answer than ``fine`` is an error.

        ``path`` is below the repository or absolute.
        """
        url = self._address + (path if path.startswith("/") else f"/v2/{self._path}/{path}")
        answer = self._exchange(method, url)
        scope = "pull" if method == "GET" else "pull,push"
        if answer.status_code == 401 and (token := self._authorize(answer, scope)) is not None:
            answer = self._exchange(method, url, headers={"Authorization": token})
        if answer.status_code not in fine:
            raise self._fault(answer, method)
        return answer

    @cached_property
    def _address(self) -> str:
        """The registry's address; plain HTTP only on this machine, and only where it does not speak TLS."""
        if _is_loopback(self._server):
            with requests.Session() as once:
                once.trust_env = False
                try:
                    once.get(f"https://{self._server}/v2/", timeout=_TIMEOUT_S, verify=self._session.verify)
                except requests.RequestException:
                    return f"http://{self._server}"
        return f"https://{self._server}"

    def _exchange(self, method: str, url: str, **more: object) -> requests.Response:
        try:
            return self._session.request(method, url, timeout=_TIMEOUT_S, allow_redirects=method == "GET", **more)  # type: ignore[arg-type]
        except requests.exceptions.SSLError as error:
            raise errors.RegistryError(f"{self._host}: its certificate is not valid here; check the name") from error
        except requests.RequestException as error:
            said = f"{self.place}: no answer ({type(error).__name__}); check its name, and try again later"
            raise errors.RegistryError(said) from error

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
        """Return the error for an answer. It leaves out the body, which may repeat our request."""
        status = answer.status_code
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

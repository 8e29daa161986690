"""Requests to a registry: where it is, who we are to it, and what its answers mean."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import requests

from workflows import errors
from workflows.image import retry
from workflows.image.credentials import Login
from workflows.image.retry import Transient

_TIMEOUT_S = (10, 60)
_HUB = "registry-1.docker.io"
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class Transport:
    """One repository of one registry over HTTP; raises ``Transient`` for what may pass, ``RegistryError`` for the rest.

    Parameters
    ----------
    host, path
        As a reference names them, e.g. ``ghcr.io`` and ``owner/multimesh-jax``.
    """

    def __init__(self, host: str, path: str, login: Login | None) -> None:
        self.place = f"{host}/{path}"
        self._host, self._path, self._login = host, path, login
        self._server = _HUB if host == "docker.io" else host
        self._session = requests.Session()
        # Without this, requests would put a login from ~/.netrc in place of ours.
        self._session.auth = _as_it_is
        self._session.trust_env = not _is_loopback(self._server)
        if (authority := _authority(self._server)) is not None:
            self._session.verify = authority
        self._authorizations: dict[str, str] = {}
        self._origin: str | None = None

    def close(self) -> None:
        """Close its connections."""
        self._session.close()

    def send(
        self,
        method: str,
        path: str,
        *,
        scope: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        fine: Collection[int] = range(200, 400),
    ) -> requests.Response:
        """Send one request, with a login where the registry asks for it.

        Parameters
        ----------
        path
            Below the repository, or an absolute path of the registry.
        scope
            ``pull`` or ``pull,push``: what a token is asked for.
        fine
            Statuses that are an answer; all others raise.
        """
        url = self.origin() + (path if path.startswith("/") else f"/v2/{self._path}/{path}")
        answer = self._exchange(method, url, body, self._with_login(headers, scope))
        if answer.status_code == 401:
            self._authorizations.pop(scope, None)
            authorization = self._authorize(answer.headers.get("WWW-Authenticate", ""), scope)
            if authorization is not None:
                self._authorizations[scope] = authorization
                answer = self._exchange(method, url, body, self._with_login(headers, scope))
        if answer.status_code not in fine:
            raise self._fault(answer, method)
        return answer

    def origin(self) -> str:
        """Return the registry's address; plain HTTP only on this machine, and only where it does not speak TLS."""
        if self._origin is None:
            schemes = ("https", "http") if _is_loopback(self._server) else ("https",)
            self._origin = f"{self._first_that_answers(schemes)}://{self._server}"
        return self._origin

    def _first_that_answers(self, schemes: tuple[str, ...]) -> str:
        for scheme in schemes[:-1]:
            try:
                self._session.get(f"{scheme}://{self._server}/v2/", timeout=_TIMEOUT_S)
                return scheme
            except requests.RequestException:
                continue
        return schemes[-1]

    def _with_login(self, headers: Mapping[str, str] | None, scope: str) -> dict[str, str]:
        # A token of a smaller scope may be answered with 403, which would look like a refusal.
        known = self._authorizations.get(scope)
        return {**(headers or {}), **({"Authorization": known} if known else {})}

    def _exchange(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], **more: Any
    ) -> requests.Response:
        follow = method == "GET"
        try:
            return self._session.request(
                method, url, data=body, headers=dict(headers), timeout=_TIMEOUT_S, allow_redirects=follow, **more
            )
        except requests.exceptions.SSLError as error:
            raise errors.RegistryError(f"{self._host}: its certificate is not valid here; check the name") from error
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise Transient(f"no answer ({type(error).__name__})") from error

    def _authorize(self, challenge: str, scope: str) -> str | None:
        """Answer the registry's question who we are; None if we have nothing to answer."""
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic":
            return self._login.basic if self._login and not self._login.identity else None
        parameters = dict(_PARAMETER.findall(rest))
        realm = parameters.get("realm", "")
        if kind.lower() != "bearer" or not realm:
            return None
        if urlsplit(realm).scheme != "https" and not _is_loopback(urlsplit(realm).netloc):
            raise errors.RegistryError(f"{self._host}: wants our login sent to {realm} in the open; it was not sent")
        asked = {"service": parameters.get("service", ""), "scope": f"repository:{self._path}:{scope}"}
        if self._login and self._login.identity:
            form = {"grant_type": "refresh_token", "refresh_token": self._login.secret, "client_id": "multimesh"}
            answer = self._exchange("POST", realm, urlencode(asked | form).encode(), _FORM)
        else:
            headers = {"Authorization": self._login.basic} if self._login else {}
            answer = self._exchange("GET", realm, None, headers, params=asked)
        if answer.status_code != 200:
            raise self._fault(answer, "a token")
        try:
            said = answer.json()
            token = said.get("token") or said.get("access_token")
        except (ValueError, AttributeError) as error:
            raise errors.RegistryError(f"{self._host}: its token service does not answer in JSON") from error
        return f"Bearer {token}" if token else None

    def _fault(self, answer: requests.Response, method: str) -> Exception:
        """Return what an answer means: try again, or over. Its body is not repeated: it may say what we sent."""
        status = answer.status_code
        if status == 429 or status >= 500:
            return Transient(f"answer {status}", retry.retry_after(answer.headers.get("Retry-After")))
        if status == 401:
            who = "the login for it is not accepted" if self._login else "nobody is logged in"
            return errors.RegistryError(f"{self.place}: {who} (401); run `docker login {self._host}`")
        if status == 403:
            return errors.RegistryError(f"{self.place}: this login may not do that (403); ask its owner for access")
        if status == 404:
            return errors.RegistryError(f"{self.place}: does not exist (404); create it or correct --repo and --name")
        return errors.RegistryError(f"{self.place}: refuses {method} (answer {status}); check that it is a registry")


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _is_loopback(netloc: str) -> bool:
    host = urlsplit(f"//{netloc}").hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _authority(server: str) -> str | None:
    """Return the certificate authority that Docker uses for a registry, if one is set up."""
    file = Path("/etc/docker/certs.d") / server / "ca.crt"
    return str(file) if file.is_file() else None

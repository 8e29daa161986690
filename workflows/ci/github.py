"""The few calls of GitHub's REST interface that the workflows make.

See https://github.com/github/rest-api-description; the address and the token are those that a workflow run is given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from workflows import errors

_TIMEOUT = 60  # seconds, for connecting and for each read
_REPOSITORY = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")


class GitHub:
    """Issues, pull requests and releases of the repository that a workflow run's environment names.

    That is ``GITHUB_API_URL``, ``GITHUB_REPOSITORY`` and ``GITHUB_TOKEN``; one that is missing or malformed is a
    ``UsageError``. The token never shows in a log or an error.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        for name in ("GITHUB_REPOSITORY", "GITHUB_TOKEN"):
            if not environ.get(name):
                raise errors.UsageError(f"{name} is not set; this command runs in a workflow, or give it by hand")
        repository = environ["GITHUB_REPOSITORY"]
        if not _REPOSITORY.fullmatch(repository):
            raise errors.UsageError(f"GITHUB_REPOSITORY '{repository}': is not of the form owner/name")
        api = environ.get("GITHUB_API_URL", "https://api.github.com").rstrip("/")
        self._root, self._owner = f"{api}/repos/{repository}", repository.partition("/")[0]
        self._session = requests.Session()
        accepted = {"Accept": "application/vnd.github+json"}
        self._session.headers.update({"Authorization": f"Bearer {environ['GITHUB_TOKEN']}"} | accepted)
        # A POST that was answered with 5xx may have worked, so no POST is repeated.
        status = (429, 500, 502, 503, 504)
        again = Retry(total=4, backoff_factor=1, status_forcelist=status, allowed_methods=("GET", "PATCH"))
        for scheme in ("https://", "http://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=again))

    def upsert_issue(self, title: str, body: str, label: str) -> str:
        """Open an issue with this label, or rewrite the open one; return its address."""
        return self._upsert("/issues", self._open_issues(label), {"title": title, "body": body}, {"labels": [label]})

    def close_issues(self, comment: str, label: str) -> list[str]:
        """Close the open issues with this label; return their addresses."""
        issues = self._open_issues(label)
        for issue in issues:
            self._ask("POST", f"/issues/{issue['number']}/comments", json={"body": comment})
            self._ask("PATCH", f"/issues/{issue['number']}", json={"state": "closed"})
        return [str(issue["html_url"]) for issue in issues]

    def upsert_pull(self, branch: str, base: str, title: str, body: str) -> str:
        """Open a pull request of a branch, or rewrite the open one; return its address."""
        mine = self._ask("GET", "/pulls", params={"head": f"{self._owner}:{branch}", "state": "open"})
        return self._upsert("/pulls", mine, {"title": title, "body": body}, {"head": branch, "base": base})

    def _open_issues(self, label: str) -> list[Any]:
        found = self._ask("GET", "/issues", params={"labels": label, "state": "open"})
        return [issue for issue in found if "pull_request" not in issue]

    def _upsert(self, path: str, mine: list[Any], said: dict[str, Any], new: dict[str, Any]) -> str:
        if mine:
            return str(self._ask("PATCH", f"{path}/{mine[0]['number']}", json=said)["html_url"])
        return str(self._ask("POST", path, json=said | new)["html_url"])

    def publish_release(self, tag: str, notes: str, files: list[Path]) -> str:
        """Make the release of a tag with these files; return its address. One that exists is an error."""
        made = self._ask("POST", "/releases", json={"tag_name": tag, "name": tag, "body": notes, "draft": True})
        upload = str(made["upload_url"]).partition("{")[0]
        for path in files:
            kind = {"Content-Type": "application/octet-stream"}
            self._ask("POST", upload, params={"name": path.name}, data=path.read_bytes(), headers=kind)
        # Last: a reader never sees a release without its files. Legacy: the highest version is shown as the latest.
        made = self._ask("PATCH", f"/releases/{made['id']}", json={"draft": False, "make_latest": "legacy"})
        return str(made["html_url"])

    def _ask(self, method: str, path: str, **arguments: Any) -> Any:
        url = path if path.startswith("http") else f"{self._root}{path}"
        try:
            answer = self._session.request(method, url, timeout=_TIMEOUT, **arguments)
        except requests.RequestException as error:
            raise errors.NetworkError(f"{method} {url}: no answer ({type(error).__name__}); run again later") from error
        if answer.status_code in (401, 403):
            raise errors.ToolError(
                f"{method} {url}: refused ({answer.status_code}, {_reason(answer)}); {_remedy(_reason(answer))}"
            )
        if not answer.ok:
            raise errors.ToolError(f"{method} {url}: answered {answer.status_code} ({_reason(answer)})")
        return answer.json()


def _remedy(reason: str) -> str:
    if "not permitted to create" in reason:
        return "allow it under Settings, Actions, General: Allow GitHub Actions to create and approve pull requests"
    return "the token lacks a permission; the workflow names it"


def _reason(answer: requests.Response) -> str:
    try:
        return str(answer.json().get("message", answer.reason))[:200]
    except (ValueError, AttributeError):
        return str(answer.reason)

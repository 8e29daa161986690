"""bazel-remote as a cache server: a container of the pinned image, which bounds its own size."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
import urllib.error
import urllib.request

from workflows import errors, proc
from workflows.cache.settings import USER, Place, Settings, read_password, write_private
from workflows.cache.usage import Hits

_STARTS_WITHIN_S = 30.0
_METRIC = re.compile(r"^bazel_remote_incoming_requests_total\{([^}]*)\}\s+([0-9.e+]+)$", re.MULTILINE)
_PINNED = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")


def start(place: Place, settings: Settings, password: str | None, pin: str | None) -> None:
    """Start the container and wait until it answers.

    Raises
    ------
    PinError
        No digest of the image is known.
    CacheError
        The container does not start or does not answer.
    """
    if pin is None or not _PINNED.fullmatch(pin):
        raise errors.PinError(
            "bazel-remote: no digest of its image is locked; run `python -m workflows bump images` where its registry "
            "can be reached, or use --backend nginx"
        )
    place.content.mkdir(exist_ok=True)
    if password is not None:
        # The unsalted form is the only one that both this standard library can write and bazel-remote reads.
        digest = base64.b64encode(hashlib.sha1(password.encode(), usedforsecurity=False).digest()).decode()
        write_private(place.root / "htpasswd", f"{USER}:{{SHA}}{digest}\n")
    _docker("rm", "--force", name(place), check=False)
    result = _docker(*run_argv(place, settings, pin), check=False)
    if result.returncode:
        raise errors.CacheError(f"bazel-remote: the container does not start ({result.complaint})")
    end = time.monotonic() + _STARTS_WITHIN_S
    while _get(place, settings, "status") is None:
        if time.monotonic() > end or not _running(place):
            said = _docker("logs", "--tail", "3", name(place), check=False).complaint
            raise errors.CacheError(f"bazel-remote: does not answer on {settings.address}; it said: {said}")
        time.sleep(0.1)


def run_argv(place: Place, settings: Settings, pin: str) -> list[str]:
    """Return the arguments of ``docker`` that start the server; none holds a secret."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    argv = ["run", "--detach", "--name", name(place), "--restart", "unless-stopped"]
    argv += ["--user", f"{os.getuid()}:{os.getgid()}", "--read-only", "--cap-drop", "ALL"]
    argv += ["--security-opt", "no-new-privileges", "--publish", f"{host}:{settings.port}:8080"]
    argv += ["--mount", f"type=bind,source={place.content},target=/data"]
    if settings.password_file:
        argv += ["--mount", f"type=bind,source={place.root / 'htpasswd'},target=/htpasswd,readonly"]
    # The image's entry point names the address and the folder already.
    argv += [pin, "--max_size", str(settings.max_bytes >> 30), "--enable_endpoint_metrics"]
    return argv + (["--htpasswd_file", "/htpasswd"] if settings.password_file else [])


def stop(place: Place) -> bool:
    """Stop and remove the container; return False if there is none."""
    if _docker("container", "inspect", name(place), check=False).returncode:
        return False
    result = _docker("rm", "--force", name(place), check=False)
    if result.returncode:
        raise errors.CacheError(f"{name(place)}: cannot be removed ({result.complaint})")
    return True


def state(place: Place, settings: Settings) -> str:
    """Return ``running``, ``not answering`` or ``stopped``."""
    if not _running(place):
        return "stopped"
    return "not answering" if _get(place, settings, "status") is None else "running"


def hits(place: Place, settings: Settings) -> Hits | None:
    """Return how many actions were found since the server started, if it says."""
    text = _get(place, settings, "metrics")
    return None if text is None else parse_metrics(text)


def parse_metrics(text: str) -> Hits:
    """Read the lookups of actions out of Prometheus text."""
    counts = {"hit": 0, "miss": 0}
    for labels, value in _METRIC.findall(text):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if pairs.get("kind") == "ac" and pairs.get("method") == "get" and pairs.get("status") in counts:
            counts[pairs["status"]] += int(float(value))
    return Hits(counts["hit"], counts["miss"])


def name(place: Place) -> str:
    """Return the container's name: one a folder."""
    return "multimesh-cache-" + hashlib.sha256(str(place.root.resolve()).encode()).hexdigest()[:12]


def _running(place: Place) -> bool:
    answer = _docker("container", "inspect", "--format", "{{.State.Running}}", name(place), check=False)
    return answer.text == "true"


def _docker(*args: str, check: bool) -> proc.Result:
    try:
        return proc.run(["docker", *args], check=check)
    except errors.ToolError as error:
        raise errors.ToolError("docker: not found; install a Docker engine, or use --backend nginx") from error


def _get(place: Place, settings: Settings, path: str) -> str | None:
    request = urllib.request.Request(f"http://{settings.address}/{path}")
    if settings.password_file:
        login = f"{USER}:{read_password(settings.password_file)}"
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=2) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except (OSError, ValueError, urllib.error.URLError):
        return None

"""Runs a build of a snapshot of this clone by buildx, and explains why one failed."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tooling.core import console, errors, files, proc
from tooling.image import bazel_cache, buildx, digests, engine, snapshot
from tooling.image.request import Request, fits_an_option
from tooling.image.snapshot import Snapshot

if TYPE_CHECKING:
    from docker.models.images import Image

    from docker import DockerClient

FOLDER, ARCHIVE = Path("build/image"), Path("docker/context/python.tar.gz")
_CA_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
# Labels say what buildx would ask git.
_SETTINGS = {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDX_GIT_INFO": "false"}
# BuildKit's summary of the step that broke a build, not of those that were stopped for that, with its last lines.
_FAILED = r"(?m)^------\n > (.*):\n((?:.*\n)*?)------$"
_REASON = r"(?m)^ERROR: (?:failed to (?:build|solve): )*(.*)"
_TELLING = r"(?!error: [a-z-]+$)([A-Za-z]*(error|ERROR|Error|Exception)|E|fatal|curl)(: | \()"
# Where a builder looks for a base: a step of its own, or the first of a stage.
_BASE = r"\[internal\] load metadata|\[.* \d+/\d+\] FROM "
_UNREACHABLE = (
    r"(?i)could ?n.t (resolve|connect)|could not (resolve|connect)|temporary failure|name resolution|no such host|"
    r"(unable|failed) to (connect|fetch|establish)|connection (refused|reset|timed out)|reset by peer|timed? ?out|"
    r"unreachable|certificate (verif|problem|signed|is not)|x509|local issuer|too ?many ?requests|max retries|"
    r"(status|http|error|code):? (429|50[0234])\b|\b50[0234] +(internal|bad|service|gateway|server)"
)
_CAUSES: tuple[tuple[str, type[errors.ToolingError], str], ...] = (
    (proc.DISK_FULL, errors.ToolingError, "the engine's disk is full; free some space (`docker system df`), run again"),
    (proc.OTHER_FILES, errors.SourceError,
     "the package index offers other files than the locked ones; do not use them"),
    ("(?i)exec format error", errors.EngineError,
     "the engine's machine cannot run programs of this platform; register QEMU there (Debian and Ubuntu: "
     "qemu-user-static, binfmt-support), or leave out --platform"),
    (_UNREACHABLE, errors.NotThereError,
     "cannot reach what it needs ({last}); check --pip-config, --ca-bundle and --network; a Python that cannot be "
     "fetched may be given with --python-archive"),
)  # fmt: skip


class Plan(NamedTuple):
    """One build, ready to run: the options of its command without the output, and what it goes by."""

    base: buildx.Bases
    arguments: dict[str, str]
    labels: dict[str, str]
    options: list[str]
    context: str

    def argv(self, target: str, *output: str) -> list[str]:
        """Return the command that builds a target."""
        argv = ["docker", "buildx", "build", "--progress=plain", "--file", f"{self.context}/{buildx.DOCKERFILE}"]
        argv += self.options
        for flag, pairs in (("--build-arg", self.arguments), ("--label", self.labels)):
            argv += [word for pair in pairs.items() for word in (flag, "=".join(pair))]
        return [*argv, "--target", target, *output, self.context]

    def to_image(self, target: str, result: Path, archive: Path | None) -> list[str]:
        """Return the command that makes the image: in the engine, or in a file with the times of all files set."""
        output = ["--load"]  # a separate builder keeps its image, unless it is told to hand it over
        if archive:
            output = ["--build-arg", f"SOURCE_DATE_EPOCH={buildx.EPOCH}"]
            output += ["--output", f"type=docker,compression=gzip,rewrite-timestamp=true,dest={archive}"]
        return self.argv(target, *output, "--metadata-file", str(result))


def make_plan(root: Path, request: Request, view: Snapshot, context: Path, secrets: Path) -> Plan:
    """Return the build of a request from the files in ``context``; the file of a Bazel cache lies in ``secrets``."""
    pins, from_source = digests.load(root), request.jaxlib == "source"
    base = buildx.bases(request, pins)
    arguments = buildx.make_arguments(request, pins, base)
    python = "of the base"
    if not request.base_image or request.python_archive:  # the pinned bases have older ones
        python = f"standalone sha256:{arguments['PYTHON_SHA256']}"
    labels = buildx.labels(root, request, base, view, python=python, source=find_source(root))
    options = ["--platform", request.platform] if request.platform else []
    options += [] if request.layer_cache else ["--no-cache"]
    options += find_access(request, os.environ)
    if from_source:
        _check_bazel(root, arguments)
    if from_source and request.use_bazel_cache:
        options += _reach_cache(request, secrets)
    return Plan(base, arguments, labels, options, str(context))


def _check_bazel(root: Path, arguments: Mapping[str, str]) -> None:
    """Refuse a Bazel that jax would refuse: it takes minutes until it looks."""
    wanted = (root / "third_party/jax/.bazelversion").read_text(encoding="utf-8").strip()
    if f"/{wanted}/" not in arguments["BAZEL_URL"] or not arguments["BAZEL_SHA256"]:
        raise errors.SourceError(
            f"third_party/jax wants Bazel {wanted}, and {digests.FILE} has {arguments['BAZEL_URL']}, sha256 "
            f"{arguments['BAZEL_SHA256'] or 'null'}; write its address and checksum there"
        )


def find_access(request: Request, environ: Mapping[str, str]) -> list[str]:
    """Return the options by which a build reaches its packages; they name files and variables, never their content."""

    def find_file(*variables: str) -> Path | None:
        path = next((Path(environ[name]) for name in variables if environ.get(name)), None)
        return path if path and path.is_file() and fits_an_option(path) else None

    options = ["--network", request.network] if request.network != "default" else []
    if config := request.pip_config or find_file("PIP_CONFIG_FILE"):
        options += ["--secret", f"id=pip.conf,src={config.absolute()}"]
    if bundle := request.ca_bundle or find_file(*_CA_VARIABLES):
        options += ["--secret", f"id=ca.pem,src={bundle.absolute()}"]
    for name in filter(environ.get, _PROXIES):
        options += ["--build-arg", name]  # without a value: buildx takes it from the environment
    return options


def _reach_cache(request: Request, secrets: Path) -> list[str]:
    """Return the options that hand over the settings of the Bazel cache, if one answers."""
    server = bazel_cache.find_server(request.bazel_cache)
    if server is None:
        console.note("no Bazel cache of yours runs here; the build goes on without (docker/start-cache.sh starts one)")
        return []
    console.note(f"Bazel cache {server.address}: {'read and written' if request.bazel_cache_write else 'read only'}")
    server.write_rc(secrets / "bazelrc", write=request.bazel_cache_write)
    # One on this machine's loopback is seen from the host network only.
    on_loopback = server.address.startswith(("127.", "localhost", "[::1]"))
    return ["--secret", f"id=bazelrc,src={secrets / 'bazelrc'}", *(["--network", "host"] if on_loopback else [])]


def name_components(request: Request) -> tuple[str, ...]:
    """Return the components whose files a build reads."""
    return ("maxtext", "jax", "xla") if request.jaxlib == "source" else ("maxtext",)


def run(
    root: Path,
    client: DockerClient,
    request: Request,
    allow: Callable[[Plan, Snapshot], None] = lambda plan, view: None,
) -> Image:
    """Build an image, with all that it needs beside it; it has no name yet.

    ``allow`` gets what will be built, and raises where that may not be. An image for a push has no times of its build,
    so that another build of the commit has the same digest, where the engine can.
    """
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="multimesh-image-") as temporary,
        files.lock(folder / "lock", waiting="another build runs in this clone; this one waits for its end"),
    ):
        place, context = Path(temporary), folder / "context"
        view = snapshot.take_snapshot(root, folder, name_components(request))
        if request.python_archive:
            shutil.copyfile(request.python_archive, context / ARCHIVE)
        plan = make_plan(root, request, view, context, place)
        allow(plan, view)
        if request.base_image:
            plan.labels[f"{buildx.LABEL}.python"] = _ask_python(plan, place)
        if view.changed:
            console.note(f"not committed, and read by the build: {shorten_names(view.changed)}")
        for reference in plan.base.unpinned:
            console.note(f"{reference}: not pinned by digest; a release refuses that")
        archive = place / "image.tar" if request.upload and engine.rewrites_times(client) else None
        _run(plan.to_image(request.target, place / "result", archive), plan)
        answer = json.loads((place / "result").read_text(encoding="utf-8"))
        if archive:
            with archive.open("rb") as file:
                client.images.load(file)
    # By the configuration or, in a containerd store, by the manifest.
    names = [answer[key] for key in ("containerimage.config.digest", "containerimage.digest") if key in answer]
    return engine.find_image(client, *names)


def _run(argv: Sequence[str], plan: Plan) -> None:
    done = proc.run(argv, env=os.environ | _SETTINGS, check=False, on_line=console.note)
    if done.returncode:
        raise explain(done, plan.base)


def _ask_python(plan: Plan, place: Path) -> str:
    """Return which Python an image has on a base that nobody pinned: its own, or the standalone one."""
    _run(plan.argv("facts", "--output", f"type=local,dest={place / 'facts'}"), plan)
    fields = dict(line.split(" = ", 1) for line in (place / "facts/pyvenv.cfg").read_text().splitlines())
    if fields["home"].startswith("/opt/python"):
        return f"standalone sha256:{plan.arguments['PYTHON_SHA256']}"
    return f"{fields['version']} of the base"


def shorten_names(names: Sequence[str]) -> str:
    """Return the first of many names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def explain(result: proc.Result, base: buildx.Bases) -> errors.ToolingError:
    """Return the error for a build that failed: the step, the reason, and the remedy."""
    output = result.stderr.decode("utf-8", "replace")
    step, tail = match.groups() if (match := re.search(_FAILED, output)) else ("", "")
    lines = [re.sub(r"^\d+\.\d+ ", "", line).strip() for line in tail.splitlines()]
    reason = (re.findall(_REASON, output) or [result.complaint])[-1]
    title = " ".join(word for word in step.split() if not word.startswith(("--mount=", "--from=", "--chown=")))
    where = f"step `{title if len(title) <= 100 else title[:97] + '...'}`" if step else "the build"
    # apt and pip first say the fault, then its consequence.
    telling = [line for line in lines if re.match(_TELLING, line)][-3:][:1]
    telling = telling or [line for line in lines if line and not line.startswith("WARNING")][-1:] or [reason]
    last = proc.shorten(re.sub(r"^(error|ERROR|Error): ", "", telling[0]))
    if re.match(_BASE, step):
        pin = next((pin for pin in base if pin.digest and pin.digest in step + reason), base.build)
        return errors.NotThereError(
            f"{pin.exact}: the base image cannot be fetched ({proc.shorten(reason)}); log in to its registry, give "
            f"another --base-image, or {pin.remedy}"
        )
    for pattern, kind, remedy in _CAUSES:
        if re.search(pattern, "\n".join([*lines, reason])):
            return kind(f"{where}: {remedy.format(last=last)}")
    return errors.EngineError(f"{where} failed: {last}")


def find_source(root: Path) -> str | None:
    """Return the address on GitHub of the repository, without a login that may be in it.

    A workflow's run says it; a clone came from there. A registry of GitHub links an image to it.
    """
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and name:
        return f"{server}/{name}"
    url = proc.run(["git", "-C", root, "remote", "get-url", "origin"], check=False).text
    match = re.fullmatch(r"(?:\w+://)?(?:[^/@]*@)?github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?", url)
    return f"https://github.com/{match[1]}" if match else None

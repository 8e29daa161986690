"""Runs a build of a snapshot of this clone by buildx, and explains why one failed."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tooling.core import console, errors, files, proc
from tooling.image import bazel_cache, buildx, digests, snapshot
from tooling.image.engine import Engine
from tooling.image.request import Built, ImageSpec, Means, fits_an_option
from tooling.image.snapshot import Snapshot

FOLDER, ARCHIVE = Path("build/image"), Path("docker/context/python.tar.gz")
_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
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
    """One build, ready to run: the command without its output, and what it goes by."""

    spec: ImageSpec
    means: Means
    base: buildx.Bases
    arguments: dict[str, str]
    labels: dict[str, str]
    access: tuple[str, ...]
    context: str

    def argv(self, target: str, *output: str) -> list[str]:
        """Return the command that builds a target."""
        argv = ["docker", "buildx", "build", "--progress=plain", "--file", f"{self.context}/{buildx.DOCKERFILE}"]
        argv += ["--platform", self.spec.platform] if self.spec.platform else []
        argv += ["--network", self.means.network] if self.means.network != "default" else []
        argv += [] if self.means.layer_cache else ["--no-cache"]
        argv += [word for pair in self.arguments.items() for word in ("--build-arg", "=".join(pair))]
        argv += [word for pair in self.labels.items() for word in ("--label", "=".join(pair))]
        return [*argv, *self.access, "--target", target, *output, self.context]

    def to_image(self, result: Path, archive: Path | None) -> list[str]:
        """Return the command that makes the image: in the engine, or in a file with the times of all files set."""
        output = ["--load"]  # a separate builder keeps its image, unless it is told to hand it over
        if archive:
            output = ["--build-arg", f"SOURCE_DATE_EPOCH={buildx.EPOCH}"]
            output += ["--output", f"type=docker,compression=gzip,rewrite-timestamp=true,dest={archive}"]
        return self.argv(self.spec.target, *output, "--metadata-file", str(result))


def make_plan(root: Path, spec: ImageSpec, means: Means, view: Snapshot, context: Path, secrets: Path) -> Plan:
    """Return the build of a spec from the files in ``context``; the file of a Bazel cache lies in ``secrets``."""
    pins = digests.load(root)
    base = buildx.bases(spec, pins)
    machine = _PLATFORMS.get(os.uname().machine, "linux/amd64")
    arguments = buildx.make_arguments(spec, pins, base, machine=machine, cached=means.use_bazel_cache)
    if spec.jaxlib == "source":
        _check_bazel(root, arguments)
    python = "of the base"
    if not spec.base_image or spec.python_archive:  # the pinned bases have older ones
        python = f"standalone sha256:{arguments['PYTHON_SHA256']}"
    labels = buildx.labels(root, spec, base, view, python=python, source=find_source(root))
    access = find_access(means, os.environ)
    if spec.jaxlib == "source" and means.use_bazel_cache:
        means, secret = _reach_cache(means, secrets)
        access += secret
    return Plan(spec, means, base, arguments, labels, access, str(context))


def _check_bazel(root: Path, arguments: Mapping[str, str]) -> None:
    """Refuse a Bazel that jax would refuse: it takes minutes until it looks."""
    wanted = (root / "third_party/jax/.bazelversion").read_text(encoding="utf-8").strip()
    if f"/{wanted}/" not in arguments["BAZEL_URL"] or not arguments["BAZEL_SHA256"]:
        raise errors.SourceError(
            f"third_party/jax wants Bazel {wanted}, and {digests.FILE} has {arguments['BAZEL_URL']}, sha256 "
            f"{arguments['BAZEL_SHA256'] or 'null'}; write its address and checksum there"
        )


def find_access(means: Means, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options by which a build reaches its packages; they name files and variables, never their content."""

    def find_file(*variables: str) -> Path | None:
        path = next((Path(environ[name]) for name in variables if environ.get(name)), None)
        return path if path and path.is_file() and fits_an_option(path) else None

    options: list[str] = []
    if config := means.pip_config or find_file("PIP_CONFIG_FILE"):
        options += ["--secret", f"id=pip.conf,src={config.absolute()}"]
    if bundle := means.ca_bundle or find_file(*_CA_VARIABLES):
        options += ["--secret", f"id=ca.pem,src={bundle.absolute()}"]
    for name in filter(environ.get, _PROXIES):
        options += ["--build-arg", name]  # without a value: buildx takes it from the environment
    return tuple(options)


def _reach_cache(means: Means, secrets: Path) -> tuple[Means, tuple[str, ...]]:
    """Return means that reach the Bazel cache, if one answers, and the option that hands its settings over."""
    server = bazel_cache.find_server(means.bazel_cache)
    if server is None:
        console.note("no Bazel cache of yours runs here; the build goes on without (docker/start-cache.sh starts one)")
        return means, ()
    console.note(f"Bazel cache {server.address}: {'read and written' if means.bazel_cache_write else 'read only'}")
    server.write_rc(secrets / "bazelrc", write=means.bazel_cache_write)
    # One on this machine's loopback is seen from the host network only.
    on_loopback = server.address.startswith(("127.", "localhost", "[::1]"))
    secret = ("--secret", f"id=bazelrc,src={secrets / 'bazelrc'}")
    return means._replace(network="host") if on_loopback else means, secret


def name_components(spec: ImageSpec) -> tuple[str, ...]:
    """Return the components whose files a build reads."""
    return ("maxtext", "jax", "xla") if spec.jaxlib == "source" else ("maxtext",)


def run(
    root: Path, engine: Engine, spec: ImageSpec, means: Means,
    allow: Callable[[Plan, Snapshot], None] = lambda plan, view: None, *, same_bytes: bool = False,
) -> Built:  # fmt: skip
    """Build an image, with all that it needs beside it; it has no name yet.

    ``allow`` gets what will be built, and raises where that may not be. ``same_bytes``: without the times of the build,
    so that another build of the commit has the same digest, where the engine can.
    """
    started, folder = time.monotonic(), root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="multimesh-image-") as temporary,
        files.lock(folder / "lock", waiting="another build runs in this clone; this one waits for its end"),
    ):
        place, context = Path(temporary), folder / "context"
        view = snapshot.take_snapshot(root, folder, name_components(spec))
        if spec.python_archive:
            shutil.copyfile(spec.python_archive, context / ARCHIVE)
        plan = make_plan(root, spec, means, view, context, place)
        allow(plan, view)
        if spec.base_image:
            plan.labels[f"{buildx.LABEL}.python"] = _ask_python(plan, place)
        if view.changed:
            console.note(f"not committed, and read by the build: {shorten_names(view.changed)}")
        for reference in plan.base.unpinned:
            console.note(f"{reference}: not pinned by digest; a release refuses that")
        archive = place / "image.tar" if same_bytes and engine.rewrites_times else None
        _run(plan.to_image(place / "result", archive), plan)
        answer = json.loads((place / "result").read_text(encoding="utf-8"))
        if archive:
            with archive.open("rb") as file:
                engine.client.images.load(file)
    # By the configuration or, in a containerd store, by the manifest.
    names = [answer[key] for key in ("containerimage.config.digest", "containerimage.digest") if key in answer]
    return describe(engine, spec, *names)._replace(seconds=time.monotonic() - started)


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


def describe(engine: Engine, spec: ImageSpec, *names: str) -> Built:
    """Ask the engine about an image that it has under one of these names."""
    image = next((answer for answer in map(engine.inspect, names) if answer is not None), None)
    if image is None:
        raise errors.EngineError(f"{' or '.join(names)}: the engine has no such image; build it first")
    labels = dict((image.get("Config") or {}).get("Labels") or {})
    return Built(spec, str(image["Id"]), int(image.get("Size") or 0), labels)


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

"""Builds an image from a snapshot of this clone by buildx: its bases, arguments and labels, and why one failed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from docker.models.images import Image

from docker import DockerClient
from tooling.core import console, errors, files, proc
from tooling.image import bazel_cache, engine, reference, release, snapshot
from tooling.image.reference import LABEL, OCI, ImageLock, ImagePin
from tooling.image.snapshot import Snapshot
from tooling.sources import manifest

FOLDER, ARCHIVE = Path("build/image"), Path("docker/context/python.tar.gz")
LOCKS = ("sources.lock", "docker/images.lock", "requirements/run.txt", "requirements/cuda12.txt")
# No time of a file or of an image is later, so that two builds of a commit have one digest: 2026-01-01.
EPOCH = 1767225600
_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
_CA_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
# Labels say what buildx would ask git.
_SETTINGS = {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDX_GIT_INFO": "false"}
# BuildKit's summary of the step that broke a build, not of those that were stopped for that, with its last lines.
_FAILED = r"(?m)^------\n > (.*):\n((?:.*\n)*?)------$"
_REASON = r"(?m)^ERROR: (?:failed to (?:build|solve): )*(.*)"


@contextmanager
def prepare(root: Path, request: argparse.Namespace) -> Iterator[list[str]]:
    """Take a snapshot, and have the command that builds it, without its output; a dry run leaves nothing.

    ``ToolingError``: it may not be built, or its push would be refused.
    """
    with tempfile.TemporaryDirectory(prefix="multimesh-image-") as place:
        folder, from_source = Path(place) if request.dry_run else root / FOLDER, request.jaxlib == "source"
        with files.lock(folder / "lock", waiting="another build runs in this clone; this one waits for its end"):
            view = snapshot.take_snapshot(root, folder, ("maxtext", "jax", "xla") if from_source else ("maxtext",))
            if request.python_archive:
                shutil.copyfile(request.python_archive, folder / "context" / ARCHIVE)
            lock, context = reference.load_lock(root), str(root / FOLDER / "context")
            bases = choose_bases(request, lock)
            arguments = make_arguments(request, lock, bases)
            labels = make_labels(root, request, bases, view, arguments["PYTHON_SHA256"])
            if request.upload:
                release.check_push(root, request, labels, view.changed)
            command = ["docker", "buildx", "build", "--progress=plain", "--file", f"{context}/docker/Dockerfile"]
            command += find_access(request, os.environ)
            if from_source and request.use_bazel_cache:
                command += reach_cache(request, Path(place))
            for flag, pairs in (("--build-arg", arguments), ("--label", labels)):
                command += [word for pair in pairs.items() for word in (flag, "=".join(pair))]
            if view.changed:
                console.note(f"not committed, and read by the build: {proc.shorten(', '.join(view.changed), 200)}")
            if labels[f"{OCI}.base.digest"] == "unpinned":
                console.note(f"{labels[f'{OCI}.base.name']}: not pinned by digest; a release refuses that")
            yield [*command, "--target", request.target, context]


def choose_bases(request: argparse.Namespace, lock: ImageLock) -> list[ImagePin]:
    """Return the images that tools and result are built on: of CUDA's, by digest for the locked version alone."""
    if request.base_image:
        return [ImagePin(request.base_image)] * 2
    if request.accelerator == "cpu":
        return [lock.images["ubuntu"]] * 2
    pinned = [lock.images["cuda-devel"], lock.images["cuda-base"]]
    others = [ImagePin(re.sub(r"(?<=/cuda:)[0-9.]+", request.cuda_version, pin.reference)) for pin in pinned]
    return [pin if pin.reference == other.reference else other for pin, other in zip(pinned, others, strict=True)]


def make_arguments(request: argparse.Namespace, lock: ImageLock, bases: Sequence[ImagePin]) -> dict[str, str]:
    """Return the build arguments. Without a Bazel cache, Bazel reads nothing that another build left."""
    platform = request.platform or _PLATFORMS.get(os.uname().machine, "linux/amd64")
    python, bazel = lock.files[f"python {platform}"], lock.files[f"bazel {platform}"]
    if request.python_archive:
        python = {"url": "", "sha256": files.sha256(request.python_archive)}
    return {
        "BASE_IMAGE": bases[0].exact,
        "RUNTIME_BASE_IMAGE": bases[1].exact,
        "ACCELERATOR": request.accelerator,
        "JAXLIB": request.jaxlib,
        "PYTHON_URL": python["url"],
        "PYTHON_SHA256": python["sha256"] or "",
        "CUDA_VERSION": request.cuda_version,
        "CUDNN_VERSION": request.cudnn_version or "",
        "BUILD_TYPE": request.build_type,
        "BAZEL_CACHE": "kept" if request.use_bazel_cache else "none",
        "BAZEL_URL": bazel["url"],
        "BAZEL_SHA256": bazel["sha256"] or "",
    }


def make_labels(
    root: Path, request: argparse.Namespace, bases: Sequence[ImagePin], view: Snapshot, python: str
) -> dict[str, str]:
    """Return the labels of an image, in a fixed order; none of them changes when nothing else does.

    ``python`` is the checksum of the standalone one, which an image has whose base has none that is new enough.
    """

    def first(pattern: str, name: str) -> str:
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        return match.group(1) if match else "unknown"

    # The installed versions: the locked wheels bring CUDA with them, whatever the base image has.
    wheels = first(r"^nvidia-cuda-runtime-cu12==(\S+)", "requirements/cuda12.txt")
    cuda = request.cuda_version if request.jaxlib == "source" else wheels
    pin, pinned = bases[request.target == "runtime"], all("@sha256:" in pin.exact for pin in bases)
    source = "/".join(os.environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
    sums = "".join(files.sha256(root / name) for name in LOCKS)
    return {
        f"{OCI}.title": "MultiMesh for JAX",
        f"{OCI}.description": f"MaxText in pipelines on stock JAX: {request.target}, {request.accelerator}",
        f"{OCI}.licenses": "Apache-2.0",
        **({f"{OCI}.source": source} if source != "/" else {}),  # by which GitHub links an image to its repository
        f"{OCI}.version": first(r'^version = "([^"]+)"', "multimesh/pyproject.toml"),
        f"{OCI}.revision": view.revision,
        f"{OCI}.base.name": pin.reference.partition("@")[0],
        f"{OCI}.base.digest": pin.exact.partition("@")[2] if pinned else "unpinned",
        f"{LABEL}.target": request.target,
        f"{LABEL}.accelerator": {"cpu": "cpu", "cuda12": f"cuda12 {cuda}"}[request.accelerator],
        f"{LABEL}.jaxlib": f"{request.jaxlib} {request.build_type}" if request.jaxlib == "source" else "wheel",
        f"{LABEL}.jax": manifest.find_newest(root, "jax")[0],
        f"{LABEL}.maxtext": manifest.load_lock(root / "sources.lock")["maxtext"].version,
        f"{LABEL}.maxtext.revision": view.maxtext,
        f"{LABEL}.python": f"{'of the base, or ' if request.base_image else ''}standalone sha256:{python}",
        # Packages of the distribution are locked nowhere.
        f"{LABEL}.lock": f"sha256:{hashlib.sha256(sums.encode()).hexdigest()}",
    }


def find_access(request: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Return the options by which a build reaches its packages; they name files and variables, never their content."""
    options = ["--platform", request.platform] if request.platform else []
    options += [] if request.layer_cache else ["--no-cache"]
    options += ["--network", request.network] if request.network != "default" else []
    for name, file, variables in (
        ("pip.conf", request.pip_config, ("PIP_CONFIG_FILE",)),
        ("ca.pem", request.ca_bundle, _CA_VARIABLES),
    ):
        path = file or next((Path(environ[variable]) for variable in variables if environ.get(variable)), None)
        options += _share(name, path) if path and path.is_file() else []
    for name in filter(environ.get, _PROXIES):
        options += ["--build-arg", name]  # without a value: buildx takes it from the environment
    return options


def _share(name: str, path: Path) -> list[str]:
    """Return the option that shows a build a file; engines read its value as a line of CSV."""
    source = str(path.absolute()).replace('"', '""')
    return ["--secret", f'id={name},"src={source}"']


def reach_cache(request: argparse.Namespace, place: Path) -> list[str]:
    """Return the options that hand over the settings of a Bazel cache, if one answers; they are written to ``place``.

    Only the container that ``start-cache.sh`` started gets its password: another server may listen on its port.
    """
    folder, write = bazel_cache.default(), request.bazel_cache_write
    ours = bazel_cache.look(folder).partition(" ")[0]
    address, path = request.bazel_cache or ours, folder / ("bazelrc" if write else "reading.bazelrc")
    if not address:
        console.note("no Bazel cache of yours runs here; the build goes on without (docker/start-cache.sh starts one)")
        return []
    if address != ours:
        path = place / "bazelrc"
        bazel_cache.write_rc(path, address, write=write)
    console.note(f"Bazel cache {address}: {'read and written' if write else 'read only'}")
    # One on this machine's loopback is seen from the host network only.
    on_loopback = address.startswith(("127.", "localhost", "[::1]"))
    return [*_share("bazelrc", path), *(["--network", "host"] if on_loopback else [])]


def run(root: Path, client: DockerClient, request: argparse.Namespace) -> Image:
    """Build an image; it has no name yet.

    One for a push has no times of its build, so that another build of the commit has the same digest, where the engine
    can: only a store of containerd keeps them.
    """
    with prepare(root, request) as command, tempfile.TemporaryDirectory(prefix="multimesh-image-") as place:
        result, archive = Path(place, "result"), Path(place, "image.tar")
        timeless = request.upload and "io.containerd.snapshotter.v1" in str(client.info().get("DriverStatus"))
        command += ["--metadata-file", str(result)]
        if timeless:
            command += ["--build-arg", f"SOURCE_DATE_EPOCH={EPOCH}", "--output"]
            command += [f"type=docker,compression=gzip,rewrite-timestamp=true,dest={archive}"]
        else:
            command += ["--load"]  # a separate builder keeps its image, unless it is told to hand it over
        done = proc.run(command, env=os.environ | _SETTINGS, check=False, on_line=console.note)
        if done.returncode:
            raise explain(done)
        answer = json.loads(result.read_text(encoding="utf-8"))
        if timeless:
            with archive.open("rb") as file:
                client.images.load(file)
    # By the configuration or, in a containerd store, by the manifest.
    names = [answer[key] for key in ("containerimage.config.digest", "containerimage.digest") if key in answer]
    return engine.find_image(client, *names)


def explain(result: proc.Result) -> errors.ToolingError:
    """Return the error for a build that failed: the step, its last lines, and the remedy of a cause that we know."""
    output = result.stderr.decode("utf-8", "replace")
    step, tail = match.groups() if (match := re.search(_FAILED, output)) else ("", "")
    reason = (re.findall(_REASON, output) or [result.complaint])[-1]
    lines = [re.sub(r"^\d+\.\d+ ", "", line).strip() for line in tail.splitlines()]
    said = proc.shorten(" / ".join([line for line in lines if line][-5:]) or reason)
    title = " ".join(word for word in step.split() if not word.startswith("--"))
    label = f"step `{proc.shorten(title, 100)}`" if step else "the build"
    return errors.explain("build", "\n".join([step, tail, reason]), label=label, said=said)

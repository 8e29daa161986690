"""The command that builds an image, its labels, its pins, and what reaches it of the caller's settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import locks
from tooling.core import errors
from tooling.image import build, buildx, digests
from tooling.image.reference import make
from tooling.image.request import Request
from tooling.image.snapshot import Snapshot

REQUEST = Request(make("r.example/i", None, "T"))
DIGEST = "sha256:" + "a" * 64
SNAPSHOT = Snapshot("c0ffee", "beef")


@pytest.fixture
def pinned(root: Path) -> digests.ImageLock:
    """The repository's lock, with a digest for every image."""
    lock = digests.load(root)
    images = {name: digests.ImagePin(pin.reference, DIGEST) for name, pin in lock.images.items()}
    return lock._replace(images=images)


def test_the_base_is_cuda_on_ubuntu_by_digest(pinned: digests.ImageLock) -> None:
    base = buildx.bases(REQUEST, pinned)
    assert base.build.exact == f"docker.io/nvidia/cuda:12.8.1-cudnn-devel-ubuntu22.04@{DIGEST}"
    assert base.runtime.exact == f"docker.io/nvidia/cuda:12.8.1-base-ubuntu22.04@{DIGEST}"
    assert base.unpinned == ()
    assert "ubuntu:22.04" in buildx.bases(REQUEST._replace(accelerator="cpu"), pinned).build.exact
    assert buildx.bases(REQUEST._replace(base_image=f"debian@{DIGEST}"), pinned).unpinned == ()
    assert buildx.bases(REQUEST._replace(base_image="debian:12"), pinned).unpinned == ("debian:12",)
    other = buildx.bases(REQUEST._replace(cuda_version="12.6.3"), pinned)
    assert other.build.exact == "docker.io/nvidia/cuda:12.6.3-cudnn-devel-ubuntu22.04"
    assert other.unpinned == (other.build.reference, other.runtime.reference), "nobody pinned it"


def test_each_platform_has_its_python_and_a_file_is_held_against_its_own_checksum(
    pinned: digests.ImageLock, tmp_path: Path
) -> None:
    def arguments(**changes: object) -> dict[str, str]:
        return buildx.make_arguments(REQUEST._replace(**changes), pinned, buildx.bases(REQUEST, pinned))

    for platform, word in (("linux/amd64", "x86_64"), ("linux/arm64", "aarch64")):
        assert word in arguments(platform=platform)["PYTHON_URL"]
        assert len(arguments(platform=platform)["PYTHON_SHA256"]) == 64
    (tmp_path / "python.tar.gz").write_bytes(b"python")
    archived = arguments(python_archive=tmp_path / "python.tar.gz")
    assert (archived["PYTHON_URL"], archived["PYTHON_SHA256"][:12]) == ("", "11a4a60b518b")


def test_platform_network_and_cache_are_options(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*build._CA_VARIABLES, *build._PROXIES, "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    request = REQUEST._replace(network="host", layer_cache=False, platform="linux/arm64")
    for asked, options in (
        (REQUEST, []),
        (request, ["--platform", "linux/arm64", "--no-cache", "--network", "host"]),
    ):
        plan = build.make_plan(root, asked, SNAPSHOT, Path("here"), tmp_path)
        words = plan._replace(arguments={"A": "1"}, labels={"l": "v"}).argv("runtime", "--load")
        assert words[:6] == ["docker", "buildx", "build", "--progress=plain", "--file", "here/docker/Dockerfile"]
        end = ["--build-arg", "A=1", "--label", "l=v", "--target", "runtime", "--load", "here"]
        assert words[6:] == [*options, *end]


def test_labels_name_revision_lock_and_versions(root: Path, pinned: digests.ImageLock) -> None:
    def labels(snapshot: Snapshot = SNAPSHOT, source: str | None = None, **changes: object) -> dict[str, str]:
        base = buildx.bases(REQUEST._replace(**changes), pinned)
        return buildx.labels(
            root, REQUEST._replace(**changes), base, snapshot, python="3.13.5 of the base", source=source
        )

    usual = labels()
    assert usual["org.opencontainers.image.revision"] == "c0ffee"
    assert usual["org.opencontainers.image.base.digest"] == DIGEST
    assert usual["io.github.multimesh-jax.lock"] == buildx.digest_locks(root)
    assert usual["io.github.multimesh-jax.maxtext.revision"] == "beef"
    assert usual["io.github.multimesh-jax.python"] == "3.13.5 of the base"
    jax = locks.locked_versions(root / "requirements" / "run.txt", "3.13.0")["jax"]
    assert usual["io.github.multimesh-jax.jax"] == jax
    # The installed version, not the one that the base image is named after.
    assert usual["io.github.multimesh-jax.accelerator"] == "cuda12 12.8.90"
    assert labels(jaxlib="source")["io.github.multimesh-jax.accelerator"] == "cuda12 12.8.1"
    assert labels(source="s")["org.opencontainers.image.source"] == "s"
    assert "org.opencontainers.image.source" not in usual
    assert "unknown" not in usual.values()


@pytest.mark.parametrize(
    ("remote", "source"),
    [
        ("https://github.com/some-lab/multimesh-jax.git", "https://github.com/some-lab/multimesh-jax"),
        ("git@github.com:some-lab/multimesh-jax.git", "https://github.com/some-lab/multimesh-jax"),
        ("https://me:hunter2@github.com/some-lab/x", "https://github.com/some-lab/x"),
        ("https://me:hunter2@git.example/some-lab/x.git", None),
        ("", None),
    ],
)
def test_an_image_names_the_repository_that_it_comes_from(tmp_path: Path, remote: str, source: str | None) -> None:
    build.proc.run(["git", "init", "-q", tmp_path])
    if remote:
        build.proc.run(["git", "-C", tmp_path, "remote", "add", "origin", remote])
    assert build.find_source(tmp_path) == source


def test_a_malformed_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / digests.FILE).parent.mkdir()
    for fault in ({"reference": "a"}, "text"):
        (tmp_path / digests.FILE).write_text(json.dumps({"images": {"x": fault}, "files": {}}), encoding="utf-8")
        with pytest.raises(errors.SourceError, match=r"images\.lock: images\.x: .*; restore it with git"):
            digests.load(tmp_path)


def test_a_configuration_with_a_password_is_handed_over_as_a_file(tmp_path: Path) -> None:
    config, other = tmp_path / "pip.conf", tmp_path / "other.conf"
    config.write_text("[global]\nindex-url = https://user:hunter2@index.example/simple\n")
    path = ["--secret", f"id=pip.conf,src={config}"]
    assert build.find_access(REQUEST._replace(pip_config=config), {}) == path
    assert build.find_access(REQUEST, {"PIP_CONFIG_FILE": str(config)}) == path
    first = build.find_access(REQUEST._replace(pip_config=other), {"PIP_CONFIG_FILE": str(config)})
    assert first == ["--secret", f"id=pip.conf,src={other}"]
    for variable in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE"):
        assert build.find_access(REQUEST, {variable: str(config)}) == ["--secret", f"id=ca.pem,src={config}"]
        assert build.find_access(REQUEST, {variable: str(tmp_path / "none")}) == []
    comma = tmp_path / "a,b"
    comma.write_text("x")
    assert build.find_access(REQUEST, {"PIP_CERT": str(comma)}) == [], "an engine would read two fields"
    assert build.find_access(REQUEST, {"HTTPS_PROXY": "http://u:hunter2@p.example"}) == ["--build-arg", "HTTPS_PROXY"]


def test_a_bazel_that_jax_does_not_want_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "third_party/jax").mkdir(parents=True)
    arguments = {"BAZEL_URL": "https://bazel.example/7.7.0/bazel", "BAZEL_SHA256": "ab"}
    for version in ("7.7.0", "99.1.0"):
        (tmp_path / "third_party/jax/.bazelversion").write_text(f"{version}\n")
        if version == "7.7.0":
            build._check_bazel(tmp_path, arguments)
    with pytest.raises(errors.SourceError, match=r"third_party/jax wants Bazel 99\.1\.0, and docker/images\.lock has"):
        build._check_bazel(tmp_path, arguments)


def test_images_with_cuda_ask_for_the_driver_and_for_no_toolkit(root: Path) -> None:
    """JAX finds its libraries by their wheels. A toolkit on its path would give it another cuBLASLt."""
    stages = (root / "docker/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").split("\nFROM ")
    asking = [stage.split(None, 3)[2] for stage in stages if "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in stage]
    assert asking == ["accelerator-cuda12", "toolbox"]
    assert not [stage for stage in stages if re.search("LD_LIBRARY_PATH=[^ ]*/usr/local/cuda", stage)]

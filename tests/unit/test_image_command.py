from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests import locks
from tooling.core import errors
from tooling.image import build, buildx, digests
from tooling.image.engine import Engine
from tooling.image.reference import make
from tooling.image.request import ImageSpec, Means
from tooling.sources import manifest

DOCKER = Engine(("docker",))
MEANS = Means(None, None, "default", True, True, None, False)
DIGEST = "sha256:" + "a" * 64


def spec(**changes: object) -> ImageSpec:
    plain = ImageSpec(
        make("r.example/i", None, "T"), "runtime", "cuda12", "wheel", "12.8.1", None, "Release", None, None, None
    )
    return plain._replace(**changes)  # type: ignore[arg-type]


@pytest.fixture
def pinned(root: Path) -> digests.ImageLock:
    """The repository's lock, with a digest for every image."""
    held = digests.load(root)
    images = {name: digests.ImagePin(pin.reference, DIGEST) for name, pin in held.images.items()}
    return held._replace(images=images)


def argv(
    engine: Engine = DOCKER, means: Means = MEANS, result: Path | None = Path("r"), **changes: object
) -> list[str]:
    return buildx.build_argv(
        engine, spec(**changes), means, build_args={"A": "1"}, labels={"l": "v"}, access=(), result=result
    )


def test_the_base_is_cuda_on_ubuntu_by_digest(pinned: digests.ImageLock) -> None:
    base = buildx.bases(spec(), pinned)
    assert base.build.exact == f"docker.io/nvidia/cuda:12.8.1-cudnn-devel-ubuntu22.04@{DIGEST}"
    assert base.runtime.exact == f"docker.io/nvidia/cuda:12.8.1-base-ubuntu22.04@{DIGEST}"
    assert base.unpinned == ()


def test_another_cuda_version_is_another_image_that_nobody_pinned(pinned: digests.ImageLock) -> None:
    base = buildx.bases(spec(cuda_version="12.6.3"), pinned)
    assert base.build.exact == "docker.io/nvidia/cuda:12.6.3-cudnn-devel-ubuntu22.04"
    assert base.unpinned == (base.build.reference, base.runtime.reference)


def test_a_base_image_given_by_digest_counts_as_pinned(pinned: digests.ImageLock) -> None:
    assert buildx.bases(spec(base_image=f"debian@{DIGEST}"), pinned).unpinned == ()
    assert buildx.bases(spec(base_image="debian:12"), pinned).unpinned == ("debian:12",)


def test_an_image_for_the_cpu_needs_no_cuda(pinned: digests.ImageLock) -> None:
    assert "ubuntu:22.04" in buildx.bases(spec(accelerator="cpu"), pinned).build.exact


def test_each_platform_has_its_python(pinned: digests.ImageLock) -> None:
    base = buildx.bases(spec(), pinned)
    for platform, word in (("linux/amd64", "x86_64"), ("linux/arm64", "aarch64")):
        asked = buildx.make_arguments(
            spec(platform=platform), pinned, base, machine="linux/amd64", multimesh="multimesh"
        )
        assert word in asked["PYTHON_URL"]
        assert len(asked["PYTHON_SHA256"]) == 64


def test_a_given_python_is_held_against_its_own_checksum(pinned: digests.ImageLock, tmp_path: Path) -> None:
    archive = tmp_path / "python.tar.gz"
    archive.write_bytes(b"python")
    base = buildx.bases(spec(), pinned)
    asked = buildx.make_arguments(
        spec(python_archive=archive), pinned, base, machine="linux/amd64", multimesh="multimesh"
    )
    assert asked["PYTHON_URL"] == ""
    assert asked["PYTHON_SHA256"].startswith("11a4a60b518b")


def test_buildx_is_started_by_itself_where_it_can_be() -> None:
    plugin = DOCKER._replace(plugin="/usr/lib/docker/cli-plugins/docker-buildx")
    assert argv()[:4] == ["docker", "buildx", "build", "--progress=plain"]
    assert argv(plugin) == ["/usr/lib/docker/cli-plugins/docker-buildx", "build", *argv()[3:]]
    assert argv()[-4:] == ["--load", "--metadata-file", "r", "."]
    common = ["--file", "docker/Dockerfile", "--target", "runtime", "--build-arg", "A=1", "--label", "l=v"]
    assert [word for word in argv() if word in common] == common


def test_platform_network_and_cache_are_options() -> None:
    asked = argv(means=MEANS._replace(network="host", layer_cache=False), platform="linux/arm64")
    assert "--no-cache" in asked
    assert asked[asked.index("--platform") + 1] == "linux/arm64"
    assert asked[asked.index("--network") + 1] == "host"


def test_labels_name_revision_lock_and_versions(root: Path, pinned: digests.ImageLock) -> None:
    got = buildx.labels(root, spec(), buildx.bases(spec(), pinned), "c0ffee", "beef")
    assert got["org.opencontainers.image.revision"] == "c0ffee"
    assert got["org.opencontainers.image.base.digest"] == DIGEST
    assert got["io.github.multimesh-jax.lock"] == buildx.lock_digest(root)
    assert got["io.github.multimesh-jax.maxtext"] == "0.2.5"
    jax = locks.locked_versions(root / "requirements" / "run.txt", "3.13.0")["jax"]
    assert got["io.github.multimesh-jax.jax"] == jax
    # What is installed, not what the base image is named after.
    assert got["io.github.multimesh-jax.accelerator"] == "cuda12 12.8.90"
    from_source = buildx.labels(root, spec(jaxlib="source"), buildx.bases(spec(), pinned), "c", "b", "s")
    assert from_source["io.github.multimesh-jax.accelerator"] == "cuda12 12.8.1"
    assert from_source["org.opencontainers.image.source"] == "s"
    assert "org.opencontainers.image.source" not in got
    assert got["io.github.multimesh-jax.python"] == "unpinned"
    named = buildx.labels(root, spec(), buildx.bases(spec(), pinned), "c", "b", None, "12" * 32)
    assert named["io.github.multimesh-jax.python"] == "12" * 32
    assert "unknown" not in got.values()


def test_a_missing_or_stale_maxtext_is_named_before_the_build(root: Path, tmp_path: Path) -> None:
    (tmp_path / "sources.lock").write_text((root / "sources.lock").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(errors.PinError, match="--group run"):
        build._component(tmp_path, "maxtext", "run")
    pinned = manifest.read_pin(root / "sources.lock", "maxtext", "patched_commit")
    assert build._component(tmp_path, "maxtext", "run", only_plan=True) == pinned, "what a dry run shows"
    tree = tmp_path / "third_party" / "maxtext"
    (tree / "src" / "maxtext").mkdir(parents=True)
    build.proc.run(["git", "init", "-q", tree])
    name = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    build.proc.run(["git", "-C", tree, *name, "commit", "-q", "--allow-empty", "-m", "m"])
    with pytest.raises(errors.PinError, match=r"third_party/maxtext is at [0-9a-f]{12}, not at "):
        build._component(tmp_path, "maxtext", "run")


def test_what_git_does_not_track_is_found_wherever_a_build_reads(root: Path, tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C"]
    tracked = {build.IGNORE: (root / build.IGNORE).read_bytes(), ".gitignore": b".env\nbuild/\n/third_party/\n"}
    tracked |= dict.fromkeys(("maxtext/run.py", "multimesh/src/multimesh/plan.py", "docs/a b.md"), b"")
    harmless = ("build/key", ".venv/secret", "notes.txt", "multimesh/src/multimesh/__pycache__/plan.pyc",
                "third_party/.synced", "third_party/jax/new.py", "docker/context/python.tar.gz")  # fmt: skip
    planted = ("docker/context/id_rsa", "docker/id_rsa", "docs/.env", "maxtext/.env",
               "multimesh/src/multimesh/trial.py", "requirements/mine.txt", "third_party/maxtext/src/.env",
               "third_party/maxtext/src/maxtext/id_rsa")  # fmt: skip
    trees = {
        tmp_path: tracked,
        tmp_path / "third_party/maxtext": {"src/maxtext/train.py": b"", ".gitignore": b".env\n"},
        tmp_path / "third_party/jax": {"build/build.py": b""},
    }

    def write(tree: Path, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes(content)

    for tree, files in trees.items():
        write(tree, files)
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "m"]):
            build.proc.run([*git, tree, *words])
    write(tmp_path, dict.fromkeys(harmless, b""))
    build.check_context(tmp_path)
    write(tmp_path, dict.fromkeys(planted, b""))
    assert build.list_strays(tmp_path) == planted
    assert build.list_strays(tmp_path, jaxlib_from_source=True) == (
        *planted[:6],
        "third_party/jax/new.py",
        *planted[6:],
    )
    with pytest.raises(errors.PinError, match=r"docker/id_rsa, .* and 3 more: git does not track"):
        build.check_context(tmp_path)


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
    assert build._source(tmp_path) == source


def test_an_ignore_file_is_read_as_builders_read_it(root: Path) -> None:
    patterns = [line for line in (root / build.IGNORE).read_text().splitlines() if line and not line.startswith("#")]
    for name in ("docs/a.md", "third_party/maxtext/src/x.py", "multimesh/src/multimesh/plan.py", "docker/Dockerfile"):
        assert not build._is_ignored(name, patterns), name
    for name in ("notes.txt", ".env", "third_party/.synced", "third_party/jax/.git/config", "docs/__pycache__/a.py",
                 "multimesh/a.pyc", "a/b/c.egg-info/x", "third_party/multimesh/tests/x.py"):  # fmt: skip
        assert build._is_ignored(name, patterns), name


def test_modes_are_those_of_git_whatever_the_checkout_has(root: Path, tmp_path: Path) -> None:
    """A umask of 077 gave an image that its user could not read."""
    for name, text in (("a/script.sh", "#!/bin/sh\n"), ("a/data", "data\n"), ("empty", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to("/nowhere")
    for before in (0o700, 0o777):
        for path in (tmp_path / "a", tmp_path / "a/script.sh", tmp_path / "a/data", tmp_path / "empty"):
            path.chmod(before)
        subprocess.run([sys.executable, root / "docker/scripts/modes.py", tmp_path], check=True)
        modes = {str(path.relative_to(tmp_path)): path.lstat().st_mode & 0o777 for path in tmp_path.rglob("*")}
        assert modes | {"link": 0} == {"a": 0o755, "a/script.sh": 0o755, "a/data": 0o644, "empty": 0o644, "link": 0}


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_what_git_does_not_look_at_is_not_released(root: Path, tmp_path: Path, flag: str) -> None:
    """Trees that hold other bytes than the commit of their label, although ``git status`` is silent."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C"]
    tree = tmp_path / "third_party" / "maxtext"
    for place, files in ((tmp_path, (build.IGNORE, "maxtext/run.py")), (tree, ("src/maxtext/train.py",))):
        for name in files:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes((root / build.IGNORE).read_bytes())
        (place / ".gitignore").write_text("third_party/\n")
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "m"]):
            build.proc.run([*git, place, *words])
    assert build.list_strays(tmp_path) == ()
    for place, name in ((tmp_path, "maxtext/run.py"), (tree, "src/maxtext/train.py")):
        build.proc.run([*git, place, "update-index", flag, name])
        (place / name).write_text("a token")
    assert not str(build._revision(tmp_path)).endswith("-dirty")
    assert build.list_strays(tmp_path) == ("maxtext/run.py", "third_party/maxtext/src/maxtext/train.py")

    build.proc.run([*git, tree, "update-index", flag.replace("--", "--no-"), "src/maxtext/train.py"])
    build.shutil.rmtree(tree / ".git")
    (tmp_path / "third_party" / "multimesh" / "src").mkdir(parents=True)
    assert build.list_strays(tmp_path)[1:] == ("third_party/maxtext", "third_party/multimesh")
    pinned = "ab" * 20
    (tmp_path / "sources.lock").write_text(json.dumps({"components": {"maxtext": {"patched_commit": pinned}}}))
    assert build._component(tmp_path, "maxtext", "run") == f"{pinned}-dirty"


def test_the_lock_is_written_as_it_is_read(root: Path, tmp_path: Path) -> None:
    text = (root / digests.FILE).read_text(encoding="utf-8")
    (tmp_path / digests.FILE).parent.mkdir()
    (tmp_path / digests.FILE).write_text(text, encoding="utf-8")
    digests.save(tmp_path, digests.load(tmp_path))
    assert (tmp_path / digests.FILE).read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "fault",
    [{"reference": "a"}, "text"],
)
def test_a_malformed_lock_is_named(tmp_path: Path, fault: object) -> None:
    (tmp_path / digests.FILE).parent.mkdir()
    (tmp_path / digests.FILE).write_text(json.dumps({"images": {"x": fault}, "files": {}}), encoding="utf-8")
    with pytest.raises(errors.ManifestError, match=r"images\.lock: is malformed"):
        digests.load(tmp_path)


def test_a_program_ends_though_an_interrupt_left_the_lock_of_popen_taken() -> None:
    proc = build.proc
    process = subprocess.Popen(["sleep", "1000"], process_group=0)
    process._waitpid_lock.acquire()  # type: ignore[attr-defined]
    proc._end(process)
    assert process.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()


def test_an_environment_in_parts_is_whole(root: Path, tmp_path: Path) -> None:
    """With CUDA and without: each file is in one part, at its place, and no part of CUDA has another's."""
    packages = "lib/python3.13/site-packages"
    cuda = [
        "nvidia/cudnn/lib/libcudnn.so.9",
        "nvidia/nccl/lib/libnccl.so.2",
        "nvidia/cusparse/a",
        "nvidia/nvcc/b",
        "jax_plugins/c",
    ]
    for number, names in enumerate((["jax/__init__.py", ".hidden"], [*cuda, "jax/__init__.py", ".hidden"])):
        environment, parts = tmp_path / f"environment-{number}", tmp_path / f"parts-{number}"
        files = {"bin/python", "pyvenv.cfg", ".stamp", *(f"{packages}/{name}" for name in names)}
        for name in files:
            (environment / name).parent.mkdir(parents=True, exist_ok=True)
            (environment / name).write_text(name)
        (environment / "lib64").symlink_to("lib")
        subprocess.run([root / "docker/scripts/parts.sh", environment, parts], check=True)
        held = [{str(f.relative_to(part)) for f in part.rglob("*") if f.is_file()} for part in sorted(parts.iterdir())]
        held = [{name for name in part if not name.startswith("lib64/")} for part in held]
        assert sorted(name for part in held for name in part) == sorted(files)
        assert [len(part) for part in held] == ([1, 1, 1, 2, 5] if number else [0, 0, 0, 0, 5])
        assert (parts / "5" / "lib64").is_symlink()
        assert not list(environment.iterdir())


def test_layers_of_cuda_name_locked_packages(root: Path) -> None:
    steps = re.findall(r"cuda\.sh(.*)", (root / "docker" / "Dockerfile").read_text(encoding="utf-8"))
    locked = re.findall(
        r"^([\w-]+)==", (root / "requirements" / "cuda12.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = [name for step in steps for name in step.split()]
    assert set(named) <= set(locked)
    assert len(named) == len(set(named))
    assert steps[-1] == "", "the last installs what is left"


def test_hardware_is_told_where_there_is_none(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, root / "docker" / "hardware.py"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    titles = {line[:12].strip() for line in done.stdout.splitlines()} - {""}
    assert titles == {"GPUs", "packages", "NCCL", "verbs", "UCX", "InfiniBand", "container", "JAX sees"}
    assert all(line[12:].strip() for line in done.stdout.splitlines())


def test_packages_of_jax_that_do_not_fit_are_named(root: Path, tmp_path: Path) -> None:
    """JAX ignores a plugin of another version, and says no more than that there is no GPU where one is missing."""
    venv.create(tmp_path, with_pip=False)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    script = (root / "docker/scripts/contents.sh").read_text(encoding="utf-8")
    script = script.replace("/opt/.venv/bin/python", str(tmp_path / "bin" / "python"))

    def faults(accelerator: str, *versions: str) -> list[str]:
        for name, version in zip(("jaxlib", "jax_cuda12_pjrt", "jax_cuda12_plugin"), versions, strict=True):
            for old in site.glob(f"{name}-*.dist-info/METADATA"):
                old.unlink()
            if version:
                (site / f"{name}-{version}.dist-info").mkdir(exist_ok=True)
                text = f"Name: {name}\nVersion: {version}\n"
                (site / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
        for empty in site.glob("*.dist-info"):
            if not any(empty.iterdir()):
                empty.rmdir()
        argv = ["sh", "-s", "dev", accelerator]
        said = subprocess.run(argv, input=script, capture_output=True, text=True, check=False).stdout
        return re.findall("fault: packages of JAX that do not fit: (.*)", said) + re.findall("no Python.*", said)

    assert faults("cpu", "0.10.2", "", "") == []
    assert faults("cuda12", "0.10.2", "0.10.2", "0.10.2") == []
    for wrong in (("0.11.0", "0.10.2", "0.10.2"), ("0.10.2", "0.9.2", "0.10.2"), ("0.10.2", "0.10.2", "0.9.2")):
        told = f"jaxlib {wrong[0]}, jax-cuda12-pjrt {wrong[1]}, jax-cuda12-plugin {wrong[2]}"
        assert faults("cuda12", *wrong) == [told]
    (told,) = faults("cuda12", "0.10.2", "", "0.10.2")
    assert told == "jaxlib 0.10.2, jax-cuda12-pjrt is missing, jax-cuda12-plugin 0.10.2"
    for accelerator in ("cuda12", "cuda13"):
        (told,) = faults(accelerator, "0.10.2", "", "")
        assert told == f"jaxlib 0.10.2, jax-{accelerator}-pjrt is missing, jax-{accelerator}-plugin is missing"
    assert faults("cpu", "", "", "") == ["jaxlib is missing"]

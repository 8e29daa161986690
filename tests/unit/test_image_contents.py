"""The scripts of the Dockerfile, and the check of an image's content, run here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests import locks


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


def test_an_environment_in_parts_is_whole(root: Path, tmp_path: Path) -> None:
    """Each file is in one part, with CUDA and without, at its place, and no part of CUDA has another's."""
    packages = "lib/python3.13/site-packages"
    cuda = ["nvidia/cudnn/lib/libcudnn.so.9", "nvidia/nccl/lib/libnccl.so.2"]
    cuda += ["nvidia/cusparse/a", "nvidia/nvcc/b", "jax_plugins/c"]
    for number, names in enumerate((["jax/__init__.py", ".hidden"], [*cuda, "jax/__init__.py", ".hidden"])):
        environment, parts = tmp_path / f"environment-{number}", tmp_path / f"parts-{number}"
        files = {"bin/python", "pyvenv.cfg", ".stamp", *(f"{packages}/{name}" for name in names)}
        for name in files:
            (environment / name).parent.mkdir(parents=True, exist_ok=True)
            (environment / name).write_text(name)
        (environment / "lib64").symlink_to("lib")
        subprocess.run([root / "docker/scripts/parts.sh", environment, parts], check=True)
        layers = [
            {str(f.relative_to(part)) for f in part.rglob("*") if f.is_file() and "lib64" not in f.parts}
            for part in sorted(parts.iterdir())
        ]
        assert sorted(name for part in layers for name in part) == sorted(files)
        assert [len(part) for part in layers] == ([1, 1, 1, 2, 5] if number else [0, 0, 0, 0, 5])
        assert (parts / "5" / "lib64").is_symlink()
        assert not list(environment.iterdir())


def test_layers_of_cuda_name_locked_packages(root: Path) -> None:
    steps = re.findall(r"cuda\.sh(.*)", (root / "docker" / "Dockerfile").read_text(encoding="utf-8"))
    packages = [name for step in steps for name in step.split()]
    assert set(packages) <= locks.locked_versions(root / "requirements" / "cuda12.txt").keys()
    assert len(packages) == len(set(packages))
    assert steps[-1] == "", "the last installs what is left"


NOT_THERE = "jaxlib 0.10.2, jax-{0}-pjrt is missing, jax-{0}-plugin is missing"


def test_packages_of_jax_that_do_not_fit_are_named(root: Path, tmp_path: Path) -> None:
    """JAX ignores a plugin of another version, and says no more than that there is no GPU where one is missing."""
    venv.create(tmp_path, with_pip=False)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    script = (root / "docker/scripts/contents.sh").read_text(encoding="utf-8")
    script = script.replace("/opt/.venv/bin/python", str(tmp_path / "bin" / "python"))
    for accelerator, versions, fault in (
        ("cpu", ("0.10.2",), None),
        ("cuda12", ("0.10.2", "0.10.2", "0.10.2"), None),
        ("cuda12", ("0.11.0", "0.10.2", "0.10.2"), "jaxlib 0.11.0, jax-cuda12-pjrt 0.10.2, jax-cuda12-plugin 0.10.2"),
        ("cuda12", ("0.10.2", "0.9.2", "0.10.2"), "jaxlib 0.10.2, jax-cuda12-pjrt 0.9.2, jax-cuda12-plugin 0.10.2"),
        ("cuda12", ("0.10.2", "0.10.2", "0.9.2"), "jaxlib 0.10.2, jax-cuda12-pjrt 0.10.2, jax-cuda12-plugin 0.9.2"),
        ("cuda12", ("0.10.2", "", "0.10.2"), "jaxlib 0.10.2, jax-cuda12-pjrt is missing, jax-cuda12-plugin 0.10.2"),
        ("cuda12", ("0.10.2",), NOT_THERE.format("cuda12")),
        ("cuda13", ("0.10.2",), NOT_THERE.format("cuda13")),
        ("cpu", (), "jaxlib is missing"),
    ):
        for name, version in zip(("jaxlib", "jax_cuda12_pjrt", "jax_cuda12_plugin"), versions, strict=False):
            if version:
                (site / f"{name}-{version}.dist-info").mkdir()
                (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        argv = ["sh", "-c", script, "contents.sh", "dev", accelerator, ""]
        output = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
        for folder in site.glob("*.dist-info"):
            shutil.rmtree(folder)
        lines = re.findall("fault: packages of JAX that do not fit: (.*)", output) + re.findall("no Python.*", output)
        assert lines == ([fault] if fault else []), versions

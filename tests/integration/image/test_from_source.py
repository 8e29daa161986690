"""``--jaxlib source``: the sources that the lock names go into the build, up to the Bazel that GitHub has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tooling.core import errors

from .conftest import Repository

WHO = {f"GIT_{role}_{field}": "upstream@example.org" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}


def upstream(place: Path, files: dict[str, str]) -> str:
    """Make a repository of one commit; return that."""
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    for argv in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", place, *argv], check=True, env=os.environ | WHO)
    answer = subprocess.run(["git", "-C", place, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return answer.stdout.strip()


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.stand_in("a small jax and xla on this machine")
def test_the_build_of_jaxlib_begins_with_the_bazel_that_jax_names(
    changed: Repository, trixie: str, tmp_path: Path
) -> None:
    xla = upstream(tmp_path / "xla", {"BUILD": "\n"})
    bazel = re.search(r"bazel-([\d.]+)-linux-x86_64", (changed.path / "docker" / "images.lock").read_text())
    assert bazel
    jax = upstream(
        tmp_path / "jax",
        {
            ".bazelversion": f"{bazel[1]}\n",
            "build/build.py": "raise SystemExit('Bazel came')\n",
            "third_party/xla/revision.bzl": f'XLA_COMMIT = "{xla}"\n',
        },
    )
    manifest = changed.path / "sources.yaml"
    text = manifest.read_text()
    for name in ("jax-ml/jax", "openxla/xla"):
        text = text.replace(f"https://github.com/{name}.git", f"file://{tmp_path / name.partition('/')[2]}")
    manifest.write_text(text)
    lock = json.loads((changed.path / "sources.lock").read_text())
    lock["components"]["jax"] |= {"commit": jax, "tree": None, "patched_commit": jax}
    (changed.path / "sources.lock").write_text(json.dumps(lock))
    options = ("--jaxlib", "source", "--accelerator", "cpu", "--base-image", trixie, "--tag", "source")

    refused = changed.build(*options, check=False)
    assert refused.returncode == errors.SourceError.exit_code
    assert "third_party/jax is not there; run ./bootstrap.sh --group source" in refused.stderr

    sync = [sys.executable, "-m", "tooling", "sync", "--group", "source"]
    subprocess.run(sync, cwd=changed.path, env=os.environ | {"PYTHONPATH": str(changed.path)}, check=True)
    assert (changed.path / "third_party" / "xla" / "BUILD").is_file()
    built = changed.build(*options, check=False)
    output = built.stderr
    assert "Bazel came" in output or "github.com" in output or "Name or service not known" in output, output[-3000:]
    assert built.returncode in (errors.NotThereError.exit_code, errors.EngineError.exit_code), output[-3000:]

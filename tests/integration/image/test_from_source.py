"""``--jaxlib source``: the sources that the lock names go into the build, up to the Bazel that GitHub has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repositories import commit
from tooling.core import errors

from .conftest import Repository


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.stand_in("a small jax and xla on this machine")
def test_the_build_of_jaxlib_begins_with_the_bazel_that_jax_names(
    copy: Repository, trixie: str, tmp_path: Path
) -> None:
    xla = commit(tmp_path / "xla", {"BUILD": "\n"})
    bazel = re.search(r"bazel-([\d.]+)-linux-x86_64", (copy.path / "docker" / "images.lock").read_text())
    assert bazel
    jax = commit(
        tmp_path / "jax",
        {
            ".bazelversion": f"{bazel[1]}\n",
            "build/build.py": "raise SystemExit('Bazel came')\n",
            "third_party/xla/revision.bzl": f'XLA_COMMIT = "{xla}"\n',
        },
    )
    manifest = copy.path / "sources.yaml"
    text = manifest.read_text()
    for name in ("jax-ml/jax", "openxla/xla"):
        text = text.replace(f"https://github.com/{name}.git", f"file://{tmp_path / name.partition('/')[2]}")
    manifest.write_text(text)
    lock = json.loads((copy.path / "sources.lock").read_text())
    lock["components"]["jax"] |= {"commit": jax, "tree": None, "patched_commit": jax}
    (copy.path / "sources.lock").write_text(json.dumps(lock))
    options = ("--jaxlib", "source", "--accelerator", "cpu", "--base-image", trixie, "--tag", "source")

    refusal = copy.build(*options, code=errors.SourceError.exit_code)
    assert "third_party/jax is not there; run ./bootstrap.sh --group source" in refusal.stderr

    sync = [sys.executable, "-m", "tooling", "sync", "--group", "source"]
    subprocess.run(sync, cwd=copy.path, env=os.environ | {"PYTHONPATH": str(copy.path)}, check=True)
    assert (copy.path / "third_party" / "xla" / "BUILD").is_file()
    process = subprocess.run([copy.path / "docker" / "build.py", *options], capture_output=True, text=True)
    assert re.search(r"Bazel came|github\.com|Name or service not known", process.stderr), process.stderr[-3000:]
    assert process.returncode in (errors.NotThereError.exit_code, errors.EngineError.exit_code), process.stderr[-3000:]

"""The steps of the workflows that need nothing but the repository."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tooling.ci import steps
from tooling.image import buildx


def test_the_notes_of_a_first_release_are_no_longer_than_github_takes(tmp_path: Path) -> None:
    subject = "x" * 100
    commits = "".join(
        f"commit refs/heads/main\ncommitter A <a@example.org> {n} +0000\ndata {len(subject)}\n{subject}\n"
        for n in range(1500)
    )
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    subprocess.run([*git, "fast-import", "--quiet"], input=commits.encode(), check=True)
    subprocess.run([*git, "tag", "v0.1.0", "main"], check=True)
    told = {"repository": "ghcr.io/some-lab/multimesh-jax", "pull": "docker pull it"}
    labels = {f"{buildx.OCI}.version": "0.1.0", f"{buildx.LABEL}.accelerator": "cpu"}
    pin = {"version": "0.2.5", "commit": None, "tree": "f" * 40, "archives": {}, "patches": {}}
    (tmp_path / "sources.lock").write_text(json.dumps({"components": {"maxtext": pin}}))
    text = steps.notes(tmp_path, "v0.1.0", {"version": "v0.1.0", "labels": labels, "image": told}, gpu=False)
    assert text.count(f"- {subject} (") == 1000
    said = f"maxtext 0.2.5 is pinned by its bytes (tree {'f' * 40}); the commit of its tag was read nowhere."
    assert said in text
    assert len(text) < 125_000

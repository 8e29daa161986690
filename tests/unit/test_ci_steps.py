"""The steps of the workflows that need nothing but the repository."""

from __future__ import annotations

import json
from pathlib import Path

from tooling.ci import steps
from tooling.image import buildx


def test_notes_say_how_to_begin_and_which_commits_nobody_told(tmp_path: Path) -> None:
    told = {"repository": "ghcr.io/some-lab/multimesh-jax", "pull": "docker pull it"}
    labels = {f"{buildx.OCI}.version": "0.1.0", f"{buildx.LABEL}.accelerator": "cpu"}
    pin = {"version": "0.2.5", "commit": None, "tree": "f" * 40, "archives": {}, "patches": {}}
    (tmp_path / "sources.lock").write_text(json.dumps({"components": {"maxtext": pin}}))
    text = steps.notes(tmp_path, "v0.1.0", {"version": "v0.1.0", "labels": labels, "image": told}, gpu=False)
    said = f"maxtext 0.2.5 is pinned by its bytes (tree {'f' * 40}); the commit of its tag was read nowhere."
    assert said in text
    assert text.startswith("```console\ndocker pull it\ndocker run --rm ghcr.io/some-lab/multimesh-jax:v0.1.0 /opt/")

"""The steps of the workflows that need nothing but the repository."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tooling.ci import steps
from tooling.image import pipeline
from tooling.image.reference import LABEL, OCI
from tooling.sources import sync


def test_notes_say_how_to_begin_and_which_commits_nobody_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image: dict[str, Any] = {"repository": "ghcr.io/some-lab/multimesh-jax", "pull": "docker pull it"}
    labels = {f"{OCI}.version": "0.1.0", f"{LABEL}.accelerator": "cpu"}
    digest = "sha256:" + "ab" * 32
    image |= {"digest": digest, "id": digest, "bytes": 1, "candidate": "sha-x", "tags": []}
    check = {"job": "small", "verdict": "ok"}
    document = {"format": 4, "created": "2026-01-01", "image": image, "check": check, "labels": labels}
    (tmp_path / "release.json").write_text(json.dumps(document))
    pin = {"version": "0.2.5", "commit": None, "tree": "f" * 40}
    (tmp_path / "sources.lock").write_text(json.dumps({"components": {"maxtext": pin}}))
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    steps.run_notes(argparse.Namespace(tag="v0.1.0", file=tmp_path / "release.json", gpu=False))
    text = capsys.readouterr().out
    assert f"maxtext 0.2.5 is pinned by its bytes (tree {'f' * 40}); the commit of its tag was read nowhere." in text
    assert text.startswith("```console\ndocker pull it\ndocker run --rm ghcr.io/some-lab/multimesh-jax:v0.1.0 /opt/")


def test_every_command_names_a_function_and_its_groups_are_those_that_are_installed(root: Path) -> None:
    document = tomllib.loads((root / "tooling/commands.toml").read_text(encoding="utf-8"))
    commands = [*document["commands"].values(), *document["commands"]["ci"]["commands"].values()]
    names = [command["run"].rpartition(".") for command in commands if "commands" not in command]
    assert all(callable(getattr(importlib.import_module(f"tooling.{module}"), name)) for module, _, name in names)
    assert {*document["options"]["sources"]["--group"]["choices"]} == {*sync.DEFAULT, *sync.ADDED, "image"}
    stages = document["options"]["image-content"]
    assert (stages["--image"]["choices"], stages["--stage"]["choices"]) == ([*pipeline.IMAGES], [*pipeline.STAGES])


def test_every_message_names_a_command_that_runs_outside_of_the_environment(root: Path) -> None:
    """Without ``.venv/bin/`` a system's Python was started, which has none of the packages."""
    lines = [
        f"{path.relative_to(root)}: {line.strip()}"
        for folder in ("tooling", "docker", ".devcontainer", ".github")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".sh", ".yml", ".lock", ".md", ".json")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(?<!\.venv/bin/)\bpython3? -m tooling", line) and "``python -m" not in line
    ]
    assert lines == []

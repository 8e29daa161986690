"""What every workflow keeps to, read as GitHub would read it. The jobs themselves run in tests/integration/github."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tooling.core.files import ROOT
from tooling.image import reference

FOLDER = ROOT / ".github" / "workflows"
FOREIGN = ("bootstrap.sh", ".ci/run", "pytest", "--group dev")  # they run code that a change of a pin may bring


def workflow(name: str) -> dict[Any, Any]:
    return dict(yaml.safe_load((FOLDER / name).read_text(encoding="utf-8")))


def scripts(body: Mapping[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in body["steps"])


@pytest.mark.parametrize("name", [path.name for path in FOLDER.glob("*.yml")])
def test_what_may_log_in_or_write(name: str) -> None:
    """A self-hosted runner keeps the login of one job for those after it. GitHub's own are thrown away after a job.

    Who can write runs nothing but the locked tools.
    """
    assert workflow(name)["permissions"] == {}
    for body in workflow(name)["jobs"].values():
        if "steps" not in body:
            continue
        before, login, _ = scripts(body).partition("docker login")
        private = 'printf \'DOCKER_CONFIG=%s\\n\' "$RUNNER_TEMP/docker" >>"$GITHUB_ENV"' in before
        attests = any(step.get("with", {}).get("push-to-registry") for step in body["steps"])
        assert not login or private or body["runs-on"] == "ubuntu-24.04"
        assert not attests or (login and not private), "actions/attest reads ~/.docker/config.json alone"
        writes = {name for name, right in body["permissions"].items() if right == "write"}
        rights = writes - {"issues", "id-token", "pages"}
        assert not rights or not [word for word in FOREIGN if word in scripts(body)]
        assert "git apply" not in scripts(body)
        steps = [step for step in body["steps"] if step.get("uses", "").startswith("actions/download-artifact@")]
        assert not rights or all("name" in step["with"] for step in steps), "an artifact by its name, not by a pattern"


def test_a_release_is_approved_checked_first_and_reads_no_cache_that_a_branch_wrote() -> None:
    release, build = workflow("release.yml")["jobs"], workflow("image.yml")["jobs"]["build"]
    assert release["approve"]["environment"] == "release"
    assert release["image"]["needs"] == "approve"
    assert "image" in release["publish"]["needs"]
    assert build["env"]["CACHE"] == (
        "${{ inputs.jaxlib == 'source' && (inputs.release != '' && '--no-cache' || '--bazel-cache-write') || '' }}"
    )
    text = scripts(build)
    assert 0 < text.index("ci preflight") < text.index("docker/build.py")
    assert 'printf "$(' not in text, "the exit code of what printf is given would be lost"


@pytest.mark.parametrize("owner", ["Some-Lab", "somebody_corp", "7"])
@pytest.mark.parametrize("registry", ["ghcr.io", "r.example:5000"])
def test_every_owner_of_github_has_an_image(owner: str, registry: str, tmp_path: Path) -> None:
    (step,) = [step for step in workflow("image.yml")["jobs"]["build"]["steps"] if step.get("id") == "name"]
    env = {"GITHUB_REPOSITORY_OWNER": owner, "REGISTRY": registry, "GITHUB_OUTPUT": str(tmp_path / "output")}
    subprocess.run(["bash", "-euo", "pipefail", "-c", step["run"]], env=env, check=True)
    name = f"{registry}/{owner.lower()}/multimesh-jax"
    assert (tmp_path / "output").read_text() == f"image={name}\n"
    assert str(reference.make(name, None, "1")) == f"{name}:1", "build.py takes it"

"""What every workflow keeps to, read as GitHub would read it. The jobs themselves run in tests/integration/github."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tooling.image import reference

FOLDER = Path(__file__).resolve().parents[2] / ".github" / "workflows"
FOREIGN = ("bootstrap.sh", ".ci/run", "pytest", "--group dev")  # they run code that a change of a pin may bring


def workflow(name: str) -> dict[Any, Any]:
    return dict(yaml.safe_load((FOLDER / name).read_text(encoding="utf-8")))


JOBS = [
    pytest.param(body, id=f"{path.name}:{name}")
    for path in sorted(FOLDER.glob("*.yml"))
    for name, body in workflow(path.name)["jobs"].items()
    if "steps" in body
]


def scripts(body: Mapping[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in body["steps"])


@pytest.mark.parametrize("body", JOBS)
def test_who_logs_in_has_a_docker_configuration_of_its_own(body: dict[str, Any]) -> None:
    """A self-hosted runner keeps the login of one job for those after it. GitHub's own are thrown away after a job."""
    before, login, _ = scripts(body).partition("docker login")
    private = 'printf \'DOCKER_CONFIG=%s\\n\' "$RUNNER_TEMP/docker" >>"$GITHUB_ENV"' in before
    attests = any(step.get("with", {}).get("push-to-registry") for step in body["steps"])
    assert not login or private or body["runs-on"] == "ubuntu-24.04"
    assert not attests or (login and not private), "actions/attest reads ~/.docker/config.json alone"


@pytest.mark.parametrize("body", JOBS)
def test_who_can_write_runs_nothing_but_the_locked_tools(body: dict[str, Any]) -> None:
    rights = {name for name, right in body["permissions"].items() if right == "write"} - {"issues", "id-token", "pages"}
    text = scripts(body)
    assert not rights or not [word for word in FOREIGN if word in text]
    assert "git apply" not in text
    steps = [step for step in body["steps"] if step.get("uses", "").startswith("actions/download-artifact@")]
    assert not rights or all("name" in step["with"] for step in steps), "an artifact by its name, not by a pattern"


@pytest.mark.parametrize("name", [path.name for path in FOLDER.glob("*.yml")])
def test_a_workflow_begins_without_permissions(name: str) -> None:
    assert workflow(name)["permissions"] == {}


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

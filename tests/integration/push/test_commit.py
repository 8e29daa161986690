"""An image of a running devcontainer."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import uuid

import pytest

from workflows import errors
from workflows.image import commit

from .conftest import workflows

SECRET = "hunter2-hunter2-hunter2"
ODD = 'a "b" $HOME c\\d'


@pytest.fixture
def container(make_tiny, tmp_path):
    """A container with a change in its files, a token in its environment and a folder of its user."""
    name = f"devcontainer-{uuid.uuid4().hex[:8]}"
    (tmp_path / "mine.txt").write_text(SECRET)
    image = make_tiny(user="0", env={"MODE": ODD})
    argv = ["docker", "run", "--detach", "--name", name, "--env", f"API_TOKEN={SECRET}", "--env", "MODE=mine"]
    argv += ["--mount", f"type=bind,source={tmp_path},target=/mine", image.id]
    subprocess.run(
        [*argv, "/bin/sh", "-c", "echo work >/work.txt; exec /bin/busybox sleep 600"], check=True, capture_output=True
    )
    yield name
    subprocess.run(["docker", "rm", "--force", name], capture_output=True)


def test_commit_keeps_files_and_drops_secrets(engine, container: str, capsys) -> None:
    made = commit.commit(engine, commit.find(engine, container), {"org.example.made": "here"})
    try:
        ran = subprocess.run(["docker", "run", "--rm", made, "/bin/cat", "/work.txt"], capture_output=True, text=True)
        assert ran.stdout == "work\n", ran.stderr
        saved = subprocess.run(["docker", "save", made], capture_output=True, check=True).stdout
        assert SECRET.encode() not in saved
        with tarfile.open(fileobj=io.BytesIO(saved)) as archive:
            manifest = json.load(archive.extractfile("manifest.json"))
            config = json.load(archive.extractfile(manifest[0]["Config"]))
        assert config["config"]["Labels"]["org.example.made"] == "here"
        assert {"API_TOKEN=", f"MODE={ODD}"} <= set(config["config"]["Env"])
        said = capsys.readouterr().err
        assert "not in the image: the values of API_TOKEN, MODE" in said
        assert "mounted, so not in the image: /mine" in said
    finally:
        subprocess.run(["docker", "rmi", "--force", made], capture_output=True)
    names = subprocess.run(["docker", "images", "--format", "{{.Repository}}"], capture_output=True, text=True).stdout
    assert "multimesh-commit-" not in names


def test_committing_no_container(docker_engine) -> None:
    done = workflows("image", "--commit", "no-such-container", "--stage", "devcontainer", "--accelerator", "cpu")
    assert (done.returncode, done.stdout) == (13, "")
    assert "no such container" in done.stderr


def test_variables_are_as_in_the_image() -> None:
    image = ["PATH=/bin", "HOME=/root"]
    assert commit.restored(["PATH=/mine", "HOME=/other", "TOKEN=a=b"], image) == {"HOME": "/root", "TOKEN": ""}
    assert commit.restored(image, image) == {}
    with pytest.raises(errors.UsageError, match="cannot be left out"):
        commit.restored(["a b=c"], image)

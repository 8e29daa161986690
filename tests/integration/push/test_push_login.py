"""Logging in to a real registry that asks for it; the password goes nowhere else."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.parts import packages, processes
from tooling.core import errors
from tooling.image import reference, tags
from tooling.image.reference import Reference
from tooling.image.registry import Registry

from .conftest import Tiny, tooling

USER, SECRET = "builder", "correct-horse-battery"
CONFIG = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:{port}"}}
auth: {{htpasswd: {{realm: here, path: {htpasswd}}}}}
"""
HELPER = """\
#!/bin/sh
read -r host
[ "$1" = get ] && echo '{"ServerURL": "'"$host"'", "Username": "%s", "Secret": "%s"}'
"""
BUILDX = {"cliPluginsExtraDirs": [str(Path.home() / ".docker" / "cli-plugins")]}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry that wants a user and a password."""
    folder, port = tmp_path_factory.mktemp("guarded"), processes.free_port()
    htpasswd = [packages.need("htpasswd", "apache2-utils"), "-niB", USER]
    hashed = subprocess.run(htpasswd, input=SECRET, capture_output=True, text=True, check=True).stdout
    (folder / "htpasswd").write_text(hashed)
    config = folder / "registry.yml"
    config.write_text(CONFIG.format(root=folder / "data", port=port, htpasswd=folder / "htpasswd"))
    argv = [packages.need("docker-registry", "docker-registry"), "serve", str(config)]
    with processes.server(argv, folder / "log", healthy=lambda: processes.listens(port)):
        yield f"127.0.0.1:{port}"


@pytest.fixture
def target(guarded: str) -> Reference:
    return reference.make(f"{guarded}/team", "login", "v1")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict], None]:
    """Be somebody whose Docker configuration is this."""

    def write(document: dict) -> None:
        (tmp_path / "config.json").write_text(json.dumps(document | BUILDX))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    return write


def auth(secret: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{USER}:{secret}".encode()).decode()}


@pytest.mark.stand_in("a registry on this machine")
def test_nobody_and_somebody_else_are_refused(docker_engine, target: Reference, config) -> None:
    options = ("--upload", "--repo", target.repository, "--tag", "v1", "--accelerator", "cpu", "--allow-dirty")
    for document, said in (
        ({}, "nobody is logged in (401); run `docker login"),
        ({"auths": {target.host: auth("a-wrong-password")}}, "the login for it is not accepted (401)"),
    ):
        config(document)
        done = tooling("image", *options)
        assert (done.returncode, done.stdout) == (16, ""), done.stderr
        assert said in done.stderr
        assert "a-wrong-password" not in done.stderr


@pytest.mark.parametrize("way", ["file", "helper", "store"])
def test_push_with_a_login(
    make_tiny, engine, target: Reference, config, tmp_path, monkeypatch, capfd, way: str
) -> None:
    helper = tmp_path / "bin" / "docker-credential-here"
    helper.parent.mkdir()
    helper.write_text(HELPER % (USER, SECRET))
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(helper.parent), prepend=":")
    ways = {
        "file": {"auths": {target.host: auth(SECRET)}},
        "helper": {"credHelpers": {target.host: "here"}},
        "store": {"credsStore": "here", "auths": {target.host: {}}},
    }
    config(ways[way])
    image: Tiny = make_tiny(way)
    engine.run("tag", image.id, str(target.tagged("sha-1")))

    registry = Registry(target)
    registry.check_push()
    pushed = tags.push(engine, image.id, target.tagged("sha-1"))
    moved = tags.promote(engine, target, pushed.digest, ("v1",))

    assert moved[0].digest == pushed.digest
    said = "".join(capfd.readouterr())
    assert SECRET not in said
    assert auth(SECRET)["auth"] not in said
    assert SECRET not in repr(registry.__dict__)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"credHelpers": {"HOST": "no-such-helper"}}, "docker-credential-no-such-helper is not here or failed"),
        ({"credHelpers": {"HOST": "../../bin/sh"}}, "is not here or failed"),
        ({"auths": {"HOST": {"auth": "%%%"}}}, "cannot be read; log in again"),
    ],
)
def test_broken_configurations_are_named(target: Reference, config, document: dict, said: str) -> None:
    config(json.loads(json.dumps(document).replace("HOST", target.host or "")))
    with pytest.raises(errors.RegistryError, match=said):
        Registry(target)

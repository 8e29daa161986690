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


def host(target: Reference) -> str:
    return target.repository.partition("/")[0]


def auth(secret: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{USER}:{secret}".encode()).decode()}


@pytest.mark.stand_in("a registry on this machine")
def test_nobody_and_somebody_else_are_refused(docker_engine, target: Reference, config) -> None:
    for document, said in (
        ({}, "no basic auth credentials); log in to the registry"),
        ({"auths": {host(target): auth("a-wrong-password")}}, "; log in to the registry"),
    ):
        config(document)
        done = tooling("ci", "preflight", target.repository, "--tag", "v1")
        assert (done.returncode, done.stdout) == (36, ""), done.stderr
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
        "file": {"auths": {host(target): auth(SECRET)}},
        "helper": {"credHelpers": {host(target): "here"}},
        "store": {"credsStore": "here", "auths": {host(target): {}}},
    }
    config(ways[way])
    image: Tiny = make_tiny(way)
    engine.run("tag", image.id, str(target.tagged("sha-1")))

    tags.check_push(engine, target)
    pushed = tags.push(engine, image.id, target.tagged("sha-1"))
    moved = tags.promote(engine, target, pushed.digest, ("v1",))

    assert moved[0].digest == pushed.digest
    said = "".join(capfd.readouterr())
    assert SECRET not in said
    assert auth(SECRET)["auth"] not in said


@pytest.mark.stand_in("a registry on this machine")
@pytest.mark.parametrize(
    "document", [{"credHelpers": {"HOST": "no-such-helper"}}, {"auths": {"HOST": {"auth": "%%%"}}}]
)
def test_a_broken_configuration_ends_in_one_line(docker_engine, target: Reference, config, document: dict) -> None:
    config(json.loads(json.dumps(document).replace("HOST", host(target))))
    done = tooling("ci", "preflight", target.repository, "--tag", "v1")
    assert (done.returncode, done.stdout) == (36, ""), done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.stand_in("a registry on this machine")
def test_a_login_at_home_counts_as_docker_reads_it(
    docker_engine, target: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine
) -> None:
    """`DOCKER_CONFIG` hides the login in the home folder from the client, so it hides it from us."""
    home = tmp_path / "home"
    (home / ".docker").mkdir(parents=True)
    (home / ".docker" / "config.json").write_text(json.dumps({"auths": {host(target): auth(SECRET)}} | BUILDX))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    tags.check_push(engine, target)
    (tmp_path / "config.json").write_text(json.dumps(BUILDX))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(errors.RegistryError, match="log in to the registry"):
        tags.check_push(engine, target)

"""Logging in to a real registry that asks for it; the password goes nowhere else."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.parts import registry as registries
from tooling.image import engine as engines
from tooling.image import reference
from tooling.image.reference import Reference
from tooling.image.registry import Registry

from .conftest import tooling

USER, SECRET = "builder", "correct-horse-battery"
HELPER = """\
#!/bin/sh
read -r host
[ "$1" = get ] && echo '{"ServerURL": "'"$host"'", "Username": "%s", "Secret": "%s"}'
"""
pytestmark = pytest.mark.stand_in("a registry on this machine")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry that wants a user and a password."""
    with registries.running(tmp_path_factory.mktemp("guarded"), login=(USER, SECRET)) as address:
        yield address


@pytest.fixture
def target(guarded: str) -> Reference:
    return reference.make(f"{guarded}/team", "login", "v1")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict], None]:
    """Be somebody whose Docker configuration is this."""

    def write(document: dict) -> None:
        (tmp_path / "config.json").write_text(json.dumps(document))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    return write


def host(target: Reference) -> str:
    return target.repository.partition("/")[0]


def auth(secret: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{USER}:{secret}".encode()).decode()}


def test_nobody_and_somebody_else_are_refused(target: Reference, config) -> None:
    for document in ({}, {"auths": {host(target): auth("a-wrong-password")}}):
        config(document)
        done = tooling("ci", "preflight", target.repository, "--tag", "v1")
        assert (done.returncode, done.stdout) == (4, ""), done.stderr
        assert f"refused (401 Unauthorized); log in with `docker login {host(target)}`" in done.stderr
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
    engine.api.reload_config()
    there, image = Registry(target.repository), make_tiny(way)
    image.tag(*target.tagged("candidate"))
    there.check_push()
    engines.push(engine, target.tagged("candidate"))
    (moved,) = there.promote(there.get("candidate").digest, ("v1",))
    assert image.id in there.ids(there.get("v1"))
    assert moved["digest"] == there.digest("v1")
    output = "".join(capfd.readouterr())
    assert SECRET not in output
    assert auth(SECRET)["auth"] not in output


@pytest.mark.parametrize(
    "document", [{"credHelpers": {"HOST": "no-such-helper"}}, {"auths": {"HOST": {"auth": "%%%"}}}]
)
def test_a_broken_configuration_ends_in_one_line(target: Reference, config, document: dict) -> None:
    config(json.loads(json.dumps(document).replace("HOST", host(target))))
    done = tooling("ci", "preflight", target.repository, "--tag", "v1")
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")

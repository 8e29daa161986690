"""Logging in to a real registry that asks for it; the password goes nowhere else."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.parts import processes
from tests.integration.parts import registry as registries
from tooling.image import engine as engines
from tooling.image import reference
from tooling.image.reference import Reference
from tooling.image.registry import Registry

from .conftest import tooling

USER, SECRET, WRONG = "builder", "correct-horse-battery", "a-wrong-password"
HELPER = f"""\
#!/bin/sh
read -r host
[ "$1" = get ] && echo '{{"ServerURL": "'"$host"'", "Username": "{USER}", "Secret": "{SECRET}"}}'
"""
pytestmark = pytest.mark.stand_in("a registry on this machine")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry that wants a user and a password."""
    with registries.running(tmp_path_factory.mktemp("guarded"), login=(USER, SECRET)) as address:
        yield address


@pytest.fixture
def target(guarded: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reference:
    """A repository there, asked by somebody whose Docker configuration is the test's parameter."""
    document = json.dumps(request.param).replace("HOST", guarded)
    (tmp_path / "config.json").write_text(document)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return reference.make(f"{guarded}/team", "login", "v1")


def auth(secret: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{USER}:{secret}".encode()).decode()}


REFUSED = "refused (401 Unauthorized); log in with `docker login 127.0.0.1:"
REFUSALS = {
    "nobody": ({}, REFUSED),
    "wrong password": ({"auths": {"HOST": auth(WRONG)}}, REFUSED),
    "no helper": ({"credHelpers": {"HOST": "no-such-helper"}}, "error: "),
    "no base64": ({"auths": {"HOST": {"auth": "%%%"}}}, "error: "),
}


@pytest.mark.parametrize(("target", "message"), REFUSALS.values(), ids=REFUSALS, indirect=["target"])
def test_who_has_no_login_is_refused_in_one_line(target: Reference, message: str) -> None:
    process = tooling("ci", "preflight", target.repository, "--tag", "v1", code=4)
    assert message in process.stderr
    assert process.stderr.splitlines()[-1].startswith("error: ")
    assert WRONG not in process.stderr


WAYS = {
    "file": {"auths": {"HOST": auth(SECRET)}},
    "helper": {"credHelpers": {"HOST": "here"}},
    "store": {"credsStore": "here", "auths": {"HOST": {}}},
}


@pytest.mark.parametrize("target", WAYS.values(), ids=WAYS, indirect=True)
def test_push_with_a_login(make_tiny, engine, target: Reference, tmp_path, monkeypatch, capfd) -> None:
    helper = processes.write_program(tmp_path / "bin" / "docker-credential-here", HELPER)
    monkeypatch.setenv("PATH", str(helper.parent), prepend=":")
    engine.api.reload_config()
    remote, image = Registry(target.repository), make_tiny()
    image.tag(*target.tagged("candidate"))
    remote.check_push()
    engines.push(engine, target.tagged("candidate"))
    (move,) = remote.promote(remote.get("candidate").digest, ("v1",))
    assert image.id in remote.ids(remote.get("v1"))
    assert move["digest"] == remote.digest("v1")
    output = "".join(capfd.readouterr())
    assert SECRET not in output
    assert auth(SECRET)["auth"] not in output

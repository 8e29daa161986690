"""Signing with a real cosign, against a real registry."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.integration.parts import packages
from workflows import console, errors
from workflows.image import attest, push

from .conftest import FAST


@pytest.fixture(scope="module")
def cosign(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Debian 13's cosign, in a folder."""
    folder = tmp_path_factory.mktemp("cosign")
    return str(packages.from_sid(folder, "cosign", suite="trixie") / "usr" / "bin")


@pytest.mark.stand_in("a registry on this machine")
def test_sign_and_verify(make_tiny, engine, target, cosign: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", cosign, prepend=os.pathsep)
    monkeypatch.setenv("COSIGN_PASSWORD", "a-password")
    subprocess.run(["cosign", "generate-key-pair"], cwd=tmp_path, check=True, capture_output=True)
    image, other = make_tiny("signed"), make_tiny("unsigned")
    digests = []
    for each in (image, other):
        engine.run("tag", each.id, str(target.staging))
        digests.append(push.push(engine, each.id, target.staging, FAST, console.Reporter(quiet=True)).digest)
    key = str(tmp_path / "cosign.key")
    attest.check_key(key)

    signature = attest.sign(target, digests[0], key, plain_http=True)

    assert signature["public_key"] == (tmp_path / "cosign.pub").read_text().rstrip()
    monkeypatch.setenv("SIGNING_KEY", (tmp_path / "cosign.key").read_text())
    attest.check_key("env://SIGNING_KEY")
    assert (
        attest.sign(target, digests[0], "env://SIGNING_KEY", plain_http=True)["public_key"] == signature["public_key"]
    )
    with pytest.raises(errors.IntegrityError, match="has no signature of this key"):
        attest.verify(target.at(digests[1]), signature["public_key"], plain_http=True)


def test_keys_that_are_not_there(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    for key in ("env://NO_KEY", "env://a b", str(tmp_path / "no.key")):
        with pytest.raises(errors.UsageError, match="--sign-key"):
            attest.check_key(key)

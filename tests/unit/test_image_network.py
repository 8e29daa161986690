from __future__ import annotations

from pathlib import Path

import pytest

from tooling.core import errors
from tooling.image import network
from tooling.image.request import Means

SECRET = "https://user:hunter2@index.example/simple"


def means(**changes: object) -> Means:
    plain = {"pip_config": None, "ca_bundle": None, "network": "default", "layer_cache": True}
    cache = {"use_bazel_cache": True, "bazel_cache": None, "bazel_cache_write": False}
    return Means(**{**plain, **cache, **changes})  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose only pip configuration is the one below."""
    monkeypatch.setattr(network, "SYSTEM", ())
    monkeypatch.setattr(network.sys, "prefix", str(tmp_path))
    (tmp_path / ".config" / "pip").mkdir(parents=True)
    return {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / ".config" / "pip" / "pip.conf")}


def configure(home: dict[str, str], text: str) -> None:
    Path(home["PIP_CONFIG_FILE"]).write_text(text, encoding="utf-8")


def test_an_index_with_a_password_travels_in_the_environment_only(home: dict[str, str]) -> None:
    configure(home, f"[global]\nindex-url = {SECRET}\n")
    got = network.access(means(), home)
    assert "hunter2" not in " ".join(got.options)
    assert SECRET in got.variables[network.PIP_VARIABLE]
    assert f"id=pip.conf,env={network.PIP_VARIABLE}" in got.options


def test_the_environment_wins_over_the_files(home: dict[str, str]) -> None:
    configure(home, "[global]\nindex-url = https://file.example/simple\n")
    got = network.access(means(), home | {"PIP_INDEX_URL": "https://variable.example/simple"})
    assert "variable.example" in got.variables[network.PIP_VARIABLE]
    assert "file.example" not in got.variables[network.PIP_VARIABLE]


def test_folders_of_this_machine_are_left_out_and_named(home: dict[str, str]) -> None:
    configure(home, "[global]\nextra-index-url = file:///a/simple https://b.example/simple\nfind-links = /wheels\n")
    got = network.access(means(), home)
    assert set(got.left_out) == {"file:///a/simple", "/wheels"}
    assert "b.example" in got.variables[network.PIP_VARIABLE]
    assert "wheels" not in got.variables[network.PIP_VARIABLE]


def test_what_is_about_this_machine_alone_stays_here(home: dict[str, str]) -> None:
    configure(home, "[global]\ncache-dir = /mine\nuser = true\nrequire-virtualenv = true\n")
    got = network.access(means(), home)
    assert (got.options, got.variables) == ((), {})


def test_the_certificates_that_pip_trusts_are_handed_over(home: dict[str, str], tmp_path: Path) -> None:
    bundle = tmp_path / "company.pem"
    bundle.write_text("certificates", encoding="utf-8")
    configure(home, f"[global]\ncert = {bundle}\n")
    assert f"id=ca.pem,src={bundle}" in network.access(means(), home).options


def test_a_given_file_is_taken_as_it_is(home: dict[str, str], tmp_path: Path) -> None:
    configure(home, f"[global]\nindex-url = {SECRET}\n")
    got = network.access(means(pip_config=tmp_path / "other.conf"), home)
    assert got.options == ("--secret", f"id=pip.conf,src={tmp_path / 'other.conf'}")
    assert got.variables == {}


def test_proxies_go_by_name(home: dict[str, str]) -> None:
    got = network.access(means(), home | {"HTTPS_PROXY": "http://user:hunter2@proxy.example:3128"})
    assert got.options == ("--build-arg", "HTTPS_PROXY")


def test_a_broken_configuration_is_named(home: dict[str, str]) -> None:
    configure(home, "index-url = https://no.section.example\n")
    with pytest.raises(errors.UsageError, match="--pip-config"):
        network.access(means(), home)

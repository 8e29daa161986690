"""How a build gets pip's configuration, certificates and proxies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tooling.image import network
from tooling.image.request import Means

MEANS = Means(None, None, "default", True, True, None, False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A pip.conf of a company, whose index wants a password."""
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://user:hunter2@index.example/simple\n")
    return tmp_path / "pip.conf"


def test_a_configuration_is_handed_over_as_a_file(config: Path) -> None:
    handed = ("--secret", f"id=pip.conf,src={config}")
    assert network.access(MEANS._replace(pip_config=config), {}) == handed
    assert network.access(MEANS, {"PIP_CONFIG_FILE": str(config)}) == handed


def test_the_file_that_is_given_wins(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.conf"
    got = network.access(MEANS._replace(pip_config=other), {"PIP_CONFIG_FILE": str(config)})
    assert got == ("--secret", f"id=pip.conf,src={other}")


@pytest.mark.parametrize("variable", ["PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE"])
def test_trusted_certificates_are_handed_over(tmp_path: Path, variable: str) -> None:
    bundle = tmp_path / "company.pem"
    bundle.write_text("certificates", encoding="utf-8")
    assert network.access(MEANS, {variable: str(bundle)}) == ("--secret", f"id=ca.pem,src={bundle}")


def test_files_that_are_not_there_or_that_an_engine_cannot_take_stay_here(tmp_path: Path) -> None:
    odd = tmp_path / 'a,"b'
    odd.write_text("")
    for path in ("/dev/null", tmp_path / "none", odd):
        assert network.access(MEANS, {"PIP_CONFIG_FILE": str(path), "PIP_CERT": str(path)}) == ()


def test_an_index_in_a_variable_is_named_with_the_remedy(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = "https://user:hunter2@index.example/simple"
    network.tell_unread(MEANS, {"PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": index})
    said = capsys.readouterr().err
    assert said == (
        "PIP_INDEX_URL and PIP_EXTRA_INDEX_URL: not handed to the build; write it into a file, and add "
        "--pip-config FILE\n"
    )
    network.tell_unread(MEANS._replace(pip_config=config), {"PIP_INDEX_URL": index})
    network.tell_unread(MEANS, {"PIP_INDEX_URL": index, "PIP_CONFIG_FILE": str(config)})
    network.tell_unread(MEANS, {"PIP_INDEX_URL": ""})
    assert capsys.readouterr().err == ""


def test_proxies_go_by_name() -> None:
    got = network.access(MEANS, {"HTTPS_PROXY": "http://user:hunter2@proxy.example:3128"})
    assert got == ("--build-arg", "HTTPS_PROXY")

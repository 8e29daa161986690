"""What somebody who wants in has tried: tampered manifests and locks, and injections."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tooling.core import errors
from tooling.image import digests, reference
from tooling.image.request import add_options, from_options
from tooling.sources import git, manifest, sync

HEX, SHA = "a" * 40, "b" * 64
FETCHED = {"url": "https://example.org/a.git", "groups": ["run"]}
IMAGE = {"reference": "docker.io/a/b:1", "digest": f"sha256:{SHA}"}
FILE = {"url": "https://example.org/f", "sha256": SHA}

MANIFESTS: dict[str, Any] = {
    "name-escapes": {"../a": FETCHED},
    "name-is-an-option": {"-a": FETCHED},
    "path-escapes": {"a": FETCHED | {"path": "../../evil"}},
    "path-absolute": {"a": FETCHED | {"path": "/etc"}},
    "path-into-git": {"a": FETCHED | {"path": "src/.git/hooks"}},
    "path-backslash": {"a": FETCHED | {"path": "a\\..\\b"}},
    "tag-with-a-refspec": {"a": FETCHED | {"tag": "v1:refs/heads/main"}},
    "wheel-escapes": {"a": FETCHED | {"wheel": "../a"}},
    "link": {"a": FETCHED | {"link": "../../home"}},
    "unknown-field": {"a": FETCHED | {"run": "make install"}},
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_tampered_manifest_is_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "sources.yaml").write_text(json.dumps({"format": 1, "components": MANIFESTS[case]}))
    with pytest.raises(errors.SourceError):
        manifest.load(tmp_path / "sources.yaml")


@pytest.mark.parametrize(
    "fields",
    [
        {"images": {"a": IMAGE | {"digest": ""}}, "files": {}},  # an empty one would be no pin at all
        {"images": {"a": IMAGE}, "files": {"b": FILE | {"url": "http://example.org/f; reboot"}}},
    ],
)
def test_a_tampered_lock_of_images_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / digests.FILE).write_text(json.dumps(fields))
    with pytest.raises(errors.SourceError, match=r"images\.lock: .*; restore it with git"):
        digests.load(tmp_path)


def test_the_locks_as_they_should_be_are_taken(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / digests.FILE).write_text(json.dumps({"images": {"a": IMAGE}, "files": {"b": FILE}}))
    assert digests.load(tmp_path).images["a"].exact == f"docker.io/a/b:1@sha256:{SHA}"


def asking(*argv: str) -> Callable[[], object]:
    def ask() -> object:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_options(parser)
        return from_options(parser.parse_args(argv))

    return ask


INJECTIONS: list[Callable[[], object]] = [
    *(asking(f"--tag={text}") for text in ("a;reboot", "$(id)", "`id`", "--privileged", "a\nb")),
    *(asking(f"--repo={text}") for text in ("o/$(id)", "o/i\n--push", "user:pass@r.example/i", "-o/i")),
    *(asking(f"--base-image={text}") for text in ("x;id", "x@sha256:12", "x\nRUN id", "user:pass@r.example/x")),
    *(asking(f"--cuda-version={text}") for text in ("12.8; id", "12.8.1\nRUN id")),
    asking("--bazel-cache=127.0.0.1:9090 --config=evil"),
    lambda: reference.make("ghcr.io/o/i", None, "1").at("sha256:12"),
    *(
        (lambda text=text: sync.read_override(text))
        for text in (f"a=ext::sh@{HEX}", f"a=--upload-pack=x@{HEX}", f"a=https://u:p@r.example/a@{HEX}", "a=https://r.example/a@main")
    ),
]  # fmt: skip


@pytest.mark.parametrize("injection", INJECTIONS)
def test_an_injection_is_refused(injection: Callable[[], object]) -> None:
    with pytest.raises(errors.OptionError) as refused:
        injection()
    assert "pass@" not in str(refused.value)
    assert "u:p@" not in str(refused.value)


@pytest.mark.parametrize(
    "start", ["https://example.org:8443", "http://[::1]:80", "ssh://git@r.example", "git://r", "file://"]
)
def test_ordinary_addresses_pass(start: str) -> None:
    assert git.check_address(f"{start}/a b/c.git", "it")


@given(st.text(alphabet="-uox:/@.=e ext[]\n\\", max_size=20))
def test_an_accepted_address_is_no_option_and_no_helper(url: str) -> None:
    with contextlib.suppress(errors.OptionError):
        assert git.check_address(url, "it").startswith(tuple(f"{scheme}://" for scheme in git.SCHEMES))

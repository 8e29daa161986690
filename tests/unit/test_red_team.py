"""What somebody who wants in has tried: tampered manifests and locks, and injections."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tooling import cli
from tooling.core import errors
from tooling.image import pipeline, reference
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
        {"images": {"a": {"reference": "a"}}, "files": {}},
        {"images": {"a": "text"}, "files": {}},
        {"images": {"a": IMAGE}, "files": {"b": FILE | {"url": "http://example.org/f; reboot"}}},
    ],
)
def test_a_tampered_lock_of_images_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / reference.LOCK).write_text(json.dumps(fields))
    with pytest.raises(errors.SourceError, match=r"images\.lock: .*; restore it with git"):
        reference.load_lock(tmp_path)


TAGS = [
    "", "-rf", "--privileged", ".hidden", "a b", "a;reboot", "$(id)", "`id`", "a:b", "a/b", "a@sha256:0", "t\n", "é",
    "x" * 129,
]  # fmt: skip
REPOSITORIES = [
    "", "https://ghcr.io/o/i", "user:pass@host.example/i", "ghcr.io//i", "ghcr.io/o/../i", "/etc/passwd", "o/i/",
    "o/i:tag", "o/i@sha256:0", "o/i;reboot", "o/$(id)", "o/ i", "o/i\n", "o/i\n--push", "-o/i", "o/-i", "o/i-",
    "o/a..b", "host.example:port/i", "o/" + "i" * 300,
]  # fmt: skip
BASES = ["x;id", "x@sha256:12", "x\nRUN id", "user:pass@r.example/x"]
INJECTIONS: list[Callable[[], object]] = [
    *(partial(pipeline.parse, [f"--tag={text}"]) for text in TAGS),
    *(partial(pipeline.parse, [f"--repo={text}"]) for text in REPOSITORIES),
    *(partial(pipeline.parse, [f"--base-image={text}"]) for text in BASES),
    *(partial(pipeline.parse, [f"--cuda-version={text}"]) for text in ("12.8; id", "12.8.1\nRUN id")),
    partial(pipeline.parse, ["--bazel-cache=127.0.0.1:9090 --config=evil"]),
    partial(cli.main_inner, ["promote", "ghcr.io/o/i@sha256:12", "--tag", "1"]),
    *(partial(sync.read_override, f"a={text}") for text in
      (f"ext::sh@{HEX}", f"--upload-pack=x@{HEX}", f"https://u:p@r.example/a@{HEX}", "https://r.example/a@main")),
]  # fmt: skip


@pytest.mark.parametrize("injection", INJECTIONS)
def test_an_injection_is_refused(injection: Callable[[], object]) -> None:
    with pytest.raises(errors.OptionError) as error:
        injection()
    assert "pass@" not in str(error.value)
    assert "u:p@" not in str(error.value)


@pytest.mark.parametrize(
    "start", ["https://example.org:8443", "http://[::1]:80", "ssh://git@r.example", "git://r", "file://"]
)
def test_ordinary_addresses_pass(start: str) -> None:
    assert git.check_address(f"{start}/a b/c.git", "it")


@given(st.text(alphabet="-uox:/@.=e ext[]\n\\", max_size=20))
def test_an_accepted_address_is_no_option_and_no_helper(url: str) -> None:
    with contextlib.suppress(errors.OptionError):
        assert git.check_address(url, "it").startswith(tuple(f"{scheme}://" for scheme in git.SCHEMES))

"""What somebody who wants in has tried: 17 tampered manifests and locks, 21 injections, 25 crafted wheels."""

from __future__ import annotations

import argparse
import io
import json
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tooling.core import errors
from tooling.image import digests, reference
from tooling.image.request import add_options, from_options
from tooling.sources import git, manifest, sync, wheel

HEX, SHA = "a" * 40, "b" * 64
PIN = {"version": "1", "commit": HEX, "tree": HEX, "archives": {}, "patches": {}}
FETCHED = {"url": "https://example.org/a.git", "version": "1.0", "groups": ["run"]}
IMAGE = {"reference": "docker.io/a/b:1", "digest": f"sha256:{SHA}"}
FILE = {"url": "https://example.org/f", "sha256": SHA}

MANIFESTS: dict[str, Any] = {
    "name-escapes": {"../a": FETCHED},
    "name-is-an-option": {"-a": FETCHED},
    "path-escapes": {"a": FETCHED | {"path": "../../evil"}},
    "path-absolute": {"a": FETCHED | {"path": "/etc"}},
    "path-into-git": {"a": FETCHED | {"path": "src/.git/hooks"}},
    "path-backslash": {"a": FETCHED | {"path": "a\\..\\b"}},
    "version-is-an-option": {"a": FETCHED | {"version": "--upload-pack=x"}},
    "version-with-a-newline": {"a": FETCHED | {"version": "1.0\n--index-url=http://evil.example"}},
    "tag-with-a-refspec": {"a": FETCHED | {"tag": "v1:refs/heads/main"}},
    "package-is-an-option": {"a": FETCHED | {"wheel": {"package": "--pre", "file": "a.whl", "root": "a"}}},
    "wheel-file-escapes": {"a": FETCHED | {"wheel": {"package": "a", "file": "../a.whl", "root": "a"}}},
    "link-escapes": {"a": {"link": "../../home", "groups": ["run"]}},
    "unknown-field": {"a": FETCHED | {"run": "make install"}},
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_tampered_manifest_is_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "sources.yaml").write_text(json.dumps({"format": 1, "components": MANIFESTS[case]}))
    with pytest.raises(errors.ManifestError):
        manifest.load(tmp_path / "sources.yaml")


@pytest.mark.parametrize("held", [{"tree": HEX[:-1]}, {"archives": {"a.whl": SHA.upper()}}])
def test_a_tampered_lock_of_sources_is_refused(tmp_path: Path, held: dict[str, Any]) -> None:
    (tmp_path / "sources.lock").write_text(json.dumps({"components": {"a": PIN | held}}))
    with pytest.raises(errors.ManifestError, match=r"sources\.lock: .*; restore it with git"):
        manifest.load_lock(tmp_path / "sources.lock")


@pytest.mark.parametrize(
    "held",
    [
        {"images": {"a": IMAGE | {"digest": ""}}, "files": {}},  # an empty one would be no pin at all
        {"images": {"a": IMAGE}, "files": {"b": FILE | {"url": "http://example.org/f; reboot"}}},
    ],
)
def test_a_tampered_lock_of_images_is_refused(tmp_path: Path, held: dict[str, Any]) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / digests.FILE).write_text(json.dumps(held))
    with pytest.raises(errors.ManifestError, match=r"images\.lock: .*; restore it with git"):
        digests.load(tmp_path)


def test_the_locks_as_they_should_be_are_taken(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / digests.FILE).write_text(json.dumps({"images": {"a": IMAGE}, "files": {"b": FILE}}))
    assert digests.load(tmp_path).images["a"].exact == f"docker.io/a/b:1@sha256:{SHA}"


def asked(*argv: str) -> Callable[[], object]:
    def ask() -> object:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_options(parser)
        return from_options(parser.parse_args(argv))

    return ask


INJECTIONS: list[Callable[[], object]] = [
    *(asked(f"--tag={text}") for text in ("a;reboot", "$(id)", "`id`", "--privileged", "a\nb")),
    *(asked(f"--repo={text}") for text in ("o/$(id)", "o/i\n--push", "user:pass@r.example/i", "-o/i")),
    *(asked(f"--base-image={text}") for text in ("x;id", "x@sha256:12", "x\nRUN id", "user:pass@r.example/x")),
    *(asked(f"--cuda-version={text}") for text in ("12.8; id", "12.8.1\nRUN id")),
    asked("--bazel-cache=127.0.0.1:9090 --config=evil"),
    lambda: reference.make("ghcr.io/o/i", None, "1").at("sha256:12"),
    *(
        (lambda text=text: sync._override(text))
        for text in (f"a=ext::sh@{HEX}", f"a=--upload-pack=x@{HEX}", f"a=https://u:p@r.example/a@{HEX}", "a=https://r.example/a@main")
    ),
]  # fmt: skip


@pytest.mark.parametrize("injection", INJECTIONS)
def test_an_injection_is_refused(injection: Callable[[], object]) -> None:
    with pytest.raises(errors.UsageError) as refused:
        injection()
    assert "pass@" not in str(refused.value)
    assert "u:p@" not in str(refused.value)


def entry(name: str, data: bytes = b"x", mode: int = 0o100644) -> tuple[str, bytes, int]:
    return name, data, mode


LINK = stat.S_IFLNK | 0o777
WHEELS: dict[str, tuple[str, bytes, int]] = {
    name: entry(name)
    for name in (
        "../out", "pkg/../../out", "/tmp/out", "~/out", "C:/out", "pkg\\out", "pkg//out", "pkg/./out",
        "pkg/a\x00b", "pkg/a\nb", "pkg/a\x7fb", "pkg/.git/config", "pkg/.GIT/config", "pkg/git~1/config",
        "pkg/GIT~2/x", "pkg/.git./x", "pkg/.git /x", "pkg/.git:x/y", "pkg/.g\u200cit/x",
    )
} | {
    f"link to {target}": entry("pkg/link", target.encode(), LINK)
    for target in ("/etc/passwd", "../out", "a/../../out", ".git/config", "")
}  # fmt: skip


@pytest.mark.parametrize("case", [*WHEELS, "no zip at all"])
def test_a_crafted_wheel_is_refused(tmp_path: Path, case: str) -> None:
    path = tmp_path / "a.whl"
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("pkg/good", "good")
        if case in WHEELS:
            name, data, mode = WHEELS[case]
            info = zipfile.ZipInfo("x")
            info.filename, info.external_attr = name, mode << 16
            archive.writestr(info, data)
    path.write_bytes(made.getvalue() if case in WHEELS else b"PK\x03\x04 of no archive")
    with pytest.raises(errors.IntegrityError, match=r"do not use it|cannot be read as a wheel"):
        wheel.import_tree(git.init(tmp_path / "repository"), path, "pkg", label="a")
    assert not (tmp_path / "out").exists()


def test_the_cases_are_as_many_as_they_were() -> None:
    assert (len(MANIFESTS) + 4, len(INJECTIONS), len(WHEELS) + 1) == (17, 21, 25)

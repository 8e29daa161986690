"""Manifests with mistakes, one small file each; and those of this repository."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from tooling.core import errors
from tooling.image import buildx
from tooling.sources import manifest, named
from tooling.sources.workspace import Workspace

BAD = sorted((Path(__file__).parent / "bad_manifests").glob("*.yaml"))


@pytest.mark.parametrize("path", BAD, ids=[path.stem for path in BAD])
def test_bad_manifest_is_refused(path: Path) -> None:
    expected = path.read_text().splitlines()[0].removeprefix("# error: ")

    with pytest.raises(errors.ManifestError) as caught:
        manifest.load(path)

    said = str(caught.value)
    assert said.startswith(path.name)
    assert expected.encode().decode("unicode_escape").strip() in said
    assert "user:secret" not in said


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "sources.yaml").write_bytes(b"format: \xff\n")

    with pytest.raises(errors.ManifestError, match=r"cannot be read .*byte"):
        manifest.load(tmp_path / "sources.yaml")


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(errors.ManifestError, match="No such file"):
        manifest.load(tmp_path / "sources.yaml")


def test_manifest_of_this_repository(root: Path) -> None:
    wanted, pins = manifest.load(root / "sources.yaml"), manifest.load_lock(root / "sources.lock")

    assert [each.name for each in wanted.of(["run"])] == ["maxtext", "multimesh"]
    assert [each.name for each in wanted.of(["source"])] == ["jax", "xla"]
    assert wanted.named("xla").follows == "jax"
    assert pins.keys() == {"maxtext", "jax"}, "the tree of jax names xla's commit"
    assert all(pin.fixed for pin in pins.values())
    for name, pin in pins.items():
        assert manifest.pin_of(wanted.named(name), pins) == pin


def test_the_locked_source_of_jax_is_that_of_the_locked_wheel(root: Path) -> None:
    """JAX's wheel says the commit that it was built from; so does the installed one, where it is the locked one."""
    held = manifest.load_lock(root / "sources.lock")["jax"]
    version, hashes = named.newest_pin(Workspace(root), "jax")
    assert held.version == version == buildx.jax(root)
    assert hashes
    installed = metadata.distribution("jax")
    if installed.version == version:
        told = Path(str(installed.locate_file("jax/version.py"))).read_text(encoding="utf-8")
        assert f"_git_hash: str = '{held.commit}'" in told


def test_lock_of_this_repository_is_as_it_would_be_written(root: Path, tmp_path: Path) -> None:
    manifest.save_lock(
        tmp_path / "lock", manifest.load(root / "sources.yaml"), manifest.load_lock(root / "sources.lock")
    )
    assert (tmp_path / "lock").read_text() == (root / "sources.lock").read_text()


def test_one_value_is_read_without_the_rest(root: Path, tmp_path: Path) -> None:
    path = root / "sources.lock"
    for name, pin in manifest.load_lock(path).items():
        for field in ("version", "commit", "tree", "patched_commit", "patched_tree"):
            assert manifest.read_pin(path, name, field) == getattr(pin, field)
    assert manifest.read_pin(path, "max", "version") is None
    (tmp_path / "sources.lock").write_text('{"components": {"alpha": {"tree": null}}}')
    assert manifest.read_pin(tmp_path / "sources.lock", "alpha", "tree") is None


def test_lock_agrees_with_the_patches_on_disk(root: Path) -> None:
    from tooling.sources import sync

    wanted, pins = manifest.load(root / "sources.yaml"), manifest.load_lock(root / "sources.lock")
    for component in wanted.components:
        if not component.link and not component.follows:
            recipe = sync.make_recipe(Workspace(root), component, pins)
            assert [each.file for each in recipe.patches] == [file for file, _ in pins[component.name].patches]


@pytest.mark.parametrize(
    ("field", "value"),
    [("commit", "main"), ("commit", "990e6a0"), ("tree", "-x"), ("patched_commit", "A" * 40)],
)
def test_lock_takes_whole_hashes_only(root: Path, tmp_path: Path, field: str, value: str) -> None:
    path = tmp_path / "sources.lock"
    entry = {"version": "1", "commit": None, "tree": None, "archives": {}, "patches": {}}
    path.write_text(json.dumps({"components": {"alpha": entry | {field: value}}}))

    with pytest.raises(errors.ManifestError, match=f"components.alpha.{field} is no hash of git"):
        manifest.load_lock(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"components": {"alpha": {"commit": null}}}', '{"components": {"a": 1}}']
)
def test_a_malformed_lock_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "sources.lock").write_text(text)
    with pytest.raises(errors.ManifestError, match=r"sources\.lock: is malformed .*; restore it with git"):
        manifest.load_lock(tmp_path / "sources.lock")

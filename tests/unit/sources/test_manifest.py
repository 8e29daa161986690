"""Manifests with mistakes, one small file each; and those of this repository."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest

from tooling.core import errors
from tooling.sources import manifest

BAD = sorted((Path(__file__).parent / "bad_manifests").glob("*.yaml"))


@pytest.mark.parametrize("path", BAD, ids=[path.stem for path in BAD])
def test_bad_manifest_is_refused(path: Path) -> None:
    expected = path.read_text().splitlines()[0].removeprefix("# error: ")

    with pytest.raises(errors.SourceError) as error:
        manifest.load(path)

    message = str(error.value)
    assert message.startswith(path.name)
    assert expected.encode().decode("unicode_escape").strip() in message
    assert "user:secret" not in message


def test_manifest_and_lock_of_this_repository(root: Path, tmp_path: Path) -> None:
    sources, locked = manifest.load(root / "sources.yaml"), manifest.load_lock(root / "sources.lock")
    assert {name: component.groups for name, component in sources.items()} == {
        "maxtext": ("run", "image"), "jax": ("source",), "xla": ("source",),
    }  # fmt: skip
    assert sources["xla"].commit.component == "jax"
    assert locked.keys() == {"maxtext", "jax"}, "the tree of jax names xla's commit"
    for name, pin in locked.items():
        assert manifest.make_recipe(root, sources[name], locked).pin == pin
    shutil.copyfile(root / "sources.lock", tmp_path / "lock")
    manifest.save_lock(tmp_path / "lock", sources, locked)
    assert (tmp_path / "lock").read_text() == (root / "sources.lock").read_text()


def test_the_locked_source_of_jax_is_that_of_the_locked_wheel(root: Path) -> None:
    """JAX's wheel says the commit that it was built from; so does the installed one, where it is the locked one."""
    pin = manifest.load_lock(root / "sources.lock")["jax"]
    version, hashes = manifest.find_newest(root, "jax")
    assert pin.version == version
    assert hashes
    distribution = metadata.distribution("jax")
    if distribution.version == version:
        text = Path(str(distribution.locate_file("jax/version.py"))).read_text(encoding="utf-8")
        assert f"_git_hash: str = '{pin.commit}'" in text


WHOLE = [("version", "--pre"), ("version", "1\n--pre"), ("commit", "main"), ("commit", "990e6a0"), ("tree", "-x"),
         ("patched_commit", "A" * 40)]  # fmt: skip
ENTRY = {"version": "1", "commit": None, "tree": None}
LOCKS = [
    *((json.dumps({"components": {"alpha": ENTRY | {field: value}}}), f"components.alpha.{field}: .* does not match .*")
      for field, value in WHOLE),
    *((text, ".*") for text in ("", "[]", "{}", '{"components": {"a": {"commit": null}}}', '{"components": {"a": 1}}')),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), LOCKS)
def test_a_lock_takes_whole_hashes_only_and_a_malformed_one_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sources.lock").write_text(text)
    with pytest.raises(errors.SourceError, match=rf"sources\.lock: {message}; restore it with git"):
        manifest.load_lock(tmp_path / "sources.lock")

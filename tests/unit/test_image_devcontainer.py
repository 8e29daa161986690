"""What ``devcontainer.json`` becomes when a pin moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tooling.core import errors
from tooling.image import digests


@pytest.fixture
def text(root: Path) -> str:
    return (root / digests.DEVCONTAINER).read_text(encoding="utf-8")


def test_it_follows_the_lock_and_keeps_its_comments(root: Path, text: str, tmp_path: Path) -> None:
    held = digests.load(root)
    path = tmp_path / digests.DEVCONTAINER
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    digests.follow(tmp_path, held)
    assert path.read_text(encoding="utf-8") == text

    base = replace(held.images["cuda-devel"], digest="sha256:" + "34" * 32)
    digests.follow(tmp_path, replace(held, images=held.images | {"cuda-devel": base}))
    pairs = zip(text.splitlines(), path.read_text(encoding="utf-8").splitlines(), strict=True)
    assert [(after.strip()) for before, after in pairs if before != after] == [f'"BASE_IMAGE": "{base.exact}",']

    path.write_text(text.replace('"PYTHON_URL"', '"PYTHON"'), encoding="utf-8")
    with pytest.raises(errors.ManifestError, match='has 0 lines "PYTHON_URL"'):
        digests.follow(tmp_path, held)

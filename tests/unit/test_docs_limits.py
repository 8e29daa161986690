"""docs/limits.md: what MultiMesh says there is what it says."""

from __future__ import annotations

import re
from pathlib import Path


def test_words_of_multimesh_are_in_its_messages(root: Path) -> None:
    page = (root / "docs" / "limits.md").read_text(encoding="utf-8")
    table = page.partition("## MultiMesh says")[2].partition("\n## ")[0]
    words = re.findall(r'^\| "([^"]+)"', table, re.MULTILINE)
    files = (root / "multimesh" / "src" / "multimesh").rglob("*.py")
    source = "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in files)
    assert len(words) >= 5
    for said in words:  # numbers stand for what is filled in
        assert re.search(re.sub(r"\d+", r"\\{[^}]+\\}", re.escape(said)), source), said

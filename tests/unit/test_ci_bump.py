"""What is run to show that new pins work, and what a pull request says of them."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

import pytest

from tooling.ci import bump, relock
from tooling.ci.relock import Move
from tooling.core import errors
from tooling.image import digests


def built(*moves: Move) -> list[tuple[str, str]]:
    return [(argv[2], argv[4]) for argv in bump.checks(moves, None) if argv[0] == "docker/build.py"]


def test_an_image_is_built_where_what_it_holds_moved() -> None:
    assert built(Move("jax", "1", "2"), Move("bazel-remote", "a", "b")) == []
    assert built(Move("ubuntu", "a", "b")) == [("cpu", "runtime")]
    both = [("cuda12", "dev"), ("cuda12", "runtime")]
    assert built(Move("cuda-base", "a", "b"), Move("cuda-devel", "a", "b")) == both
    assert built(Move("ubuntu", "a", "a", "no answer"), Move("cuda-devel", "a", "b")) == [("cuda12", "dev")]
    assert built(Move("jax", "1", "2"), Move(relock.NEWEST, "1", "2")) == [("cuda12", "runtime")], "with its plugin"
    assert built(Move(relock.NEWEST, "1", "2", "no such release")) == []
    oldest = [".ci/run", "oldest-jax"]
    assert oldest in bump.checks([Move(relock.EARLIER, "1", "2")], None), "its images have another"
    assert oldest not in bump.checks([Move(relock.NEWEST, "1", "2"), Move(relock.EARLIER, "1", "2", "no")], None)
    assert bump.checks([Move("ubuntu", "a", "b")], "host")[-1][-2:] == ["--network", "host"]


def test_a_fault_stays_in_its_row() -> None:
    move = Move("ubuntu", "sha256:" + "ab" * 32, "sha256:" + "ab" * 32, "no answer |\nat all")
    assert move.line == "| ubuntu | abababababab | abababababab | no answer / at all |"
    assert "nothing was validated" in bump.report([move], {})
    assert "The validation **failed** on the new pins:\n\n```text\n$ x\n```" in bump.report(
        [move], {"passed": False, "said": "$ x\n"}
    )


def test_what_another_job_says_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote it ran code of others; the job that reads it has a token, and moves the same pins itself."""
    path = tmp_path / bump.MOVES
    path.write_text(json.dumps([{"name": "jax", "old": "1", "new": 2}]))
    monkeypatch.setattr(bump, "upgrade", lambda mirror: [Move("jax", "1", "2")])
    assert bump.again(tmp_path, None) == [Move("jax", "1", "2")]
    for wrong in ("[1]", "{", '[{"name": "jax", "extra": 1}]', '[{"name": "jax"}]'):
        path.write_text(wrong)
        with pytest.raises(errors.UsageError, match="cannot be read"):
            bump.again(tmp_path, None)


def test_other_moves_than_those_that_were_tried_are_not_proposed(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / bump.MOVES).write_text(json.dumps([{"name": "jax", "old": "1", "new": "2"}]))
    for now, fine in (([Move("jax", "1", "2")], True), ([Move("jax", "1", "3")], False), ([], False)):
        monkeypatch.setattr(bump, "upgrade", lambda mirror, now=now: now)
        with contextlib.nullcontext() if fine else pytest.raises(errors.IntegrityError, match="other pins move now"):
            bump.run_propose(argparse.Namespace(folder=tmp_path, mirror=None))
    assert "| jax | 1 | 2 | moved |" in (tmp_path / bump.TEXT).read_text()


def test_bazel_is_moved_without_a_checksum_that_nobody_read(root: Path, tmp_path: Path) -> None:
    text = (root / digests.FILE).read_text(encoding="utf-8")
    (tmp_path / digests.FILE).parent.mkdir()
    (tmp_path / digests.FILE).write_text(text, encoding="utf-8")
    before = digests.load(tmp_path)
    assert f"/bazel-{digests.move_bazel(tmp_path, '99.1.0')}-linux-arm64" in text
    after = digests.load(tmp_path)
    changed = {name for name, file in after.files.items() if file != before.files[name]}
    assert changed == {"bazel linux/amd64", "bazel linux/arm64"}
    url = "https://github.com/bazelbuild/bazel/releases/download/99.1.0/bazel-99.1.0-linux-arm64"
    assert after.files["bazel linux/arm64"] == digests.FilePin(url, None)
    assert digests.move_bazel(tmp_path, "99.1.0") == "99.1.0"

"""What is run to show that new pins work, and what a pull request says of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from workflows import errors
from workflows.ci import relock, upgrade
from workflows.ci.upgrade import Move
from workflows.image import digests


def built(*moves: Move) -> list[tuple[str, str]]:
    return [(argv[2], argv[4]) for argv in upgrade.checks(moves, None) if argv[0] == "docker/build.py"]


def test_an_image_is_built_where_what_it_holds_moved() -> None:
    assert built(Move("jax", "1", "2"), Move("bazel-remote", "a", "b")) == []
    assert built(Move("ubuntu", "a", "b")) == [("cpu", "runtime")]
    both = [("cuda12", "dev"), ("cuda12", "runtime")]
    assert built(Move("cuda-base", "a", "b"), Move("cuda-devel", "a", "b")) == both
    assert built(Move("ubuntu", "a", "a", "no answer"), Move("cuda-devel", "a", "b")) == [("cuda12", "dev")]
    assert built(Move("jax", "1", "2"), Move(relock.NEWEST, "1", "2")) == [("cuda12", "runtime")], "with its plugin"
    assert built(Move(relock.NEWEST, "1", "2", "no such release")) == []
    oldest = [".ci/run", "oldest-jax"]
    assert oldest in upgrade.checks([Move(relock.EARLIER, "1", "2")], None), "its images have another"
    assert oldest not in upgrade.checks([Move(relock.NEWEST, "1", "2"), Move(relock.EARLIER, "1", "2", "no")], None)
    assert upgrade.checks([Move("ubuntu", "a", "b")], "host")[-1][-2:] == ["--network", "host"]


def test_a_fault_stays_in_its_row() -> None:
    move = Move("ubuntu", "sha256:" + "ab" * 32, "sha256:" + "ab" * 32, "no answer |\nat all")
    assert move.line == "| ubuntu | abababababab | abababababab | no answer / at all |"
    assert "nothing was validated" in upgrade.report([move], {})
    assert "The validation **failed** on the new pins:\n\n```text\n$ x\n```" in upgrade.report(
        [move], {"passed": False, "said": "$ x\n"}
    )


def test_a_patch_of_pins_changes_nothing_else(tmp_path: Path) -> None:
    """Whoever applies it has a token and runs this repository's programs: what made it had neither."""
    root, folder, again = tmp_path / "root", tmp_path / "bump", tmp_path / "again"
    for name in ("sources.lock", "requirements/run.in", "workflows/x.py", ".github/workflows/ci.yml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("old\n")
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for argv in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "t"]):
        subprocess.run([*git, *argv], check=True)
    subprocess.run(["git", "clone", "-q", root, again], check=True)
    (root / "requirements/run.in").write_text("new\n")
    (root / "workflows/x.py").write_text("evil\n")
    upgrade.save(folder, root, [Move("jax", "1", "2")])
    assert upgrade.load(folder) == [Move("jax", "1", "2")]
    assert upgrade.apply(folder, root), "it is applied already"
    assert upgrade.apply(folder, again)
    assert ((again / "requirements/run.in").read_text(), (again / "workflows/x.py").read_text()) == ("new\n", "old\n")

    patch = folder / upgrade.PATCH
    for evil in (["diff", "HEAD"], ["diff", "-R", "--no-index", "--", "/dev/null", ".github/workflows/ci.yml"]):
        patch.write_bytes(subprocess.run([*git, *evil], capture_output=True).stdout)
        with pytest.raises(errors.IntegrityError, match=r"changes (workflows/x.py|.github/workflows/ci.yml), which is"):
            upgrade.apply(folder, again)
    patch.write_bytes(
        b"diff --git a/workflows/x.py b/patches/x\nsimilarity index 100%\n"
        b"rename from workflows/x.py\nrename to patches/x\n"
    )
    with pytest.raises(errors.IntegrityError, match="which is no pin"):
        upgrade.apply(folder, again)
    patch.write_bytes(b"")
    assert not upgrade.apply(folder, again)


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

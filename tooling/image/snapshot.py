"""The files that a build reads, as trees of git: no file is in an image that its labels do not count.

A tree holds all that git tracks, or would add where a build looks, as it is now; those of ``third_party/`` lie beside.
A build reads a copy, so that a file which is saved later changes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tooling.core import errors, proc
from tooling.sources import manifest

IGNORE = "docker/Dockerfile.dockerignore"


class Snapshot(NamedTuple):
    """The commits of this repository and of MaxText, marked where files differ, and those files: no commit holds them.

    A file that differs in another component marks this repository.
    """

    revision: str
    maxtext: str
    changed: tuple[str, ...] = ()


def take_snapshot(root: Path, folder: Path, names: Sequence[str]) -> Snapshot:
    """Copy a clone with these components to ``folder / "context"``, and say what that is.

    ``SourceError``: a component is missing, has no history, or is at another commit than its pin.
    """
    context = folder / "context"
    shutil.rmtree(context, ignore_errors=True)
    # Data that lies beside the files of a build is not read.
    lines = (root / IGNORE).read_text(encoding="utf-8").split() if (root / IGNORE).is_file() else ["!."]
    read = [line[1:] for line in lines if line.startswith("!") and line != "!third_party"]
    commit, changed = _copy(root, context, read)
    dirty, maxtext, sources = bool(changed), "", manifest.load(root / "sources.yaml")
    for name in names:
        place = root / "third_party" / name
        remedy = f"run ./bootstrap.sh --group {'image' if name == 'maxtext' else 'source'}"
        if not place.is_dir():
            raise errors.NotThereError(f"third_party/{name} is not there; {remedy}")
        pin, files = _copy(place, context / "third_party" / name, ["."])
        ref = manifest.make_recipe(root, sources[name], manifest.load_lock(root / "sources.lock")).ref
        if proc.run(["git", "-C", place, "rev-parse", "--verify", ref], check=False).text != pin:
            raise errors.SourceError(f"third_party/{name} is at {pin[:12]}, which is not its pin; {remedy}")
        changed += [f"third_party/{name}/{file}" for file in files]
        if name == "maxtext":
            maxtext = f"{pin}-dirty" if files else pin
        else:
            dirty = dirty or bool(files)
    return Snapshot(f"{commit}-dirty" if dirty else commit, maxtext, tuple(changed))


def _copy(place: Path, target: Path, paths: Sequence[str]) -> tuple[str, list[str]]:
    """Copy the files of a clone as they are now, new ones from ``paths``; return its commit, and what differs from it.

    A file that git was told not to look at has the content that was committed.
    """
    target.mkdir(parents=True, exist_ok=True)
    options = ["rev-parse", "--path-format=absolute", "--show-toplevel", "HEAD", "--git-path", "index"]
    head = proc.run(["git", "-C", place, *options, "--git-path", "objects"], check=False)
    top, commit, index, objects = head.text.splitlines() if not head.returncode else ("", "", "", "")
    if Path(top).resolve() != place.resolve():
        raise errors.SourceError(f"{place} has no history of git, so nobody knows its commit; clone it")

    with tempfile.TemporaryDirectory(prefix="multimesh-git-") as folder:
        # An index and objects of the copy: those of the clone stay as they are.
        shutil.copyfile(index, f"{folder}/index")
        env = os.environ | {"GIT_INDEX_FILE": f"{folder}/index", "GIT_OBJECT_DIRECTORY": folder}
        env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = json.dumps(objects, ensure_ascii=False)

        def git(*args: str) -> str:
            argv: list[str | Path] = ["git", "-C", place, "-c", "core.autocrlf=false", "--literal-pathspecs", *args]
            return os.fsdecode(proc.run(argv, env=env).stdout)

        git("add", "--update")
        new = git("ls-files", "--others", "--exclude-standard", "-z", "--", *paths).split("\0")
        Path(folder, "new").write_bytes(os.fsencode("\0".join(name for name in new if name[-1:] != "/")))  # no clones
        git("add", f"--pathspec-from-file={folder}/new", "--pathspec-file-nul")
        tree = git("write-tree").strip()
        changed = git("diff", "--no-renames", "--ignore-submodules", "--name-only", "-z", commit, tree).split("\0")
        Path(folder, "index").unlink()
        git(f"--work-tree={target}", "read-tree", "--reset", "-u", tree)
    return commit, changed[:-1]

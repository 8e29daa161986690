"""A build reads one tree of git, whose labels count all that is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.repositories import commit, git
from tooling.core import errors
from tooling.image import snapshot
from tooling.sources import manifest


def write(place: Path, **files: str) -> None:
    for name, text in files.items():
        path = place / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with a patched MaxText at its pin; its name is not plain."""
    place = tmp_path / 'a "clone": $(x)'
    write(place, run="1", src__library="2", ignored="3")
    (place / "link").symlink_to("run")
    commit(place, {".gitignore": "ignored\nbuild/\nthird_party/\n.env\nsources.*\n"})
    pin = commit(place / "third_party/maxtext", {"src/train": "4"})
    entry = {"url": "https://r.example/maxtext.git", "groups": ["image"]}
    sources = dict.fromkeys(("maxtext", "jax"), entry)
    pins = {name: {"version": "1", "commit": pin, "tree": None, "patched_commit": pin} for name in sources}
    (place / "sources.yaml").write_text(json.dumps({"format": 1, "components": sources}))
    (place / "sources.lock").write_text(json.dumps({"components": pins}))
    component = manifest.load(place / "sources.yaml")["maxtext"]
    ref = manifest.make_recipe(place, component, manifest.load_lock(place / "sources.lock")).ref
    git(place / "third_party/maxtext", "update-ref", ref, pin)
    return place


def look(clone: Path, *names: str) -> snapshot.Snapshot:
    return snapshot.take_snapshot(clone, clone / "build", names or ("maxtext",))


def read(clone: Path) -> dict[str, str]:
    folder = clone / "build" / "context"
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_it_is_what_git_tracks_with_maxtext_beside(clone: Path) -> None:
    write(clone, **{".env": "API_TOKEN=hunter2", "third_party__other__key": "k"})
    view = look(clone)
    assert view.changed == ()
    assert view.revision == git(clone, "rev-parse", "HEAD")
    files = read(clone)
    assert files.keys() == {".gitignore", "run", "src/library", "link", "third_party/maxtext/src/train"}
    assert (clone / "build/context/link").is_symlink()
    assert git(clone, "status", "--porcelain") == git(clone / "third_party/maxtext", "status", "--porcelain") == ""
    write(clone, run="saved meanwhile", third_party__maxtext__src__train="saved meanwhile", new="saved meanwhile")
    assert "saved meanwhile" not in read(clone).values(), "it was pushed under the clean commit"


def test_changed_and_new_files_are_in_it_and_in_the_label(clone: Path) -> None:
    write(clone, src__library="changed", docs__id_rsa="new", third_party__maxtext__src__train="changed")
    (clone / "run").unlink()
    objects = git(clone, "count-objects")
    view = look(clone)
    assert view.changed == ("docs/id_rsa", "run", "src/library", "third_party/maxtext/src/train")
    assert view.revision.endswith("-dirty")
    assert view.maxtext.endswith("-dirty")
    files = read(clone)
    assert files["src/library"] == files["third_party/maxtext/src/train"] == "changed"
    assert files["docs/id_rsa"] == "new"
    assert "run" not in files
    assert git(clone, "count-objects") == objects, "a secret that lies there is not in the clone's history"
    git(clone, "checkout", "-q", ".")
    (clone / "docs/id_rsa").unlink()
    view = look(clone)
    assert "docs/id_rsa" not in read(clone)
    assert (view.revision.endswith("-dirty"), view.maxtext.endswith("-dirty")) == (False, True), "MaxText has its own"


def test_a_file_that_became_a_folder_or_a_link_is_copied_as_that(clone: Path) -> None:
    (clone / "run").unlink()
    write(clone, run__inner="in a folder now")
    (clone / "src").rename(clone / "moved")
    (clone / "src").symlink_to("moved")
    look(clone)
    files = read(clone)
    assert (files["run/inner"], files["moved/library"]) == ("in a folder now", "2")
    assert (clone / "build/context/src").readlink() == Path("moved")
    (clone / "run/inner").unlink()
    (clone / "run").rmdir()
    (clone / "run").symlink_to("nowhere")
    look(clone)
    assert (clone / "build/context/run").is_symlink()


def test_data_beside_the_files_of_a_build_is_not_read(clone: Path) -> None:
    write(clone, docker__Dockerfile="", **{"docker__Dockerfile.dockerignore": "# names\n*\n!docker\n!gone\n!src\n"})
    commit(clone, {})
    write(clone, data__huge="not read", src__new="read")
    view = look(clone)
    assert view.changed == ("src/new",)
    assert "data/huge" not in read(clone)
    write(clone, run="a change of a tracked file")
    assert look(clone).changed == ("run", "src/new")


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_a_file_that_git_does_not_look_at_has_the_committed_content(clone: Path, flag: str) -> None:
    """A tree held other bytes than the commit of its label, although ``git status`` was silent."""
    git(clone, "update-index", flag, "run")
    git(clone / "third_party/maxtext", "update-index", flag, "src/train")
    write(clone, run="a token", third_party__maxtext__src__train="a token")
    view = look(clone)
    assert (view.changed, read(clone)["run"]) == ((), "1")


def test_a_killed_build_leaves_nothing(clone: Path) -> None:
    look(clone)
    context = clone / "build/context"
    write(context, docker__context__python="left by a build", src__library="half")
    (clone / "build/index.lock").touch()
    write(clone, src__library="changed")
    look(clone)
    files = read(clone)
    assert "docker/context/python" not in files
    assert files["src/library"] == "changed"


def test_a_component_that_is_not_the_pinned_one_is_named(clone: Path) -> None:
    maxtext = clone / "third_party/maxtext"
    git(maxtext, "commit", "-q", "--allow-empty", "-m", "more")
    with pytest.raises(errors.SourceError, match=r"third_party/maxtext is at [0-9a-f]{12}, which is not its pin; run"):
        look(clone)
    maxtext.rename(clone / "third_party/gone")
    with pytest.raises(errors.SourceError, match=r"third_party/maxtext is not there; run ./bootstrap.sh --group image"):
        look(clone)
    with pytest.raises(errors.SourceError, match=r"third_party/jax is not there; run ./bootstrap.sh --group source"):
        look(clone, "jax")
    maxtext.mkdir()
    with pytest.raises(errors.SourceError, match="has no history of git"):
        look(clone)

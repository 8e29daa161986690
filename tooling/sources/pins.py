"""``lock`` and ``bump``: write pins, for the patches on disk and for another version."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from tooling.core import console, errors, files
from tooling.core.console import Subparsers, command
from tooling.core.files import ROOT
from tooling.sources import fetch, git, manifest, sync
from tooling.sources.fetch import Recipe
from tooling.sources.manifest import CommitFile, Component, Pin

LOCKED = "requirements/run.txt"


def register(subparsers: Subparsers) -> None:
    """Add the commands."""
    text = "record the patches as they are on disk, and what they give"
    parser = command(subparsers, "lock", run_lock, text, [".venv/bin/python -m tooling lock maxtext"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="components (default: all)")
    text = "move a component to another version, with its patches"
    parser = command(subparsers, "bump", run_bump, text, [".venv/bin/python -m tooling bump maxtext 0.2.5"])
    parser.add_argument("name", metavar="NAME", help="component")
    parser.add_argument("version", metavar="VERSION", help="its new version; a commit where it has no tags")
    parser.add_argument("--mirror", metavar="URL", help="ask URL/ instead of the upstream")


def run_lock(args: argparse.Namespace) -> None:
    """Rewrite the patch entries of ``sources.lock``; the pins of upstreams stay."""
    sources, pins = manifest.load(ROOT / "sources.yaml"), manifest.load_lock(ROOT / "sources.lock")
    for component in [manifest.find(sources, name) for name in args.names] or sources.values():
        if component.follows:
            continue
        pins[component.name] = _build(component, manifest.pin_of(component, pins))
        manifest.save_lock(ROOT / "sources.lock", sources, pins)
        console.note(f"{component.name}: locked")


def run_bump(args: argparse.Namespace) -> None:
    """Write ``sources.yaml`` and ``sources.lock`` for a new version; nothing, unless its patches apply there."""
    path, name, version = ROOT / "sources.yaml", args.name, args.version
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", version):
        raise errors.OptionError(f"'{version}' is no version; write letters, digits, dots, dashes or underscores")
    sources = manifest.load(path, {name: version})
    component = manifest.find(sources, name)
    if component.follows:
        raise errors.OptionError(f"{name}: the tree of {component.follows} names its commit; it has no version to bump")
    text = _with_version(path, name, version)
    commit = (
        _commit_in_wheel(component, component.commit) if component.commit else _commit_of_tag(component, args.mirror)
    )
    pin = _build(component, Pin(version, commit, None), args.mirror)
    # The lock goes first: a kill between the two leaves a manifest that the next bump corrects.
    manifest.save_lock(ROOT / "sources.lock", sources, manifest.load_lock(ROOT / "sources.lock") | {name: pin})
    files.write(path, text)
    print(f"{name}: {version} is {pin.commit}; run `.venv/bin/python -m tooling sync` to bring it in")


def _with_version(path: Path, name: str, version: str) -> str:
    """Return the manifest's text with one version changed and all else, comments too, as it was."""
    fields = r"(?:(?:    .*|[ ]*#.*|[ ]*)\n)*?"  # of this component alone
    place = rf"(?m)^(  {re.escape(name)}:[ ]*\n{fields}    version:\s+)(?:\"[^\"]*\"|'[^']*'|[^\s#]+)"
    text, changed = re.subn(place, rf'\g<1>"{version}"', path.read_text(encoding="utf-8"), count=1)
    if changed != 1:
        raise errors.SourceError(f"sources.yaml: {name} has no line 'version:' of its own; write one, indented by four")
    return text


def _build(component: Component, pin: Pin, mirror: str | None = None) -> Pin:
    """Return a pin with what its patches give, built aside, and with its tree and wheel."""
    name, wheel, series = component.name, component.wheel, fetch.load_series(ROOT, component.name)
    if not series and not fetch.is_wrapped(component):  # there is nothing to try: a commit fixes all
        return pin._replace(patched_commit=pin.commit, patched_tree=pin.tree)
    with sync.stage(ROOT) as stage:
        built = fetch.build(ROOT, Recipe(component, pin, series), stage, mirror, verify=False)
        with git.open_repo(stage / name) as repo:
            tree = git.find_object(repo, f"{git.BASE}:{component.path}")
            patched_tree = repo.head.commit.tree.hexsha
            if wheel and not pin.archives:
                digest = fetch.unpack_wheel(wheel.package, component.version, (), stage / "wheel", name)
                content = git.write_tree(repo, stage / "wheel" / wheel.root)
                if content != tree:
                    raise errors.SourceError(
                        f"{name}: {wheel.file} holds tree {content}, the commit {tree}; leave it out"
                    )
                pin = pin._replace(archives={wheel.file: digest})
    return pin._replace(tree=tree, patched_commit=built.commit, patched_tree=patched_tree)


def _commit_of_tag(component: Component, mirror: str | None) -> str:
    """Return the commit of a version: of its tag, or the version itself where it is a commit."""
    if git.COMMIT.fullmatch(component.version):
        return component.version
    if not component.tag:
        raise errors.OptionError(f"{component.name}: has no 'tag' in sources.yaml, so its version must be a commit")
    url, ref = component.address(mirror), f"refs/tags/{component.tag}"
    with tempfile.TemporaryDirectory() as folder, git.open_repo(Path(folder), new=True) as repo:
        lines = git.run(repo, "ls_remote", "--end-of-options", url, ref, f"{ref}^{{}}").splitlines()
    commits = {name: commit for commit, name in (line.split("\t") for line in lines)}
    if not commits:
        raise errors.NotThereError(f"{component.name}: {url} has no tag {component.tag}; check the version")
    return commits.get(f"{ref}^{{}}") or commits[ref]


def _commit_in_wheel(component: Component, file: CommitFile) -> str:
    """Return the commit that the locked wheel of a component's version names; pip compares the wheel with its hash."""
    name, (version, hashes) = component.name, find_newest(ROOT, file.wheel)
    if version != component.version:
        raise errors.SourceError(
            f"{name}: {LOCKED} has {file.wheel} {version}, and only a locked wheel says the commit of its sources; run "
            f"`.venv/bin/python -m tooling bump {name} {version}`, or lock {component.version}"
        )
    with tempfile.TemporaryDirectory(prefix="multimesh-wheel-") as folder:
        wheel = Path(folder, "wheel")
        fetch.unpack_wheel(file.wheel, version, hashes, wheel, name)
        try:
            text = (wheel / file.file).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise errors.SourceError(f"{name}: the wheel of {file.wheel} {version} holds no {file.file}") from error
    return fetch.read_commit(text, file, name)


def find_newest(root: Path, package: str) -> tuple[str, tuple[str, ...]]:
    """Return the newest locked version of a package, and the sha256 of each of its files."""
    from packaging.version import Version

    text = (root / LOCKED).read_text(encoding="utf-8")
    blocks = re.findall(rf"(?m)^{re.escape(package)}==([^\s;]+)(.*(?:\n    .*)*)", text)
    if not blocks:
        raise errors.SourceError(f"{package}: {LOCKED} does not have it; run `.ci/lock run`")
    version, hashes = max(blocks, key=lambda block: Version(block[0]))
    return version, tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", hashes))

"""``lock``: write the pin of a component, for the patches on disk and for another version."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from tooling.core import errors
from tooling.core.console import Subparsers, command
from tooling.core.files import ROOT
from tooling.sources import fetch, git, manifest, sync
from tooling.sources.manifest import CommitFile, Component, Pin, Recipe

LOCKED = "requirements/run.txt"


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    text, python = "record what the patches of a component give, here or at another version", ".venv/bin/python"
    examples = [f"{python} -m tooling lock maxtext", f"{python} -m tooling lock maxtext 0.2.5"]
    parser = command(subparsers, "lock", run, text, examples)
    parser.add_argument("name", metavar="NAME", help="component")
    parser.add_argument("version", nargs="?", help="its new version; a commit where it has no tags")


def run(args: argparse.Namespace) -> None:
    """Write ``sources.lock``; nothing, unless the patches apply."""
    path, name = ROOT / "sources.lock", args.name
    sources, pins = manifest.load(ROOT / "sources.yaml"), manifest.load_lock(path)
    component = manifest.find(sources, name)
    if component.follows:
        raise errors.OptionError(f"{name}: the tree of {component.follows} names its commit; it has no pin to lock")
    if args.version:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", args.version):
            raise errors.OptionError(f"'{args.version}' is no version; write letters, digits, dots, dashes")
        file, where = component.commit, (component, args.version)
        commit = _commit_in_wheel(*where, file) if file else _commit_of_tag(*where)
        pins[name] = Pin(args.version, commit, None)
    elif name not in pins:
        raise errors.OptionError(f"{name}: sources.lock has no version of it; give one behind the name")
    pins[name] = pin = _build(component, pins[name])
    manifest.save_lock(path, sources, pins)
    print(f"{name}: {pin.version} is {pin.commit}; run `.venv/bin/python -m tooling sync` to bring it in")


def _build(component: Component, pin: Pin) -> Pin:
    """Return a pin with what its patches give, built aside, and with its tree and wheel."""
    name, series = component.name, manifest.list_patches(ROOT, component.name)
    if not series and not fetch.is_wrapped(component):  # there is nothing to try: a commit fixes all
        return pin._replace(patched_commit=pin.commit)
    with sync.stage(ROOT) as stage:
        commit, _ = fetch.build(ROOT, Recipe(component, pin, series), stage, verify=False)
        with git.open_repo(stage / name) as repo:
            tree, digest = git.find_object(repo, f"{git.BASE}:{component.path}"), pin.wheel_sha256
            if component.wheel and not digest:
                digest = fetch.unpack_wheel(name, pin.version, (), stage / "wheel")
                content = git.write_tree(repo, stage / "wheel" / component.wheel)
                if content != tree:
                    raise errors.SourceError(f"{name}: its wheel holds tree {content}, the commit {tree}; leave it out")
    return pin._replace(tree=tree, wheel_sha256=digest, patched_commit=commit)


def _commit_of_tag(component: Component, version: str) -> str:
    """Return the commit of a version: of its tag, or the version itself where it is a commit."""
    if git.COMMIT.fullmatch(version):
        return version
    if not component.tag:
        raise errors.OptionError(f"{component.name}: has no 'tag' in sources.yaml, so its version must be a commit")
    url, tag = git.find_address(component.url), component.tag.replace("{version}", version)
    with tempfile.TemporaryDirectory() as folder, git.open_repo(Path(folder), new=True) as repo:
        text = git.run(repo, "ls_remote", "--end-of-options", url, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}")
    if not text:
        raise errors.NotThereError(f"{component.name}: {url} has no tag {tag}; check the version")
    return text.splitlines()[-1].split("\t")[0]  # of an annotated tag its commit comes last


def _commit_in_wheel(component: Component, version: str, file: CommitFile) -> str:
    """Return the commit that the locked wheel of a component's version names; pip compares the wheel with its hash."""
    name, (locked, hashes) = component.name, find_newest(ROOT, component.name)
    if locked != version:
        raise errors.SourceError(
            f"{name}: {LOCKED} has {name} {locked}, and only a locked wheel says the commit of its sources; run "
            f"`.venv/bin/python -m tooling lock {name} {locked}`, or have {version} there"
        )
    with tempfile.TemporaryDirectory(prefix="multimesh-wheel-") as folder:
        fetch.unpack_wheel(name, version, hashes, Path(folder, "wheel"))
        try:
            return manifest.read_commit(Path(folder, "wheel", file.file), file, name)
        except OSError as error:
            raise errors.SourceError(f"{name}: the wheel of {name} {version} holds no {file.file}") from error


def find_newest(root: Path, package: str) -> tuple[str, tuple[str, ...]]:
    """Return the newest locked version of a package, and the sha256 of each of its files."""
    from packaging.version import Version

    text = (root / LOCKED).read_text(encoding="utf-8")
    blocks = re.findall(rf"(?m)^{re.escape(package)}==([^\s;]+)(.*(?:\n    .*)*)", text)
    if not blocks:
        raise errors.SourceError(f"{package}: {LOCKED} does not have it; run `.ci/lock run`")
    version, hashes = max(blocks, key=lambda block: Version(block[0]))
    return version, tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", hashes))

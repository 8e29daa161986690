"""Commits that files name: JAX's wheel names that of its sources, and a file in these names that of XLA."""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tooling.core import errors
from tooling.sources import manifest, patch, wheel
from tooling.sources.manifest import Component, Named, Pin
from tooling.sources.workspace import Workspace

LOCKED = Path("requirements/run.txt")


def resolve(here: Workspace, component: Component, pins: Mapping[str, Pin]) -> tuple[Component, Pin]:
    """Return a component with its pin: that of the lock, or the commit that another component's tree names now.

    ``PinError`` where the lock does not have this version, or the other component is not in ``third_party/``.
    """
    if not component.follows or component.commit is None:
        return component, manifest.pin_of(component, pins)
    path = here.place(component.follows) / component.commit.file
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise errors.PinError(
            f"{component.name}: {path.relative_to(here.root)} names its commit, and is not there; "
            f"run `python -m tooling sync {component.follows} {component.name}`"
        ) from None
    commit = _read(text, component.commit, component.name)
    patches = patch.digests(patch.load_series(here.root, component.name))
    return component._replace(version=commit), Pin(commit, commit, None, patches=patches)


def newest_pin(here: Workspace, package: str) -> tuple[str, tuple[str, ...]]:
    """Return the newest locked version of a package, and the sha256 of each of its files."""
    from packaging.version import Version

    text = (here.root / LOCKED).read_text(encoding="utf-8")
    blocks = re.findall(rf"(?m)^{re.escape(package)}==([^\s;]+)(.*(?:\n    .*)*)", text)
    if not blocks:
        raise errors.PinError(f"{package}: {LOCKED} does not have it; run `python -m tooling ci lock run`")
    version, rest = max(blocks, key=lambda block: Version(block[0]))
    return version, tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", rest))


def in_wheel(here: Workspace, component: Component, named: Named) -> str:
    """Return the commit that the locked wheel of a component's version names; pip holds the wheel against its hash."""
    version, hashes = newest_pin(here, named.wheel)
    if version != component.version:
        raise errors.PinError(
            f"{component.name}: {LOCKED} has {named.wheel} {version}, and only a locked wheel says the commit of its "
            f"sources; run `python -m tooling bump {component.name} {version}`, or lock {component.version} first"
        )
    asked = manifest.Wheel(named.wheel, f"{named.wheel}-{version}-py3-none-any.whl", "")
    with tempfile.TemporaryDirectory(prefix="multimesh-wheel-") as folder:
        path = wheel.download(component, asked, hashes, Path(folder))
        try:
            with zipfile.ZipFile(path) as archive:
                text = archive.read(named.file).decode("utf-8", "replace")
        except (KeyError, zipfile.BadZipFile) as error:
            raise errors.MissingCommitError(f"{component.name}: {path.name} holds no {named.file}") from error
    return _read(text, named, component.name)


def _read(text: str, named: Named, label: str) -> str:
    found = re.search(rf"(?m)^{named.name}\b[^=\n]*=\s*['\"]([0-9a-f]{{40}})['\"]", text)
    if found is None:
        raise errors.MissingCommitError(f'{label}: {named.file} has no line {named.name} = "COMMIT"')
    return found[1]

"""README's part on the last release: how to pull and run its image, and install its wheel."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from workflows import errors, files
from workflows.image import publish
from workflows.image.command import LABEL

FILE, PAGE = "docs/released.json", "README.md"
_PLACE = re.compile(r"(<!-- released -->\n).*?(<!-- /released -->\n)", re.DOTALL)
_NONE = "Neither the package nor an image is published yet, so all three begin with a clone.\n"


@dataclass(frozen=True)
class Released:
    """A release: its tag, the image as ``docker pull`` wants it, and the owner and name of the repository on GitHub."""

    tag: str
    image: str
    digest: str
    repository: str
    gpus: bool

    @property
    def lines(self) -> str:
        """README's text."""
        how, job = ("--gpus all ", "validate-gpu.sh") if self.gpus else ("", "validate-cpu.sh")
        wheel = f"multimesh_jax-{self.tag[1:]}-py3-none-any.whl"
        return (
            f"{self.tag} is published, as an image and as a wheel; the image by digest is `{self.digest}`.\n\n"
            f"```console\n$ docker pull {self.image}:{self.tag}\n"
            f"$ docker run --rm {how}{self.image}:{self.tag} /opt/maxtext/{job}\n"
            f"$ pip install https://github.com/{self.repository}/releases/download/{self.tag}/{wheel}\n```\n\n"
        )


def load(root: Path) -> Released | None:
    """Return the last release that was written down, if any."""
    held = json.loads((root / FILE).read_text(encoding="utf-8"))
    return Released(**held) if held else None


def show(text: str, last: Released | None) -> str:
    """Return README with the lines of a release."""
    changed, places = _PLACE.subn(lambda found: f"{found[1]}{last.lines if last else _NONE}{found[2]}", text)
    if places != 1:
        raise errors.ManifestError(
            f"{PAGE}: has {places} places between <!-- released --> and <!-- /released -->; write one"
        )
    return changed


def write(root: Path, release: Path, repository: str, tag: str) -> Released | None:
    """Write down a release by the ``release.json`` of its image, unless that did not get the tag ``latest``."""
    told = publish.read(release)
    image, gpus = told["image"], told["labels"][f"{LABEL}.accelerator"] != "cpu"
    if "latest" not in [each["tag"] for each in image["tags"]]:
        return None
    last = Released(tag, image["repository"], image["digest"], repository, gpus)
    page = show((root / PAGE).read_text(encoding="utf-8"), last)
    files.write_json(root / FILE, asdict(last))
    files.write(root / PAGE, page)
    return last

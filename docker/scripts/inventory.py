"""Write what an image holds: a CycloneDX SBOM and a list of licences. The same image gives the same bytes."""

from __future__ import annotations

import argparse
import json
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

import yaml

_NAMESPACE = uuid.UUID("a5e9b7a4-51c8-5d0c-8a1f-6f5d9f3c2b10")


@dataclass(frozen=True, order=True)
class Part:
    """A package: where it is from, its name and version, and the licence that it declares."""

    kind: str
    name: str
    version: str
    licence: str

    @property
    def purl(self) -> str:
        """Its package url, e.g. ``pkg:pypi/jax@0.10.2``."""
        kind = "deb/debian" if self.kind == "deb" else self.kind
        return f"pkg:{kind}/{quote(self.name.lower())}@{quote(self.version, safe='')}"


def python_packages() -> Iterator[Part]:
    """Yield the distributions of this environment."""
    for dist in metadata.distributions():
        yield Part("pypi", dist.metadata["Name"], dist.version, declared(dist.metadata))


def declared(fields: metadata.PackageMetadata) -> str:
    """Return the licence that a distribution declares: an expression, a classifier, or the first line of a text."""
    if expression := fields.get("License-Expression"):
        return str(expression)
    classifiers = [each for each in fields.get_all("Classifier") or [] if each.startswith("License :: ")]
    if classifiers:
        return " and ".join(sorted(each.rpartition(" :: ")[2] for each in classifiers))
    lines = str(fields.get("License") or "").strip().splitlines()
    return lines[0].strip() if lines else "not declared"


def system_packages() -> Iterator[Part]:
    """Yield Debian's packages; their licences are in /usr/share/doc/NAME/copyright."""
    query = ["dpkg-query", "--show", "--showformat=${Package} ${Version}\n"]
    for line in subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines():
        name, version = line.split()
        yield Part("deb", name, version, f"/usr/share/doc/{name}/copyright")


def sources(lock: Path) -> Iterator[Part]:
    """Yield what comes from ``third_party/``."""
    components = yaml.safe_load(lock.read_text(encoding="utf-8"))["components"]
    yield Part("generic", "maxtext", components["maxtext"]["version"], "Apache-2.0")


def sbom(parts: list[Part]) -> dict[str, object]:
    """Return the CycloneDX document."""
    components = [
        {
            "type": "library",
            "bom-ref": part.purl,
            "name": part.name,
            "version": part.version,
            "purl": part.purl,
            "licenses": [{"license": {"name": part.licence}}],
        }
        for part in parts
    ]
    serial = uuid.uuid5(_NAMESPACE, json.dumps(components))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": "multimesh-jax", "bom-ref": "multimesh-jax"}},
        "components": components,
    }


def main() -> None:
    """Write ``sbom.cdx.json`` and ``licences.txt``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", type=Path, required=True, help="sources.lock")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    args = parser.parse_args()
    parts = sorted({*python_packages(), *system_packages(), *sources(args.lock)})
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "sbom.cdx.json").write_text(json.dumps(sbom(parts), indent=1) + "\n", encoding="utf-8")
    lines = [f"{part.kind:8}{part.name} {part.version}: {part.licence}\n" for part in parts]
    (args.output / "licences.txt").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()

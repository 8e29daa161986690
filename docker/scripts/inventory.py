"""Write what an image holds: a CycloneDX SBOM, a list of licences and their texts. The same image gives the same bytes.

cyclonedx-py reads the Python packages; this adds what it does not look at: the packages of the distribution, a
standalone Python and the patched MaxText.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

ENVIRONMENT, STANDALONE = Path("/opt/.venv/bin/python"), Path("/opt/python")
_TEXT = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|AUTHORS)", re.IGNORECASE)
_CLASSIFIER = "License :: OSI Approved :: "


def python_packages() -> dict[str, Any]:
    """Return the SBOM of this image's environment."""
    options = ["--gather-license-texts", "--output-reproducible", "--spec-version=1.6", "--no-validate"]
    argv = [sys.executable, "-m", "cyclonedx_py", "environment", *options, str(ENVIRONMENT)]
    return dict(json.loads(subprocess.run(argv, check=True, capture_output=True).stdout))


def system_packages() -> Iterator[dict[str, Any]]:
    """Yield the packages of the distribution, by its own name and release; their licences lie beside them."""
    system = platform.freedesktop_os_release()
    distribution = f"{system['ID']}-{system['VERSION_ID']}"
    query = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\n"]
    for line in subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines():
        name, version, machine = line.split()
        purl = f"pkg:deb/{system['ID']}/{name}@{quote(version, safe='')}?arch={machine}&distro={distribution}"
        yield component(name, version, purl, f"/usr/share/doc/{name}/copyright")


def other(lock: Path) -> Iterator[dict[str, Any]]:
    """Yield the parts of which no package manager knows."""
    if STANDALONE.is_dir():
        version = subprocess.run([STANDALONE / "bin/python3", "-V"], check=True, capture_output=True, text=True).stdout
        version = version.split()[1]
        yield component("python-build-standalone", version, f"pkg:generic/cpython@{version}", "PSF-2.0 and others")
    version = json.loads(lock.read_text(encoding="utf-8"))["components"]["maxtext"]["version"]
    yield component("maxtext", version, f"pkg:github/AI-Hypercomputer/maxtext@v{version}", "Apache-2.0")


def component(name: str, version: str, purl: str, licence: str) -> dict[str, Any]:
    """Return a component of an SBOM."""
    licences = [{"license": {"name": licence}}]
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "licenses": licences}


def texts() -> Iterator[tuple[str, str]]:
    """Yield the licences and notices that packages, and a standalone Python, bring along: whose, and the text."""
    folders = [
        (info.name.removesuffix(".dist-info"), info) for info in ENVIRONMENT.parents[1].glob("lib/*/*/*.dist-info")
    ]
    folders += [
        (f"python-build-standalone {info.parent.name}", info.parent) for info in STANDALONE.glob("lib/*/LICENSE.txt")
    ]
    for owner, folder in sorted(folders):
        for file in sorted(folder.rglob("*") if folder.suffix == ".dist-info" else folder.glob("LICENSE.txt")):
            if file.is_file() and _TEXT.match(file.name):
                yield owner, file.read_text(encoding="utf-8", errors="replace").strip()


def declared(part: dict[str, Any]) -> str:
    """Return the licences that a component declares, on one line; of a text, its first line stays in the SBOM too."""
    entries, names = [], list[str]()
    for entry in part.get("licenses", []):
        licence = entry.get("license", {})
        text = licence.pop("text", None)
        if text is not None and text.get("encoding") == "base64":
            continue  # a file beside the package: see texts()
        if text is not None:
            licence["name"] = text["content"].strip().partition("\n")[0][:100]
        entries.append(entry)
        names.append(str(entry.get("expression") or licence.get("id") or licence["name"]).removeprefix(_CLASSIFIER))
    part["licenses"] = entries
    return " and ".join(dict.fromkeys(names)) or "not declared"


def main() -> None:
    """Write ``sbom.cdx.json``, ``licences.txt`` and ``THIRD-PARTY-NOTICES``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", type=Path, required=True, help="sources.lock")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    sbom = python_packages()
    sbom["metadata"]["component"] = {"type": "container", "name": "multimesh-jax", "bom-ref": "multimesh-jax"}
    sbom.pop("dependencies", None)
    for part in sbom["components"]:
        # What was installed from a folder has none.
        part.setdefault("purl", f"pkg:pypi/{part['name']}@{part['version']}")
    sbom["components"] = sorted(
        [*sbom["components"], *system_packages(), *other(args.lock)], key=lambda part: part["purl"]
    )
    with (args.output / "THIRD-PARTY-NOTICES").open("w", encoding="utf-8") as notices:
        notices.write(
            "Texts of licences in this image. Those of the distribution's packages: /usr/share/doc/*/copyright.\n"
        )
        for owner, text in texts():
            notices.write(f"\n{'=' * 80}\n{owner}\n{'=' * 80}\n\n{text}\n")
    lines = [
        f"{part['purl'].partition('/')[0]} {part['name']} {part['version']}: {declared(part)}\n"
        for part in sbom["components"]
    ]
    (args.output / "sbom.cdx.json").write_text(json.dumps(sbom, indent=1) + "\n", encoding="utf-8")
    (args.output / "licences.txt").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()

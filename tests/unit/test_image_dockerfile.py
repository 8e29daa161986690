"""What every image of the Dockerfile sets for NVIDIA's container runtime, read through the stages that it stands on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGE = re.compile(r"^FROM (\S+)(?: AS (\S+))?$", re.MULTILINE)


def variables(target: str, arguments: dict[str, str]) -> dict[str, str]:
    """Return the environment of a target: that of its stages, the outermost last."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    starts = list(STAGE.finditer(text))
    ends = [each.start() for each in starts[1:]] + [len(text)]
    stages = {each[2]: (each[1], text[each.end() : end]) for each, end in zip(starts, ends, strict=True)}
    found: dict[str, str] = {}
    name = target
    while name in stages:
        base, body = stages[name]
        for line in re.findall(r"^ENV (.*)$", body, re.MULTILINE):
            found = dict(word.split("=", 1) for word in line.split()) | found
        name = re.sub(r"\$\{(\w+)\}", lambda argument: arguments.get(argument[1], argument[0]), base)
    return found


@pytest.mark.parametrize("target", ["runtime", "dev", "devcontainer"])
def test_an_image_with_cuda_asks_for_the_driver(target: str) -> None:
    found = variables(target, {"ACCELERATOR": "cuda12", "JAXLIB": "wheel"})
    assert found["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert found["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    # JAX finds its libraries by their wheels. A toolkit on this path would give it another cuBLASLt.
    assert "/usr/local/cuda" not in found.get("LD_LIBRARY_PATH", "")
    assert (target == "runtime") == ("LD_LIBRARY_PATH" not in found)


def test_an_image_for_the_cpu_asks_for_none() -> None:
    assert not [name for name in variables("runtime", {"ACCELERATOR": "cpu", "JAXLIB": "wheel"}) if "NVIDIA" in name]

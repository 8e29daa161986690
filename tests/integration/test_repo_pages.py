"""Each page as somebody follows it: a clone, an empty home, nothing set, a Python that has what the page installs."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages
from tests.pages import ROOT

INSTALLS = re.compile(r"pip install(?: \./multimesh)?((?: [a-z]+)*)(?=`|\n| &&)")
ELSEWHERE = {  # commands that are not run here: who runs them, or what they need
    "./bootstrap.sh": "CI",
    ".ci/run": "CI",
    ".venv/bin/pytest": "CI",
    ".venv/bin/zizmor": "CI: .ci/run lint",
    ".venv/bin/python -m tooling": "tests/integration/sources, tests/integration/github",
    "docker/build.py": "tests/integration/image",
    "docker run": "tests/integration/image; the second needs a GPU",
    "./build.py": "tests/integration/image",
    "./start-cache.sh": "tests/integration/cache",
    "cd docker": "the line before ./build.py",
    "maxtext/run.py": "maxtext/tests: the environment of ./bootstrap.sh",
    ".venv/bin/python maxtext/tests/grid.py": "hours; pytest -m full maxtext/tests/test_parity.py",
    "git clone https://": "GitHub",
    "python multimesh/benchmarks/": "each takes minutes, and its figures a quiet machine",
    "multimesh/benchmarks/": "as above",
}


def script(name: str) -> str:
    """What the page types into a shell, without what is run elsewhere."""
    lines = [*pages.typed(name), *(line for body in pages.blocks(name, "sh") for line in body.splitlines())]
    return "\n".join(line for line in lines if not line.startswith(tuple(ELSEWHERE)))


@functools.cache
def environment(folder: Path, packages: tuple[str, ...]) -> Path:
    environment_folder = folder / ("-".join(packages).replace("/", "") or "alone")
    subprocess.run([sys.executable, "-m", "venv", str(environment_folder)], check=True)
    install = [f"{environment_folder}/bin/python", "-m", "pip", "install", "-q", "--no-input"]
    subprocess.run([*install, f"{ROOT}/multimesh", *packages], check=True)
    return environment_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("environments")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in pages.names() if script(name) or pages.blocks(name, "python")])
def test_a_page_from_top_to_bottom(name: str, folder: Path, tmp_path: Path) -> None:
    packages = " ".join(INSTALLS.findall((ROOT / name).read_text(encoding="utf-8"))).split()
    local = [f"{ROOT}/{package}" for package in ("planner", "numerics") if f" ./{package}" in (ROOT / name).read_text()]
    venv = environment(folder, tuple(sorted({*packages, *local})))
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    (clone / "page.py").write_text("\n".join(pages.blocks(name, "python")))
    (clone / "train.py").write_text("".join(pages.blocks(name, "py")[:1]))  # docs/ten-minutes.md starts it
    # What the machine's administrator sets stays: the package index may be a mirror with a certificate of its own.
    settings = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))}
    env = settings | {"HOME": str(tmp_path), "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
    shell = ["bash", "-ec", f"python page.py\n{script(name)}\nwait"]
    process = subprocess.run(shell, cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]


SOURCE = """
import datasets
rows = [{"number": i, **Text()[i]} for i in range(64)]
datasets.Dataset.from_list(rows).save_to_disk("rows")
source = datasets.load_from_disk("rows").shuffle(seed=0)
batch = batch_of(source, step=2)
for name, rows in batch.items():
    expected = np.array([source[i][name] for i in range(2 * ROWS, 3 * ROWS)], np.int32)
    np.testing.assert_array_equal(rows, expected)
assert sorted(source["number"]) == list(range(64)) != list(source["number"])
print("read")
"""


def test_the_recipe_for_data_reads_rows_of_a_hugging_face_dataset_on_disk(tmp_path: Path) -> None:
    """A dataset of Arrow files in the place of the source of docs/processes.md."""
    env = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", pages.blocks("docs/processes.md", "python")[0] + SOURCE]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "read"

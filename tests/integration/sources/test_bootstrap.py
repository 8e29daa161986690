"""``bootstrap.sh`` itself: from a machine's Python to a clone that can be worked in."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests import repositories
from tests.integration.parts.processes import write_program
from tooling.core.files import ROOT

from .conftest import SOURCE, Clone, make_clone

TOOL, USAGE = 1, 2
COMPLETE = """
import git, humanize, jsonschema, multimesh, packaging, rich, tooling, yaml
from importlib import metadata
for package in metadata.distributions():
    assert package.files, package.name
    assert not [file for file in package.files if not file.locate().exists() and file.suffix != ".pyc"], package.name
"""
BASE = os.path.realpath(sys.executable)  # the Python that this one's environment was made from


def start(clone: Clone, *args: str, **env: str) -> subprocess.Popen[str]:
    """Start ``bootstrap.sh`` as a user with an empty home would, in a session of its own."""
    settings = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))}
    full = settings | {"PATH": os.environ["PATH"], "HOME": str(clone.root.parent / "home")} | env
    command, pipe = [str(clone.root / "bootstrap.sh"), *args], subprocess.PIPE
    return subprocess.Popen(command, cwd="/", env=full, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def end(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for its end."""
    stdout, stderr = process.communicate(timeout=300)
    assert "Traceback" not in stderr, stderr
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def bootstrap(clone: Clone, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return end(start(clone, *args, **env))


def python_of(clone: Clone) -> Path:
    return clone.root / ".venv" / "bin" / "python"


def furnish(root: Path) -> Clone:
    """A clone that wants one link and one small package, so that what is tested is the way and not the load."""
    clone = make_clone(root)
    (root.parent / "home").mkdir(exist_ok=True)
    shutil.copytree(ROOT / "requirements", root / "requirements")
    locked = (ROOT / "requirements" / "run.txt").read_text().replace("\\\n", "\\")
    small = next(line for line in locked.splitlines() if line.startswith("humanize==")).replace("\\", "\\\n")
    (root / "requirements" / "run.txt").write_text(small + "\n")
    for project in ("multimesh", "planner", "numerics", "maxtext"):
        shutil.copytree(ROOT / project / "src", root / project / "src")
        for name in ("pyproject.toml", "README.md"):
            shutil.copy2(ROOT / project / name, root / project / name)
    for name in ("bootstrap.sh", "pyproject.toml", "multimesh/hatch_build.py"):
        shutil.copy2(ROOT / name, root / name)
    commit = repositories.commit(root.parent / "upstream", {"README": "hello\n"})
    clone.add("alpha", f"file://{root.parent}/upstream", commit, None, groups=["run", "image"])
    return clone


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone, in a folder with a space, that two bootstraps have just made ready at the same time."""
    clone = furnish(tmp_path_factory.mktemp("bootstrap") / "a clone")
    both = [end(process) for process in [start(clone, "--group", "run") for _ in range(2)]]
    assert [process.returncode for process in both] == [0, 0], both
    return clone


def test_what_a_bootstrap_leaves_and_that_a_second_one_needs_no_index(base: Clone) -> None:
    program = "import multimesh, tooling, humanize; print(multimesh.__file__); print(tooling.__file__)"
    paths = subprocess.run([python_of(base), "-c", program], cwd="/", capture_output=True, text=True, check=True).stdout
    folders = ("multimesh/src/multimesh", "tooling")
    assert paths.split("\n")[:2] == [f"{base.root}/{folder}/__init__.py" for folder in folders]
    assert base.state("alpha") == "clean"

    no_index = {"PIP_INDEX_URL": "http://127.0.0.1:1/", "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1"}
    second = bootstrap(base, "--group", "run", **no_index)
    assert second.returncode == 0, second.stderr
    assert second.stderr.startswith(f"Python {platform.python_version()} ({BASE})")
    assert len(second.stderr.splitlines()) == 1
    assert second.stdout.splitlines()[1].split()[:4] == ["alpha", "kept", "in", "place"]


def test_changed_requirements_and_a_package_of_half_are_something_to_do(base: Clone) -> None:
    """As a pip that was killed leaves it: the metadata is there, the list of its files is not, nor are all files."""
    locked = base.root / "requirements" / "run.txt"
    packages = next((base.root / ".venv" / "lib").glob("python*")) / "site-packages"

    def halve() -> None:
        next(packages.glob("humanize-*.dist-info/RECORD")).unlink()
        (packages / "humanize" / "__init__.py").unlink()
        (base.root / ".venv" / ".multimesh-ready").unlink()

    for change in (lambda: locked.write_text(locked.read_text() + "# more\n"), halve):
        assert "installing" not in bootstrap(base, "--group", "run").stderr
        change()
        second = bootstrap(base, "--group", "run")
        assert second.returncode == 0
        assert "requirements/run.txt: installing" in second.stderr
    assert (packages / "humanize" / "__init__.py").is_file()
    assert list(packages.glob("humanize-*.dist-info/RECORD"))


def test_packages_for_gpus_are_of_one_cuda(base: Clone) -> None:
    for other in ("cuda12", "compile-gpu"):
        process = bootstrap(base, "--group", other, "--group", "cuda13")
        assert process.returncode == USAGE
        assert "JAX uses either cuda12, of which compile-gpu is a part, or cuda13; choose one" in process.stderr


@pytest.mark.parametrize(
    ("seed", "signum"),
    [
        pytest.param(number, signum, id=f"{signum.name} {number}", marks=() if number in (0, 7) else pytest.mark.full)
        for number, signum in enumerate([signal.SIGKILL] * 7 + [signal.SIGHUP] * 3)
    ],
)
def test_killed_at_a_random_moment_and_run_again(tmp_path: Path, seed: int, signum: signal.Signals) -> None:
    """A kill of the process alone, as by a lack of memory; a hang-up of all that its terminal has."""
    clone = furnish(tmp_path / "clone")
    process = start(clone, "--group", "run")
    steps = ["making .venv", "requirements/tooling.txt: installing", "requirements/run.txt: installing"]
    random = Random(seed)
    step = random.choice(steps)
    for line in process.stderr:
        if line.startswith(step):
            break
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(random.random() * 3)
    (os.killpg if signum == signal.SIGHUP else os.kill)(process.pid, signum)
    process.wait(120)

    second = bootstrap(clone, "--group", "run")

    assert second.returncode == 0, second.stderr
    assert str(clone.root) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert [path.name for path in clone.root.glob(".venv*")] == [".venv"]
    assert subprocess.run([python_of(clone), "-c", COMPLETE], cwd="/").returncode == 0


def test_interrupted_bootstrap_says_so(tmp_path: Path) -> None:
    process = start(furnish(tmp_path / "clone"))
    assert process.stderr.readline().startswith("Python 3.")
    assert process.stderr.readline() == "making .venv\n"

    process.send_signal(signal.SIGINT)

    assert process.communicate(timeout=120)[1] == "error: interrupted; run the same command again to go on\n"
    assert process.returncode == 130


HIDE = f"""#!{sys.executable}
import runpy, sys
sys.modules['ensurepip'] = None
del sys.argv[:2]
runpy.run_path(sys.argv[0], None, '__main__')
"""
"""A Python of a distribution that keeps ``venv`` in a package of its own."""


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("#!/bin/sh\nexit 1\n", r"error: no Python found; install 3.13 \(Debian, Ubuntu: apt-get install "),
        (HIDE, r".* has no ensurepip: install (\S+) \(Debian, Ubuntu: apt-get install \1\)"),
    ],
    ids=["none", "one that cannot make environments"],
)
def test_no_python(tmp_path: Path, python: str, message: str) -> None:
    """PATH has nothing but what bootstrap.sh uses, and this as python3."""
    write_program(tmp_path / "bin" / "python3", python)
    for name in ("bash", "dirname", "env"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    process = bootstrap(furnish(tmp_path / "clone"), PATH=str(tmp_path / "bin"))
    assert process.returncode == TOOL
    (line,) = process.stderr.splitlines()
    assert re.match(message, line)


def test_named_python_makes_an_environment_for_images_anew_or_is_refused(tmp_path: Path) -> None:
    """Building images needs no packages of ours."""
    clone = furnish(tmp_path / "clone")
    other = python_of(clone)
    answer = f"3.{14 if sys.version_info < (3, 14) else 13}.0\\n{other}\\n"
    write_program(other, f"#!/bin/sh\ncase $* in *sysconfig*) printf '{answer}' ;; *) exit 1 ;; esac\n")

    refusal = bootstrap(clone, "--group", "run", PYTHON="/path/to/no/python3")
    assert refusal.returncode == TOOL
    assert refusal.stderr.startswith("error: /path/to/no/python3: is not there, or is no Python; install one")
    assert other.exists(), "nothing was touched"

    process = bootstrap(clone, "--group", "image", PYTHON=sys.executable)
    assert process.returncode == 0, process.stderr
    assert process.stderr.splitlines()[0].startswith(f"Python {platform.python_version()} ({BASE})")
    assert "requirements/run.txt" not in process.stderr
    assert subprocess.run([other, "-c", "import jsonschema, pip, yaml"]).returncode == 0
    assert subprocess.run([other, "-c", "import humanize"], capture_output=True).returncode == 1
    assert clone.state("alpha") == "clean"


def test_help_wrong_options_and_no_package_index(tmp_path: Path) -> None:
    clone = furnish(tmp_path / "clone")
    before = sorted(clone.root.rglob("*"))
    assert "Install the Python packages" in bootstrap(clone, "--help").stdout
    assert bootstrap(clone, "--groups", "run").returncode == USAGE
    assert sorted(clone.root.rglob("*")) == before, "nothing has changed"
    no_index = {"PIP_INDEX_URL": "http://127.0.0.1:1/", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    process = bootstrap(clone, "--group", "run", **no_index)
    assert process.returncode == SOURCE
    assert process.stderr.splitlines()[-1].startswith("error: requirements/tooling.txt: pip failed (")
    assert process.stderr.endswith("check the network and pip's index\n")

"""``bootstrap.sh`` itself: from a machine's Python to a clone that can be worked in."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ROOT, Clone, make_clone

NETWORK, TOOL, USAGE = 26, 31, 2
TIMEOUT_S = 300
BASE = os.path.realpath(sys.executable)  # the Python that this one's environment was made from


def bootstrap(clone: Clone, *args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``bootstrap.sh`` as a user with an empty home would."""
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))}
    full = kept | {"PATH": os.environ["PATH"], "HOME": str(clone.root.parent / "home")} | env
    command = [str(clone.root / "bootstrap.sh"), *args]
    done = subprocess.run(command, cwd=cwd, env=full, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def furnish(root: Path) -> Clone:
    """A clone that wants one link and one small package, so that what is tested is the way and not the load."""
    clone = make_clone(root)
    (root.parent / "home").mkdir(exist_ok=True)
    shutil.copytree(ROOT / "requirements", root / "requirements")
    locked = (ROOT / "requirements" / "run.txt").read_text().replace("\\\n", "\\")
    small = next(line for line in locked.splitlines() if line.startswith("humanize==")).replace("\\", "\\\n")
    (root / "requirements" / "run.txt").write_text(small + "\n")
    for project in ("multimesh", "maxtext"):
        shutil.copytree(ROOT / project / "src", root / project / "src")
        for name in ("pyproject.toml", "README.md"):
            shutil.copy2(ROOT / project / name, root / project / name)
    for name in ("bootstrap.sh", "pyproject.toml", "multimesh/hatch_build.py"):
        shutil.copy2(ROOT / name, root / name)
    clone.components["multimesh"] = {"link": "multimesh", "groups": ["run", "dev"]}
    clone.write()
    return clone


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone, in a folder with a space, that two bootstraps have just made ready at the same time."""
    clone = furnish(tmp_path_factory.mktemp("bootstrap") / "a clone")
    env = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_")) or key == "PATH"}
    command = [str(clone.root / "bootstrap.sh"), "--group", "run"]
    both = [
        subprocess.Popen(
            command, env=env | {"HOME": str(clone.root.parent / "home")}, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=TIMEOUT_S)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    return clone


def test_what_a_bootstrap_leaves(done: Clone) -> None:
    program = "import multimesh, tooling, humanize; print(multimesh.__file__); print(tooling.__file__)"
    python = done.root / ".venv" / "bin" / "python"
    found = subprocess.run([python, "-c", program], cwd="/", capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )

    assert found[0] == str(done.root / "multimesh" / "src" / "multimesh" / "__init__.py")
    assert found[1] == str(done.root / "tooling" / "__init__.py")
    assert os.readlink(done.place("multimesh")) == "../multimesh"


def test_maxtext_is_found_where_sync_puts_it(done: Clone) -> None:
    package = done.root / "third_party" / "maxtext" / "src" / "maxtext"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    python = done.root / ".venv" / "bin" / "python"

    found = subprocess.run(
        [python, "-c", "import maxtext; print(maxtext.__file__)"],
        cwd=done.root,
        capture_output=True,
        text=True,
        check=True,
    )

    assert found.stdout.strip() == str(package / "__init__.py")


def test_second_bootstrap_needs_no_index(done: Clone, tmp_path: Path) -> None:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:1/", "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1"}

    again = bootstrap(done, "--group", "run", cwd=tmp_path, **nowhere)

    assert again.returncode == 0, again.stderr
    assert again.stderr == f"Python {platform.python_version()} (of .venv: {BASE})\n"
    assert again.stdout.splitlines()[1].split() == ["multimesh", "kept", "link", "to", "../multimesh", "-"]


def test_changed_requirements_and_missing_packages_are_something_to_do(done: Clone) -> None:
    locked = done.root / "requirements" / "run.txt"
    note = done.root / ".venv" / ".multimesh-ready"
    for change in (lambda: locked.write_text(locked.read_text() + "# more\n"), note.unlink):
        assert "installing" not in bootstrap(done, "--group", "run").stderr
        change()
        assert "requirements/run.txt: installed" in bootstrap(done, "--group", "run").stderr


@pytest.mark.parametrize("other", ["cuda12", "compile-gpu"])
def test_packages_for_gpus_are_of_one_cuda(done: Clone, other: str) -> None:
    process = bootstrap(done, "--group", other, "--group", "cuda13")
    assert process.returncode == 2
    assert "JAX uses either cuda12, of which compile-gpu is a part, or cuda13; choose one" in process.stderr


def test_the_compiler_for_gpus_comes_without_the_rest_of_cuda(done: Clone) -> None:
    locked = (ROOT / "requirements" / "run.txt").read_text().replace("\\\n", "\\")
    asks_for_more = next(line for line in locked.splitlines() if line.startswith("optax==")).replace("\\", "\\\n")
    (done.root / "requirements" / "compile-gpu.txt").write_text(asks_for_more + "\n")
    process = bootstrap(done, "--group", "compile-gpu")
    assert process.returncode == 0, process.stderr
    assert "requirements/compile-gpu.txt: installed" in process.stderr
    assert subprocess.run([done.root / ".venv/bin/python", "-c", "import jax"], check=False).returncode


def test_removed_link_comes_back(done: Clone) -> None:
    bootstrap(done, "--group", "run")
    done.place("multimesh").unlink()

    assert "multimesh  created" in bootstrap(done, "--group", "run").stdout
    assert os.readlink(done.place("multimesh")) == "../multimesh"


def test_killed_while_making_the_environment(tmp_path: Path) -> None:
    clone = furnish(tmp_path / "clone")
    (clone.root / ".venv" / "bin").mkdir(parents=True)
    (clone.root / ".venv" / "bin" / "python").symlink_to(sys.executable)  # as `python -m venv` leaves it before pip

    process = bootstrap(clone, "--group", "image")

    assert process.returncode == 0, process.stderr
    assert (clone.root / ".venv" / "bin" / "pip").exists()


def test_interrupted_bootstrap_says_so(tmp_path: Path) -> None:
    clone = furnish(tmp_path / "clone")
    env = os.environ | {"HOME": str(tmp_path)}
    process = subprocess.Popen([clone.root / "bootstrap.sh"], env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline().startswith("Python 3.")
    assert process.stderr.readline() == "making .venv\n"

    process.send_signal(signal.SIGINT)

    assert process.communicate(timeout=60)[1] == "error: interrupted; run the same command again to go on\n"
    assert process.returncode == 130


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Path]:
    """A folder with the programs that bootstrap.sh uses, but no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "env"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def test_no_python(tmp_path: Path, tools: Path) -> None:
    clone = furnish(tmp_path / "clone")
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)

    process = bootstrap(clone, PATH=str(tools))

    assert process.returncode == TOOL
    assert process.stderr.startswith("error: no Python found; install 3.13 (Debian, Ubuntu: apt-get install ")
    assert len(process.stderr.splitlines()) == 1


def test_python_that_cannot_make_environments(tmp_path: Path, tools: Path) -> None:
    """As on a machine where the distribution keeps ``venv`` in a package of its own."""
    clone = furnish(tmp_path / "clone")
    hide = (
        "import importlib.util as u, sys\nfind = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'ensurepip' else find(name, package)\n"
    )
    run = "place = sys.argv.index('-c') if '-c' in sys.argv else 0\nif place: exec(sys.argv[place + 1])\n"
    go_on = f"else: import os; os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
    (tools / "python3").write_text(f"#!{sys.executable}\n{hide}{run}{go_on}")
    (tools / "python3").chmod(0o755)

    process = bootstrap(clone, "--offline", PATH=str(tools))

    assert process.returncode == TOOL
    assert "cannot make environments; install its venv package (Debian, Ubuntu: apt-get install " in process.stderr
    assert len(process.stderr.splitlines()) == 1


def test_named_python_makes_the_environment_anew_or_is_refused(tmp_path: Path) -> None:
    clone = furnish(tmp_path / "clone")
    (clone.root / ".venv" / "bin").mkdir(parents=True)
    other = clone.root / ".venv" / "bin" / "python"
    answer = {"path": str(other), "version": [3, 14 if sys.version_info < (3, 14) else 13, 0], "final": True,
              "free": False, "implementation": "CPython", "bits": 64, "missing": []}  # fmt: skip
    other.write_text(f"#!/bin/sh\ncase $* in *importlib*) echo '{json.dumps(answer)}' ;; *) exit 1 ;; esac\n")
    other.chmod(0o755)

    refused = bootstrap(clone, "--group", "run", PYTHON="/path/to/no/python3")
    assert refused.returncode == TOOL
    assert refused.stderr.startswith("error: PYTHON=/path/to/no/python3: No such file or directory; or name ")
    assert other.exists(), "nothing was touched"

    process = bootstrap(clone, "--group", "image", PYTHON=sys.executable)
    assert process.returncode == 0, process.stderr
    first = process.stderr.splitlines()[0]
    assert first.startswith(f"Python {platform.python_version()} (PYTHON: {BASE})")
    assert first.endswith(f"; makes .venv anew, which had Python 3.{answer['version'][1]}.0")
    assert subprocess.run([other, "-c", "import pip"]).returncode == 0


def test_pyenv_of_another_home(tmp_path: Path, tools: Path) -> None:
    """Its shims are on PATH; the one that is active is old, those of other versions fail."""
    clone = furnish(tmp_path / "clone")
    root = tmp_path / "somebody" / ".pyenv"
    here = root / "versions" / platform.python_version() / "bin" / "python3"
    for folder in (root / "shims", here.parent):
        folder.mkdir(parents=True)
    here.symlink_to(BASE)
    old = {"path": "/usr/bin/python3", "version": [3, 9, 2], "final": True, "free": False, "implementation": "CPython",
           "bits": 64, "missing": []}  # fmt: skip
    answer = f"case $* in *importlib*) echo '{json.dumps(old)}' ;; *) exec {BASE} \"$@\" ;; esac"
    for name, text in (("python3", answer), ("python3.13", "exit 127"), ("python3.12", "exit 127")):
        (root / "shims" / name).write_text(f"#!/bin/sh\n{text}\n")
        (root / "shims" / name).chmod(0o755)

    process = bootstrap(clone, "--groups", "run", PATH=f"{root}/shims:{tools}")

    assert process.returncode == USAGE, process.stderr
    assert process.stderr.startswith(f"Python {platform.python_version()} (pyenv: {BASE})")


def test_help_and_wrong_options_change_nothing(tmp_path: Path) -> None:
    clone = furnish(tmp_path / "clone")
    before = sorted(clone.root.rglob("*"))
    assert "Bring in sources" in bootstrap(clone, "--help").stdout
    assert bootstrap(clone, "--groups", "run").returncode == USAGE
    assert sorted(clone.root.rglob("*")) == before


def test_building_images_needs_no_packages(tmp_path: Path) -> None:
    clone = furnish(tmp_path / "clone")
    clone.components["multimesh"]["groups"].append("image")
    clone.write()
    process = bootstrap(clone, "--group", "image")
    assert process.returncode == 0, process.stderr
    assert "requirements/run.txt" not in process.stderr
    python = clone.root / ".venv" / "bin" / "python"
    assert subprocess.run([python, "-c", "import jsonschema, yaml"]).returncode == 0
    assert subprocess.run([python, "-c", "import humanize"], capture_output=True).returncode == 1
    assert clone.place("multimesh").is_symlink()


@pytest.mark.telling("1-26-the package index cannot be reached; check the network and run again")
@pytest.mark.parametrize(
    ("retries", "code", "said"),
    [
        ("1", NETWORK, "the package index cannot be reached; check the network and run again"),
        ("0", TOOL, "pip failed (ERROR: Could not find a version that satisfies the requirement"),  # no more from pip
    ],
)
def test_no_package_index(tmp_path: Path, retries: str, code: int, said: str) -> None:
    clone = furnish(tmp_path / "clone")
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:1/", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": retries}

    process = bootstrap(clone, "--group", "run", **nowhere)

    assert process.returncode == code
    assert process.stderr.splitlines()[-1].startswith(f"error: requirements/tooling.txt: {said}")


def test_wrong_option_is_named(done: Clone) -> None:
    process = bootstrap(done, "--group", "run", "--group", "everything")

    assert process.returncode == USAGE
    assert "invalid choice: 'everything'" in process.stderr

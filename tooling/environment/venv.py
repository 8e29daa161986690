"""Makes ``.venv`` with the Python that runs this, which ``find_python`` chose, and goes on in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tooling import cli  # noqa: E402
from tooling.core import console, files, proc  # noqa: E402
from tooling.environment import packages  # noqa: E402

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
BASE = os.path.realpath(sys.executable)
REQUIREMENTS = ROOT / "requirements" / "tooling.txt"
STAMP = VENV / ".multimesh-tooling.json"
# The package is not installed yet, and the user's folder (which relative paths mean) is not this clone.
GO_ON = "import sys; sys.path[0] = sys.argv.pop(1); import tooling.cli; sys.exit(tooling.cli.main())"


def make_and_go_on(options: Sequence[str]) -> int:
    """Make the environment if need be, then become ``python -m tooling bootstrap`` in it."""
    wanted = {"requirements": files.sha256(REQUIREMENTS), "root": str(ROOT), "python": BASE}
    if read_stamp() != wanted:
        cli.parse(["bootstrap", *options])  # before anything is made
        with files.lock(ROOT / "third_party" / ".venv.lock"):
            if read_stamp() != wanted:
                make(wanted)
    return os.execv(PYTHON, [str(PYTHON), "-c", GO_ON, str(ROOT), "bootstrap", *options])  # noqa: S606


def read_stamp() -> object:
    """Return the note of the last finished run, or nothing; an environment whose Python is gone counts as none."""
    return files.read_object(STAMP) if PYTHON.exists() else None


def make(stamp: object) -> None:
    """Create or repair the environment and install the packages of ``tooling`` itself."""
    if not usable():
        console.note("making .venv")
        proc.run([BASE, "-m", "venv", "--clear", VENV])
    label = str(REQUIREMENTS.relative_to(ROOT))
    console.note(f"installing {label}")
    packages.pip(str(PYTHON), "--require-hashes", "-r", str(REQUIREMENTS), label=label)
    files.write_json(STAMP, stamp)


def usable() -> bool:
    """Say whether the environment is ours, whole and made from this Python; a moved clone's is not."""
    question = "import os, pip, sys; sys.exit(os.path.realpath(sys._base_executable) != sys.argv[1])"
    activate = VENV / "bin" / "activate"
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", question, BASE], capture_output=True).returncode:
        return False
    return activate.exists() and str(VENV) in activate.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(cli.main(inner=make_and_go_on))

"""Makes ``.venv`` with the Python that runs this, which ``find_python`` chose, and goes on in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tooling import cli  # noqa: E402
from tooling.core import errors, files, proc  # noqa: E402
from tooling.sources import manifest  # noqa: E402

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
        args = cli.parse(["bootstrap", *options])  # before anything is made
        if args.dry_run:
            return forecast(args.groups or manifest.GROUPS)
        with files.locked(ROOT / "third_party" / ".venv.lock"):
            if read_stamp() != wanted:
                make(wanted)
    return os.execv(PYTHON, [str(PYTHON), "-c", GO_ON, str(ROOT), "bootstrap", *options])  # noqa: S606


def forecast(wanted: Sequence[str]) -> int:
    """Say what would be made, with nothing but Python: no other program and no package reads the locks."""
    print(f"would make {VENV} and install {REQUIREMENTS.relative_to(ROOT)}")
    entries = re.split(r"(?m)^  (?=\S+:$)", (ROOT / "sources.yaml").read_text(encoding="utf-8"))[1:]
    for entry in entries:
        of = re.search(r"(?m)^    groups: \[(.*)\]", entry)
        version = re.search(r"(?m)^    version: (\S+)", entry)
        if of and set(of[1].replace(" ", "").split(",")) & set(wanted):
            name = entry.partition(":")[0]
            print(f"would bring third_party/{name}: " + (version[1].strip('"')[:12] if version else "a link"))
    for path in (ROOT / "requirements" / f"{group}.txt" for group in wanted):
        if path.exists():
            print(f"would install {path.relative_to(ROOT)}")
    return 0


def read_stamp() -> object:
    """Return the note of the last finished run, or nothing; an environment whose Python is gone counts as none."""
    return files.read_object(STAMP) if PYTHON.exists() else None


def make(stamp: object) -> None:
    """Create or repair the environment and install the packages of ``tooling`` itself."""
    if not usable():
        print("making .venv", file=sys.stderr, flush=True)
        quietly([BASE, "-m", "venv", "--clear", str(VENV)], "python -m venv")
    print("installing requirements/tooling.txt", file=sys.stderr, flush=True)
    install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    quietly([*install, "--require-hashes", "-r", str(REQUIREMENTS)], "pip install -r requirements/tooling.txt")
    files.write_json(STAMP, stamp)


def usable() -> bool:
    """Say whether the environment is ours, whole and made from this Python; a moved clone's is not."""
    question = "import os, pip, sys; sys.exit(os.path.realpath(sys._base_executable) != sys.argv[1])"
    activate = VENV / "bin" / "activate"
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", question, BASE], capture_output=True).returncode:
        return False
    return activate.exists() and str(VENV) in activate.read_text(encoding="utf-8")


def quietly(command: list[str], label: str) -> None:
    """Run a command; show its output only if it fails."""
    done = proc.run(command, check=False)
    if done.returncode:
        said = [line.strip() for line in (done.text + done.stderr.decode("utf-8", "replace")).splitlines()]
        lines = [line for line in said if "ERROR" in line] or [done.complaint]
        raise errors.ToolError(
            f"{label} failed: {lines[-1][:400]}; check the network and disk, then run the same command again"
        )


if __name__ == "__main__":
    sys.exit(cli.main(inner=make_and_go_on))

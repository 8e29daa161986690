#!/usr/bin/env python3
"""The door to `multimesh_maxtext`: train MaxText. `maxtext/run.py --help` teaches the flags."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
sys.path[:1] = [str(ROOT / name / "src") for name in ("maxtext", "multimesh")]  # not this folder: its name is MaxText's

if Path(sys.prefix) != VENV and (VENV / "bin" / "python").exists():
    os.execv(VENV / "bin" / "python", [str(VENV / "bin" / "python"), *sys.argv])  # noqa: S606
try:
    from multimesh_maxtext.cli import command
except ImportError as missing:
    sys.exit(f"{missing.name} is not installed here; run: {ROOT / 'bootstrap.sh'} --group run")
command(sys.argv[1:], root=ROOT)

#!/usr/bin/env python3
"""The door to `multimesh_maxtext`: train MaxText. `maxtext/run.py --help` teaches the flags."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
VENV, OWN = f"{ROOT}/.venv", [f"{ROOT}/{folder}/src" for folder in ("maxtext", "multimesh", "planner")]
# Not this folder, whose name is MaxText's; and what is installed before PYTHONPATH, where a stray numpy.py may lie.
GIVEN = {os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(":")}
sys.path[:] = OWN + sorted(sys.path[1:], key=lambda place: os.path.abspath(place) in GIVEN)
if sys.prefix != VENV and os.path.exists(f"{VENV}/bin/python"):
    os.execv(f"{VENV}/bin/python", [f"{VENV}/bin/python", *sys.argv])  # noqa: S606
try:
    from multimesh_maxtext.command.cli import command
except ImportError as missing:
    sys.exit(f"{missing.name} is not installed here; run: {ROOT}/bootstrap.sh --group run")
except KeyboardInterrupt:
    sys.exit(130)
command(sys.argv[1:], root=ROOT)

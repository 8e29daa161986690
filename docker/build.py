#!/bin/sh
# fmt: off
""":"
# A shell reads this part and starts the Python of .venv, which takes it for a string and goes on below.
case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
python=$here/../.venv/bin/python
[ -x "$python" ] || { echo "error: there is no .venv yet; run ./bootstrap.sh --group run" >&2; exit 11; }
exec "$python" -I "$0" "$@"
":"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from workflows.cli import main

sys.exit(main(["image", *sys.argv[1:]]))

#!/bin/sh
# fmt: off
""":"
# A shell reads this part and starts the Python of .venv, or any that fits (for --help); it goes on below.
case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
[ ! -x "$here/../.venv/bin/python" ] || exec "$here/../.venv/bin/python" -I "$0" "$@"
fits='import sys; from tooling.environment.check_python import OLDEST; sys.exit(sys.version_info < OLDEST)'
for python in python3 python3.14 python3.13 python3.12 python3.11; do
  PYTHONPATH=$here/.. "$python" -PBc "$fits" 2>/dev/null && exec "$python" -I "$0" "$@"
done
echo "error: no Python is new enough; run ./bootstrap.sh --group image" >&2; exit 1
":"""
import sys
from pathlib import Path

sys.dont_write_bytecode = sys.prefix == sys.base_prefix  # --help of a bare clone changes nothing
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tooling.cli import main  # noqa: E402

sys.exit(main(["image", *sys.argv[1:]]))

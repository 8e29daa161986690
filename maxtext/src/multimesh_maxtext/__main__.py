"""``python -m multimesh_maxtext``: the command of ``maxtext/run.py`` where there is no repository."""

import sys

from multimesh_maxtext.cli import main

sys.exit(main(sys.argv[1:]))

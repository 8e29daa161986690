"""``python -m multimesh_maxtext``: the command of ``maxtext/run.py`` where there is no repository.

``python -m multimesh_maxtext join CONFIG KEY=VALUE...`` is the trainer that it starts as one of several processes,
``... foresee CONFIG KEY=VALUE...`` the one that forecasts, and ``... compile FILE`` what ``--hlo`` starts.
"""

import sys

from multimesh_maxtext.cli import command
from multimesh_maxtext.launch import compile_module, foresee, join

if sys.argv[1:2] == ["join"]:
    join(sys.argv[2:])
elif sys.argv[1:2] == ["foresee"]:
    foresee(sys.argv[2:])
elif sys.argv[1:2] == ["compile"]:
    compile_module(sys.argv[2])
else:
    command(sys.argv[1:])

"""``python -m multimesh_maxtext``: the command of ``maxtext/run.py`` where there is no repository.

``python -m multimesh_maxtext join CONFIG KEY=VALUE...`` is the trainer that it starts as one of several processes,
``... foresee CONFIG KEY=VALUE...`` the one that forecasts, ``... compile FILE`` what ``--hlo`` starts, and
``... export DIR STEP TARGET`` what ``--export`` starts.
"""

import sys

from multimesh_maxtext.cli import command
from multimesh_maxtext.launch import compile_module, foresee, join, write_export

if sys.argv[1:2] == ["join"]:
    join(sys.argv[2:])
elif sys.argv[1:2] == ["foresee"]:
    foresee(sys.argv[2:])
elif sys.argv[1:2] == ["compile"]:
    compile_module(sys.argv[2])
elif sys.argv[1:2] == ["export"]:
    write_export(*sys.argv[2:])
else:
    command(sys.argv[1:])

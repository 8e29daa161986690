"""``python -m multimesh_maxtext``: the command of ``maxtext/run.py`` where there is no repository.

The command starts this program with other words. ``join CONFIG KEY=VALUE...`` trains as one of several processes,
``foresee CONFIG KEY=VALUE...`` forecasts, ``compile FILE`` serves ``--hlo``, and ``export DIR STEP TARGET`` serves
``--export``.
"""

import sys

from multimesh_maxtext.command.cli import command
from multimesh_maxtext.trainer.start import compile_module, foresee, join, write_export

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

"""``python -m workflows``."""

import sys

from workflows.sources import quick

if __name__ == "__main__":
    quick.answer(sys.argv[1:])
    from workflows.cli import main

    sys.exit(main())

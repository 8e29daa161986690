"""``python -m workflows``."""

import sys

from workflows.sources import quick

if __name__ == "__main__":
    if quick.answer(sys.argv[1:]):
        sys.exit(0)
    from workflows.cli import main

    sys.exit(main())

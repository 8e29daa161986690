"""``python -m workflows``."""

import sys

from workflows.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""modes.py FOLDER...: the modes of git, whatever the checkout has: 755 for folders and scripts, 644 for other files."""

import os
import sys

for folder in sys.argv[1:]:
    for place, _, names in os.walk(folder):
        os.chmod(place, 0o755)  # noqa: S103
        for path in (os.path.join(place, name) for name in names):
            if not os.path.islink(path):
                with open(path, "rb") as file:
                    os.chmod(path, 0o755 if file.read(2) == b"#!" else 0o644)

#!/bin/sh
# Leave out the test suites that packages bring along: nobody runs them in an image, and they are a tenth of its size.
set -eu
find /opt/.venv/lib -type d \( -name tests -o -name test \) -path '*/site-packages/*' -prune -exec rm -r {} +

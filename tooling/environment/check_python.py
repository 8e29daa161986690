"""Whether this Python, of 3.6 or later, may be that of ``.venv``: ``bootstrap.sh`` runs it in each that it finds.

It prints the Python itself, not an environment, a link or a shim that leads to it; or why it cannot be taken.
"""

import os
import platform
import sys
import sysconfig

OLDEST, PREFERRED, NEWEST = (3, 11), (3, 12), (3, 14)  # `.ci/lock` writes what follows


def find_fault() -> str:
    """Return why this Python cannot be taken, or nothing."""
    version, supported = platform.python_version(), f"{in_dots(OLDEST)} to {in_dots(NEWEST)}"
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        return f"is Python {version}, not {supported}; install one of these"
    if platform.python_implementation() != "CPython":
        return "is not CPython"
    if sys.version_info[3] != "final":
        return "is a pre-release"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "is a free-threaded build"
    try:  # some systems package modules apart
        import bz2, ctypes, ensurepip, lzma, ssl, venv, zlib  # noqa: E401, F401, I001
    except ImportError as error:
        package = "python{}.{}-venv".format(*sys.version_info)
        return f"has no {error.name}: install {package} (Debian, Ubuntu: apt-get install {package})"
    return ""


def in_dots(version: tuple) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version))


def main() -> int:
    """Return 0 where this Python is to be taken."""
    fault = find_fault()
    if fault:
        print(f"{sys.executable}: {fault}")
        return 1
    program, minor = sys.argv[1:]
    waits = program == "python3" and sys.version_info < PREFERRED and int(minor) >= PREFERRED[1]
    if waits and not os.environ.get("PYTHON"):  # while all that have a newer JAX are looked for
        return 1
    print(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
    return 0


if __name__ == "__main__":
    sys.exit(main())

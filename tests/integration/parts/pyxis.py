#!/usr/bin/env python3
"""``srun`` with pyxis' options, in place of pyxis itself: each task is a container of the real Docker engine.

Put a link to this file, named srun, before the real one on PATH. As pyxis does, it hands the task's environment on and
shows the folders of ``--container-mounts`` alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_OPTIONS = ("--container-image", "--container-mounts", "--no-container-mount-home")
_OF_THE_IMAGE = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")


def submit(words: list[str]) -> list[str]:
    """Return the real srun's command line; its tasks run this script again where a container is asked for."""
    folder = Path(sys.argv[0]).parent
    real = shutil.which(
        "srun", path=os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != folder)
    )
    assert real is not None
    first = next((n for n, word in enumerate(words) if not word.startswith("-")), len(words))
    values = {name: value for name, _, value in (word.partition("=") for word in words[:first]) if name in _OPTIONS}
    options = [word for word in words[:first] if word.partition("=")[0] not in _OPTIONS]
    if not values:
        return [real, *words]
    folders = [f"--volume={mount}" for mount in values["--container-mounts"].split(",")]
    task = [sys.executable, __file__, "task", *folders, values["--container-image"], *words[first:]]
    return [real, *options, *task]


def run(words: list[str]) -> list[str]:
    """Return the command line of a task's container."""
    variables = [f"--env={name}" for name in os.environ if name not in _OF_THE_IMAGE]
    user = f"--user={os.getuid()}:{os.getgid()}"
    options = ["--rm", "--init", "--network=host", "--ipc=host", "--entrypoint="]
    return ["docker", "run", *options, user, *variables, *words]


def main(words: list[str]) -> None:
    """Run srun, or a task."""
    if words[:1] == ["task"]:
        os.execvp("docker", run(words[1:]))
    argv = submit(words)
    if words == ["--help"]:
        subprocess.run(argv, check=True)
        print("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
    else:
        os.execv(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])

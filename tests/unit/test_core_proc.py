"""Programs end with the process that started them, however that ends; and how far work is."""

from __future__ import annotations

import contextlib
import importlib
import os
import pty
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.integration.parts import processes
from tooling.core import errors, files, proc
from tooling.image import pipeline
from tooling.sources import sync

CODE = """
import sys
import tomllib
from pathlib import Path
from tooling import cli
from tooling.core import files, proc

def work(argv):
    with files.lock(Path(argv[0])):
        proc.run(["sh", "-c", "echo; sleep 60 & sleep 60"], on_line=print)

sys.exit(cli.main(sys.argv[1:], work))
"""


def test_a_program_that_fails_or_is_not_there_is_named() -> None:
    assert proc.run(["echo", "$(a) b"]).text == "$(a) b"
    for argv, message in ((["sh", "-c", "echo no >&2; exit 3"], "exit 3'.*: no$"), (["no-such-program"], "not found")):
        with pytest.raises(errors.ToolingError, match=message):
            proc.run(argv)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_all_that_was_started_ends_and_the_lock_is_free(tmp_path: Path, signum: signal.Signals) -> None:
    argv = [sys.executable, "-uc", CODE, str(tmp_path / "lock")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        pids = list(proc.descendants(process.pid))
        process.send_signal(signum)
        process.wait(120)
        assert process.returncode == (-signum if signum == signal.SIGKILL else 130)
    ending = pids[:1] if signum == signal.SIGKILL else pids  # nobody can be told of a kill but children
    processes.wait_for(lambda: not any(map(processes.runs, ending)), "all have ended")
    with files.lock(tmp_path / "lock"):
        pass
    subprocess.run(["kill", *map(str, pids)], capture_output=True)


WORK = """
import time
from tooling.core import console
with console.work("alpha: fetching [bold]") as advance:
    advance(1, 4)
    time.sleep(0.3)
"""


def test_a_terminal_gets_a_bar_and_a_pipe_a_line(root: Path) -> None:
    command, env = [sys.executable, "-c", WORK], os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    reader, writer = pty.openpty()
    with subprocess.Popen(command, cwd=root, env=env, stderr=writer) as process:
        os.close(writer)
        output = b""
        with contextlib.suppress(OSError):  # Linux says EIO where the other end closed
            while chunk := os.read(reader, 65536):
                output += chunk
    os.close(reader)
    assert process.returncode == 0, output
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 10 in output.decode()
    assert re.search(r"alpha: fetching \[bold\].* 25%", output.decode())
    child = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True)
    assert child.stderr == "alpha: fetching [bold]\n"


def test_every_command_names_a_function_and_its_groups_are_those_that_are_installed(root: Path) -> None:
    document = tomllib.loads((root / "tooling/commands.toml").read_text(encoding="utf-8"))
    commands = [*document["commands"].values(), *document["commands"]["ci"]["commands"].values()]
    names = [command["run"].rpartition(".") for command in commands if "commands" not in command]
    assert all(callable(getattr(importlib.import_module(f"tooling.{module}"), name)) for module, _, name in names)
    assert {*document["options"]["sources"]["--group"]["choices"]} == {*sync.DEFAULT, *sync.ADDED, "image"}
    stages = document["options"]["image-content"]
    assert (stages["--image"]["choices"], stages["--stage"]["choices"]) == ([*pipeline.IMAGES], [*pipeline.STAGES])

"""Programs end with the process that started them, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.parts import processes
from tooling.core import errors, files, proc

CODE = """
import sys
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
    for argv, said in ((["sh", "-c", "echo no >&2; exit 3"], "exit 3'.*: no$"), (["no-such-program"], "not found")):
        with pytest.raises(errors.ToolingError, match=said):
            proc.run(argv)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_all_that_was_started_ends_and_the_lock_is_free(tmp_path: Path, signum: signal.Signals) -> None:
    argv = [sys.executable, "-uc", CODE, str(tmp_path / "lock")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        pids = list(proc.descendants(process.pid))
        process.send_signal(signum)
        process.wait(30)
        assert process.returncode == (-signum if signum == signal.SIGKILL else 130)
    ours = pids[:1] if signum == signal.SIGKILL else pids  # nobody can be told of a kill but children
    processes.wait_for(lambda: not any(map(processes.runs, ours)), "all have ended", patience_s=5)
    with files.lock(tmp_path / "lock"):
        pass
    subprocess.run(["kill", *map(str, pids)], capture_output=True)

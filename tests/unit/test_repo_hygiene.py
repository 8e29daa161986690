"""What every committed file of this repository obeys."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import imports

MAX_LINES = 500
DOORS = ("bootstrap.sh", "docker/build.py", "docker/start-cache.sh", "maxtext/run.py")
DOOR_LINES = 20
# Absolute paths that a committed file may name: those that every Debian system and our images have; /path/to/x;
# and /jax/..., which is how JAX names its monitoring events.
# /caches is of the devcontainer.
SYSTEM_FOLDERS = {*("bin", "dev", "etc", "opt", "proc", "run", "srv", "sys", "tmp", "usr", "var"),
                  *("caches", "workspace", "path", "jax")}  # fmt: skip
# Hosts that a committed file may name: public ones that we fetch from or point to, and names reserved for examples.
PUBLIC_HOSTS = {
    *("img.shields.io", "api.github.com", "archive.ubuntu.com", "bazel.build", "containers.dev", "docker.io"),
    *("deb.debian.org", "docs.github.com", "docs.jax.dev", "files.pythonhosted.org", "ghcr.io", "github.com"),
    *("jobset.sigs.k8s.io", "json-schema.org", "mirror.bazel.build", "nvcr.io", "openxla.org", "pypi.org"),
    *("raw.githubusercontent.com", "cyclonedx.org", "index.docker.io", "spdx.org", "storage.googleapis.com"),
    *("ui.perfetto.dev", "www.apache.org", "www.w3.org"),
}
PICTURES = ["docs/pictures/particle-mesh.png"]
RESERVED_HOST = r"(^|\.)(example(\.(com|org|net))?|invalid|test|localhost)$|^127\.|^\[?::1\]?$|^0\.0\.0\.0$|^$"
ABSOLUTE_PATH = re.compile(r"""(?:(?<=[\s"'`=(])|^)/([A-Za-z_][\w.-]*)/[\w.-]""", re.MULTILINE)
URL = re.compile(r"https?://[^\s\"'`<>)\\|,;]+")


def tracked(root: Path, *patterns: str) -> list[Path]:
    argv = ["git", "-C", str(root), "ls-files", "-z", "--", *patterns]
    names = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split("\0")
    return [root / name for name in names if name and (root / name).is_file() and not (root / name).is_symlink()]


def text_of(path: Path) -> str:
    """Return the text of a file, "" of a binary one."""
    content = path.read_bytes()
    with contextlib.suppress(UnicodeDecodeError):
        return "" if b"\0" in content else content.decode()
    return ""


def test_every_file_is_text_or_a_picture_of_the_documentation(root: Path) -> None:
    """Files that programs leave behind, such as caches of XLA, do not belong into git."""
    assert relative(root, [path for path in tracked(root) if path.stat().st_size and not text_of(path)]) == PICTURES


def relative(root: Path, paths: list[Path]) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in paths)


def shell_scripts(root: Path) -> list[Path]:
    """Shell scripts by their first line; a .py that begins in the shell is linted as Python."""
    shebang = re.compile(r"#!.*\b(ba|da)?sh\b")
    return [path for path in tracked(root) if path.suffix != ".py" and shebang.match(text_of(path).partition("\n")[0])]


def test_files_fit_in_a_head_and_doors_only_open(root: Path) -> None:
    files = tracked(root, "*.py", "*.sh", "*.md", "*.yaml", "*.yml", ".ci/run", "docker/Dockerfile")
    limits = dict.fromkeys(files, MAX_LINES) | {root / door: DOOR_LINES for door in DOORS}
    assert relative(root, [path for path, most in limits.items() if len(text_of(path).splitlines()) > most]) == []


def is_public(url: str) -> bool:
    host = re.sub(r"[{$].*", "", urlsplit(re.split(r"[{[]", url)[0]).hostname or "")
    return host in PUBLIC_HOSTS or re.search(RESERVED_HOST, host) is not None


def test_no_file_names_a_path_of_somebodys_machine_or_a_private_host(root: Path) -> None:
    """The Dockerfile and its scripts speak of paths inside of an image, which are nobody's machine."""
    faults = []
    for path in tracked(root):
        name, text = str(path.relative_to(root)), text_of(path)
        if name != "docker/Dockerfile" and not name.startswith("docker/scripts/"):
            folders = [match for match in ABSOLUTE_PATH.finditer(text) if match[1] not in SYSTEM_FOLDERS]
            faults += [f"{name}: {match[0]}" for match in folders]
        faults += [f"{name}: {url}" for url in URL.findall(text) if not is_public(url)]
    assert faults == []


def test_requirements_are_locked_by_hash_and_name_no_index(root: Path) -> None:
    for path in tracked(root, "requirements/*.txt"):
        text = text_of(path)
        unlocked = [line for line in text.splitlines() if "==" in line and not line.endswith("\\")]
        assert (path.name, unlocked) == (path.name, [])
        assert "--hash=sha256:" in text
        assert not re.search(r"--(extra-)?index-url|--find-links|--trusted-host", text)


def test_shell_scripts_and_the_dockerfile_are_clean(root: Path) -> None:
    scripts, tools = [str(path) for path in shell_scripts(root)], Path(sys.executable).parent
    assert scripts
    programs = {"shellcheck": ["-x", *scripts], "shfmt": ["-i", "2", "-ci", "-d", *scripts]}
    for program, words in (programs | {"hadolint": ["docker/Dockerfile"]}).items():
        process = subprocess.run([tools / program, *words], capture_output=True, text=True, cwd=root, check=False)
        assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_the_names_of_folders_import_from_where_they_should(root: Path) -> None:
    folders = ("docker", "maxtext", "multimesh", "numerics", "planner")
    assert not [name for name in folders if (root / name / "__init__.py").exists()]
    code = (
        "import importlib.util, json\n"
        "names = ('maxtext', 'multimesh', 'multimesh_maxtext')\n"
        "print(json.dumps({n: importlib.util.find_spec(n).origin for n in names}))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    origin = {name: Path(path or "") for name, path in json.loads(process.stdout).items()}
    assert root / "multimesh" / "src" / "multimesh" in origin["multimesh"].parents
    assert root / "third_party" / "maxtext" / "src" / "maxtext" in origin["maxtext"].parents
    assert root / "maxtext" / "src" / "multimesh_maxtext" in origin["multimesh_maxtext"].parents


def test_one_distribution_never_imports_the_other(root: Path) -> None:
    imports = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)
    for package, others in (
        ("multimesh/src", {"tooling", "multimesh_maxtext", "maxtext"}),  # it loads others on first use alone
        ("planner/src", {"tooling", "multimesh_maxtext", "maxtext", "multimesh_numerics"}),
        ("numerics/src", {"tooling", "multimesh_maxtext", "maxtext", "multimesh_planner"}),
        ("maxtext/src", {"tooling", "multimesh_numerics"}),
        ("tooling", {"multimesh", "multimesh_planner", "multimesh_numerics", "multimesh_maxtext", "maxtext"}),
    ):
        files = tracked(root, f"{package}/*.py")
        assert files
        faults = [path for path in files if not others.isdisjoint(imports.findall(text_of(path)))]
        assert (package, relative(root, faults)) == (package, [])


@pytest.mark.longer
def test_wheels_hold_what_git_tracks_and_are_built_alike_twice(root: Path, tmp_path: Path) -> None:
    for project in ("multimesh", "planner", "numerics", "maxtext"):
        name = f"multimesh_{project.replace('multimesh', 'jax')}"
        for folder in ("one", "two"):
            build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / folder]
            subprocess.run(build, cwd=root / project, check=True, capture_output=True)
        [first], [second] = (list((tmp_path / folder).glob(f"{name}-*.whl")) for folder in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()
        with zipfile.ZipFile(first) as archive:
            contents = {file for file in archive.namelist() if ".dist-info/" not in file}
        source = root / project / "src"
        assert contents == {str(path.relative_to(source)) for path in tracked(root, f"{project}/src")}


def test_neither_a_module_nor_a_folder_of_the_tooling_imports_in_a_circle(root: Path) -> None:
    """Imports within functions and for types count; the entry points, which open the door to commands, do not."""
    graph = imports.graph(root / "tooling")
    assert set(imports.bottom_up(graph)) == graph.keys()
    folders = {path.parent.name for path in tracked(root, "tooling/*/*.py")}

    def folder(module: str) -> str:
        return first if (first := module.partition(".")[0]) in folders else ""

    needs: dict[str, set[str]] = {name: set() for name in ("", *folders)}
    for module, others in graph.items():
        if module not in ("__main__", "cli"):
            needs[folder(module)] |= set(map(folder, others)) - {folder(module)}
    assert imports.bottom_up(needs)[-1] == "ci"


def test_every_message_names_a_command_that_runs_outside_of_the_environment(root: Path) -> None:
    """Without ``.venv/bin/`` a system's Python was started, which has none of the packages."""
    pattern = re.compile(r"^(?!.*``python -m).*(?<!\.venv/bin/)\bpython3? -m tooling", re.MULTILINE)
    files = tracked(root, "tooling", "docker", ".devcontainer", ".github")
    assert [(path, pattern.findall(text_of(path))) for path in files if pattern.search(text_of(path))] == []

"""From the engine to public tags: a real engine, a real registry, and the faults between them."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest

from tests.integration.parts import packages
from tests.integration.parts import registry as real
from tests.integration.parts.proxy import Fault, FaultyProxy
from tooling.core import errors
from tooling.core.files import ROOT
from tooling.image import engine
from tooling.image import registry as registries
from tooling.image.reference import OCI, Reference, list_tags, name_candidate
from tooling.image.registry import Registry

from .conftest import PINNED, TOOLING, tooling

MANIFEST = "PUT .*/manifests/"
# A blob's bytes come by PATCH, and an empty PUT ends them; from an engine with containerd's store one PUT has them.
BYTES = "(PATCH|PUT) .*/blobs/uploads/"
pytestmark = pytest.mark.stand_in("a registry on this machine")


def test_push_promote_pull_run(make_tiny, send, remote: Registry, target: Reference) -> None:
    image = make_tiny("first words")
    digest = send(image).digest
    assert remote.digest("v1") is None  # a pushed image has no public tag yet
    moves = remote.promote(digest, list_tags(target, latest=True, version="v1.2.3"))
    assert [(move["tag"], move["before"]) for move in moves] == [(t, None) for t in ("v1", "v1.2.3", "v1.2", "latest")]
    name = target.at(digest)
    subprocess.run(["docker", "rmi", "--force", image.id, name], capture_output=True)
    process = subprocess.run(["docker", "run", "--rm", name], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "first words"), process.stderr
    skopeo = packages.need("skopeo", "skopeo")
    for tag in ("v1", "latest"):
        argv = [skopeo, "inspect", "--tls-verify=false", f"docker://{target.tagged(tag)}"]
        assert json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)["Digest"] == digest


@pytest.mark.parametrize(
    "fault",
    [
        Fault(MANIFEST, 2, status=503),
        Fault(MANIFEST, cut_after=0),
        Fault(MANIFEST, status=429),
        Fault(BYTES, cut_after=100_000),
    ],
    ids=["503", "cut manifest", "429", "cut layer"],
)
def test_passing_faults(make_tiny, send, faulty: FaultyProxy, fault: Fault) -> None:
    """The engine itself tries a layer again, or we do."""
    faulty.faults = [fault]
    send(make_tiny())
    assert fault.times == 0


@pytest.mark.parametrize("status", [401, 403, 404])
def test_refusals_are_final(make_tiny, send, remote, faulty: FaultyProxy, monkeypatch, status: int) -> None:
    """Of the question before a push, and of what is left of a push after all attempts."""
    faulty.faults = [Fault("POST ", 100, status=status)]
    with pytest.raises(errors.EngineError, match=rf"refused \({status} .*log in with `docker login"):
        remote.check_push()
    assert faulty.count("POST ") == 1
    monkeypatch.setattr(engine, "_WAITS_S", ())
    with pytest.raises(errors.EngineError, match=r"not pushed \(.*log in with `docker login"):
        send(make_tiny())


def test_promotion_that_stops_half_way(make_tiny, send, remote: Registry, faulty: FaultyProxy, capfd) -> None:
    """What moved is said before the next tag, and the same command goes on; faults that pass are no stop."""
    first, second = send(make_tiny("old")).digest, send(make_tiny("new")).digest
    faulty.faults = [Fault(MANIFEST, status=503), Fault(MANIFEST, status=429), Fault("GET .*/manifests/", cut_after=0)]
    remote.promote(first, ("v1", "main"))
    faulty.faults = [Fault("PUT .*/manifests/main", 9, status=403)]
    with pytest.raises(errors.EngineError, match="refused"):
        remote.promote(second, ("v1", "main"))
    assert f":v1: {second} (before: {first})" in capfd.readouterr().err
    assert (remote.digest("v1"), remote.digest("main")) == (second, first)
    faulty.faults = []
    assert [move["before"] for move in remote.promote(second, ("v1", "main"))] == [second, first]


def test_fixed_tags_never_move(make_tiny, send, remote: Registry, target: Reference) -> None:
    """Two images of a commit have names of their own, and both may be promoted."""
    old = make_tiny("old")
    first, second = send(old).digest, send(make_tiny("new")).digest
    for digest in (first, second):
        assert remote.check_pushed_here(digest)[f"{OCI}.revision"] == "ab" * 20
    for tag in ("v1", "dev-v1.0.0"):
        names = list_tags(target.tagged(tag), latest=False, version="v1.0.0")
        remote.promote(first, names)
        remote.promote(first, names)
        with pytest.raises(errors.EngineError, match=r"v1\.0\.0: is another image already; take the next version"):
            remote.promote(second, names)
        assert {remote.digest(name) for name in names} == {first}
    for names in (("v1.0",), ("latest",)):
        with pytest.raises(errors.OptionError, match="a release alone moves it"):
            remote.promote(second, names)
    with pytest.raises(errors.EngineError, match="is another image already"):
        remote.promote(second, (name_candidate(PINNED, old.id, checked=True),))


def test_tags_stay_with_the_highest_version(make_tiny, send, remote: Registry, target: Reference, capfd) -> None:
    versions = ("v1.9.0", "v1.10.0", "v1.9.1", "v1.8.7")
    images = {
        version: send(make_tiny(version, labels=PINNED | {f"{OCI}.version": version[1:]})).digest
        for version in versions
    }
    for version, digest in images.items():
        moves = remote.promote(digest, list_tags(target, latest=True, version=version))
        assert "v1" in [move["tag"] for move in moves]
    assert "latest stays with a newer release" in capfd.readouterr().err
    minor = {"v1.9": "v1.9.1", "v1.10": "v1.10.0", "v1.8": "v1.8.7", "latest": "v1.10.0"}
    assert {tag: remote.digest(tag) for tag in minor} == {tag: images[version] for tag, version in minor.items()}
    second = remote.promote(images["v1.9.0"], list_tags(target, latest=True, version="v1.9.0"))
    assert [move["tag"] for move in second] == ["v1", "v1.9.0"]


def test_only_an_image_that_was_checked_here_is_promoted(
    make_tiny, uploading, remote: Registry, target: Reference
) -> None:
    """``promote R@DIGEST --tag v0.1`` moved the tag of a release to an empty image."""
    tooling(*uploading(make_tiny(), "--release", f"v{PINNED[f'{OCI}.version']}"))
    line = f"v{PINNED[f'{OCI}.version'].rpartition('.')[0]}"
    before = remote.digest(line)
    image = make_tiny("of somebody", labels={})
    image.tag(*target.tagged("theirs"))
    subprocess.run(["docker", "push", "-q", str(target.tagged("theirs"))], check=True)
    unchecked = make_tiny("unchecked", labels=PINNED | {f"{OCI}.revision": "cd" * 20})
    tooling(*uploading(unchecked, "--validate", "none"))
    for name, tag, code, fault in (
        (remote.digest("theirs"), "main", 4, "so it passed no check"),
        (remote.digest("v1"), "main", 4, "so it passed no check"),
        ("sha256:" + "ab" * 32, "main", 4, "is not in its registry; push it first"),
        (before, line, 2, f"--tag {line}: is the tag of a release"),
    ):
        assert fault in tooling("promote", target.at(name), "--tag", tag, code=code).stderr
    assert (remote.digest(line), remote.digest("main")) == (before, None)


def test_failed_check_moves_nothing(make_tiny, send, uploading, remote: Registry, tmp_path) -> None:
    before = send(make_tiny("good")).digest
    remote.promote(before, ("v1",))
    process = tooling(*uploading(make_tiny("bad", verdict="echo error: loss is NaN; exit 1")), code=5)
    assert "loss is NaN" in process.stderr
    assert remote.digest("v1") == before
    assert not (tmp_path / "release.json").exists()


@pytest.mark.parametrize("step", [BYTES, "PUT .*/manifests/sha-", "PUT .*/manifests/v1"], ids=["bytes", "sha", "v1"])
def test_interrupted_push(make_tiny, uploading, remote, faulty: FaultyProxy, tmp_path, step) -> None:
    image = make_tiny("good")
    hold = Fault(step, hold=True)
    faulty.faults = [hold]
    with subprocess.Popen([*TOOLING, *uploading(image)], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert hold.reached.wait(120)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert (tmp_path / "release.json").exists() == ("v1" in step), "it is there before the first tag"
    hold.released.set()
    tooling(*uploading(image))
    document = json.loads((tmp_path / "release.json").read_text())
    assert remote.digest("v1") == document["image"]["digest"]
    assert image.id in remote.ids(remote.get("v1"))


def test_the_right_to_push_is_asked_without_an_image(remote: Registry, faulty: FaultyProxy) -> None:
    """An empty image without labels was the first of a new package, and each check left a manifest."""
    remote.check_push()
    assert faulty.count(MANIFEST) == faulty.count(BYTES) == 0
    assert faulty.count("DELETE .*/blobs/uploads/") == 1


def test_an_unknown_certificate_is_named_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    with real.running(tmp_path, tls=True) as encrypted:
        with monkeypatch.context() as context:
            context.setattr(registries, "_LOOPBACK", re.compile("none"))  # as if it were another machine's
            with pytest.raises(errors.EngineError, match="certificate cannot be verified"):
                Registry(f"{encrypted}/team/x").check_push()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "crt"))
        Registry(f"{encrypted}/team/x").check_push()

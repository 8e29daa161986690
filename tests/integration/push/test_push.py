"""From the engine to public tags: a real engine, a real registry, and what goes wrong between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.integration.parts import packages
from tests.integration.parts.proxy import Fault, FaultyProxy
from tooling.core import errors
from tooling.image import tags
from tooling.image.engine import Engine
from tooling.image.reference import Reference
from tooling.image.tags import Pushed

from .conftest import ROOT, Tiny, digest_of, tooling

MANIFEST = "PUT .*/manifests/"
# A blob's bytes come by PATCH, and an empty PUT ends them; from an engine with containerd's store one PUT has them.
BYTES, BLOB = "(PATCH|PUT) .*/blobs/uploads/", "PUT .*/blobs/uploads/"


@pytest.fixture
def send(engine: Engine) -> Callable[[Tiny, Reference], Pushed]:
    """Push an image under its candidate's tag."""

    def send(image: Tiny, target: Reference) -> Pushed:
        name = tags.candidate(target, {}, image.id)
        engine.run("tag", image.id, str(name))
        return tags.push(engine, image.id, name, lambda wait: None)

    return send


@pytest.mark.stand_in("a registry on this machine")
def test_push_promote_pull_run(make_tiny, send, engine: Engine, target: Reference) -> None:
    image = make_tiny("first words")

    pushed = send(image, target)
    assert digest_of(target, "v1") is None  # a pushed image has no public tag yet
    moved = tags.promote(engine, target, pushed.digest, tags.tags(target, latest=True, version="v1.2.3"))

    assert [(each.tag, each.before) for each in moved] == [(t, None) for t in ("v1", "v1.2.3", "v1.2", "latest")]
    name = target.at(pushed.digest)
    subprocess.run(["docker", "rmi", "--force", image.id, name], capture_output=True)
    ran = subprocess.run(["docker", "run", "--rm", name], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "first words"), ran.stderr
    skopeo = packages.need("skopeo", "skopeo")
    for tag in ("v1", "latest"):
        argv = [skopeo, "inspect", "--tls-verify=false", f"docker://{target.tagged(tag)}"]
        assert json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)["Digest"] == pushed.digest


@pytest.mark.stand_in("a registry on this machine")
@pytest.mark.parametrize(
    ("faults", "attempts", "told"),
    [
        ([Fault(MANIFEST, 2, status=503)], 3, "503"),
        ([Fault(MANIFEST, status=500), Fault(MANIFEST, status=502)], 3, "502"),
        ([Fault(MANIFEST, cut_after=0)], 2, "attempt 2 of 6"),
        ([Fault(MANIFEST, status=429)], 2, "429"),
    ],
    ids=["503", "500-502", "cut-manifest", "429"],
)
def test_passing_faults(make_tiny, send, target, faulty: FaultyProxy, capsys, faults, attempts, told) -> None:
    faulty.faults = faults
    image = make_tiny()
    pushed = send(image, target)
    assert (faulty.count(BLOB), faulty.count(MANIFEST)) == (2, attempts)  # one layer and one configuration
    ours = [line for line in capsys.readouterr().err.splitlines() if " of 6 in " in line]
    # An engine with containerd's store itself tries once more. The name has the case's number too.
    assert not ours or told in ours[-1].replace(target.repository, "")
    assert digest_of(target, tags.candidate(target, {}, image.id).tag) == pushed.digest


@pytest.mark.stand_in("a registry on this machine")
def test_reset_within_a_layer(make_tiny, send, target, faulty: FaultyProxy) -> None:
    """The engine itself tries a layer again, or we do."""
    faulty.faults = [reset] = [Fault(BYTES, cut_after=100_000)]
    image = make_tiny()
    pushed = send(image, target)
    assert reset.times == 0
    assert digest_of(target, tags.candidate(target, {}, image.id).tag) == pushed.digest


@pytest.mark.stand_in("a registry on this machine")
@pytest.mark.parametrize("status", [401, 403, 404])
@pytest.mark.parametrize("request_", [MANIFEST, "POST "])
def test_refusals_are_final(make_tiny, send, target, faulty: FaultyProxy, status: int, request_: str) -> None:
    faulty.faults = [Fault(request_, 100, status=status)]
    image = make_tiny()
    with pytest.raises(errors.RegistryError, match=r"refused \("):
        send(image, target)
    # Docker's engine asks a second time after a 401, with a fresh login.
    assert faulty.count(request_) <= 2
    faulty.faults = []
    assert digest_of(target, tags.candidate(target, {}, image.id).tag) is None


def test_the_last_attempt_says_so(make_tiny, send, target, faulty: FaultyProxy) -> None:
    faulty.faults = [Fault(MANIFEST, 100, status=503)]
    with pytest.raises(errors.RegistryError, match="6 times; try again later"):
        send(make_tiny(), target)


@pytest.mark.stand_in("a registry on this machine")
def test_another_image_under_the_candidates_tag_is_noticed(make_tiny, engine: Engine, target: Reference) -> None:
    checked, other = make_tiny("checked"), make_tiny("other")
    engine.run("tag", other.id, str(target.tagged("sha-1")))
    with pytest.raises(errors.IntegrityError, match="another image than the one that was checked"):
        tags.push(engine, checked.id, target.tagged("sha-1"))


@pytest.mark.stand_in("a registry on this machine")
def test_promotion_that_stops_half_way(make_tiny, send, engine: Engine, target: Reference, faulty: FaultyProxy) -> None:
    first = send(make_tiny("old"), target)
    tags.promote(engine, target, first.digest, ("v1", "latest"))
    second = send(make_tiny("new"), target)
    faulty.faults = [Fault("PUT .*/manifests/latest", 9, status=403)]
    noted: list[tags.Moved] = []

    with pytest.raises(errors.RegistryError, match=f"Tags moved: v1 .before: {first.digest}.; as they were: latest"):
        tags.promote(engine, target, second.digest, ("v1", "latest"), noted.extend)

    assert noted == [("v1", first.digest, second.digest)]  # before the promotion stopped
    assert (digest_of(target, "v1"), digest_of(target, "latest")) == (second.digest, first.digest)
    faulty.faults = []
    moved = tags.promote(engine, target, second.digest, ("v1", "latest"))
    assert [each.before for each in moved] == [second.digest, first.digest]


@pytest.mark.stand_in("a registry on this machine")
def test_a_version_taken_between_the_check_and_the_move_stays(
    make_tiny, send, engine: Engine, target: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = send(make_tiny("mine"), target), send(make_tiny("theirs"), target)
    names, still = tags.tags(target, latest=False, version="v1.0.0"), tags._still

    def meanwhile(engine, names, reference):
        tags.promote(engine, target, theirs.digest, ("v1.0.0-x",))
        create = ("create", "--prefer-index=false", "--tag", str(target.tagged("v1.0.0")), target.at(theirs.digest))
        tags.imagetools(engine, *create, label="theirs")
        return still(engine, names, reference)

    monkeypatch.setattr(tags, "_still", lambda *args: (monkeypatch.undo(), meanwhile(*args))[1])
    with pytest.raises(errors.RegistryError, match=r"v1\.0\.0: is another image already; .* Tags moved: v1 .*; as"):
        tags.promote(engine, target, mine.digest, names)
    assert digest_of(target, "v1.0.0") == theirs.digest


def test_promotion_survives_passing_faults(
    make_tiny, send, engine: Engine, target: Reference, faulty: FaultyProxy
) -> None:
    pushed = send(make_tiny(), target)
    faulty.faults = [Fault(MANIFEST, status=503), Fault(MANIFEST, status=429), Fault("GET .*/manifests/", cut_after=0)]
    tags.promote(engine, target, pushed.digest, ("v1",))
    assert digest_of(target, "v1") == pushed.digest


@pytest.mark.stand_in("a registry on this machine")
def test_release_tag_never_moves(make_tiny, send, engine: Engine, target: Reference) -> None:
    first, second = send(make_tiny("old"), target), send(make_tiny("new"), target)
    names = tags.tags(target, latest=False, version="v1.0.0")
    tags.promote(engine, target, first.digest, names)
    tags.promote(engine, target, first.digest, names)
    with pytest.raises(errors.RegistryError, match=r":v1\.0\.0: is another image already"):
        tags.promote(engine, target, second.digest, names)
    assert {digest_of(target, name) for name in names} == {first.digest}
    of_a_target = tags.tags(target.tagged("dev-v1.0.0"), latest=False, version="v1.0.0")
    tags.promote(engine, target, first.digest, of_a_target)
    with pytest.raises(errors.RegistryError, match=r":dev-v1\.0\.0: is another image already"):
        tags.promote(engine, target, second.digest, of_a_target)


@pytest.mark.stand_in("a registry on this machine")
def test_tags_stay_with_the_highest_version(make_tiny, send, engine: Engine, target: Reference, capfd) -> None:
    labels = "org.opencontainers.image.version"
    versions = ("v1.9.0", "v1.10.0", "v1.9.1", "v1.8.7")
    images = {each: send(make_tiny(each, labels={labels: each[1:]}), target).digest for each in versions}
    for version, digest in images.items():
        moved = tags.promote(engine, target, digest, tags.tags(target, latest=True, version=version))
        assert "v1" in [each.tag for each in moved]
    assert "latest stays with a newer release" in capfd.readouterr().err
    minor = {"v1.9": "v1.9.1", "v1.10": "v1.10.0", "v1.8": "v1.8.7", "latest": "v1.10.0"}
    assert {tag: digest_of(target, tag) for tag in minor} == {tag: images[each] for tag, each in minor.items()}
    again = tags.promote(engine, target, images["v1.9.0"], tags.tags(target, latest=True, version="v1.9.0"))
    assert [each.tag for each in again] == ["v1", "v1.9.0"]


def test_promoting_what_is_not_there(target: Reference) -> None:
    done = tooling("promote", target.at("sha256:" + "ab" * 32), "--tag", "v1")
    assert (done.returncode, done.stdout) == (36, "")
    assert done.stderr.startswith("error: ")
    assert "push it first" in done.stderr


@pytest.mark.stand_in("a registry on this machine")
def test_failed_check_moves_nothing(make_tiny, send, engine: Engine, target: Reference, tmp_path) -> None:
    before = send(make_tiny("good"), target)
    tags.promote(engine, target, before.digest, ("v1", "latest"))
    bad = make_tiny("bad", verdict="echo error: loss is NaN; exit 1")
    subprocess.run(["docker", "tag", bad.id, str(target)], check=True)
    options = ("--no-build", "--upload", "--allow-dirty", "--repo", target.repository, "--tag", "v1")

    done = tooling("image", *options, "--release-file", str(tmp_path / "release.json"))

    assert done.returncode == 35, done.stderr
    assert "loss is NaN" in done.stderr
    assert (digest_of(target, "v1"), digest_of(target, "latest")) == (before.digest, before.digest)
    assert not (tmp_path / "release.json").exists()


@pytest.mark.stand_in("a registry on this machine")
@pytest.mark.parametrize("step", [BYTES, "PUT .*/manifests/sha-", "PUT .*/manifests/v1"], ids=["bytes", "sha", "v1"])
def test_interrupted_push(
    make_tiny, engine: Engine, target: Reference, faulty: FaultyProxy, tmp_path, step: str
) -> None:
    image = make_tiny("good")
    subprocess.run(["docker", "tag", image.id, str(target)], check=True)
    options = ["image", "--no-build", "--upload", "--allow-dirty", "--repo", target.repository, "--tag", "v1"]
    options += ["--release-file", str(tmp_path / "release.json")]
    hold = Fault(step, hold=True)
    faulty.faults = [hold]
    argv, env = [sys.executable, "-m", "tooling", *options], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert hold.reached.wait(60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert (tmp_path / "release.json").exists() == ("v1" in step), "it is there before the first tag"
    hold.released.set()

    again = tooling(*options)

    assert again.returncode == 0, again.stderr
    document = json.loads((tmp_path / "release.json").read_text())
    assert digest_of(target, "v1") == document["image"]["digest"]
    # An engine with containerd's store names an image by its manifest.
    assert image.id in (digest_of(target, "v1"), tags.get(engine, str(target)).document["config"]["digest"])


@pytest.mark.stand_in("a registry on this machine")
def test_what_would_stop_a_push_is_asked_with_an_empty_image(
    make_tiny, send, engine: Engine, target: Reference, faulty: FaultyProxy
) -> None:
    tags.check_push(engine, target)
    assert tags.get(engine, str(target.tagged("push-check"))).document["layers"]
    assert engine.inspect(str(target.tagged("push-check"))) is None, "nothing stays in the engine"
    tags.check_free(engine, target, ("main", "v1.0.0", "latest"))
    tags.promote(engine, target, send(make_tiny(), target).digest, ("main", "v1.0.0"))
    tags.check_free(engine, target, ("main", "v1.0", "latest"))
    with pytest.raises(errors.RegistryError, match=r":v1\.0\.0: is another image already; take the next version"):
        tags.check_free(engine, target, ("main", "v1.0.0"))
    faulty.faults = [Fault("POST ", 100, status=403)]
    with pytest.raises(errors.RegistryError, match=r"refused \("):
        tags.check_push(engine, target)

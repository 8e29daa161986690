"""What a push does about attestations: decided from the request, the engine and the environment."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from workflows import errors
from workflows.image import attest, digests
from workflows.image.engine import Engine
from workflows.image.reference import make
from workflows.image.spec import Actions, ImageSpec, Means, Request

SPEC = ImageSpec(make("r.example/i", None, "T"), "runtime", "cpu", "wheel", "", None, "Release", None, None, None)
MEANS = Means(None, None, "default", True, True, None, False)
SCANNER = "docker.io/docker/buildkit-syft-scanner:stable-1"


@dataclasses.dataclass(frozen=True)
class Told(Engine):
    """An engine whose attestations are known without asking one."""

    through: str | None = None

    def attests(self) -> str | None:
        return self.through


@pytest.fixture
def decide(root: Path):
    def of(through: str | None, environ: dict[str, str] | None = None, **actions: object) -> attest.Attesting:
        engine = Told(("docker",), "docker", "28.0.0", "28.0.0", "buildx", None, through)
        request = Request(SPEC, MEANS, Actions(upload=True, **actions))  # type: ignore[arg-type]
        held = digests.load(root)
        images = {name: digests.ImagePin(pin.reference, None) for name, pin in held.images.items()}
        return attest.decide(engine, request, digests.ImageLock(images, held.files), environ or {})

    return of


def test_an_engine_gets_a_name_for_the_subject_and_a_builder_has_it_from_its_push(decide) -> None:
    by_engine, by_builder = decide("engine"), decide("builder")
    wanted = ("--attest=type=provenance,mode=max", f"--attest=type=sbom,generator={SCANNER}")
    assert by_builder.options == by_builder.options_for("builder") == wanted
    assert by_engine.options_for("engine") == (*wanted, "--tag=r.example/i:staging-T")
    assert by_engine.options_for("builder") == ()
    assert by_engine.kinds == ("provenance", "sbom")
    assert by_engine.unpinned == (SCANNER,)


def test_a_scanner_by_digest_is_pinned(decide) -> None:
    assert decide("engine", scanner=f"r.example/s@sha256:{'a' * 64}").unpinned == ()
    assert decide("engine", attest="provenance").unpinned == ()


@pytest.mark.parametrize("proxy", ["HTTP_PROXY", "https_proxy"])
def test_proxies_are_not_published(decide, proxy: str) -> None:
    assert decide("engine", {proxy: "http://me:word@proxy.example"}).options[0] == "--attest=type=provenance,mode=min"


def test_a_run_on_github_is_the_builder(decide) -> None:
    names = {"SERVER_URL": "https://github.com", "REPOSITORY": "o/r", "RUN_ID": "7", "RUN_ATTEMPT": "2"}
    environ = {"GITHUB_ACTIONS": "true"} | {f"GITHUB_{name}": value for name, value in names.items()}
    wanted = "mode=max,builder-id=https://github.com/o/r/actions/runs/7/attempts/2"
    assert decide("engine", environ).options[0] == f"--attest=type=provenance,{wanted}"


def test_where_there_are_none(decide) -> None:
    none = decide(None)
    assert (none.through, none.options, none.kinds) == (None, (), ())
    assert none.said.startswith("none: this engine keeps no image index (docker 28.0.0, buildx)")
    assert decide("engine", attest="none").said == "none: --attest none"
    assert decide("engine", build=False).through is decide("builder", commit="c").through is None
    with pytest.raises(errors.EngineError, match=r"--attest sbom: .* turn on docker's containerd image store"):
        decide(None, attest="sbom")


def test_a_push_without_what_was_to_be_attached_is_an_error(decide) -> None:
    found = [{"digest": "sha256:a", "image": "sha256:b", "kinds": ["provenance"]}]
    attest.check(found, decide("engine", attest="provenance"), "r.example/i")
    with pytest.raises(errors.IntegrityError, match=r"without its attestations \(sbom\)"):
        attest.check(found, decide("engine"), "r.example/i")

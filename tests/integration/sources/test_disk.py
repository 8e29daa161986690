"""Disks that are full or may not be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.parts import disks

from .conftest import Clone, Upstream, make_clone

DISK = 1
MEGABYTES = 6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    with disks.small(tmp_path / "small disk", MEGABYTES) as disk:
        yield disk


@pytest.fixture
def there(small_disk: Path, clone: Clone, alpha: Upstream) -> Clone:
    """A clone on the small disk, its component in place."""
    other = make_clone(small_disk / "clone")
    other.components, other.pins = clone.components, clone.pins
    other.write()
    other.ok("sync")
    return other


def test_disk_full(there: Clone, alpha: Upstream) -> None:
    before = there.head("alpha")
    alpha.commit({"blob.bin": os.urandom(4 << 20).hex()}, "large")
    there.add("alpha", there.components["alpha"]["url"], alpha.head, alpha.tree())

    said = there.refused(DISK, "sync")

    assert "free some" in said
    assert there.head("alpha") == before
    assert there.leftovers == []


def test_read_only(there: Clone, small_disk: Path, alpha: Upstream) -> None:
    there.add("alpha", there.components["alpha"]["url"], alpha.head, alpha.tree())
    disks.make_read_only(small_disk)

    said = there.refused(DISK, "sync")

    assert "Read-only file system; make it writable" in said
    assert there.state("alpha") == "outdated", "looking needs no writing"


def test_nothing_to_do_on_a_read_only_disk_succeeds(there: Clone, small_disk: Path) -> None:
    disks.make_read_only(small_disk)

    assert "kept" in there.ok("sync")

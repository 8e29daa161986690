"""What later processes find again: the table of a search, checked when it is read; a damaged file is only slower."""

import json
import os

import pytest
from multimesh.core import disk_cache
from multimesh.schedules import auto as module

import multimesh as mm

COSTS = mm.schedules.StageCosts(((1.0, 2.0, 1.0), (1.5, 1.0, 1.0), (1.0, 1.0, 2.0), (2.0, 1.0, 1.0)))
SHAPE = 4, 1, 8


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("MULTIMESH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def chosen(costs=COSTS):
    """Choose as a new process would."""
    module._choose.cache_clear()
    return mm.schedules.Auto(costs, evaluations=60).choose(*SHAPE)


def searches(monkeypatch):
    count = []
    search = module.search
    monkeypatch.setattr(module, "search", lambda *args, **more: count.append(1) or search(*args, **more))
    return count


def test_a_search_is_not_repeated_and_gives_the_same_choice(place, monkeypatch):
    count = searches(monkeypatch)
    first, second = chosen(), chosen()
    assert len(count) == 1
    assert str(first) == str(second)
    assert first.taken.table == second.taken.table
    other = mm.schedules.StageCosts(((1.0, 2.0, 1.0), *COSTS.times[1:3], (2.5, 1.0, 1.0)))
    chosen(other)
    assert len(count) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "{",
        lambda kept: "",
        lambda kept: "[]",
        lambda kept: json.dumps({**kept, "rows": kept["rows"][:-1]}),
        lambda kept: json.dumps({**kept, "rows": [row[::-1] for row in kept["rows"]]}),
        lambda kept: json.dumps({**kept, "rows": [row[1:] for row in kept["rows"]]}),
        lambda kept: json.dumps({**kept, "phases": "X"}),
        lambda kept: json.dumps({**kept, "rows": [["a"]]}),
    ],
)
def test_a_damaged_file_is_ignored_with_a_line_and_written_anew(place, monkeypatch, damage):
    want = str(chosen())
    (file,) = place.glob("*.json")
    whole = file.read_text()
    file.write_text(damage(json.loads(whole)))
    count = searches(monkeypatch)
    with pytest.warns(UserWarning, match=rf"{file.name} is damaged and ignored \(MULTIMESH_CACHE\)"):
        assert str(chosen()) == want
    assert len(count) == 1
    assert file.read_text() == whole
    assert [*place.iterdir()] == [file]


def test_it_can_be_switched_off_and_needs_no_folder(tmp_path, monkeypatch):
    count = searches(monkeypatch)
    (tmp_path / "file").touch()
    for given in ("off", str(tmp_path / "file/no-folder")):
        monkeypatch.setenv("MULTIMESH_CACHE", given)
        chosen()
        chosen()
    assert len(count) == 4


def test_the_oldest_files_go_first(place, monkeypatch):
    monkeypatch.setattr(disk_cache, "MOST", 3)
    for number in range(5):
        disk_cache.put(str(number), number)
        os.utime(place / f"{number}.json", (number, number))
    disk_cache.put("5", 5)
    assert sorted(path.stem for path in place.iterdir()) == ["3", "4", "5"]
    assert disk_cache.get("4") == 4
    assert disk_cache.get("0") is None


def test_the_key_has_the_versions(monkeypatch):
    first = disk_cache.key(1, (2.0,))
    assert first == disk_cache.key(1, (2.0,)) != disk_cache.key(1, (3.0,))
    monkeypatch.setattr(disk_cache, "_version", lambda name: "another")
    assert disk_cache.key(1, (2.0,)) != first

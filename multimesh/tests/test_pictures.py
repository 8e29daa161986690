"""Pictures and traces of timelines, as far as one can say without a browser; tests/integration looks at them in one."""

import collections
import itertools
import json
import time
import xml.etree.ElementTree as ET

import drawings
import pytest
from multimesh.commands import forecast
from multimesh.commands.forecast import Shape
from multimesh.observe.timelines import perfetto, svg
from multimesh.observe.timelines.spans import Span
from multimesh.observe.timelines.timeline import Timeline
from multimesh.schedules.costs import UNIT_COSTS

import multimesh as mm

SHAPES = [
    ("gpipe", Shape(2, 1, 3)),
    ("1f1b", Shape(4, 1, 8)),
    ("interleaved", Shape(4, 2, 8)),
    ("interleaved", Shape(8, 2, 32)),
    ("zb-h1", Shape(4, 1, 8)),
    ("zb-v", Shape(4, 2, 8)),
]
IDS = [f"{name}-{shape.submeshes}-{shape.microbatches}" for name, shape in SHAPES]
NAME = "{http://www.w3.org/2000/svg}"


def line(name, shape):
    return forecast.simulate_schedule(name, shape).timeline


def classes(root, tag):
    return collections.Counter(part for e in root.iter(NAME + tag) for part in e.get("class", "").split())


@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=IDS)
def test_a_box_for_each_program_and_a_line_for_each_transfer(name, shape):
    """Boxes of a row do not overlap, and lie in the picture."""
    timeline = line(name, shape)
    root = ET.fromstring(svg.draw(timeline))
    assert classes(root, "rect")["c"] == len(timeline.spans)
    assert classes(root, "path")["x"] == len(timeline.transfers)
    labels = [e.text for e in root.iter(NAME + "text")]
    assert [f"submesh {r}" for r in range(shape.submeshes)] == [text for text in labels if text.startswith("submesh ")]
    assert labels[0] == timeline.title
    assert labels.count(f"{100 * timeline.bubbles[0]:.1f} %") == shape.submeshes
    width, height = float(root.get("width")), float(root.get("height"))
    rows = collections.defaultdict(list)
    for e in root.iter(NAME + "rect"):
        x, y, w, h = (float(e.get(k)) for k in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
        if "c" in e.get("class", "").split():
            rows[y].append((x, x + w))
    assert len(rows) == shape.submeshes
    for boxes in rows.values():
        boxes.sort()
        assert all(a[1] <= b[0] + 0.01 for a, b in itertools.pairwise(boxes))


def test_a_picture_says_in_words_what_it_shows():
    root = ET.fromstring(svg.draw(line("1f1b", Shape(2, 1, 2))))
    assert root.get("role") == "img"
    ids = {e.get("id"): e.text for e in root}
    title, description = root.get("aria-labelledby").split()
    assert ids[title] == "1f1b: 2 submeshes, 2 microbatches"
    assert ids[description].startswith(
        "makespan 9, bubble 33.3 % in all. submesh 0 computes 6 and is idle for 3 (33.3 %)"
    )


def test_names_are_escaped():
    timeline = Timeline('<b> & "q"', "a < b", "s", ("submesh 0",), (Span(0, 0.0, 1e-3, "", "<x>&"),))
    root = ET.fromstring(svg.draw(timeline))
    assert next(e.text for e in root.iter(NAME + "text")) == '<b> & "q"'
    assert json.loads(perfetto.trace(timeline))["traceEvents"][-1]["name"] == "<x>&"


def test_a_page_needs_no_other_file(tmp_path):
    line("1f1b", Shape(2, 1, 3)).to_html(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text().replace("http://www.w3.org/2000/svg", "")
    assert not any(word in text for word in ("http:", "https:", "src=", "href=", "@import", "fetch("))


def test_an_empty_timeline_is_a_picture_too(tmp_path):
    empty = Timeline("nothing", "", "", ("submesh 0",), ())
    empty.to_svg(tmp_path / "a.svg")
    empty.to_perfetto(tmp_path / "a.json")
    empty.to_html(tmp_path / "a.html")
    assert ET.parse(tmp_path / "a.svg").getroot().tag == NAME + "svg"
    assert str(empty).endswith("makespan 0, bubble 0.0 % in all")


@pytest.mark.parametrize(
    ("transfer", "costs"), [(0.0, UNIT_COSTS), (0.5, UNIT_COSTS), (0.1257, {"F": 0.3331, "B": 0.7173, "W": 0.1239})]
)
@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=IDS)
def test_a_trace_keeps_the_rules_of_its_format(name, shape, transfer, costs):
    """The Trace Event Format: required fields, nesting, flows that start and end inside of slices."""
    timeline = forecast.simulate_schedule(name, shape, costs, transfer).timeline
    document = json.loads(perfetto.trace(timeline))
    events = document["traceEvents"]
    assert all({"ph", "name", "pid", "tid"} <= e.keys() for e in events)
    assert all(e["ts"] >= 0 for e in events if e["ph"] != "M")
    kinds = collections.Counter(e["ph"] for e in events)
    assert kinds["X"] == len(timeline.spans) + (len(timeline.transfers) if transfer else 0)
    assert kinds["s"] == kinds["f"] == len(timeline.transfers)
    assert kinds["t"] == (len(timeline.transfers) if transfer else 0)
    slices = collections.defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] > 0
            slices[e["tid"]].append((e["ts"], e["ts"] + e["dur"], e["name"]))
    for lane in slices.values():
        lane.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(lane))
    flows = collections.defaultdict(dict)
    for e in events:
        if e["ph"] in "stf":
            assert any(start <= e["ts"] < end for start, end, _ in slices[e["tid"]])
            flows[e["id"]][e["ph"]] = e
    for flow in flows.values():
        assert flow["s"]["ts"] <= flow["f"]["ts"]
        assert len({(e["name"], e["cat"]) for e in flow.values()}) == 1  # what ties the ends together
        assert flow["f"]["bp"] == "e"
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(slices) <= set(names)
    assert sorted(names)[0] > max(e["pid"] for e in events)  # Perfetto merges threads 0 and that of the process
    assert list(names.values())[: shape.submeshes] == [f"submesh {r}" for r in range(shape.submeshes)]
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {f"live on submesh {r}" for r in range(shape.submeshes)}
    assert max(e["args"]["activations"] for e in counters) == max(timeline.peaks)


def test_a_plan_draws_its_forecast(tmp_path):
    import jax
    import numpy as np
    from jax.sharding import Mesh

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    plan = mm.jit(lambda x: mm.task(lambda x: x + 1, "add", mesh=mesh)(x)).plan(np.ones(3))
    plan.to_svg(tmp_path / "a.svg", {"add": 2})
    plan.to_html(tmp_path / "a.html", {"add": 2})
    plan.to_perfetto(tmp_path / "a.json", {"add": 2})
    assert (tmp_path / "a.svg").read_text() in (tmp_path / "a.html").read_text()
    assert "makespan 2, " in (tmp_path / "a.svg").read_text()
    assert json.loads((tmp_path / "a.json").read_text())["otherData"]["makespan"] == 2


def test_the_pictures_of_the_documentation_are_current_and_small():
    assert drawings.list_stale() == [], "run multimesh/tests/drawings.py --write and look at what changed"
    assert all(len(text) < 70_000 for text in drawings.drawings().values())


def test_a_picture_of_ten_thousand_programs_takes_seconds():
    programs, rows = 10_000, 16
    spans = tuple(Span(n % rows, n // rows, n // rows + 1, "F", "", n % rows, n // rows) for n in range(programs))
    began = time.process_time()
    picture = svg.draw(Timeline("", "", "", tuple(map(str, range(rows))), spans))
    assert time.process_time() - began < 10  # 0.5 on a quiet machine; minutes with anything quadratic in it
    assert picture.count('<rect class="c F"') == programs

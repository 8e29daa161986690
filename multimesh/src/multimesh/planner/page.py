"""Suggestions as one page that needs nothing else: memory against time, what steps consist of, a timeline, bills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from multimesh import schedules
from multimesh.hardware.devices import Device
from multimesh.hardware.software import Stack
from multimesh.planner import layer, picture, stage_layers
from multimesh.planner.best_first import Option
from multimesh.planner.bill import OVERHEAD, Bill, Terms
from multimesh.planner.lost import describe_how
from multimesh.planner.suggestions import Suggestions
from multimesh.planner.transformer import Transformer
from multimesh.schedules.costs import StageCosts
from multimesh.schedules.simulate import simulate
from multimesh.timelines.timeline import Timeline

_COLORS = {
    "matrix products": "#0072b2",
    "attention": "#56b4e9",
    "memory": "#009e73",
    "tensor parallelism": "#e69f00",
    "context parallelism": "#f0c35e",
    "expert parallelism": "#d55e00",
    "sharded parameters": "#cc79a7",
    "bubble": "#8a8f98",
    "gradients": "#b06a3b",
}
_OTHER = "#b9c0c9"
_SHOWN = 12  # bars
_ROUNDS = 2  # microbatches of a timeline, for each stage of the pipeline


def timeline(model: Transformer, option: Option, device: Device, software: Stack) -> Timeline | None:
    """Return the schedule of a configuration with the first microbatches; None: it has no pipeline."""
    how = option.how
    if how.pp == 1:
        return None
    parts = layer.parts(model, how, device.with_software(software.year), software)
    of = stage_layers.times(model, how, parts)
    number = min(how.microbatches, _ROUNDS * how.pp + how.microbatches % how.pp)
    times = tuple((s.forward + parts.blocked, s.backward + parts.blocked, s.weights) for s in of)
    table = schedules.get(how.schedule).table(how.pp, how.interleave, number, True)
    title = f"{how.schedule}, {how.stages} stages on {how.pp} submeshes, {number} of {how.microbatches} microbatches"
    return simulate(table, StageCosts(times, (parts.hop,) * (len(of) - 1)), title=title)


def page(
    found: Suggestions, bills: Sequence[Bill] = (), terms: Terms | None = None, drawn: Timeline | None = None
) -> str:
    """Return the page as HTML.

    ``found``: suggestions, with their front.
    ``bills``, ``terms``: of devices, and what they were asked for.
    ``drawn``: the timeline of the best.
    """
    text = resources.files("multimesh.planner").joinpath("page.html").read_text(encoding="utf-8")
    body = "\n".join(_body(found, bills, terms, drawn))
    return text.replace("TITLE", escape(found.title)).replace("<!-- BODY -->", body)


def _body(found: Suggestions, bills: Sequence[Bill], terms: Terms | None, drawn: Timeline | None) -> Iterator[str]:
    best = found.best
    band = "" if best.band is None else f", within {100 * best.band:.0f} %"
    yield f"<p>The fastest: {escape(describe_how(best.how))}. A step takes {best.seconds:.4g} s{band}: a forecast.</p>"
    if best.nearest:
        yield f"<p>Nearest measured run: {escape(best.nearest)}.</p>"
    options = tuple(dict.fromkeys((*found.options, *found.front)))
    points = tuple(dict.fromkeys(picture.Point(o.seconds, o.bytes, describe_how(o.how)) for o in options))
    yield "<section id=front><h2>Memory against the time of a step</h2>"
    yield picture.draw(found.title, points, found.limit) + "</section>"
    yield "<section id=parts><h2>What a step consists of</h2>"
    yield from _bars(options[:_SHOWN])
    yield "</section>"
    if drawn is not None:
        yield "<section id=timeline><h2>The schedule of the fastest</h2><div class=wide>"
        yield drawn._repr_svg_() + "</div></section>"
    if terms is not None:
        yield "<section id=bill><h2>The bill</h2>"
        yield from _bills(bills, terms)
        yield "</section>"
    if found.lost:
        yield "<section id=lost><h2>Why others lost</h2>"
        yield from (f"<p>{escape(sentence)}</p>" for sentence in found.lost)
        yield "</section>"
    yield from (f"<p>Note: {escape(note)}</p>" for note in found.notes)


def _bars(options: Sequence[Option]) -> Iterator[str]:
    longest = max(option.seconds for option in options)
    names = dict.fromkeys(name for option in options for name, _ in option.shares)
    yield "<div class=key>"
    for name in names:
        yield f'<span><i style="background:{_COLORS.get(name, _OTHER)}"></i>{escape(name)}</span>'
    yield "</div>"
    for option in options:
        yield f"<div class=bar><span>{escape(describe_how(option.how))}</span><span class=parts>"
        for name, seconds in option.shares:
            words = f"{name}: {seconds:.3g} s, {100 * seconds / option.seconds:.0f} %"
            wide = 100 * seconds / longest
            color = _COLORS.get(name, _OTHER)
            yield f'<span style="width:{wide:.2f}%;background:{color}" title="{escape(words)}"></span>'
        yield f"</span><span class=time>{option.seconds:.4g} s</span></div>"


def _bills(bills: Sequence[Bill], terms: Terms) -> Iterator[str]:
    power = f"{terms.power:g} W a device" if terms.power is not None else f"{OVERHEAD:g} times the device's own watts"
    yield f"<p>{terms.tokens:.3g} tokens, {power}; each number is within the band.</p><div class=wide><table>"
    heads = ("device", "number", "step", "days", "device hours", "tokens a day", "cost", "MWh", "goodput", "band")
    yield f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"
    for each in bills:
        cells = (
            each.device,
            f"{each.devices:,}",
            f"{each.seconds:.4g} s",
            f"{each.days:,.1f}",
            f"{each.device_hours:,.0f}",
            f"{each.tokens_a_day:.3g}",
            "-" if each.cost is None else f"{each.cost:,.0f}",
            "-" if each.megawatt_hours is None else f"{each.megawatt_hours:,.0f}",
            f"{100 * each.goodput:.1f} %",
            f"±{100 * each.band:.0f} %",
        )
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</table></div>"

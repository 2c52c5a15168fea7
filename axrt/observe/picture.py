"""Timelines as a picture in SVG, light and dark: one row a rank, a colour a kind, microbatch
numbers, the cause of each gap, and below each row the number of chunks held. A mark is where a rank
begins its next step.

Where state is offloaded, a rank also has a thin row for each direction of its copies, and its own
row has the optimizer steps that the copies are for.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from html import escape
from itertools import groupby
from math import floor, log10
from statistics import median

from axrt.scheduler.lacks import COPIES, END, INPUT, ROOM, SLICES
from axrt.scheduler.simulation.timeline import Pause, Span, Timeline
from axrt.scheduler.task import AnyKind, Kind

_escape = partial(escape, quote=False)
_ROW, _BESIDE, _STRIP, _GAP, _LEFT, _RIGHT, _TOP = 22, 11, 12, 8, 64, 10, 44
_NARROWEST, _WIDEST = 1400, 8000
_THIN = 4  # a box with less has no room for an edge
_CLASS: dict[AnyKind, str] = {
    Kind.FORWARD: "f",
    Kind.RECOMPUTE: "c",
    Kind.BACKWARD: "b",
    Kind.INPUT: "i",
    Kind.WEIGHT: "w",
    Kind.STEP: "p",
    Kind.REFRESH: "p",
    Kind.PRECONDITION: "p",
    Kind.FETCH: "in",
    Kind.STORE: "out",
    Kind.RELOAD: "in",
    Kind.OFFLOAD: "out",
    Kind.UNLOAD: "out",
    Kind.HOST_STEP: "p",
    Kind.LOAD: "in",
    Kind.BRING: "in",
}
_NAMES_BESIDE = {
    Kind.FETCH: "copies in",
    Kind.STORE: "copies out",
    Kind.RELOAD: "reloads",
    Kind.OFFLOAD: "offloads",
    Kind.UNLOAD: "gradients",
    Kind.HOST_STEP: "host",
    Kind.LOAD: "weights",
    Kind.BRING: "whole weights",
}
_GAPS = {  # by the cause of a pause: class and words
    INPUT: ("gi", "idle: nothing has come"),
    SLICES: ("gs", "idle: other members have not sent theirs"),
    ROOM: ("gr", "idle: no room under the cap"),
    COPIES: ("gc", "idle: state is on its way"),
    END: ("ge", "idle: nothing is left"),
}
_OTHER = "o"  # of kinds without a colour of their own
_HELD = ("h", "held: forward started, weight gradient not finished")
_STYLE = """
text{font:11px sans-serif;fill:#222}.n{font-size:10px;text-anchor:middle;fill:#fff}
.t{font-size:13px;font-weight:bold}
.f{fill:#3b6fb6}.c{fill:#8a63b0}.b{fill:#2e8b57}.i{fill:#1f9e9e}.w{fill:#c7772e}.o{fill:#777}
.p{fill:#b04a5a}.in{fill:#5d7f99}.out{fill:#99855d}.l{font-size:9px}
.gi{fill:#f3d9d9}.gs{fill:#e6d9f0}.gr{fill:#f6e7bf}.gc{fill:#d9e6f3}.ge{fill:#e4e4e4}.e{stroke:#222;stroke-width:1.5}
.x{text-anchor:middle}.a{stroke:#888}.h{fill:#9a9a9a;opacity:.55}.r{fill:#f1f1f1}
rect.f,rect.c,rect.b,rect.i,rect.w{stroke:#fff;stroke-width:.6}rect.s{stroke:none}.d{opacity:.72}
@media (prefers-color-scheme:dark){svg{background:#16181c}text{fill:#ddd}.n{fill:#fff}
.r{fill:#24272d}.gi{fill:#4a3034}.gs{fill:#41344d}.gr{fill:#4a4330}.gc{fill:#30404a}.ge{fill:#33363c}.e{stroke:#eee}
rect.f,rect.c,rect.b,rect.i,rect.w{stroke:#16181c}rect.s{stroke:none}.h{fill:#777}}
"""


def draw(*lines: Timeline) -> str:
    """The SVG text of timelines, one above the other on one scale of time.

    Microbatches are numbered within their step.

    Args:
        *lines: timelines with at least one forward each.
    """
    width, longest = max(map(_width, lines)), max(map(_end, lines))
    scale = (width - _LEFT - _RIGHT) / longest
    panels, bottom = [], 0
    for line in lines:
        panels += [f'<g transform="translate(0,{bottom})">', *_panel(line, scale, width), "</g>"]
        bottom += _height(line)
    size = f'viewBox="0 0 {width} {bottom}" width="{width}" height="{bottom}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f"<style>{_STYLE}</style>", *panels, "</svg>\n"])


def _kinds_beside(line: Timeline) -> list[Kind]:
    """The kinds of copies that the timeline has, each a row of its own under a rank's."""
    ran = {span.task.kind for span in line.spans}
    return [kind for kind in _NAMES_BESIDE if kind in ran]


def _drawn(line: Timeline) -> list[Span]:
    """What is drawn: forwards and backwards, and with copies also these and the steps."""
    beside = _kinds_beside(line)
    if not beside:
        return list(line.computing())
    with_steps = (*beside, Kind.STEP)
    return [
        span
        for span in line.spans
        if span.task.kind.of_a_microbatch or span.task.kind in with_steps
    ]


def _end(line: Timeline) -> float:
    return max(span.end for span in _drawn(line))


def _pitch(line: Timeline) -> int:
    """The height of all that is drawn of a rank."""
    return _ROW + _BESIDE * len(_kinds_beside(line)) + _STRIP + _GAP


def _height(line: Timeline) -> int:
    return _TOP + line.ranks * _pitch(line) + 24


def _panel(line: Timeline, scale: float, width: int) -> Iterator[str]:
    yield f'<text class="t" x="8" y="16">{_escape(_heading(line))}</text>'
    yield from _legend(line)
    spans = sorted(_drawn(line), key=lambda span: (span.rank, span.start))
    most, beside = max(1, *line.held), _kinds_beside(line)
    for rank, of_rank in groupby(spans, key=lambda span: span.rank):
        everything, top = list(of_rank), _TOP + rank * _pitch(line)
        mine = [span for span in everything if span.task.kind not in beside]
        shallowest = min(span.task.stage for span in mine)
        yield f'<text x="8" y="{top + 15}">rank {rank}</text>'
        if member := line.member(rank):
            yield f'<text class="l" x="8" y="{top + 27}">{member}</text>'
        size = f'width="{width - _LEFT - _RIGHT}" height="{_ROW}"'
        yield f'<rect class="r" x="{_LEFT}" y="{top}" {size}/>'
        yield from (_pause(of, top, scale) for of in line.pauses if of.rank == rank)
        yield from (
            _box(span, top, scale, line.microbatches, span.task.stage > shallowest) for span in mine
        )
        yield from _borders(line, mine, top, scale)
        for kind in beside:
            copies = [span for span in everything if span.task.kind is kind]
            top += _BESIDE
            yield f'<text class="l" x="8" y="{top + _ROW - 2}">{_NAMES_BESIDE[kind]}</text>'
            yield from (_copy(span, top + _ROW - _BESIDE, scale) for span in copies)
        yield _held(line, mine, top + _ROW + _STRIP, scale, most)
    yield from _axis(line, scale, width, _height(line))


def _heading(line: Timeline) -> str:
    """The title, with how long it takes, and which share of that the busiest rank computes."""
    took = f"makespan {line.makespan:.5g}{f' {line.unit}' if line.unit else ''}"
    busy = f", utilisation {line.utilisation:.3f}" if line.ideal else ""
    return f"{line.title}: {took}{busy}" if line.title else f"{took}{busy}"


def _pause(pause: Pause, top: float, scale: float) -> str:
    """A time in which a rank ran nothing, by its cause."""
    start = max(pause.start, 0.0)  # one may have begun before the first step that is drawn
    x, width = _LEFT + start * scale, max(0.0, pause.end - start) * scale
    name, why = _GAPS[pause.cause]
    place = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_ROW}"'
    return f'<rect class="{name}" {place}><title>{why}</title></rect>'


def _borders(line: Timeline, spans: Sequence[Span], top: float, scale: float) -> Iterator[str]:
    """A mark where a rank begins a step: before the first forward of each but the first."""
    steps: dict[int, float] = {}
    for span in spans:
        if span.task.kind is Kind.FORWARD:
            steps.setdefault(span.task.microbatch // line.microbatches, span.start)
    for step, start in list(steps.items())[1:]:
        x = f"{_LEFT + start * scale:.1f}"
        way = f'd="M{x} {top - 3}v{_ROW + 6}"'
        yield f'<path class="e" {way}><title>step {step}</title></path>'


def _width(line: Timeline) -> int:
    """Wide enough for the numbers of most forwards."""
    forward = median(span.end - span.start for span in line.spans if span.task.kind is Kind.FORWARD)
    wanted = (
        _LEFT + _RIGHT + int(1.1 * _room(line.microbatches - 1) * _end(line) / forward)
        if forward
        else _WIDEST
    )
    return min(max(wanted, _NARROWEST), _WIDEST)


def _legend(line: Timeline) -> Iterable[str]:
    drawn = {span.task.kind for span in _drawn(line)}
    kinds = [*(kind for kind in _CLASS if kind in drawn), *(drawn - _CLASS.keys())]
    at = _LEFT
    for name, words in (*((_CLASS.get(kind, _OTHER), kind.label) for kind in kinds), _HELD):
        box = f'<rect class="{name}" x="{at}" y="24" width="12" height="12"/>'
        yield f'{box}<text x="{at + 16}" y="34">{_escape(words)}</text>'
        at += 30 + 7 * len(words)
    for cause in dict.fromkeys(pause.cause for pause in line.pauses):
        name, words = _GAPS[cause]
        box = f'<rect class="{name}" x="{at}" y="24" width="12" height="12"/>'
        yield f'{box}<text x="{at + 16}" y="34">{words}</text>'
        at += 30 + 6 * len(words)
    if len({span.task.stage for span in line.computing()}) > line.ranks:
        yield f'<text x="{at}" y="34">lighter: a deeper stage of the rank</text>'


def _axis(line: Timeline, scale: float, width: int, bottom: int) -> Iterable[str]:
    """Round times below the rows, about eight a screen."""
    end = _end(line)
    rough = end / (8 * width / _NARROWEST)
    magnitude: float = 10.0 ** floor(log10(rough))
    step = next(times * magnitude for times in (1, 2, 5, 10) if times * magnitude >= rough)
    for number in range(int(end / step) + 1):
        x = f"{_LEFT + number * step * scale:.1f}"
        mark = f'<path class="a" d="M{x} {bottom - 22}v6"/>'
        when = f"{number * step:g} {line.unit}"
        yield f'{mark}<text class="x" x="{x}" y="{bottom - 4}">{when}</text>'


def _box(span: Span, top: float, scale: float, microbatches: int, deeper: bool) -> str:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    kind = (
        _CLASS.get(span.task.kind, _OTHER)
        + (" d" if deeper else "")
        + (" s" if width < _THIN else "")
    )
    place = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_ROW}"'
    box = f'<rect class="{kind}" {place}><title>{span.task}</title></rect>'
    number = span.task.part if span.task.kind.of_a_bucket else span.task.microbatch % microbatches
    if width < _room(number):
        return box
    return box + f'<text class="n" x="{x + width / 2:.1f}" y="{top + 15}">{number}</text>'


def _copy(span: Span, top: float, scale: float) -> str:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    place = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BESIDE - 2}"'
    return f'<rect class="{_CLASS[span.task.kind]}" {place}><title>{span.task}</title></rect>'


def _room(number: int) -> int:
    """The width of a number, in pixels."""
    return 5 + 6 * len(str(number))


def _held(line: Timeline, spans: Sequence[Span], bottom: float, scale: float, most: int) -> str:
    """The number of chunks held over time, as a filled line."""
    changes = [(span.start, 1) for span in spans if span.task.kind is Kind.FORWARD]
    changes += [(span.end, -1) for span in spans if line.ends_a_backward(span)]
    points, held = [(spans[0].start, 0)], 0
    for when, change in sorted(changes):
        points += [(when, held), (when, held + change)]
        held += change
    drawn = " ".join(
        f"{_LEFT + when * scale:.1f},{bottom - count * _STRIP / most:.1f}" for when, count in points
    )
    return f'<polygon class="h" points="{drawn} {_LEFT + points[-1][0] * scale:.1f},{bottom}"/>'

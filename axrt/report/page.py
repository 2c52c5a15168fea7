"""The page itself: headings, charts with their tables, and tables of settings. All of it is in one
file."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from axrt.scheduler.plural import plural

from .charts import Chart, Rows, charts_of
from .run_data import RunData

_LONG, _IS_LONG = 24, ' class="long"'  # characters: a longer text takes several lines
_STYLE = """
:root{color-scheme:light dark;--text:#1b1e23;--soft:#5a6270;--back:#fff;--card:#f5f6f8;
--line:#d4d8de;--link:#0b5cad}
@media (prefers-color-scheme:dark){:root{--text:#e4e6ea;--soft:#a3abb8;--back:#14161a;
--card:#1e2127;--line:#363b44;--link:#7db8f5}}
*{box-sizing:border-box}
body{margin:0;padding:1.2rem;font:16px/1.5 system-ui,sans-serif;color:var(--text);
background:var(--back);max-width:75rem;margin-inline:auto}
h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.2rem;margin:2rem 0 .3rem}
p{margin:.3rem 0 .6rem}a{color:var(--link)}nav ul{display:flex;flex-wrap:wrap;gap:.3rem 1rem;
padding:0;list-style:none}.chart{width:100%;min-height:320px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
th,td{padding:.2rem .7rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
td{font-variant-numeric:tabular-nums}td.long{min-width:16rem;overflow-wrap:anywhere}
tbody th{white-space:nowrap}
summary{cursor:pointer;color:var(--link)}:focus-visible{outline:3px solid var(--link);
outline-offset:2px}.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));
gap:.7rem;margin:0}.cards div{background:var(--card);border-radius:.5rem;padding:.6rem .8rem}
.cards dt{color:var(--soft);font-size:.85rem}.cards dd{margin:0;font-size:1.15rem}
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem}
@media print{nav,.skip,summary{display:none}details>*{display:block}section{break-inside:avoid}
body{max-width:none;padding:0}}
"""
_SCRIPT = """
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 600px)");
function colours(isDark) {
  const text = isDark ? "#e4e6ea" : "#1b1e23", line = isDark ? "#363b44" : "#d4d8de";
  const axis = {gridcolor: line, zerolinecolor: line, linecolor: line};
  return {text, axis};
}
function layoutOf(chart, isDark) {
  const {text, axis} = colours(isDark), layout = structuredClone(chart.layout);
  for (const name of ["xaxis", "yaxis", "yaxis2"])
    if (layout[name]) Object.assign(layout[name], axis, {automargin: true});
  if (narrow.matches)  // the legend has a line for each name, and the chart keeps its height
    layout.height = (layout.height || 320)
      + 24 * chart.traces.filter(of => of.showlegend !== false).length;
  return Object.assign({margin: {l: 10, r: 40, t: 10, b: 10}, font: {color: text, size: 13},
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    legend: {orientation: "h", y: 1, yanchor: "bottom", maxheight: 2000}, hovermode: "closest",
    modebar: {bgcolor: "rgba(0,0,0,0)", color: text, orientation: "v"}}, layout);
}
function drawAll(isDark) {
  for (const chart of charts)
    Plotly.react(chart.name + "-chart", chart.traces, layoutOf(chart, isDark),
      {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"]});
}
drawAll(dark.matches);
for (const one of [dark, narrow]) one.addEventListener("change", () => drawAll(dark.matches));
addEventListener("beforeprint", () => {
  drawAll(false);
  for (const one of document.querySelectorAll("details")) one.open = true;
});
addEventListener("afterprint", () => drawAll(dark.matches));
"""


def page_of(run: RunData, against: RunData | None, plotly: str) -> str:
    """The page.

    Args:
        against: another one to compare with; None: none.
    """
    charts = list(charts_of(run, against))
    sections = [(chart.name, chart.title, _of_chart(chart)) for chart in charts]
    if run.traced and run.traced.figures:
        sections.append(("costs", "Costs of stages", _costs(run.traced.figures["fitted"])))
    if owned := run.memory.get("owned"):
        sections.append(("owners", "Owners of matrices", _owners(owned)))
    if against:
        sections.append(
            ("differences", f"Differences to {against.path.name}", _differing(run, against))
        )
    sections.append(("starts", "Starts", _starts(run)))
    sections.append(("configuration", "Configuration", _configuration(run)))
    links = "".join(
        f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in sections
    )
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}'
        f"</h2>{content}</section>"
        for name, title, content in sections
    )
    drawn = [{"name": of.name, "traces": of.traces, "layout": of.layout} for of in charts]
    title = f"{run.path.name}: a run of axrt"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f'</head><body><a class="skip" href="#main">To the content</a><header><h1>{escape(title)}'
        f'</h1>{_cards(run)}<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f'<main id="main">{body}</main>'
        f'<script type="application/json" id="charts">{_in_script(drawn)}</script>'
        f"<script>{plotly}</script><script>{_SCRIPT}</script></body></html>\n"
    )


def _in_script(value: Any) -> str:
    return json.dumps(value).replace("<", "\\u003c")


def _cards(run: RunData) -> str:
    steps, losses = run.series("loss")
    found = [("steps", f"{steps[-1] if steps else 0} of {run.steps}")]
    if losses:
        found.append(("loss", f"{losses[-1]:.4f}"))
    if validations := run.series("val_loss")[1]:
        found.append(("validation", f"{validations[-1]:.4f}"))
    if rates := run.series("tokens_per_s")[1]:
        found.append(("tokens/s", f"{sorted(rates)[len(rates) // 2]:,.0f}"))
    if times := run.series("time_s")[1]:
        found.append(("time", f"{max(times):,.0f} s"))
    if run.starts:
        found.append(("policy", str(run.starts[-1]["schedule"]["policy"])))
        found.append(("ranks", str(len(run.starts[-1]["hosts"]))))
    cards = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in found)
    return f'<dl class="cards">{cards}</dl>'


def _of_chart(chart: Chart) -> str:
    return (
        f"<p>{escape(chart.says)}</p>"
        f'<div class="chart" id="{chart.name}-chart" role="img" '
        f'aria-label="{escape(chart.title)}: {escape(chart.says)}"></div>'
        f"<details><summary>{escape(chart.title)} as a table</summary>"
        f"{_table(chart.head, chart.rows)}</details>"
    )


def _table(head: Sequence[str], rows: Rows) -> str:
    heads = "".join(f'<th scope="col">{escape(one)}</th>' for one in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>' + "".join(map(_cell, rest)) + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    return f"<td{_IS_LONG if len(text) > _LONG else ''}>{escape(text)}</td>"


def _costs(fitted: dict[str, Any]) -> str:
    head = ["stage", "forward", "input gradient", "weight gradient"]
    rows = [
        [str(stage), *(f"{1e3 * of[key]:.3g} ms" for key in ("forward", "input", "weight"))]
        for stage, of in enumerate(fitted["stages"])
    ]
    between = (
        f"<p>A message takes {1e3 * fitted['latency']:.3g} ms from a stage to the next, and the "
        f"loop {1e6 * fitted['task']:.3g} µs a task; durations vary by {fitted['jitter']:.1%}, "
        f"and microbatches in length by {fitted['lengths']:.1%}.</p>"
    )
    return between + _table(head, rows)


def _owners(owned: Sequence[dict[str, Any]]) -> str:
    rows = [
        [str(of["stage"]), str(of["owner"]), f"{of['share']:.1%}", ", ".join(of["matrices"])]
        for of in owned
    ]
    head = ["stage", "owner", "share of the stage's steps", "matrices"]
    return f"<details><summary>All owners</summary>{_table(head, rows)}</details>"


def _starts(run: RunData) -> str:
    rows = [
        [
            _moment(one["began"]),
            str(one["step"]),
            one["command"],
            ", ".join(dict.fromkeys(one["hosts"])),
            one["commit"][:13],
            ", ".join(f"{name} {of}" for name, of in one["versions"].items()),
        ]
        for one in run.starts
    ]
    made = _table(["began (UTC)", "from step", "command", "hosts", "commit", "versions"], rows)
    if not run.launches:
        return made
    launches = [
        [
            _moment(one["began"]),
            str(one["step"]),
            f"{plural(one['gained'], 'step')} in {one['took_s']:.0f} s",
            str(one["code"]),
            ", ".join(one["lost"]),
        ]
        for one in run.launches
    ]
    head = ["began (UTC)", "from step", "gained", "code", "lost hosts"]
    return f"{made}<h3>By axrt launch</h3>{_table(head, launches)}"


def _moment(began: str) -> str:
    """A time in UTC, as a person reads it."""
    return began[:19].replace("T", " ")


def _configuration(run: RunData) -> str:
    rows = [[key, json.dumps(value, default=str)] for key, value in _keys(run)]
    return f"<details><summary>All keys</summary>{_table(['key', 'value'], rows)}</details>"


def _keys(run: RunData) -> Iterator[tuple[str, Any]]:
    for section, keys in run.config.items():
        for name, value in keys.items() if isinstance(keys, dict) else ():
            yield f"{section}.{name}", value


def _differing(run: RunData, against: RunData) -> str:
    mine, theirs = dict(_keys(run)), dict(_keys(against))
    rows = [
        [key, *(json.dumps(of.get(key), default=str) for of in (mine, theirs))]
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]
    for what, key in (("last loss", "loss"), ("last validation", "val_loss")):
        values = [of.series(key)[1][-1:] for of in (run, against)]
        if all(values):
            rows.append([what, *(f"{of[0]:.6g}" for of in values)])
    rates = [sorted(of.series("tokens_per_s")[1]) for of in (run, against)]
    if all(rates):
        rows.append(["median tokens/s", *(f"{of[len(of) // 2]:,.0f}" for of in rates)])
    return _table(["", run.path.name, against.path.name], rows)

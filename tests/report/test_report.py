"""The page about a run: what a person would look for is there, and a browser shows it."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main
from axrt.report.charts import charts_of
from axrt.report.run_data import RunData
from axrt.scheduler.task import Kind

from ..cli.test_train import TINY, axrt
from ..mpi.mpirun import mpirun
from ..sweeps import is_full

pytest.importorskip("plotly")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TRAIN = ("-m", "axrt", "train", "tiny.toml", "model.layers=2", "run.trace_steps=2", "run.steps=6")
CLIPPED = "optimizer.clip=1.0"  # so that there are norms


class Page(HTMLParser):
    """What a page has: ids, links within it, texts by the section they are in, and what it loads.

    Args:
        html: the page.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.texts: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        self.rows: dict[str, list[int]] = {}  # of tables: cells of each
        self._section = ""
        self._silent = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {key: value or "" for key, value in attrs}
        self._silent = tag in ("script", "style")
        if "id" in of:
            self.ids.append(of["id"])
        if tag == "section":
            self._section = of["id"]
        if tag == "tr":
            self.rows.setdefault(self._section, []).append(0)
        if tag in ("th", "td"):
            self.rows[self._section][-1] += 1
        if tag == "a":
            self.links.append(of["href"])
        if of.get("role") == "img":
            self.labels[of["id"]] = of["aria-label"]
        self.loads += [of[key] for key in ("src", "href") if tag != "a" and key in of]

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.texts[self._section] = self.texts.get(self._section, "") + data


def report(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a traced run on two ranks, and one of another rate on one."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.toml").write_text(TINY)
    (folder / "text.txt").write_text("all work and no play " * 20)
    ended = mpirun(2, [*TRAIN, CLIPPED, "run.out=one"], cwd=folder)
    assert ended.code == 0, ended.err
    other = [sys.executable, *TRAIN[:4], "run.out=two", "optimizer.lr=0.01", "run.device=cpu"]
    other += ["memory.offload=stream", "memory.bucket_mb=0.001"]
    subprocess.run(other, cwd=folder, check=True, capture_output=True)
    return folder


def test_everything_of_a_run_is_on_its_page(runs: Path) -> None:
    result = report(str(runs / "one"), "--against", str(runs / "two"))
    assert result.exit_code == 0, result.output
    page = Page((runs / "one" / "report.html").read_text())
    assert len(set(page.ids)) == len(page.ids)
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert all(one.startswith("data:") for one in page.loads), "it needs no network"
    metrics = map(json.loads, (runs / "one/metrics.jsonl").read_text().splitlines())
    *_, last = [line["loss"] for line in metrics if "loss" in line]
    assert f"{last:.5g}" in page.texts["loss"]
    assert "two" in page.texts["loss"]
    assert "measured" in page.texts["timeline"]
    assert "simulated" in page.texts["timeline"]
    assert re.search(r"input|room", page.texts["idle"])
    assert "device, measured" in page.texts["memory"]
    assert "optimizer.lr" in page.texts["differences"]
    assert "0.01" in page.texts["differences"]
    assert "mpirun -n 2 axrt train tiny.toml" in page.texts["starts"]
    assert "torch 2." in page.texts["starts"]
    assert '"text.txt"' in page.texts["configuration"]
    assert "ms, median" in page.texts["messages"]
    assert "activation" in page.texts["messages"]
    assert {"loss-chart", "timeline-chart", "memory-chart"} <= page.labels.keys()


def test_memory_of_each_tier_stands_beside_its_prediction(runs: Path) -> None:
    report(str(runs / "two"))
    page = Page((runs / "two" / "report.html").read_text())
    for tier in ("device", "host"):
        assert f"{tier}, predicted" in page.texts["memory"]
        assert f"{tier}, measured" in page.texts["memory"]
    assert len(set(page.rows["memory"])) == 1
    told = json.loads((runs / "two" / "memory.json").read_text())
    predicted = sum(size for _, tier, size in told["predicted"][0] if tier == "host")
    assert told["measured"][0]["host"] == pytest.approx(predicted, rel=0.05)


def test_who_owns_matrices_stands_beside_memory(runs: Path) -> None:
    path = runs / "two" / "memory.json"
    told = json.loads(path.read_text())
    assert told["owners"] == "", "its optimizer steps each element by itself"
    assert told["owned"] == []
    told["owners"] = "each matrix has one of 2 owners"
    names = [f"{place}.feed.up.weight" for place in range(40)]
    told["owned"] = [{"stage": 3, "owner": 1, "share": 0.625, "matrices": names}]
    path.write_text(json.dumps(told) + "\n")
    report(str(runs / "two"))
    page = Page((runs / "two" / "report.html").read_text())
    assert "Each matrix has one of 2 owners." in page.texts["memory"]
    assert set(page.rows["owners"]) == {4}
    for text in ("62.5%", *names):
        assert text in page.texts["owners"]


def test_each_column_of_a_table_has_its_heading(runs: Path) -> None:
    report(str(runs / "one"))
    rows = Page((runs / "one" / "report.html").read_text()).rows
    assert set(rows["costs"]) == {4}, "a stage and its three costs"
    assert all(len(set(cells)) == 1 for cells in rows.values())


def test_kinds_of_tasks_are_told_apart_by_colour(runs: Path) -> None:
    charts = charts_of(RunData.read(runs / "one", pytest.fail), None)
    bars = next(chart for chart in charts if chart.name == "timeline").traces
    colour = {bar["name"]: bar["marker"]["color"] for bar in bars}
    assert {Kind.STEP.label, Kind.NORM.label, Kind.VOTE.label} <= set(colour)
    assert len(set(colour.values())) == len(colour)


def test_a_run_that_has_just_begun_has_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/config.toml").write_text("[run]\nsteps = 5\n")
    assert report(str(tmp_path / "new"), "--out", str(tmp_path / "page.html")).exit_code == 0
    assert "0 of 5" in (tmp_path / "page.html").read_text()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    result = report(str(tmp_path))
    assert (result.exit_code, "expected the directory of a run" in result.output) == (2, True)


def test_names_of_a_user_are_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    Path("text.txt").write_text("all work and no play " * 20)
    name = "<script>alert(1)<!--"
    assert axrt("tiny.toml", f"run.out={name.replace('/', '')}").exit_code == 0
    assert report(name).exit_code == 0
    assert "<script>alert" not in Path(name, "report.html").read_text()


def drawn(page: Path, size: str, profile: Path, *more: str) -> str:
    """The page as a browser draws it, which has nothing to complain of."""
    assert CHROMIUM is not None
    ended = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", "--virtual-time-budget=10000", f"--window-size={size}"),
            *(f"--user-data-dir={profile}", *more, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in ended.stderr, ended.stderr
    return ended.stdout


DARK = "--blink-settings=preferredColorScheme=0"
needs_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium"
)


@needs_a_browser
def test_a_browser_shows_what_a_person_looks_for_in_light_in_dark_and_on_paper(
    runs: Path, tmp_path: Path
) -> None:
    """AXRT_SCREENSHOTS names a directory for pictures, to look at them."""
    page, kept = tmp_path / "page.html", Path(os.environ.get("AXRT_SCREENSHOTS", tmp_path))
    asked = (str(runs / "one"), "--against", str(runs / "two"), "--out", str(page))
    assert report(*asked).exit_code == 0
    texts = {}
    for name, flags in {"light": [], "dark": [DARK]}.items():
        seen = drawn(page, "1300,2000", tmp_path / name, *flags)
        texts[name] = re.findall(r'class="xtick"><text[^>]*fill: (rgb\([^)]*\))', seen)[0]
        for text in ("Loss", "Idle time", "Messages", "Memory", "Differences", "two"):
            assert f"{text}<" in seen or text in Page(seen).texts["differences"]
        assert 'role="img"' in seen
        assert 'tabindex="0"' in seen or "<summary" in seen, "what a keyboard reaches"
        if is_full() or kept != tmp_path:  # what is on paper is no blank page, too
            picture = (f"--screenshot={kept / name}.png", *flags)
            drawn(page, "1300,4000", tmp_path / f"{name} picture", *picture)
            assert (kept / f"{name}.png").stat().st_size > 50_000
    assert texts["light"] != texts["dark"], "words have another colour in the dark"
    drawn(page, "1300,2000", tmp_path / "paper", f"--print-to-pdf={kept / 'page.pdf'}")
    assert (kept / "page.pdf").stat().st_size > 50_000


@needs_a_browser
def test_a_browser_draws_every_chart_and_has_nothing_to_complain_of(
    runs: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert report(str(runs / "one"), "--out", str(page)).exit_code == 0
    charts = Page(page.read_text()).labels
    heights = {}
    for name, size in {"desk": "1300,2000", "phone": "390,800"}.items():
        seen = drawn(page, size, tmp_path / name)
        assert seen.count('class="plot-container plotly"') == len(charts) > 5
        assert seen.count('class="point"') > 50, "tasks are drawn"
        plots = re.findall(r'<rect class="nsewdrag [^>]* height="([\d.]+)"', seen)
        heights[name] = [float(one) for one in plots]
    assert min(heights["desk"]) > 150
    for phone, desk in zip(heights["phone"], heights["desk"], strict=True):
        assert phone > 0.95 * desk, "a legend of many lines takes nothing from its chart"


def test_runs_are_one_picture_and_one_table(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [runs / name for name in ("a.svg", "a.png", "a.csv")]
    words = ["report", str(runs / "one"), "--against", str(runs / "two")]
    for name in files:
        words += [f"--{name.suffix[1:]}", str(name)]
    made = CliRunner().invoke(main, words)
    assert made.exit_code == 0, made.output
    assert made.output.split() == list(map(str, files))
    picture = files[0].read_text()
    for text in ("one, training", "two, validation", "loss, nats a token", "tokens a second"):
        assert f">{text}<" in picture
    assert files[1].read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(files[2].read_text().splitlines()))
    assert {row["run"] for row in rows} == {"one", "two"}
    of_one = RunData.read(runs / "one", pytest.fail)
    assert [
        (int(row["step"]), float(row["loss"]))
        for row in rows
        if row["run"] == "one" and row["loss"]
    ] == list(zip(*of_one.series("loss"), strict=True))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--svg", "a.pdf"), "expected a name that ends in .svg"),
        (("--csv", "no/a.csv"), "expected a place to write to"),
        (("--against", "two", "--against", "two"), "a page compares two runs, and there are 3"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    runs: Path, words: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(runs)
    refused = CliRunner().invoke(main, ["report", "one", *words])
    assert refused.exit_code == 2
    assert text in refused.output

"""`axrt sweep` chooses at each point what `axrt plan` chooses there, and none beats what has a
star."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main

from .test_plan import CLUSTER
from .test_train import TINY

SMALL = ("schedule.microbatches=2", "model.layers=2")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    Path("text.txt").write_text("all work and no play " * 20)
    Path("cluster.toml").write_text(CLUSTER)


def sweep(*asked: str) -> Result:
    return CliRunner().invoke(main, ["sweep", "cluster.toml", "tiny.toml", *SMALL, *asked])


def rows_of(*asked: str) -> list[dict[str, Any]]:
    done = sweep(*asked, "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def planned(*asked: str) -> list[dict[str, Any]]:
    command = ["plan", "tiny.toml", "--cluster", "cluster.toml", *SMALL, *asked]
    done = CliRunner().invoke(main, [*command, "--json", "--brief"])
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["layouts"]
    return found


def test_each_point_has_the_choice_of_a_plan() -> None:
    """Also where the device is another one, whose layers take another time."""
    over = ("links.node.bandwidth=1e6,1e9", "device.bandwidth=1e8,1e9")
    rows = rows_of("--over", over[0], "--over", over[1])
    for links in ("1e6", "1e9"):
        for memory in ("1e8", "1e9"):
            point = [f"links.node.bandwidth={links}", f"device.bandwidth={memory}"]
            here, plan = [row for row in rows if row["over"] == point], planned(*point)
            assert [row["set"] for row in here] == [one["set"] for one in plan]
            assert [row["step_s"] for row in here] == [one["step_s"] for one in plan]
            assert here[0]["parts_s"] == plan[0]["parts_s"]
            assert [row["chosen"] for row in here] == [True] + [False] * (len(here) - 1)


def test_a_key_that_is_chosen_otherwise_is_pinned() -> None:
    """All samples of the step stay: four in two microbatches of one on each of two replicas."""
    for key, values in (
        ("parallel.pipe", (1, 2)),
        ("schedule.microbatch_size", (1, 2)),
        ("memory.recompute", ("none", "full")),
    ):
        rows = rows_of("--over", f"{key}={','.join(map(str, values))}")
        section, name = key.split(".")
        off = {"pipe": 1, "microbatch_size": 1, "recompute": "none"}[name]
        for value in values:
            here = [row for row in rows if row["over"] == [f"{key}={value}"]]
            assert here
            for row in here:
                assert row["set"].get(section, {}).get(name, off) == value
                of = {"microbatches": 4, **row["set"]["schedule"]}
                samples = of["microbatches"] * of.get("microbatch_size", 1)
                assert samples * row["set"]["parallel"].get("data", 1) == 2
        fastest = min(row["step_s"] for row in rows)
        assert fastest == planned()[0]["step_s"] or name not in ("pipe", "microbatch_size")


def test_nothing_beats_what_has_a_star_and_something_beats_the_others() -> None:
    rows = rows_of("--over", "cluster.devices=1,2", "--over", "memory.recompute=none,full")
    numbers = [(row["step_s"], row["device_s"], row["device_bytes"]) for row in rows]
    for row, one in zip(rows, numbers, strict=True):
        beaten = any(
            other != one and all(a <= b for a, b in zip(other, one, strict=True))
            for other in numbers
        )
        assert row["unbeaten"] is not beaten
        assert row["device_s"] == row["devices"] * row["step_s"]
    assert 0 < sum(row["unbeaten"] for row in rows) < len(rows)


def test_where_nothing_fits_a_row_says_so() -> None:
    big = ("model.width=512", "memory.bucket_mb=1", "cluster.devices=1")
    done = sweep("--over", "device.memory=1e6,1e9", *big)
    assert done.exit_code == 0
    table = done.stdout.splitlines()
    assert table[0].split()[:4] == ["s", "a", "step", "device"]
    assert "device.memory=1e6: nothing fits: of all layouts, pipe 1 x data 1" in table[1]
    assert "*" in table[2]
    assert "device.memory=1e9: pipe 1 x data 1 x tensor 1, 1f1b" in table[2]
    nowhere = sweep("--over", "parallel.pipe=3,5")
    assert nowhere.exit_code == 1
    assert "parallel.pipe=3: no layout that was tried has parallel.pipe = 3 on" in nowhere.stdout


@pytest.mark.parametrize(
    ("over", "text"),
    [
        (("links.node.bandwidth",), "'links.node.bandwidth'; expected a key with values"),
        (("links.node.bandwidth=1e9,",), "expected a key with values, commas between"),
        (("parallel.partition=[1,2]",), "expected a key with values, commas between"),
        (("run.seed=1", "run.seed=2"), "--over has run.seed twice"),
        (("schedule.fill=always,never",), "--over schedule.fill: every layout has its best value"),
        (("links.node.bandwith=1e9",), "at links.node.bandwith=1e9: there is no key links"),
        (("links.node.bandwidth=1e9,25",), "at links.node.bandwidth=25: links.node.bandwidth = 25"),
        (("parallel.tensor=1,none",), "at parallel.tensor=none: parallel.tensor"),
        (("schedule.share=false,true",), "axrt plan does not take schedule.share = True"),
    ],
)
def test_what_cannot_be_is_refused(over: tuple[str, ...], text: str) -> None:
    done = sweep(*(word for one in over for word in ("--over", one)))
    assert done.exit_code == 2, done.output
    assert text in done.output

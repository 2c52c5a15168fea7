"""`axrt sweep` chooses at each point what `axrt plan` chooses there, and none beats what has a
star."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main
from axrt.config import Config
from axrt.layouts.candidates import PINNED
from axrt.layouts.search import Search
from axrt.layouts.sweep_points import points
from axrt.layouts.told import changed_keys
from axrt.ledger.prediction import Prediction

from .test_plan import CLUSTER
from .test_train import TINY

SMALL = ("schedule.microbatches=2",)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY.replace("layers = 1", "layers = 2"))
    Path("text.txt").write_text("all work and no play " * 20)
    Path("cluster.toml").write_text(CLUSTER)


def sweep(*asked: str) -> Result:
    return CliRunner().invoke(main, ["sweep", "cluster.toml", "tiny.toml", *SMALL, *asked])


def rows_of(*asked: str) -> list[dict[str, Any]]:
    done = sweep(*asked, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["source"] == "modelled"
    found: list[dict[str, Any]] = told["layouts"]
    return found


def planned(*asked: str) -> list[dict[str, Any]]:
    command = ["plan", "tiny.toml", "--cluster", "cluster.toml", *SMALL, *asked]
    done = CliRunner().invoke(main, [*command, "--json", "--brief"])
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["layouts"]
    return found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("device.bandwidth", "1e8", "1e9"), ("links.node.bandwidth", "1e6")),
        (("model.layers", "1", "2"), ("cluster.devices", "1")),
    ],
)
def test_each_point_has_the_choice_of_a_plan(
    first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    """Also where the device or the model is another one, whose layers take another time."""
    swept = [f"{key}={','.join(values)}" for key, *values in (first, second)]
    rows = rows_of("--over", swept[0], "--over", swept[1])
    for one, other in product(first[1:], second[1:]):
        point = [f"{first[0]}={one}", f"{second[0]}={other}"]
        here, plan = [row for row in rows if row["over"] == point], planned(*point)
        assert [row["set"] for row in here] == [layout["set"] for layout in plan]
        assert [row["step_s"] for row in here] == [layout["step_s"] for layout in plan]
        assert here[0]["parts_s"] == plan[0]["parts_s"]
        assert [row["chosen"] for row in here] == [True] + [False] * (len(here) - 1)


@pytest.mark.parametrize(
    ("over", "off"),
    [
        ({"parallel.tensor": (1, 2), "schedule.microbatches": (1, 2)}, (1, 8)),
        ({"parallel.pipe": (1, 2), "memory.recompute": ("none", "full")}, (1, "none")),
        ({"memory.zero": (0, 1), "parallel.data": (2,)}, (0, 1)),
    ],
)
def test_a_key_that_is_chosen_otherwise_is_pinned(
    over: dict[str, Sequence[object]], off: Sequence[object]
) -> None:
    """All samples of the step stay."""
    texts = [f"{key}={','.join(map(str, values))}" for key, values in over.items()]
    rows = rows_of(*(word for text in texts for word in ("--over", text)), "model.heads=2")
    reached = set()
    for row in rows:
        if "refused" in row:
            continue
        for text, default in zip(row["over"], off, strict=True):
            section, name, value = text.replace("=", ".").split(".")
            assert str(row["set"].get(section, {}).get(name, default)) == value
            reached.add(text)
        of = {"microbatches": 8, "microbatch_size": 1, **row["set"]["schedule"]}
        samples = of["microbatches"] * of["microbatch_size"]
        assert samples * row["set"]["parallel"].get("data", 1) == 2
    assert reached == {f"{key}={value}" for key, values in over.items() for value in values}


def test_all_that_can_be_pinned_is_known_to_a_search() -> None:
    values = dict.fromkeys(PINNED, "1") | {"schedule.policy": "zb-h1"}
    values |= {"memory.recompute": "full", "memory.offload": "none"}
    for key, value in values.items():
        (point,) = points(Path("cluster.toml"), "tiny.toml", SMALL, {key: [value]})
        assert point.pinned == {PINNED[key]: int(value) if value == "1" else value}
        assert point.config == Config.read("tiny.toml", SMALL)


def test_each_policy_of_one_pipe_can_be_pinned_also_on_one_rank() -> None:
    """There all that compute a backward as one task take equally long."""
    names = ("1f1b", "gpipe", "zb-v")
    rows = rows_of(
        "--over",
        f"schedule.policy={','.join(names)}",
        "--over",
        "parallel.pipe=1,2",
        "model.layers=4",
    )
    chosen = {tuple(row["over"]): row for row in rows if row["chosen"]}
    assert len(chosen) == 2 * len(names)
    for (policy, _), row in chosen.items():
        assert policy == f"schedule.policy={row['set']['schedule'].get('policy', '1f1b')}"
    alone = [chosen[f"schedule.policy={one}", "parallel.pipe=1"]["step_s"] for one in names[:2]]
    assert alone == [alone[0]] * 2


def test_a_pinned_key_is_never_advised() -> None:
    big = ("model.width=512", "memory.bucket_mb=1", "cluster.devices=1", "device.memory=1e6")
    done = sweep("--over", "memory.offload=none", *big)
    assert done.exit_code == 1
    assert "of all layouts with memory.offload = 'none', pipe 1 x data 1" in done.stdout
    assert "memory.offload = 'stream'" not in done.stdout


def test_nothing_beats_what_has_a_star_and_something_beats_the_others() -> None:
    rows = rows_of("--over", "cluster.devices=1,2", "--over", "memory.recompute=none,full")
    assert_stars_of(rows)
    assert 0 < sum(row["unbeaten"] for row in rows) < len(rows)


def assert_stars_of(rows: Sequence[dict[str, Any]]) -> None:
    numbers = [(row["step_s"], row["device_s"], row["device_bytes"]) for row in rows]
    for row, one in zip(rows, numbers, strict=True):
        beaten = any(
            other != one and all(a <= b for a, b in zip(other, one, strict=True))
            for other in numbers
        )
        assert row["unbeaten"] is not beaten
        assert row["device_s"] == row["devices"] * row["step_s"]


def test_runs_that_compute_something_else_are_not_compared() -> None:
    """Fewer layers are faster, and no better for that; a bucket is the same run."""
    rows = rows_of(
        "--over", "model.layers=1,2", "--over", "memory.bucket_mb=1,2", "cluster.devices=1"
    )
    for layers in ("1", "2"):
        here = [row for row in rows if row["over"][0] == f"model.layers={layers}"]
        assert_stars_of(here)
        assert any(row["unbeaten"] for row in here)
        assert {row["over"][1] for row in here} == {"memory.bucket_mb=1", "memory.bucket_mb=2"}


def test_what_has_a_star_fits_by_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is not chosen: layers' own figures are not what is told."""
    exact: list[Config] = []
    predicted = Search.predicted

    def kept(search: Search, config: Config, exactly: bool = False) -> Prediction:
        exact.extend([config] * exactly)
        return predicted(search, config, exactly)

    monkeypatch.setattr(Search, "predicted", kept)
    rows = rows_of("--over", "cluster.devices=1,2")
    assert [changed_keys(config) for config in exact] == [row["set"] for row in rows]
    assert any(row["unbeaten"] and not row["chosen"] for row in rows)

    fits = Search.fits

    def too_much(search: Search, prediction: Prediction) -> bool:
        is_second = changed_keys(prediction.config) == rows[1]["set"]
        return fits(search, prediction) and not (exact[-1:] == [prediction.config] and is_second)

    monkeypatch.setattr(Search, "fits", too_much)
    fewer = rows_of("--over", "cluster.devices=1,2")
    assert [row["set"] for row in fewer] == [row["set"] for row in [rows[0], *rows[2:]]]


def test_the_table_has_what_is_chosen_and_what_has_a_star() -> None:
    asked = ("--over", "cluster.devices=1,2")
    rows = [row for row in rows_of(*asked) if row["chosen"] or row["unbeaten"]]
    head, names, *lines = sweep(*asked, "run.eval_every=0").stdout.splitlines()
    assert head == "by modelled costs:"
    assert names.split()[:5] == ["s", "a", "step", "device", "s"]
    assert len(lines) == len(rows)
    assert any(row["unbeaten"] and not row["chosen"] for row in rows)
    for row, line in zip(rows, lines, strict=True):
        assert line.lstrip().startswith("*") is row["unbeaten"]
        assert f"{row['step_s']:.4g}" in line
        assert row["over"][0] in line


def test_what_cannot_be_searched_at_one_point_is_told_beside_the_others() -> None:
    rows = rows_of("--over", "precision.compute=float32,bfloat16", "cluster.devices=1")
    assert [row for row in rows if row["over"] == ["precision.compute=float32"]]
    (one,) = [row for row in rows if row["over"] == ["precision.compute=bfloat16"]]
    assert "the device has no operations a second of bfloat16" in one["refused"]


def test_a_key_without_effect_is_named() -> None:
    done = sweep("--over", "run.seed=1,2", "--over", "model.layers=1,2", "cluster.devices=1")
    assert "axrt: the values of run.seed make no difference" in done.stderr
    assert "values of model.layers" not in done.stderr
    assert "no difference" not in sweep("--over", "run.seed=1", "cluster.devices=1").stderr


def test_notes_of_a_choice_are_told_with_its_point() -> None:
    done = sweep("--over", "schedule.microbatch_size=1,2")
    note = "run.eval_microbatches = 2 counts microbatches"
    notes = [line for line in done.stdout.splitlines() if note in line]
    assert [line.split(":")[0] for line in notes] == ["schedule.microbatch_size=2"]


def test_costs_may_be_measured() -> None:
    """A table needs what is tried alone, and a point that it lacks is refused before a search."""
    assert CliRunner().invoke(main, ["profile", "tiny.toml"]).exit_code == 0
    asked = ("cluster.devices=1", "--costs", "costs.json")
    done = sweep("--over", "schedule.microbatch_size=1", *asked)
    assert done.exit_code == 0, done.output
    assert "by measured costs:" in done.stdout
    for over, text in (
        (
            ("schedule.microbatch_size=1,2",),
            "at schedule.microbatch_size=2: --costs costs.json has",
        ),
        (
            ("model.width=8,16", "schedule.microbatch_size=1"),
            "at model.width=16 schedule.microbatch_size=1: --costs costs.json: the tab",
        ),
        (("device.bandwidth=1e9,2e9",), "--over device.bandwidth: layers take what the table of"),
        (("device.operations.float32=1e9",), "--over device.operations.float32: layers take what"),
    ):
        done = sweep(*(word for one in over for word in ("--over", one)), *asked)
        assert done.exit_code == 2, done.output
        assert f"axrt: {text}" in done.stderr
        assert not done.stdout
        assert len(done.stderr.splitlines()) == 1
    missing = sweep("--over", "schedule.microbatch_size=1", "--costs", "none.json")
    assert missing.stderr.startswith("axrt: none.json: No such file")


def test_where_nothing_fits_a_row_says_so() -> None:
    big = ("model.width=512", "memory.bucket_mb=1", "cluster.devices=1")
    done = sweep("--over", "device.memory=1e6,1e9", *big)
    assert done.exit_code == 0
    table = done.stdout.splitlines()
    assert "device.memory=1e6: nothing fits: of all layouts, pipe 1 x data 1" in table[2]
    assert "*" in table[3]
    assert "device.memory=1e9: pipe 1 x data 1 x tensor 1, 1f1b" in table[3]
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
        (('data.source="a,b"',), "expected a key with values, commas between"),
        (("data.source={a,b",), "expected a key with values, commas between"),
        (("memory.zero=1,2,1",), "--over memory.zero has 1 twice; expected each value once"),
        (("device.memory=1e9,1000000000",), "device.memory=1e9 and device.memory=1000000000 are"),
        (("memory.zero=3",), "memory.zero = 3, which is not tried; expected one of 0, 1, 2"),
        (("schedule.policy=chimera",), "schedule.policy = 'chimera', which is not tried; expected"),
        (("memory.recompute=2",), "memory.recompute = 2, which is not tried; expected one of 'n"),
        (("memory.offload=stream",), "expected one of 'none' (and 'stream' on a cluster with devi"),
        (("memory.bucket_mb=1,2", "memory.bucket_mb=3"), "--over has memory.bucket_mb twice"),
    ],
)
def test_what_cannot_be_is_refused(over: tuple[str, ...], text: str) -> None:
    """Before anything is searched."""
    done = sweep(*(word for one in over for word in ("--over", one)))
    assert done.exit_code == 2, done.output
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_wrong_in_a_file_is_of_no_point() -> None:
    Path("tiny.toml").write_text("[model]\nlayer = 2\n")
    done = sweep("--over", "device.memory=1e9,2e9")
    assert done.exit_code == 2
    assert done.stderr == "axrt: there is no key model.layer; did you mean model.layers?\n"


def test_a_key_is_set_once() -> None:
    """But for one that is pinned: its value in the file says how many samples a step has."""
    done = sweep("--over", " model.layers =1,2", "model.layers=3")
    assert done.exit_code == 2
    assert "model.layers is set and in --over; expected one of them" in done.stderr

"""`axrt simulate`: figures, a table, a picture."""

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main
from axrt.scheduler.job import Job
from axrt.scheduler.placement import Linear, Vee
from axrt.scheduler.planning.recompute import recomputed_shares
from axrt.scheduler.planning.shards import with_shards
from axrt.scheduler.policies import NAMES, policy_by_name
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.scheduler.simulation.simulator import simulate as simulated
from axrt.scheduler.task import AnyKind, Kind


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_one_policy_as_json() -> None:
    result = simulate(
        "--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "world.held_mib=10", "--json"
    )
    found = json.loads(result.output)
    assert (
        found["policy"],
        found["placement"],
        found["ranks"],
        found["microbatches"],
        found["chunks"],
    ) == ("zb-v", "vee", 4, 8, 2)
    assert (found["makespan"], found["utilisation"]) == (25.5, pytest.approx(24 / 25.5))
    assert found["in_flight"] == found["held"] == [8, 8, 8, 8]
    assert found["held_mib"] == [40, 40, 40, 40]
    assert found["idle"] == pytest.approx([1.5] * 4)
    assert found["tasks"] == 4 * 2 * 8 * (1 + 1 + 4)
    assert len(found["span"]) == 4


def test_the_name_of_a_policy_may_be_in_capitals() -> None:
    small, large = (
        simulate("--policy", name, "--ranks", "2", "--microbatches", "4")
        for name in ("1f1b", "1F1B")
    )
    assert large.exit_code == 0, large.output
    assert large.output == small.output


def test_the_line_below_a_table_says_what_messages_take_and_what_varies() -> None:
    """It once said that messages take no time whatever the keys of the world said."""
    small = ("--policy", "all", "--ranks", "4", "--microbatches", "8")
    assert "messages take no time (" in simulate(*small).output
    keys = ("world.transfer=0.5", "world.message_cost=0.2", "world.stragglers=1,1,2,1")
    told = simulate(*small, *keys, "--jitter", "0.3").output
    assert "no time" not in told
    assert "world.transfer 0.5, world.message_cost 0.2 (" in told
    assert (
        "durations vary by --jitter 0.3, world.stragglers 1,1,2,1, drawn once (world.seed)" in told
    )


def test_waiting_a_moment_can_be_left_out() -> None:
    case = (
        "--policy",
        "zb-v",
        "--ranks",
        "8",
        "--microbatches",
        "16",
        "--steps",
        "8",
        "--latency",
        "0.02",
        "world.pieces=1",
        "--json",
    )
    lingering, hasty = (
        json.loads(simulate(*case, *more).output)["makespan"] for more in ((), ("world.linger=0",))
    )
    assert lingering < hasty


def test_all_that_fit_side_by_side() -> None:
    result = simulate("--policy", "all", "--ranks", "4", "--microbatches", "6")
    assert result.exit_code == 0, result.output
    for name in NAMES:
        assert name in result.output
    assert (
        "left out: policy interleaved-1f1b takes multiples of 4 ranks; set microbatches = 8"
        in result.output
    )
    found = json.loads(
        simulate("--policy", "all", "--ranks", "4", "--microbatches", "8", "--json").output
    )
    assert [of["policy"] for of in found] == list(NAMES)
    narrow = simulate("--policy", "all", "--ranks", "4", "--microbatches", "6", "--json")
    assert len(json.loads(narrow.stdout)) < len(NAMES)
    assert "axrt: left out: policy interleaved-1f1b takes multiples" in narrow.stderr


def test_what_is_no_terminal_gets_tables_whole() -> None:
    result = simulate("--search", "--ranks", "4", "--microbatches", "8", "--memory", "6")
    lines = result.output.splitlines()
    assert "above the bound" in lines[0]
    assert any(
        line.endswith("of which the first 12 are shown: interleaved-zb, 24.75.") for line in lines
    )


def test_an_order_is_written_followed_and_refused(tmp_path: Path) -> None:
    size = ("--ranks", "4", "--microbatches", "8", "--json")
    file = tmp_path / "order.csv"
    published = json.loads(simulate("--policy", "zb-h2", *size, "--write-order", str(file)).output)
    followed = json.loads(simulate("--policy", "fixed", "--order", str(file), *size).output)
    assert {**followed, "policy": "zb-h2"} == published
    assert file.read_text().startswith("F0.0,F0.1,")
    assert (
        json.loads(
            simulate("--policy", "fixed", "--order", "zb-h2", "--max-held", "10", *size).output
        )["makespan"]
        <= 27
    )
    for arguments, text in (
        (("--policy", "fixed"), "order = ''; expected a CSV file of tasks"),
        (
            ("--policy", "fixed", "--order", "none.csv"),
            "order = 'none.csv': No such file or directory",
        ),
        (("--policy", "1f1b", "--order", str(file)), "set policy = 'fixed'"),
        (
            ("--policy", "fixed", "--order", "zb-h2", "--max-held", "2"),
            "holds 8 chunks; set max_held = 8 or more",
        ),
        (
            ("--policy", "fixed", "--order", str(file), "--ranks", "3"),
            "an order of 4 ranks and 8 microbatches a step; expected 3 and 8",
        ),
    ):
        result = simulate(*size, *arguments)
        assert (result.exit_code, text in result.output) == (2, True), result.output
    file.write_text("F0.0,B0.0,F0.1,B0.1\nF1.0,F1.1,B1.0,B1.1\n")
    result = simulate(
        "--policy", "fixed", "--order", str(file), "--ranks", "2", "--microbatches", "2"
    )
    assert result.exit_code == 2
    assert "is stuck: " in result.output


def test_replicas_edges_and_barriers_count() -> None:
    def makespan(*more: str) -> float:
        told = json.loads(
            simulate(
                "--policy",
                "1f1b",
                "--ranks",
                "2",
                "--microbatches",
                "4",
                "--steps",
                "2",
                "--json",
                *more,
            ).output
        )
        return float(told["makespan"])

    assert (
        makespan("world.transfer=0.5", "--latency", "0.25")
        == makespan("--latency", "0.75")
        > makespan()
    )
    assert makespan("--replicas", "2") == makespan()
    assert makespan("--replicas", "2", "world.reduce_cost=1") == makespan() + 1
    assert makespan("--replicas", "2", "world.reduce_transfer=1") == makespan() + 2 * 0.5
    assert makespan("--policy", "zb-h2", "world.barrier=true") > makespan("--policy", "zb-h2")


def test_activations_that_are_offloaded_add_the_copies_that_nothing_hides() -> None:
    """Every stash goes down, and each backward but the first waits for its own to come back:

    F0 .  F1 .  F2 .  F3 B0 -- .  B1 -- .  B2 -- .  B3 --
    .  >0 .  >1 .  >2 .  >3 .  .  .  .  .  .  .  .  .  .
    .  .  <0 .  .  .  .  .  .  <1 .  .  <2 .  .  <3 .  .
    """

    def found(microbatches: int, *more: str) -> dict[str, Any]:
        case = ("--policy", "gpipe", "--ranks", "1", "--microbatches", str(microbatches))
        told = json.loads(simulate(*case, "--json", *more).output)
        assert isinstance(told, dict)
        return told

    copies = ("world.offload_activations=3", "world.stash_costs=1,1")
    assert found(3, *copies) == found(3), "there is room for all three"
    offloaded = found(4, *copies)
    assert offloaded["makespan"] == 7 + 2 + 3 * 3
    assert (offloaded["held"], offloaded["held_on_device"]) == ([4], [2])
    assert offloaded["idle_by_cause"]["copies"] == [3]
    assert offloaded["idle_by_cause"]["room"] == [3]


OFFLOADED = ("world.slots=2", "world.buckets=4", "world.step_cost=0.5", "world.copy_costs=1,1.5")


def test_steps_on_the_host_add_what_nothing_hides() -> None:
    case = ("--policy", "1f1b", "--ranks", "1", "--microbatches", "4", "--steps", "2", "--json")
    costs = ("world.buckets=3", "world.step_cost=0.5", "world.copy_costs=1,2")

    def makespan(*more: str) -> float:
        return float(json.loads(simulate(*case, *more).output)["makespan"])

    on_host = makespan(*costs, "world.host_slots=3")
    # The last gradient leaves behind two others; then its step, and its weights.
    assert on_host - makespan() == 3 * 2 + 0.5 + 1
    refused = simulate(*case, *costs, "world.host_slots=3", "world.slots=3")
    assert (refused.exit_code, "expected one of the two" in refused.output) == (2, True)


def test_weights_in_scratch_add_the_copies_that_nothing_hides() -> None:
    case = ("--policy", "breadth-first", "--ranks", "1", "--chunks", "4", "--microbatches", "4")
    state = ("world.slots=3", "world.copy_costs=0.01,0.01")

    def makespan(*more: str) -> float:
        return float(json.loads(simulate(*case, *state, *more, "--json").output)["makespan"])

    # A stage computes for one unit, and the next one comes for an eighth of that.
    assert makespan("world.bring_cost=0.125") == pytest.approx(makespan() + 0.125, abs=0.02)
    # With one room nothing comes ahead: not the four stages before forwards, nor three behind.
    alone = makespan("world.bring_cost=0.125", "world.gathered=1")
    assert alone == pytest.approx(makespan() + 7 * 0.125, abs=0.1)
    for wrong in (("world.slots=0", "world.copy_costs=0,0"), ("--zero", "1", "--replicas", "2")):
        refused = simulate(*case, *state, "world.bring_cost=1", *wrong)
        assert (refused.exit_code, "expected world.slots=3" in refused.output) == (2, True)


def test_state_that_is_offloaded_adds_the_copies_that_nothing_hides() -> None:
    case = ("--policy", "1f1b", "--ranks", "2", "--microbatches", "4", "--steps", "2")

    def found(*more: str) -> dict[str, Any]:
        told = json.loads(simulate(*case, "--json", *more).output)
        assert isinstance(told, dict)
        return told

    without = found("world.buckets=4", "world.step_cost=0.5")
    assert without["makespan"] == found("world.step_cost=2")["makespan"], "the step of stage 0"
    offloaded = found(*OFFLOADED)
    # Bucket 2 waits for the slot of bucket 0, and bucket 3 for the store behind that one.
    time_of_step = 1 + 0.5 + 1.5 + 1.5 + 1 + 0.5
    assert offloaded["makespan"] - without["makespan"] == time_of_step - 4 * 0.5
    assert offloaded["idle_by_cause"]["copies"][0] == time_of_step - 4 * 0.5
    assert without["idle_by_cause"]["copies"] == [0, 0]
    assert found(*OFFLOADED, "world.slots=4")["makespan"] < offloaded["makespan"]
    assert "state is on its way" in simulate(*case, *OFFLOADED).output
    assert "copies" not in simulate(*case).output


def test_copies_are_rows_of_their_own_below_the_rank_and_steps_are_in_its_row(
    tmp_path: Path,
) -> None:
    file = tmp_path / "o.svg"
    case = ("--policy", "1f1b", "--ranks", "2", "--microbatches", "2", "--steps", "2")
    assert simulate(*case, *OFFLOADED, "--picture", str(file)).exit_code == 0
    picture, svg = ElementTree.parse(file).getroot(), "{http://www.w3.org/2000/svg}"
    places = {
        title.text or "": (float(box.get("y", "")), float(box.get("x", "")), box)
        for box in picture.iter(f"{svg}rect")
        for title in box.iter(f"{svg}title")
        if not (title.text or "").startswith("idle")
    }
    assert len(places) == 2 * 2 * (2 * 2 + 4 * 3), "F and B; fetch, step and store"
    for stage in range(2):
        rows = [places[f"{kind}{stage}.1"][0] for kind in ("step", "fetch", "store")]
        assert rows == sorted(set(rows))
        assert rows[0] == places[f"F{stage}.0"][0]
        assert places[f"fetch{stage}.0/3"][0] == rows[1]
    assert max(row for row, *_ in places.values()) < float(picture.get("height", "")) - 24
    width = float(picture.get("width", ""))
    assert all(x + float(box.get("width", "")) <= width for _, x, box in places.values())
    words = [text.text for text in picture.iter(f"{svg}text")]
    assert words.count("copies in") == words.count("copies out") == 2
    assert "state brought in" in words


def test_a_timeline_is_written_and_drawn(tmp_path: Path) -> None:
    timeline, picture = tmp_path / "a.json", tmp_path / "b.svg"
    assert (
        simulate(
            "--policy",
            "zb-v",
            "--ranks",
            "2",
            "--microbatches",
            "4",
            "--timeline",
            str(timeline),
            "--picture",
            str(picture),
        ).exit_code
        == 0
    )
    assert CliRunner().invoke(main, ["draw", str(timeline)]).output.strip() == str(
        tmp_path / "a.svg"
    )
    assert (tmp_path / "a.svg").read_text() == picture.read_text()
    timeline.write_text("{}")
    result = CliRunner().invoke(main, ["draw", str(timeline)])
    assert (
        result.exit_code,
        "no timeline: 'spans'; expected a file of run.trace_steps" in result.output,
    ) == (2, True)
    assert CliRunner().invoke(main, ["draw", str(tmp_path / "none.json")]).exit_code == 2


def test_costs_jitter_stragglers_and_seeds_count() -> None:
    def makespan(*more: str) -> float:
        told = json.loads(
            simulate(
                "--policy", "1f1b", "--ranks", "2", "--microbatches", "4", "--json", *more
            ).output
        )
        return float(told["makespan"])

    assert makespan("--costs", "2,2,2") == 2 * makespan()
    assert makespan("world.stragglers=1,3") > 2 * makespan()
    assert makespan("--jitter", "0.5", "world.seed=1") != makespan(
        "--jitter", "0.5", "world.seed=2"
    )
    assert makespan("world.hiccups=1,2") == 2 * makespan()
    assert makespan("--steps", "3") > makespan("--steps", "2") > makespan()
    assert makespan("world.task_cost=1") == makespan() + (4 + 1) * 2


@pytest.mark.parametrize("ranks", [4, 16])
def test_the_picture_has_every_task_in_its_row(tmp_path: Path, ranks: int) -> None:
    file = tmp_path / "zb-v.svg"
    assert (
        simulate(
            "--policy", "zb-v", "--ranks", str(ranks), "--microbatches", "8", "--picture", str(file)
        ).exit_code
        == 0
    )
    picture = ElementTree.parse(file).getroot()
    boxes = [
        box
        for box in picture.iter("{http://www.w3.org/2000/svg}rect")
        if not box.findtext("{http://www.w3.org/2000/svg}title", "idle").startswith("idle")
    ]
    assert len(boxes) == ranks * 2 * 8 * 6
    assert len({box.get("y") for box in boxes}) == ranks
    for row in {box.get("y") for box in boxes}:
        spans = sorted(
            (float(b.get("x", "")), float(b.get("width", ""))) for b in boxes if b.get("y") == row
        )
        assert all(x + width <= after + 0.2 for (x, width), (after, _) in pairwise(spans))
    assert "prefers-color-scheme:dark" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "--placement", "linear"),
            "made for placement vee, not linear",
        ),
        (
            ("--policy", "all", "--ranks", "4", "--microbatches", "8", "--picture", "x.svg"),
            "--picture is of one schedule",
        ),
        (
            ("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "--max-held", "4"),
            "zb-v has a bound of its own",
        ),
        (
            ("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "--costs", "0,0,0"),
            "expected something to do",
        ),
        (
            ("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "--costs", "nan,1,1"),
            "expected 3 numbers",
        ),
        (
            ("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "world.copy_costs=1,1"),
            "without world.slots it stays on the device; expected world.slots=3",
        ),
        (
            ("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "world.stash_costs=1,1"),
            "activations that are offloaded; expected world.offload_activations",
        ),
        (
            (
                "--policy",
                "gpipe",
                "--ranks",
                "1",
                "--microbatches",
                "8",
                "world.offload_activations=2",
            ),
            "world.offload_activations = 2 with 1 stage a rank; expected at least 3",
        ),
        (
            ("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "world.stragglers=2"),
            "world.stragglers has 1 factor; expected one for each of 4 ranks",
        ),
        (
            ("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "world.hiccups=3,6"),
            "expected at most 1",
        ),
        (
            ("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "--picture", "x.png"),
            "expected a name that ends in .svg",
        ),
        (
            ("--policy", "1f1b", "--ranks", "4", "--microbatches", "8", "--recompute", "auto"),
            "--recompute = 'auto'; expected 'none', 'full'",
        ),
        (
            ("--policy", "1f1b", "--ranks", "4", "--microbatches", "8", "--costs", "1,2"),
            "'1,2'; expected 3 numbers with ',' between them",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[str, ...], text: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert text in result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `axrt train` leaves it."""
    directory = tmp_path_factory.mktemp("run")
    policy, costs = (
        policy_by_name("1f1b"),
        Costs((Work(1e-3, 1e-3, 1e-3), Work(2e-3, 2e-3, 2e-3)), edge=Edge(1e-4)),
    )
    line = simulated(Job(Linear(2), policy, 8), costs, steps=4).from_step(1)
    line.schedule = {
        "name": "1f1b",
        "ranks": 2,
        "microbatches": 8,
        "placement": "linear",
        "chunks": 0,
        "max_held": 0,
        "order": "",
    }
    line.schedule |= {"replicas": 1, "clips": False, "recompute": "none"}
    (directory / "timeline.json").write_text(line.to_json())
    return directory


def test_predicted_beside_measured(run: Path, tmp_path: Path) -> None:
    result = simulate("--like", str(run), "--picture", str(tmp_path / "both.svg"))
    assert result.exit_code == 0, result.output
    found = json.loads(simulate("--like", str(run), "--json").output)
    measured, predicted = found["measured"], found["predicted"]
    assert predicted["step"] == pytest.approx(measured["step"], rel=0.01)
    assert predicted["time"] == pytest.approx(measured["time"], rel=0.01)
    assert predicted["held"] == measured["held"] == [2, 1]
    for cause, of_ranks in measured["idle_by_cause"].items():
        assert predicted["idle_by_cause"][cause] == pytest.approx(
            of_ranks, abs=0.1 * measured["step"]
        )
    assert found["fitted"]["latency"] == pytest.approx(1e-4)
    assert f"a step took {1e3 * measured['step']:.2f} ms" in result.output
    picture = (tmp_path / "both.svg").read_text()
    assert picture.count("<g ") == 2
    assert "predicted: 1f1b on linear placement" in picture
    assert picture.count("<title>F0.8</title>") == 2, "one above the other"


def test_a_run_that_offloads_is_predicted_with_its_slots_and_buckets(tmp_path: Path) -> None:
    costs = Costs(
        Work(1e-3, 1e-3, 1e-3), step=2e-4, state=1.0, copies_in=1 / 2e-3, copies_out=1 / 1e-3
    )
    job = Job(Linear(2), policy_by_name("1f1b"), 8, slots=2)
    line = simulated(job, costs, steps=4, buckets=(2, 5)).from_step(1)
    line.schedule = {
        "name": "1f1b",
        "ranks": 2,
        "microbatches": 8,
        "placement": "linear",
        "chunks": 0,
        "max_held": 0,
        "order": "",
    }
    line.schedule |= {"replicas": 1, "clips": False, "recompute": "none", "slots": 2}
    (tmp_path / "timeline.json").write_text(line.to_json())
    found = json.loads(simulate("--like", str(tmp_path), "--json").output)
    measured, predicted, fitted = found["measured"], found["predicted"], found["fitted"]
    assert (fitted["slots"], fitted["buckets"]) == (2, [2, 5])
    assert (fitted["fetch"], fitted["store"], fitted["step"]) == pytest.approx((2e-3, 1e-3, 2e-4))
    for key in ("step", "time", "computing"):
        assert predicted[key] == pytest.approx(measured[key])
    assert predicted["idle_by_cause"]["copies"] == pytest.approx(
        measured["idle_by_cause"]["copies"]
    )
    assert sum(measured["idle_by_cause"]["copies"]) > 0
    shown = simulate("--like", str(tmp_path), "--what-if")
    assert "2000 us in and 1000 us out a bucket, 200 us its step; 2 slots, 5" in shown.output
    others = json.loads(simulate("--like", str(tmp_path), "--what-if", "--json").output)["what_if"]
    assert next(one["step"] for one in others if one["is_this_run"]) == pytest.approx(
        measured["step"]
    )
    line.schedule.pop("slots")  # as former versions write it
    (tmp_path / "timeline.json").write_text(line.to_json())
    assert simulate("--like", str(tmp_path)).exit_code == 0


def test_a_run_that_steps_on_the_host_is_predicted_with_its_rooms(tmp_path: Path) -> None:
    others: dict[AnyKind, float] = {
        Kind.SCALE: 1e-4,
        Kind.UNLOAD: 2e-3,
        Kind.HOST_STEP: 3e-3,
        Kind.LOAD: 1e-3,
    }
    job = Job(Linear(2), policy_by_name("1f1b"), 8, host_slots=2)
    costs = Costs(Work(1e-3, 1e-3, 1e-3), others=others)
    line = simulated(job, costs, steps=4, buckets=(2, 5)).from_step(1)
    line.schedule = {
        "name": "1f1b",
        "ranks": 2,
        "microbatches": 8,
        "placement": "linear",
        "chunks": 0,
        "max_held": 0,
        "order": "",
    }
    line.schedule |= {"replicas": 1, "clips": False, "recompute": "none", "host_slots": 2}
    (tmp_path / "timeline.json").write_text(line.to_json())
    found = json.loads(simulate("--like", str(tmp_path), "--json").output)
    measured, predicted, fitted = found["measured"], found["predicted"], found["fitted"]
    assert (fitted["host_slots"], fitted["buckets"]) == (2, [2, 5])
    assert fitted["on_host"] == pytest.approx({kind.value: of for kind, of in others.items()})
    assert predicted["step"] == pytest.approx(measured["step"])
    assert (
        "3000 us its hoststep, 1000 us its load a bucket; 2 slots there"
        in simulate("--like", str(tmp_path)).output
    )
    picture = tmp_path / "run.svg"
    assert simulate("--like", str(tmp_path), "--picture", str(picture)).exit_code == 0
    assert "<title>hoststep1.1/4</title>" in picture.read_text()


def test_a_run_with_weights_in_scratch_is_predicted_with_what_they_take(tmp_path: Path) -> None:
    job = build_schedule("breadth-first", 2, 4, chunks=3)
    job = with_shards(replace(job, slots=2), 0, gathered=2, offloads_weights=True)
    costs = Costs(Work(6e-3, 6e-3, 6e-3), step=1e-4, state=1.0, copies_in=1e4, copies_out=1e4)
    costs = replace(costs, others={Kind.BRING: 3e-3})
    line = simulated(job, costs, steps=4).from_step(1)
    line.schedule = {
        "name": "breadth-first",
        "ranks": 2,
        "microbatches": 4,
        "placement": "looped",
        "chunks": 3,
        "max_held": 0,
        "order": "",
    }
    line.schedule |= {"replicas": 1, "clips": False, "recompute": "none", "slots": 2}
    line.schedule |= {"gathered": 2, "offloads_weights": True}
    (tmp_path / "timeline.json").write_text(line.to_json())
    found = json.loads(simulate("--like", str(tmp_path), "--json").output)
    assert found["fitted"]["bring"] == pytest.approx(3e-3)
    assert found["predicted"]["step"] == pytest.approx(found["measured"]["step"], rel=0.02)
    assert "3000 us to bring those of a stage" in simulate("--like", str(tmp_path)).output
    assert simulate("--like", str(tmp_path), "--what-if").exit_code == 0
    picture = tmp_path / "run.svg"
    assert simulate("--like", str(tmp_path), "--picture", str(picture)).exit_code == 0
    assert "<title>bring0.2</title>" in picture.read_text()


def test_what_other_schedules_would_have_done(run: Path) -> None:
    result = simulate("--like", str(run), "--what-if")
    assert result.exit_code == 0, result.output
    assert "half of each is taken to be the weight gradient" in result.output
    found = json.loads(simulate("--like", str(run), "--what-if", "--json").output)["what_if"]
    assert [one["step"] for one in found] == sorted(one["step"] for one in found)
    this = next(one for one in found if one["is_this_run"])
    assert (this["policy"], this["faster"], this["held"]) == ("1f1b", 1.0, 2.0)
    assert found[0]["faster"] > 1.2, "one that splits backwards, and cuts the model evenly"
    assert {one["policy"] for one in found} == set(NAMES)
    best = next(one for one in found if one["copies"] == 1)
    cap = f" with max_held {best['max_held']}" if best["max_held"] else ""
    assert f"{best['policy']}{cap} would be {best['faster']:.3f} times as fast" in result.output
    assert (
        "What two copies of the weights cost to add up is not known from this run" in result.output
    )


def test_a_run_and_its_prediction_as_csv(run: Path) -> None:
    found = json.loads(simulate("--like", str(run), "--what-if", "--json").output)
    rows = list(csv.DictReader(StringIO(simulate("--like", str(run), "--csv").output)))
    ranks = range(len(found["measured"]["time"]))
    assert [(row["figures"], int(row["rank"])) for row in rows] == [
        (which, rank) for which in ("measured", "predicted") for rank in ranks
    ]
    for row in rows:
        of, rank = found[row["figures"]], int(row["rank"])
        assert float(row["computing"]) == of["computing"][rank]
        assert {key: float(value) for key, value in row.items() if key.startswith("idle_")} == {
            f"idle_{cause}": times[rank] for cause, times in of["idle_by_cause"].items()
        }
    others = list(
        csv.DictReader(StringIO(simulate("--like", str(run), "--what-if", "--csv").output))
    )
    assert [(row["policy"], float(row["step"])) for row in others] == [
        (one["policy"], one["step"]) for one in found["what_if"]
    ]
    both = simulate("--like", str(run), "--csv", "--json")
    assert both.exit_code == 2
    assert "two forms of the figures" in both.output


def test_another_schedule_is_simulated_on_the_same_model_cut_otherwise(tmp_path: Path) -> None:
    work = (Work(1e-3, 1e-3, 1e-3), Work(2e-3, 2e-3, 2e-3))
    ran = Job(Linear(2), policy_by_name("zb-h1"), 8, recomputed={0: 1})
    line = simulated(ran, Costs(work, step=4e-3, recomputed={0: 0.5}), steps=4).from_step(1)
    line.schedule = {
        "name": "zb-h1",
        "ranks": 2,
        "microbatches": 8,
        "placement": "linear",
        "chunks": 0,
        "max_held": 0,
        "order": "",
    }
    line.schedule |= {"replicas": 1, "clips": False, "recompute": "stage-aware:0.5"}
    (tmp_path / "timeline.json").write_text(line.to_json())
    found = json.loads(simulate("--like", str(tmp_path), "--what-if", "--json").output)["what_if"]
    halves = tuple(Work(*(seconds / 2 for seconds in of[:3])) for of in work for _ in range(2))
    costs = Costs(
        halves, step=2e-3, recomputed=recomputed_shares(policy_by_name("zb-v"), Vee(2), 8, 0.5)
    )
    job = Job(Vee(2), policy_by_name("zb-v"), 8, recomputed=dict.fromkeys(costs.recomputed, 1))
    expected = simulated(job, costs, steps=4).from_step(1).makespan / 3
    assert next(one["step"] for one in found if one["policy"] == "zb-v") == pytest.approx(
        expected, rel=5e-3
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--like", "nowhere"),
            "nowhere: No such file or directory; expected a run that was traced: axrt train ... "
            "run.trace_steps=5",
        ),
        (("--what-if",), "--what-if compares with a run; expected --like RUN"),
        (
            ("--like", "nowhere", "--ranks", "4"),
            "--like takes no --ranks; expected only --what-if, --picture, --json, --csv with it",
        ),
        (("--like", "nowhere", "--search"), "--like takes no --search"),
        (
            ("--like", "nowhere", "--picture", "x.png"),
            "pictures are SVG; expected a name that ends in .svg",
        ),
        (
            ("--search", "--ranks", "4", "--microbatches", "8", "--placement", "vee"),
            "--search takes no --placement",
        ),
        (
            ("--ranks", "4"),
            "expected --policy, --search or --plan, with --ranks and --microbatches; or --like RUN",
        ),
        (
            ("--search", "--policy", "1f1b", "--ranks", "4", "--microbatches", "8"),
            "do not go together; expected one of them",
        ),
        (
            ("--search", "--ranks", "4", "--microbatches", "8", "--memory", "0.1"),
            "no schedule on 4 ranks holds so little",
        ),
        (
            ("--policy", "1f1b", "--ranks", "4", "--microbatches", "8", "--recompute", "half"),
            "--recompute = 'half'; expected 'none'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_word(
    arguments: tuple[str, ...], text: str
) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_a_timeline_of_a_former_version_is_read_by_todays_names(run: Path) -> None:
    line = json.loads((run / "timeline.json").read_text())
    line["schedule"]["in_flight"] = line["schedule"].pop("max_held")
    line["schedule"]["host_rooms"] = line["schedule"].pop("host_slots", 0)
    line["stays"] = line.pop("residencies", [])
    (run / "timeline.json").write_text(json.dumps(line))
    assert simulate("--like", str(run)).exit_code == 0


def test_a_timeline_that_does_not_say_of_what_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "of.json"
    assert (
        simulate(
            "--policy", "1f1b", "--ranks", "2", "--microbatches", "4", "--timeline", str(file)
        ).exit_code
        == 0
    )
    result = simulate("--like", str(file))
    assert result.exit_code == 2
    assert "does not say which schedule it is of; expected the timeline of a run" in result.output


def test_the_search_says_how_far_the_best_is_from_the_bound() -> None:
    case = ("--search", "--ranks", "4", "--microbatches", "8")
    found = json.loads(simulate(*case, "--json").output)
    first, least = found["found"][0], found["least"]
    assert (first["policy"], first["chunks"], first["makespan"], first["least"]) == (
        "interleaved-zb",
        4,
        24.75,
        24.75,
    )
    assert least <= min(one["makespan"] for one in found["found"])
    assert [one["makespan"] for one in found["found"]] == sorted(
        one["makespan"] for one in found["found"]
    )
    little = json.loads(simulate(*case, "--memory", "2", "--json").output)["found"]
    assert {(one["policy"], one["max_held"]) for one in little} == {
        ("v-min", 0),
        ("axonn", 1),
        ("axonn", 2),
    }
    assert len(found["found"]) > len(NAMES), "several caps and chunks of some"
    shown = simulate(*case, "--latency", "0.1", "--memory", "4")
    assert shown.exit_code == 0
    assert "On its placement no schedule can take less than" in shown.output


def test_recomputation_takes_a_forward_more() -> None:
    case = ("--policy", "gpipe", "--ranks", "4", "--microbatches", "8", "--json")
    plain, again = (
        json.loads(simulate(*case, *more).output) for more in ((), ("--recompute", "full"))
    )
    assert again["makespan"] > plain["makespan"]
    assert again["tasks"] == plain["tasks"] * 3 // 2
    plain, again = (
        json.loads(simulate(*case, "world.held_mib=10", *more).output)["held_mib"]
        for more in ((), ("--recompute", "full"))
    )
    assert plain == [80] * 4
    assert again == [10] * 4


OWN = """
from axrt.scheduler.policies.one_f_one_b import OneForwardOneBackward

class Mine(OneForwardOneBackward):
    name = "mine"
"""
SMALL = ("--ranks", "4", "--microbatches", "8")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine_alone.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "mine_alone:Mine"


def test_policies_of_ones_own_are_compared_with_the_others(own: str) -> None:
    found = {
        one["policy"]: one
        for one in json.loads(
            simulate("--policy", "all", f"world.also={own}", *SMALL, "--json").output
        )
    }
    assert found["mine"]["makespan"] == found["1f1b"]["makespan"] == 33
    searched = json.loads(simulate("--search", f"world.also={own}", *SMALL, "--json").output)[
        "found"
    ]
    assert own in {one["policy"] for one in searched}
    for wrong, text in (("1f1b", "expected 'package.module:Class'"), ("none:X", "No module named")):
        result = simulate("--policy", "all", f"world.also={wrong}", *SMALL)
        assert (result.exit_code, text in result.output) == (2, True)
    assert (
        "expected --policy all" in simulate("--policy", "1f1b", f"world.also={own}", *SMALL).output
    )


def test_figures_as_csv_are_those_of_json() -> None:
    table = list(csv.DictReader(simulate("--policy", "all", *SMALL, "--csv").stdout.splitlines()))
    plain = json.loads(simulate("--policy", "all", *SMALL, "--json").stdout)
    assert [row["policy"] for row in table] == [one["policy"] for one in plain]
    for row, one in zip(table, plain, strict=True):
        assert float(row["makespan"]) == one["makespan"]
        assert float(row["held"]) == max(one["held"])
        assert float(row["idle"]) == pytest.approx(sum(one["idle"]) / 4)
        causes = [float(row[f"idle_{cause}"]) for cause in one["idle_by_cause"]]
        assert sum(causes) == pytest.approx(float(row["idle"]))
    assert len(list(csv.DictReader(simulate("--search", *SMALL, "--csv").stdout.splitlines()))) > 20


def test_costs_by_stage_count_and_must_be_of_each() -> None:
    """The last of four stages takes twice as long: on linear placement it is busy all the time."""
    stages = ("--stage-costs", "1,1,1/1,1,1/1,1,1/2,2,2")
    found = json.loads(simulate("--policy", "1f1b", *SMALL, *stages, "--json").output)
    assert found["makespan"] == 3 * 1 + 8 * 6 + 3 * 2
    assert (
        "are of 4 stages, and there are 8" in simulate("--policy", "zb-v", *SMALL, *stages).output
    )
    searched = json.loads(simulate("--search", *SMALL, *stages, "--json").stdout)["found"]
    assert {one["placement"] for one in searched} == {"linear", "bidirectional"}
    assert "left out: " in simulate("--search", *SMALL, *stages, "--json").stderr
    none = simulate("--search", *SMALL, "--stage-costs", "1,1,1/1,1,1").output
    assert "no schedule fits." in none
    assert "--stage-costs are of 2 stages" in none
    zeros = simulate("--policy", "1f1b", *SMALL, "--stage-costs", "0,0,0/0,0,0/0,0,0/0,0,0").output
    assert "expected something to do" in zeros
    both = simulate("--policy", "1f1b", *SMALL, *stages, "--costs", "1,1,1").output
    assert "both say what stages take" in both


def test_the_table_says_which_costs_were_taken() -> None:
    said = simulate("--policy", "1f1b", *SMALL, "--costs", "1,2,1.5").output
    assert (
        "costs: forward 1, input gradient 2, weight gradient 1.5 of a rank, messages take no"
        in said
    )
    assert "Times are in the unit of these costs." in said


def test_the_picture_says_how_long_it_takes_and_why_ranks_wait(tmp_path: Path) -> None:
    path = tmp_path / "p.svg"
    simulate("--policy", "1f1b", *SMALL, "--steps", "3", "--latency", "0.1", "--picture", str(path))
    drawn = path.read_text()
    assert ": makespan " in drawn
    assert ", utilisation 0." in drawn
    for step in (1, 2):
        assert drawn.count(f"<title>step {step}</title>") == 4
    causes = {"nothing has come", "no room under the cap", "nothing is left"}
    assert causes <= set(re.findall("<title>idle: ([^<]+)</title>", drawn))


def test_a_plan_is_made_for_the_costs_and_can_be_followed(tmp_path: Path) -> None:
    """The figure is a proved optimum, see tests/scheduler/test_planner.py."""
    plan = ("--plan", *SMALL, "--latency", "1", "--memory", "6")
    order = str(tmp_path / "plan.csv")
    found = json.loads(simulate(*plan, "--write-order", order, "--json").output)
    assert (found["makespan"], found["placement"], max(found["held"])) == (33, "linear", 6)
    fixed = ("--policy", "fixed", "--order", order, *SMALL, "--latency", "1", "world.pieces=1")
    assert json.loads(simulate(*fixed, "--json").output)["makespan"] == 33
    less = simulate("--plan", *SMALL, "--memory", "0.1").output
    assert "--memory 0.1: a rank holds a microbatch of its layers at least" in less
    capped = simulate("--plan", *SMALL, "--max-held", "6").output
    assert "--plan takes no --max-held; expected --memory" in capped
    assert (
        "world.samples is of a file of costs"
        in simulate("--plan", *SMALL, "world.samples=1").output
    )
    assert "--search and --plan do not go" in simulate("--plan", "--search", *SMALL).output
    stages = ("--stage-costs", "1,1,1/1,1,1/1,1,1/2,2,2")
    assert "expected --placement linear" in simulate("--plan", *SMALL, *stages).output
    last = simulate("--plan", *SMALL, *stages, "--placement", "linear", "--json").output
    assert json.loads(last)["makespan"] <= 57  # of 1f1b


def test_a_search_takes_keys_of_the_world_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    case = ("--search", "--ranks", "2", "--microbatches", "4", "--steps", "2", "--json")

    def best(*more: str) -> float:
        result = simulate(*case, *more)
        assert result.exit_code == 0, result.output
        return float(json.loads(result.output)["found"][0]["makespan"])

    (tmp_path / "slow.toml").write_text("[world]\nstep_cost = 5\n")
    assert best("world.step_cost=5") == best("--world", str(tmp_path / "slow.toml")) > best()
    for key in ("offload_activations=3", "held_mib=1"):
        refused = simulate(*case, f"world.{key}")
        assert (refused.exit_code, "--search takes no world." in refused.output) == (2, True)


def test_a_run_takes_no_keys_of_the_world() -> None:
    refused = simulate("--like", "nowhere", "world.slots=3")
    assert refused.exit_code == 2
    assert "--like takes no keys of [world]" in refused.output


@pytest.mark.parametrize(
    ("policy", "exchange", "waits", "fills"),
    [("1f1b", "0.1", 482.6, 629.9), ("zb-h2", "0.5", 530.5, 445.5)],
)
def test_a_rank_waits_at_joints_or_fills_that_time(
    policy: str, exchange: str, waits: float, fills: float
) -> None:
    """As docs/tensor-parallelism.md has it; `auto` is the faster of both."""
    found = {}
    for fill in ("never", "always", "auto"):
        result = simulate(
            *("--tensor", "2", "--joints", "7", "--costs", "8,8,8", "--exchange", exchange),
            *("--policy", policy, "--ranks", "4", "--microbatches", "16", "--json"),
            f"world.fill={fill}",
        )
        assert result.exit_code == 0, result.output
        figures = json.loads(result.output)
        found[fill] = figures["makespan"]
        assert max(figures["held"]) <= 8, "microbatches, and not their pieces"
        if fill == "never":  # 7 joints in each forward and backward of 16 microbatches
            of_ranks = figures["idle_by_cause"]["slices"]
            assert of_ranks == pytest.approx([2 * 7 * 16 * float(exchange)] * 8)
    assert found == pytest.approx({"never": waits, "always": fills, "auto": min(waits, fills)})

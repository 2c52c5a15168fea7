"""`axrt simulate`: figures, a table, a picture."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main
from axrt.scheduler.policies import NAMES


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_one_policy_as_json() -> None:
    result = simulate("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "--stash-mib", "10", "--json")
    found = json.loads(result.output)
    assert (found["policy"], found["placement"], found["ranks"], found["microbatches"], found["chunks"]) == ("zb-v", "vee", 4, 8, 2)
    assert (found["makespan"], found["utilisation"]) == (25.5, pytest.approx(24 / 25.5))
    assert found["stash"] == found["stash_weight"] == [8, 8, 8, 8]
    assert found["stash_mib"] == [40, 40, 40, 40]
    assert found["idle"] == pytest.approx([1.5] * 4)
    assert found["tasks"] == 4 * 2 * 8 * (1 + 1 + 4)
    assert len(found["span"]) == 4


def test_all_that_fit_side_by_side() -> None:
    result = simulate("--policy", "all", "--ranks", "4", "--microbatches", "6")
    assert result.exit_code == 0, result.output
    for name in NAMES:
        assert name in result.output
    assert "left out: policy interleaved-1f1b takes multiples of 4 ranks; set microbatches = 8" in result.output
    found = json.loads(simulate("--policy", "all", "--ranks", "4", "--microbatches", "8", "--json").output)
    assert [of["policy"] for of in found] == list(NAMES)


def test_costs_jitter_stragglers_and_seeds_count() -> None:
    def makespan(*more: str) -> float:
        told = json.loads(simulate("--policy", "1f1b", "--ranks", "2", "--microbatches", "4", "--json", *more).output)
        return float(told["makespan"])

    assert makespan("--costs", "2,2,2") == 2 * makespan()
    assert makespan("--straggler", "1:3") > 2 * makespan()
    assert makespan("--jitter", "0.5", "--seed", "1") != makespan("--jitter", "0.5", "--seed", "2")
    assert makespan("--hiccups", "1:2") == 2 * makespan()
    assert makespan("--steps", "3") > makespan("--steps", "2") > makespan()
    assert makespan("--task-cost", "1") == makespan() + (4 + 1) * 2


@pytest.mark.parametrize("ranks", [4, 16])
def test_the_picture_has_every_task_in_its_row(tmp_path: Path, ranks: int) -> None:
    file = tmp_path / "zb-v.svg"
    assert simulate("--policy", "zb-v", "--ranks", str(ranks), "--microbatches", "8", "--picture", str(file)).exit_code == 0
    picture = ElementTree.parse(file).getroot()
    boxes = [box for box in picture.iter("{http://www.w3.org/2000/svg}rect") if box.find("{http://www.w3.org/2000/svg}title") is not None]
    assert len(boxes) == ranks * 2 * 8 * 6
    assert len({box.get("y") for box in boxes}) == ranks
    for row in {box.get("y") for box in boxes}:
        spans = sorted((float(b.get("x", "")), float(b.get("width", ""))) for b in boxes if b.get("y") == row)
        assert all(x + width <= after + 0.2 for (x, width), (after, _) in pairwise(spans))
    assert "prefers-color-scheme:dark" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--policy", "zb-v", "--ranks", "4", "--microbatches", "8", "--placement", "linear"), "made for placement vee, not linear"),
        (("--policy", "all", "--ranks", "4", "--microbatches", "8", "--picture", "x.svg"), "--picture draws one schedule"),
        (("--policy", "1f1b", "--ranks", "4", "--microbatches", "8", "--costs", "1,2"), "'1,2'; expected 3 numbers with ',' between them"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[str, ...], text: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert text in result.output

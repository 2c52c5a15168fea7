"""A policy of one's own: tried, simulated, and trained with."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main
from axrt.config import Config
from axrt.engine import initialize
from axrt.errors import ConfigError
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..engine.models import perceptron
from ..engine.reference import (
    adamw,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)
from .test_train import TINY

OWN = '''
from axrt.scheduler.policies import Bounds, Policy
from axrt.scheduler.task import Kind


class Lifo(Policy):
    """The newest microbatch first, and half as many in flight as 1f1b has, but for one."""

    name, splits, placements = "lifo", False, ("linear",)

    def key(self, task, view):
        return (task.kind is Kind.FORWARD, -task.microbatch)

    def admits(self, task, view):
        return task.kind is not Kind.FORWARD or view.in_flight < self._cap(view.ranks, view.rank)

    def _cap(self, ranks, rank):
        return (ranks - rank) // 2 + 1

    def bounds(self, placement, rank, microbatches):
        return Bounds(self._cap(placement.ranks, rank), self._cap(placement.ranks, rank))


class Stuck(Lifo):
    def admits(self, task, view):
        return task.kind is not Kind.BACKWARD or view.in_flight > 1


class Liar(Lifo):
    def bounds(self, placement, rank, microbatches):
        return Bounds(1, 1)


class Broken(Lifo):
    def key(self, task, view):
        return view.nothing


class Unfinished(Lifo):
    def key(self, task, view):
        raise NotImplementedError


class NoBounds(Lifo):
    def bounds(self, placement, rank, microbatches):
        raise ValueError("mine")


class Elsewhere(Lifo):
    placements = ("ring",)


class Capped(Lifo):
    def __init__(self, max_held=3):
        self.max_held = max_held


class Half:
    name, splits, placements = "half", False, ("linear",)
'''


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of policies."""
    name = f"own_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def axrt(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


SMALL = ("--max-ranks", "3", "--max-microbatches", "4", "--seeds", "2")


def test_a_sound_one_passes(in_a_directory: str) -> None:
    result = axrt("check-policy", f"{in_a_directory}:Lifo", *SMALL)
    assert result.exit_code == 0, result.output
    assert ":Lifo: 24 schedules, none stuck" in result.output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Stuck", "the schedule is stuck: .*\nwith axrt simulate --policy .*:Stuck --ranks 1"),
        ("Liar", "rank 0 held 2 chunks, and bounds.* says 1; .*\nwith axrt simulate .* --ranks 2"),
        ("Unfinished", "NotImplementedError, in key, .*, line [0-9]+\nwith axrt simulate"),
        ("NoBounds", "ValueError: mine, in bounds, .*, line [0-9]+\nwith axrt simulate"),
        (
            "Broken",
            "AttributeError: '.*' object has no attribute 'nothing', in key, .*, line "
            "[0-9]+\nwith axrt simulate",
        ),
    ],
)
def test_what_is_wrong_comes_with_a_command_that_shows_it(
    in_a_directory: str, name: str, said: str
) -> None:
    result = axrt("check-policy", f"{in_a_directory}:{name}", *SMALL)
    assert result.exit_code == 1
    assert re.search(said, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Nothing", "has no attribute 'Nothing'; expected 'package.module:Class'"),
        ("Elsewhere", r"placements \('ring',\); expected a tuple of some of linear"),
        ("Half", "has no key, admits, bounds; expected what"),
        ("Stuck", "the schedule is stuck"),
    ],
)
def test_what_is_no_policy_or_gets_stuck_is_refused_before_anything_runs(
    in_a_directory: str, name: str, said: str
) -> None:
    config = {"schedule": {"policy": f"{in_a_directory}:{name}", "microbatches": 4}}

    def on_a_rank(transport: Transport) -> None:
        initialize(perceptron(), config=config, transport=transport)

    with pytest.raises(ConfigError, match=said):
        LocalWorld(2).run(on_a_rank)
    Config.read(config)  # which needs nothing of the user's
    simulated = axrt(
        "simulate", "--policy", f"{in_a_directory}:{name}", "--ranks", "2", "--microbatches", "4"
    )
    assert simulated.exit_code == 2


def test_a_cap_goes_to_the_class(in_a_directory: str) -> None:
    of = ("--ranks", "2", "--microbatches", "4", "--max-held", "5")
    assert axrt("simulate", "--policy", f"{in_a_directory}:Capped", *of).exit_code == 0
    refused = axrt("simulate", "--policy", f"{in_a_directory}:Lifo", *of)
    assert "expected a class that is called with nothing, or with max_held" in refused.output


def test_axrt_train_follows_it(in_a_directory: str) -> None:
    Path("tiny.toml").write_text(TINY)
    Path("text.txt").write_text("all work and no play " * 20)
    result = axrt("train", "tiny.toml", f"schedule.policy={in_a_directory}:Lifo")
    assert result.exit_code == 0, result.output
    assert f"schedule  {in_a_directory}:Lifo" in result.output


def test_it_trains_with_the_bits_of_plain_pytorch(in_a_directory: str) -> None:
    batches = random_batches((6, 16), classes=5, microbatches=6)
    config = configured(6, schedule={"policy": f"{in_a_directory}:Lifo"})
    outcomes = LocalWorld(3, seed=2).run(
        lambda t: train_on_a_rank(t, perceptron(), batches, 3, config, adamw)
    )
    assert together(outcomes, 1) == train_in_plain_torch(perceptron(), batches, 3, adamw)

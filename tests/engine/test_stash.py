"""Activations that live in scratch between a forward and a far backward: the bits of a run that
keeps them, and the device's bytes."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import axrt
from axrt.observe.observer import Observer
from axrt.offload.arena import Stretch
from axrt.offload.tier import DiskTier
from axrt.scheduler.task import AnyKind, Kind, Task
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import swept
from .models import masked, masked_batches, motley, perceptron, small_gpt
from .reference import (
    ONE_PIPE,
    Outcome,
    adamw,
    configured,
    plain_torch,
    random_batches,
    together,
    token_batches,
    train_on_a_rank,
)

MICROBATCHES, STEPS = 8, 2
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
FEWEST = 4  # of two stages a rank


def on_ranks(
    ranks: int,
    policy: str,
    memory: dict[str, Any],
    seed: int = 0,
    model: Any = perceptron,
    batches: Any = BATCHES,
    pipes: int = 1,
    **sections: Any,
) -> Outcome:
    data = sections.get("parallel", {}).get("data", 1)
    microbatches = MICROBATCHES // data
    config = configured(microbatches, schedule={"policy": policy}, memory=memory, **sections)
    outcomes = LocalWorld(ranks * data, seed).run(
        lambda t: train_on_a_rank(t, model(), batches, STEPS, config)
    )
    return together(
        [Outcome(outcome.losses, outcomes[0].norms, outcome.parameters) for outcome in outcomes],
        pipes * data,
    )


def reference() -> Outcome:
    return plain_torch(perceptron, BATCHES, STEPS)


class Copies(Observer):
    """Counts the stashes that went down and came back."""

    def __init__(self) -> None:
        self.ended: Counter[AnyKind] = Counter()

    def finished(self, task: Task, began_s: float, ended_s: float) -> None:
        self.ended[task.kind] += 1


@swept(
    ("policy", ("gpipe", *(name for name in ONE_PIPE if name != "gpipe"))),
    ("scratch", ["host", "disk"]),
    ("seed", range(3)),
    quick=5,
)
def test_stashes_in_scratch_change_no_bit(
    tmp_path: Path, policy: str, scratch: str, seed: int
) -> None:
    memory = {
        "offload_activations": FEWEST,
        "scratch": "host" if scratch == "host" else f"disk:{tmp_path}",
    }
    assert on_ranks(4, policy, memory, seed) == reference()
    assert not list(tmp_path.iterdir()), "something is left in the directory"


CASES: dict[str, dict[str, Any]] = {
    "recomputation": {"memory": {"recompute": "stage-aware"}},
    "all recomputed": {"memory": {"recompute": "full"}},
    "state in scratch": {"memory": {"offload": "stream"}, "optimizer": {"clip": 0.5}},
    "narrow": {"precision": {"weights": "bfloat16", "gradients": "weights"}},
    "loss scale": {"precision": {"weights": "float16", "loss_scale": 2.0**8}},
    "clipping": {"optimizer": {"clip": 0.5}},
    "zero 1": {"memory": {"zero": 1}, "parallel": {"data": 2}},
    "zero 2": {"memory": {"zero": 2}, "parallel": {"data": 2}},
    "zero 3": {"memory": {"zero": 3}, "parallel": {"data": 2}},
    "library": {"parallel": {"data": 2, "collectives": "library", "activations": "library"}},
}


@swept(("case", CASES), ("policy", ["gpipe", "adaptive", "breadth-first"]))
def test_with_all_else_the_bits_are_those_without(case: str, policy: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = dict(CASES[case])
    disk = {"bucket_mb": 0.004, "scratch": f"disk:{tmp_path}", **sections.pop("memory", {})}
    plain, found = (
        on_ranks(4, policy, {**disk, "offload_activations": places}, **sections)
        for places in (0, FEWEST)
    )
    assert found == plain


@swept(
    (
        "model, batches",
        [
            (motley, random_batches((6, 12), 4, MICROBATCHES)),
            (masked, masked_batches(MICROBATCHES)),
        ],
    ),
    ("policy", ["gpipe", "zb-h2"]),
)
def test_what_travels_is_odd_or_changed_in_place(
    model: Any, batches: Any, policy: str, tmp_path: Path
) -> None:
    plain, found = (
        on_ranks(2, policy, memory, model=model, batches=batches)
        for memory in ({}, {"offload_activations": 3, "scratch": f"disk:{tmp_path}"})
    )
    assert found == plain


@swept(("policy", ["chimera", "dualpipe"]), ("ranks", [4]))
def test_two_pipes_and_tied_weights(policy: str, ranks: int, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"model": small_gpt, "batches": token_batches(256, 8, MICROBATCHES)}
    plain, found = (
        on_ranks(ranks, policy, memory, pipes=2, **keys)
        for memory in ({}, {"offload_activations": 4, "scratch": f"disk:{tmp_path}"})
    )
    assert found == plain


def test_stashes_go_down_and_come_back(tmp_path: Path) -> None:
    """Of gpipe's eight microbatches each rank keeps one where it is."""
    memory = {"offload_activations": 4, "scratch": f"disk:{tmp_path}"}
    config = configured(MICROBATCHES, schedule={"policy": "gpipe"}, memory=memory)
    copies = [Copies() for _ in range(2)]
    LocalWorld(2, seed=1).run(
        lambda t: train_on_a_rank(
            t, perceptron(), BATCHES, STEPS, config, observers=[copies[t.rank]]
        )
    )
    for of_rank in copies:
        assert of_rank.ended[Kind.OFFLOAD] == of_rank.ended[Kind.RELOAD]
        assert of_rank.ended[Kind.OFFLOAD] >= STEPS * (MICROBATCHES - 2)


def test_evaluations_and_ends_of_data_change_nothing(tmp_path: Path) -> None:
    def run(memory: dict[str, Any]) -> list[Any]:
        config = configured(MICROBATCHES, schedule={"policy": "gpipe"}, memory=memory)

        def of_rank(transport: Transport) -> list[Any]:
            engine = axrt.initialize(perceptron(), adamw, config=config, transport=transport)
            with engine:

                def given(step: int, count: int = MICROBATCHES) -> Any:
                    return iter(BATCHES(step)[:count]) if engine.reads else None

                losses = [engine.train_batch(given(0)).loss]
                with pytest.raises(StopIteration):
                    engine.train_batch(given(1, 5))
                losses.append(engine.train_batch(given(1)).loss)
                evaluated = engine.eval_batch(given(2, 3))
                losses.append(evaluated.loss)
                losses.append(engine.train_batch(given(2)).loss)
            return losses

        return LocalWorld(3, seed=5).run(of_rank)

    assert run({"offload_activations": 3, "scratch": f"disk:{tmp_path}"}) == run({})


def test_a_disk_without_room_leaves_stashes_on_the_device_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = {
        "offload_activations": FEWEST,
        "scratch": f"disk:{tmp_path}",
        "scratch_gb": 2e-5,
    }
    assert on_ranks(2, "gpipe", memory) == reference()
    told = capsys.readouterr().err
    assert re.search(r"axrt: a stash stays on the device: \d+ bytes of stashes do not fit", told)
    assert "Set memory.scratch_gb higher, or memory.offload_activations = 0" in told


def test_a_longer_microbatch_than_the_first_stays_on_the_device_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def longer(step: int) -> Any:
        short, long = BATCHES(step), random_batches((9, 16), 5, MICROBATCHES)(step)
        return [*short[:2], *long[2:6], *short[6:]]

    memory = {"offload_activations": FEWEST, "scratch": f"disk:{tmp_path}"}
    plain = on_ranks(2, "gpipe", {}, batches=longer)
    assert on_ranks(2, "gpipe", memory, batches=longer) == plain
    told = capsys.readouterr().err
    assert re.search(r"on the device: A microbatch .* saves \d+ bytes, and the first one", told)


def test_other_bytes_from_a_disk_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = DiskTier.read

    def flipped(tier: DiskTier, stretch: Stretch, into: Tensor) -> None:
        with open(f"/proc/self/fd/{tier._file._file}", "r+b", buffering=0) as plain:
            plain.seek(stretch.start)
            (byte,) = plain.read(1)
            plain.seek(stretch.start)
            plain.write(bytes([byte ^ 1]))
        read(tier, stretch, into)

    monkeypatch.setattr(DiskTier, "read", flipped)
    memory = {"offload_activations": 4, "scratch": f"disk:{tmp_path}"}
    config = configured(MICROBATCHES, schedule={"policy": "gpipe"}, memory=memory)
    with pytest.raises(axrt.ScratchError, match="other bytes came back"):
        train_on_a_rank(LocalWorld(1).alone(), perceptron(), BATCHES, 1, config)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"memory": {"offload_activations": 3}, "schedule": {"policy": "adaptive"}},
            r"memory.offload_activations = 3 with 2 stages a rank; expected at least 4",
        ),
        (
            {"memory": {"offload_activations": 4}, "run": {"compile": "eager"}},
            r"memory.offload_activations = 4 with run.compile = 'eager'",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(sections: dict[str, Any], text: str) -> None:
    config = configured(MICROBATCHES, **sections)
    with pytest.raises(axrt.ConfigError, match=text):
        LocalWorld(2).run(lambda t: train_on_a_rank(t, perceptron(), BATCHES, 1, config))

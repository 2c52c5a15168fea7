"""A network that delays, reorders and duplicates changes no bit, and what it loses is named."""

from collections import defaultdict
from typing import Any

import pytest

import axrt
from axrt.observe.observer import Observer, Wait
from axrt.transport import Transport
from axrt.transport.control import Topic
from axrt.transport.local import Chaos, LocalWorld, Stuck

from ..engine.models import perceptron
from ..engine.reference import (
    Outcome,
    adamw,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)
from ..sweeps import fewer, swept

MICROBATCHES, STEPS = 4, 2
BATCHES = random_batches((6, 16), classes=5, microbatches=2 * MICROBATCHES)
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one pipeline": (1, {"optimizer": {"clip": 0.5}}),
    "replicas": (2, {"memory": {"bucket_mb": 0.004}}),
    "shards": (2, {"memory": {"bucket_mb": 0.004, "zero": 3}, "optimizer": {"clip": 0.5}}),
}


def config_of(kind: str, policy: str = "1f1b") -> dict[str, Any]:
    data, sections = KINDS[kind]
    schedule = {"policy": policy, "chunks": 2 if policy == "breadth-first" else 0}
    return configured(MICROBATCHES, parallel={"data": data}, schedule=schedule, **sections)


def trained(kind: str, policy: str, seed: int, chaos: Chaos) -> Outcome:
    config = config_of(kind, policy)
    data = KINDS[kind][0]
    outcomes = LocalWorld(4, seed, chaos).run(
        lambda t: train_on_a_rank(t, perceptron(), BATCHES, STEPS, config, adamw)
    )
    return together(outcomes, data)


@swept(
    ("kind", KINDS),
    ("policy", ["1f1b", "breadth-first", "zb-v"]),
    ("seed", range(4)),
    quick=4,
)
def test_delays_another_order_and_duplicates_change_no_bit(
    kind: str, policy: str, seed: int
) -> None:
    calm = trained(kind, policy, 99, Chaos(delayed=0.0))
    bad = trained(kind, policy, seed, Chaos(delayed=0.8, duplicated=0.5))
    assert (bad.losses, bad.norms) == (calm.losses, calm.norms)
    if kind == "one pipeline":
        plain = train_in_plain_torch(
            perceptron(), lambda step: BATCHES(step)[:MICROBATCHES], STEPS, adamw, clip=0.5
        )
        assert bad == plain


class Waits(Observer):
    """What each rank waits for at last."""

    def __init__(self) -> None:
        self.last: Wait | None = None

    def entered(self) -> None:
        self.last = None

    def waiting(self, wait: Wait) -> None:
        self.last = wait


def lacks_when_lost(kind: str, lost: int, seed: int) -> tuple[LocalWorld, dict[int, str]]:
    """The world, and what each rank lacks in the end."""
    world, waits = LocalWorld(4, seed, Chaos(lost=lost)), defaultdict[int, Waits](Waits)
    said: dict[int, str] = {}

    def rank_main(transport: Transport) -> None:
        watching = waits[transport.rank]
        engine = axrt.initialize(
            perceptron(),
            adamw,
            config=config_of(kind),
            transport=transport,
            observers=[watching],
        )
        mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
        for step in range(STEPS):
            result = engine.train_batch(iter(BATCHES(step)[mine]))
            assert not engine.is_main or result.grad_norm is not None
        engine.close()

    try:
        world.run(rank_main)
    except Stuck:
        for rank, one in waits.items():
            if one.last is not None:
                said[rank] = one.last.what()
    return world, said


# What rank 0 compares for a warning, whenever it comes.
WAITED_FOR_BY_NOBODY = {Topic.READ}


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_is_lost_is_named_with_its_way(kind: str) -> None:
    whole = LocalWorld(4, 5)
    config = config_of(kind)
    whole.run(lambda t: train_on_a_rank(t, perceptron(), BATCHES, STEPS, config, adamw))
    named: dict[str, int] = defaultdict(int)
    for lost in range(0, whole.sent, max(1, whole.sent // fewer(50, quick=12))):
        world, said = lacks_when_lost(kind, lost, seed=5)
        if world.lost is None:  # another history, and fewer parcels
            continue
        says, source, to = world.lost
        if says in WAITED_FOR_BY_NOBODY:
            assert not said
            continue
        assert said, f"{says} from {source} to {to} was lost, and nobody waits"
        named[says.value] += 1
        text = said.get(to, "nothing")
        assert any(name in text for name in names_of(source, to, 4 // KINDS[kind][0])), (
            f"{says} from {source} to {to}: it says {text}"
        )
        assert says.value in text or (says.value in WORDS and WORDS[says.value] in text), (
            f"{says} from {source} to {to}: it says {text}"
        )
    assert len(named) > 2, named


def names_of(source: int, to: int, pipe: int) -> tuple[str, str]:
    """What a rank is called: its number in the job for notes; for messages that in its pipeline,
    with its replica where that is another one."""
    other = f" of replica {source // pipe}" if source // pipe != to // pipe else ""
    return f"rank {source}", f"rank {source % pipe}{other}"


WORDS = {
    "leaves": "the end of every engine",
    "exchanged": "value",
    "stepped": "gradient norm",
    "shard": "shards",
}

"""Tiers give back what was put there, keep their budgets, and keep to a bandwidth."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from axrt.offload.arena import PAGE_BYTES, BudgetError, Stretch
from axrt.offload.memory import MemoryArena
from axrt.offload.scratch_file import DiskError
from axrt.offload.tier import DiskTier, HostTier, PacedTier, Tier

from ..disks import small_disk

CPU = torch.device("cpu")


def memory(num_bytes: int, fill: int = 0) -> Tensor:
    """Bytes from a page on."""
    return MemoryArena(num_bytes, CPU).bytes_of(Stretch(0, num_bytes)).fill_(fill)


def slow(tier: Tier) -> Tier:
    return PacedTier(tier, bytes_per_s=1e9)


@pytest.fixture(params=["host", "disk", "paced host", "paced disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made: Tier = HostTier(CPU) if "host" in request.param else DiskTier(tmp_path)
    made = slow(made) if "paced" in request.param else made
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


def test_what_was_put_there_comes_back_also_when_the_tier_has_grown(tier: Tier) -> None:
    first = tier.cut(5000, "moments")
    tier.write(first, memory(first.num_bytes, 1))
    second = tier.cut(100_000, "masters")
    tier.write(second, memory(second.num_bytes, 2))
    for stretch, byte in ((second, 2), (first, 1)):
        into = memory(stretch.num_bytes)
        tier.read(stretch, into)
        assert bool((into == byte).all())
    assert tier.num_bytes == first.num_bytes + second.num_bytes == (2 + 25) * PAGE_BYTES


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_budget_is_never_exceeded(kind: str, tmp_path: Path) -> None:
    budget = 3 * PAGE_BYTES
    tier = HostTier(CPU, budget) if kind == "host" else DiskTier(tmp_path, budget)
    tier.cut(2 * PAGE_BYTES, "masters")
    with pytest.raises(BudgetError, match=r"moments do not fit .*memory\.scratch_gb"):
        tier.cut(PAGE_BYTES + 1, "moments")
    tier.cut(PAGE_BYTES, "moments")
    tier.close()


def test_a_disk_that_is_full_is_told_when_room_is_taken(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as directory:
        tier = DiskTier(directory)
        tier.cut(512 * 1024, "masters")
        with pytest.raises(DiskError, match="could not be taken from the disk"):
            tier.cut(1024 * 1024, "moments")
        tier.close()


def test_a_bandwidth_is_not_exceeded(tmp_path: Path) -> None:
    tier = PacedTier(HostTier(CPU), bytes_per_s=PAGE_BYTES / 0.02)
    stretch = tier.cut(PAGE_BYTES, "moments")
    began_s = time.perf_counter()
    tier.write(stretch, memory(PAGE_BYTES))
    tier.read(stretch, memory(PAGE_BYTES))
    assert time.perf_counter() - began_s >= 0.04


def test_copies_on_end_have_the_bandwidth_and_those_after_a_pause_no_more() -> None:
    tier = PacedTier(HostTier(CPU), bytes_per_s=PAGE_BYTES / 0.02)
    stretch = tier.cut(PAGE_BYTES, "moments")

    def taken_s(copies: int) -> float:
        began_s = time.perf_counter()
        for _ in range(copies):
            tier.write(stretch, memory(PAGE_BYTES))
            time.sleep(0.001)
        return time.perf_counter() - began_s

    assert taken_s(10) >= 0.2
    time.sleep(0.02)
    assert taken_s(1) >= 0.02


def test_a_tier_that_is_let_go_gives_its_room_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tier = DiskTier(tmp_path)
    tier.cut(PAGE_BYTES, "moments")
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del tier
    assert len(os.listdir("/proc/self/fd")) == before

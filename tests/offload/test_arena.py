"""Arenas are cut before they are allocated, never above their budget, and begin at pages."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from axrt.offload.arena import PAGE_BYTES, BudgetError, Cut
from axrt.offload.memory import MemoryArena
from axrt.offload.numa import cpus_near, on_cpus

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 5 * PAGE_BYTES), max_size=20))
def test_stretches_are_whole_pages_that_do_not_meet(sizes: list[int]) -> None:
    cut = Cut("host")
    made = [cut.stretch(size, "moments") for size in sizes]
    assert all(one.start % PAGE_BYTES == one.num_bytes % PAGE_BYTES == 0 for one in made)
    assert all(one.num_bytes >= size for one, size in zip(made, sizes, strict=True))
    ends = [0, *(one.start + one.num_bytes for one in made)]
    assert [one.start for one in made] == ends[:-1]
    assert cut.num_bytes == ends[-1]


def test_a_budget_is_kept_where_the_cut_is_made() -> None:
    cut = Cut("device", budget_bytes=3 * PAGE_BYTES)
    cut.stretch(1, "weights")
    cut.stretch(PAGE_BYTES, "moments")
    with pytest.raises(
        BudgetError,
        match=r"8192 bytes of gradients do not fit the device, of which 12288 bytes may be used "
        r"and 8192 are \(weights 4096, moments 4096\); expected a larger budget",
    ):
        cut.stretch(PAGE_BYTES + 1, "gradients")
    cut.stretch(PAGE_BYTES, "gradients")
    assert cut.num_bytes == 3 * PAGE_BYTES
    assert cut.purposes == dict.fromkeys(("weights", "moments", "gradients"), PAGE_BYTES)


def test_tensors_of_any_type_lie_in_one_piece_of_memory() -> None:
    cut = Cut("host")
    stretches = [cut.stretch(size, "state") for size in (10, 5000, 4096)]
    arena = MemoryArena(cut.num_bytes, CPU)
    for number, stretch in enumerate(stretches, 1):
        tensor = arena.tensor(stretch, torch.float32, 2)
        tensor.fill_(number)
        assert tensor.data_ptr() % PAGE_BYTES == 0
    found = [arena.bytes_of(stretch).view(torch.float32)[:2].tolist() for stretch in stretches]
    assert found == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert not arena.notes


def test_memory_that_cannot_be_pinned_is_ordinary_and_a_note_says_so() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator, and memory can be pinned")
    cut = Cut("host")
    stretch = cut.stretch(100, "moments")
    arena = MemoryArena(cut.num_bytes, CPU, pinned=True)
    (note,) = arena.notes
    assert note.startswith("8192 bytes of host memory could not be pinned")
    assert arena.tensor(stretch, torch.float32, 25).tolist() == [0.0] * 25


def node(system: Path, number: int, cpus: str) -> None:
    folder = system / f"devices/system/node/node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(cpus + "\n")


def test_the_processors_of_a_devices_node_are_found(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    node(tmp_path, 0, "0-3,8")
    assert cpus_near("0000:3B:00.0", tmp_path) == [], "there is but one node"
    node(tmp_path, 1, "4-6,9-10,12")
    assert cpus_near("0000:3B:00.0", tmp_path) == [4, 5, 6, 9, 10, 12]
    assert cpus_near("0000:af:00.0", tmp_path) == []
    (device / "numa_node").write_text("-1\n")
    assert cpus_near("0000:3b:00.0", tmp_path) == []


def test_a_thread_runs_on_the_processors_that_it_may_use_and_then_on_all_again() -> None:
    import os

    before = os.sched_getaffinity(0)
    one = min(before)
    with on_cpus([one, 100_000]):
        assert os.sched_getaffinity(0) == {one}
    with on_cpus([100_000]):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before

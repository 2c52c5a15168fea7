"""A scratch file gives back what was put there, past the page cache, and says what a disk does
wrong."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from axrt.offload.arena import PAGE_BYTES, Cut, Stretch
from axrt.offload.memory import MemoryArena
from axrt.offload.scratch_file import DiskError, ScratchFile

from ..disks import small_disk

SIZES = (1, 3 * PAGE_BYTES, 700_000)


def stretches() -> tuple[list[Stretch], int]:
    cut = Cut("disk")
    return [cut.stretch(size, "moments") for size in SIZES], cut.num_bytes


def memory(num_bytes: int) -> Tensor:
    """Bytes from a page on."""
    return MemoryArena(num_bytes, torch.device("cpu")).bytes_of(Stretch(0, num_bytes))


def random_bytes(num_bytes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = memory(num_bytes)
    return made.copy_(torch.randint(256, (num_bytes,), generator=generator, dtype=torch.uint8))


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ScratchFile]:
    made = ScratchFile(tmp_path, stretches()[1], direct=request.param)
    yield made
    made.close()


def test_what_was_put_there_comes_back(file: ScratchFile) -> None:
    places, _ = stretches()
    written = [random_bytes(place.num_bytes, seed) for seed, place in enumerate(places)]
    for place, data in zip(places, written, strict=True):
        file.write(place, data)
    for place, data in reversed(list(zip(places, written, strict=True))):
        into = memory(place.num_bytes)
        file.read(place, into)
        assert torch.equal(into, data)
    again = random_bytes(places[1].num_bytes, 9)
    file.write(places[1], again)
    into = memory(places[1].num_bytes)
    file.read(places[1], into)
    assert torch.equal(into, again)


def pages_in_memory(descriptor: int, num_bytes: int) -> int:
    """The pages of a file that the system has in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(descriptor, num_bytes) as mapped:
        found = (ctypes.c_ubyte * (num_bytes // PAGE_BYTES))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), found) == 0
        del address
        return sum(one & 1 for one in found)


def test_what_is_put_there_leaves_the_systems_memory(file: ScratchFile) -> None:
    places, num_bytes = stretches()
    for seed, place in enumerate(places):
        file.write(place, random_bytes(place.num_bytes, seed))
        file.read(place, memory(place.num_bytes))
    if any("stays in memory" in note for note in file.notes):
        pytest.skip("this directory is in memory")
    assert pages_in_memory(file._file, num_bytes) == 0


def test_a_file_system_without_direct_access_is_slower_and_said(tmp_path: Path) -> None:
    with_cache = ScratchFile(tmp_path, PAGE_BYTES, direct=False)
    assert not with_cache.is_direct
    assert "go through the system's page cache, which is slower" in with_cache.notes[0]
    with_cache.close()


def test_a_directory_in_memory_is_said() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    file = ScratchFile(Path("/dev/shm"), PAGE_BYTES)
    assert any("is a tmpfs: what is put there stays in memory" in note for note in file.notes)
    place = Stretch(0, PAGE_BYTES)
    file.write(place, random_bytes(PAGE_BYTES, 0))
    file.read(place, memory(PAGE_BYTES))
    file.close()


def test_it_has_no_name_and_gives_its_room_back(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 1 << 20)
    other = ScratchFile(tmp_path, 1 << 20)  # another run with the same directory
    place = Stretch(0, PAGE_BYTES)
    mine, theirs = random_bytes(PAGE_BYTES, 1), random_bytes(PAGE_BYTES, 2)
    file.write(place, mine)
    other.write(place, theirs)
    into = memory(PAGE_BYTES)
    file.read(place, into)
    assert torch.equal(into, mine)
    assert list(tmp_path.iterdir()) == []
    file.close()
    other.close()
    file.close()


DIES = """
import os, signal, sys, torch
from pathlib import Path
from axrt.offload.scratch_file import ScratchFile
file = ScratchFile(Path(sys.argv[1]), 1 << 24)
assert os.fstat(file._file).st_blocks * 512 >= 1 << 24
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_process_that_was_killed(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


# What a disk may do wrong.


def test_a_directory_that_is_not_there_or_not_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in (tmp_path / "none", tmp_path / "file", Path("/proc")):
        with pytest.raises(DiskError, match="expected a directory that exists and can be"):
            ScratchFile(where, PAGE_BYTES)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "1m") as where:
        yield where


def test_a_disk_without_room_is_told_before_anything_is_written(disk: Path) -> None:
    with pytest.raises(
        DiskError,
        match=r"2097152 bytes could not be taken from the disk, which has 1048576 free",
    ):
        ScratchFile(disk, 2 << 20)
    ScratchFile(disk, 1 << 20).close()


def test_a_directory_that_is_only_read_is_refused(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(DiskError, match=r"no scratch file can be made in .*Read-only"):
        ScratchFile(disk, PAGE_BYTES)


def spoiled(file: ScratchFile, at: int) -> None:
    """Somebody else writes to the file."""
    with open(f"/proc/self/fd/{file._file}", "r+b", buffering=0) as other:
        other.seek(at)
        byte = other.read(1)
        other.seek(at)
        other.write(bytes([byte[0] ^ 1]))


def test_a_flipped_bit_does_not_come_back_unseen(file: ScratchFile) -> None:
    places, _ = stretches()
    for seed, place in enumerate(places):
        file.write(place, random_bytes(place.num_bytes, seed))
    spoiled(file, places[1].start + 5000)
    file.read(places[0], memory(places[0].num_bytes))
    with pytest.raises(DiskError, match=r"other bytes came back from bytes 4096 to 16384"):
        file.read(places[1], memory(places[1].num_bytes))
    file.read(places[2], memory(places[2].num_bytes))


@pytest.mark.parametrize("then_longer", [False, True])
def test_a_file_that_somebody_shortens_is_noticed(tmp_path: Path, then_longer: bool) -> None:
    places, num_bytes = stretches()
    file = ScratchFile(tmp_path, num_bytes)
    for seed, place in enumerate(places):
        file.write(place, random_bytes(place.num_bytes, seed))
    os.truncate(f"/proc/self/fd/{file._file}", PAGE_BYTES)
    if then_longer:
        os.truncate(f"/proc/self/fd/{file._file}", num_bytes)
    with pytest.raises(DiskError, match="somebody else has shortened it"):
        file.read(places[2], memory(places[2].num_bytes))
    file.close()


@pytest.mark.parametrize("looks_before", [0, 1])
def test_a_file_that_grows_while_it_is_read_is_not_found_short(
    file: ScratchFile, looks_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stashes cut new stretches on the thread that takes them out, while others are brought in. The
    file grows between a look at it and what is made of that."""
    stretch, look = Stretch(0, PAGE_BYTES), os.fstat
    there = memory(PAGE_BYTES)
    file.write(stretch, there)
    left = list(range(looks_before + 1))

    def looking(descriptor: int) -> os.stat_result:
        found = look(descriptor)
        if left and left.pop() == 0:
            file.extend(64 * PAGE_BYTES)
        return found

    monkeypatch.setattr(os, "fstat", looking)
    file.read(stretch, there)
    assert not left


def test_what_was_never_written_is_not_taken(file: ScratchFile) -> None:
    with pytest.raises(DiskError, match="other bytes came back"):
        file.read(stretches()[0][0], memory(PAGE_BYTES))


def test_errors_of_the_disk_say_how_far_it_came(file: ScratchFile, tmp_path: Path) -> None:
    place = Stretch(0, PAGE_BYTES)
    data = random_bytes(PAGE_BYTES, 0)
    file.write(place, data)
    only_read = os.open("/dev/zero", os.O_RDONLY)
    os.dup2(only_read, file._file)
    with pytest.raises(DiskError, match=r"writing Stretch\(start=0, .* failed after 0 bytes"):
        file.write(place, data)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._file)
    with pytest.raises(DiskError, match="No space left on device"):
        file.write(place, data)
    with pytest.raises(DiskError, match="shortened"):
        file.read(place, data)
    os.close(only_read)
    os.close(full)


def test_memory_that_does_not_begin_at_a_page_is_refused(file: ScratchFile) -> None:
    data = memory(2 * PAGE_BYTES)
    with pytest.raises(ValueError, match="expected as many bytes, from a multiple of 4096 on"):
        file.write(Stretch(0, PAGE_BYTES), data[8 : 8 + PAGE_BYTES])
    with pytest.raises(ValueError, match="expected as many bytes"):
        file.read(Stretch(0, PAGE_BYTES), data)

"""Free memory of the CPU is what the control groups leave of it."""

from pathlib import Path

import psutil
import pytest

from axrt.device.host_memory import free_on_host


def written(folder: Path, limit: str, most: str, used: str, now: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit).write_text(f"{most}\n")
    (folder / used).write_text(f"{now}\n")


@pytest.mark.parametrize(
    ("own", "around", "left"), [("max", "5000", 4000), ("3000", "5000", 2000), ("100", "max", 0)]
)
def test_the_second_version(tmp_path: Path, own: str, around: str, left: int) -> None:
    mine = tmp_path / "mine"
    mine.write_text("0::/slurm/job\n")
    written(tmp_path / "slurm" / "job", "memory.max", own, "memory.current", 1000)
    written(tmp_path / "slurm", "memory.max", around, "memory.current", 1000)
    assert free_on_host(tmp_path, mine) == left


def test_the_first_version(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("3:cpu:/other\n2:memory:/job\n0::/\n")
    names = ("memory.limit_in_bytes", "9000", "memory.usage_in_bytes")
    written(tmp_path / "memory" / "job", *names, 2000)
    assert free_on_host(tmp_path, mine) == 7000


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    found = free_on_host(tmp_path, tmp_path / "none")
    assert found == pytest.approx(psutil.virtual_memory().available, rel=0.5)
    assert free_on_host() <= psutil.virtual_memory().total

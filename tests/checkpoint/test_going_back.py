"""Whoever goes back to an older checkpoint has what comes of it saved; what came after it before is
set aside, and told."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import axrt
from axrt.checkpoint.folder import candidates_in, checkpoint_in
from axrt.checkpoint.lock import DirectoryLock
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..mpi.mpirun import ROOT
from .test_damage import BATCHES, engine_on, weights_of


def train_and_save(engine: axrt.Engine, folder: Path, until: int) -> None:
    while engine.step < until:
        engine.train_batch(iter(BATCHES(engine.step % 2)))
        engine.save_checkpoint(folder / f"step-{engine.step}")


def test_what_came_after_is_set_aside_by_the_first_save_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine_on() as engine:
        train_and_save(engine, tmp_path, 4)
    with engine_on() as engine:
        engine.load_checkpoint(tmp_path / "step-2")
        # who only looks changes nothing
        assert [one.step for one in candidates_in(tmp_path)] == [
            4,
            3,
            2,
            1,
        ]
        engine.train_batch(iter(BATCHES(0)))
        engine.save_checkpoint(tmp_path / "step-3")
        mine = weights_of(engine)
    aside = tmp_path / "set-aside-after-step-00000002"
    assert f"set aside: step-4, step-3 now in {aside}" in capsys.readouterr().err
    assert [one.step for one in candidates_in(aside)] == [4, 3]
    with engine_on() as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.loaded_from == tmp_path / "step-3"
        assert all(bool((value == mine[name]).all()) for name, value in weights_of(engine).items())
        engine.load_checkpoint(tmp_path / "step-1")
        train_and_save(engine, tmp_path, 2)
        engine.load_checkpoint(tmp_path / "step-1")
        train_and_save(engine, tmp_path, 3)
    assert sorted(path.name for path in tmp_path.glob("set-aside*")) == [
        "set-aside-after-step-00000001",
        "set-aside-after-step-00000001-2",
        "set-aside-after-step-00000002",
    ]


def test_on_many_ranks_too(tmp_path: Path) -> None:
    def rank_main(transport: Transport) -> None:
        with engine_on(transport) as engine:
            train_and_save(engine, tmp_path, 3)
            engine.load_checkpoint(tmp_path / "step-1")
            train_and_save(engine, tmp_path, 2)

    LocalWorld(2).run(rank_main)
    assert [one.step for one in candidates_in(tmp_path)] == [2, 1]


def test_a_name_that_no_going_back_frees_stays_taken(tmp_path: Path) -> None:
    with engine_on() as engine:
        train_and_save(engine, tmp_path, 2)
        engine.load_checkpoint(tmp_path / "step-1")
        with pytest.raises(
            axrt.ConfigError, match="step-1 exists; expected the name of a new checkpoint"
        ):
            engine.save_checkpoint(tmp_path / "step-1")


def test_what_came_after_stands_where_the_new_one_cannot_be_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with engine_on() as engine:
        train_and_save(engine, tmp_path, 3)
        engine.load_checkpoint(tmp_path / "step-1")
        with monkeypatch.context() as patched:
            patched.setattr("axrt.checkpoint.manifest.Manifest.write", full)
            with pytest.raises(axrt.SaveError, match="No space left"):
                train_and_save(engine, tmp_path, 2)
        assert [one.step for one in candidates_in(tmp_path)] == [3, 2, 1]
        engine.save_checkpoint(tmp_path / "step-2")
    assert [one.step for one in candidates_in(tmp_path)] == [2, 1]


def test_a_damaged_newest_one_makes_way(tmp_path: Path) -> None:
    with engine_on() as engine:
        train_and_save(engine, tmp_path, 3)
    (tmp_path / "step-3" / "layer-0001.safetensors").write_bytes(b"")
    for _ in range(2):
        with engine_on() as engine:
            engine.load_checkpoint(tmp_path)
            train_and_save(engine, tmp_path, 3)
    assert (tmp_path / "set-aside-after-step-00000002" / "step-3").is_dir()
    with engine_on() as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.step == 3


def test_going_back_to_what_was_set_aside_sets_aside_the_other_branch(tmp_path: Path) -> None:
    """By another spelling of the folder, too."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    folder = tmp_path / "real"
    with engine_on() as engine:
        train_and_save(engine, folder, 4)
        engine.load_checkpoint(tmp_path / "link" / "step-1")
        train_and_save(engine, folder, 6)
        first = folder / "set-aside-after-step-00000001"
        assert [one.step for one in candidates_in(first)] == [4, 3, 2]
        engine.load_checkpoint(first / "step-2")
        train_and_save(engine, folder, 3)
    assert [one.step for one in candidates_in(folder)] == [3, 2, 1]
    assert [one.step for one in candidates_in(folder / "set-aside-after-step-00000002")] == [
        6,
        5,
        4,
        3,
    ]
    assert [one.step for one in candidates_in(first)] == [4, 3, 2]


def test_a_latest_that_cannot_be_written_fails_no_save(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with engine_on() as engine:
        train_and_save(engine, tmp_path, 2)
        engine.load_checkpoint(tmp_path)
        assert engine.step == 2


def test_a_neighbour_of_another_format_is_refused_where_it_is_the_newest_and_harms_no_save(
    tmp_path: Path,
) -> None:
    def rank_main(transport: Transport) -> None:
        with engine_on(transport) as engine:
            train_and_save(engine, tmp_path, 2)
            engine.load_checkpoint(tmp_path / "step-1")
            if engine.is_main:
                (tmp_path / "old-0").mkdir()
                (tmp_path / "old-0" / "manifest.json").write_text('{"format": 1}')
            train_and_save(engine, tmp_path, 2)
            engine.load_checkpoint(tmp_path)
            assert engine.step == 2

    LocalWorld(2).run(rank_main)
    (tmp_path / "old-0").rename(tmp_path / "old-9")
    with (
        engine_on() as engine,
        pytest.raises(axrt.ConfigError, match="old-9/manifest.json is of another format"),
    ):
        engine.load_checkpoint(tmp_path)


def test_one_that_says_to_be_older_than_it_is_makes_way_too(tmp_path: Path) -> None:
    """With the manifest of an older one it is damaged, and its own step is not known."""
    with engine_on() as engine:
        train_and_save(engine, tmp_path, 3)
    shutil.copy(tmp_path / "step-1" / "manifest.json", tmp_path / "step-3" / "manifest.json")
    with engine_on() as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.step == 2
        train_and_save(engine, tmp_path, 3)
        engine.load_checkpoint(tmp_path)
        assert engine.step == 3


def test_the_newest_is_told_by_its_step_not_by_latest_nor_by_time_nor_by_name(
    tmp_path: Path,
) -> None:
    with engine_on() as engine:
        train_and_save(engine, tmp_path, 2)
        engine.train_batch(iter(BATCHES(0)))
        engine.save_checkpoint(tmp_path / "a")
        (tmp_path / "latest").write_text("step-2\n")  # as a kill between the two leaves it
        for name in ("step-1", "step-2"):
            os.utime(tmp_path / name / "manifest.json")
        assert engine.load_checkpoint(tmp_path) == {}
        assert engine.loaded_from == tmp_path / "a"
        (tmp_path / "latest").unlink()
        assert checkpoint_in(tmp_path) == tmp_path / "a"


def test_where_there_is_none_that_may_be_fine(tmp_path: Path) -> None:
    with engine_on() as engine:
        for folder in (tmp_path / "nowhere", tmp_path):
            assert engine.load_checkpoint(folder, missing_ok=True) is None
            with pytest.raises(
                axrt.ConfigError, match="nowhere does not exist|has no whole checkpoint"
            ):
                engine.load_checkpoint(folder)


HOLDS = """
import sys, time
from pathlib import Path
from axrt.checkpoint.lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_directory_that_another_process_writes_to_is_refused_by_its_name_until_it_dies(
    tmp_path: Path,
) -> None:
    copy = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert copy.stdout is not None
    assert copy.stdout.readline() == "held\n"
    with engine_on() as engine:
        engine.train_batch(iter(BATCHES(0)))
        with pytest.raises(
            axrt.ConfigError,
            match=f"is written to by process {copy.pid} on {os.uname().nodename}",
        ):
            engine.save_checkpoint(tmp_path / "a")
        assert not (tmp_path / "a.partial").exists()
        copy.kill()
        copy.communicate()
        # it is stale, and taken over
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == copy.pid
        engine.save_checkpoint(tmp_path / "a")


def test_what_another_host_holds_is_refused_until_nobody_renews_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, said = (
        tmp_path / ".lock",
        {"host": "another", "pid": 1, "started": 1.0, "job": "17", "restart": 0},
    )
    lock.write_text(json.dumps(said))
    for job, restart in (("", "0"), ("18", "1"), ("17", "0")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        with pytest.raises(
            axrt.ConfigError,
            match=r"is written to by process 1 on another; .* wait 300 s, or remove .*\.lock",
        ):
            DirectoryLock(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # the same job, queued again
    held = DirectoryLock(tmp_path)
    assert json.loads(lock.read_text())["pid"] == os.getpid()
    held.release()
    assert lock.read_bytes() == b""
    monkeypatch.delenv("SLURM_JOB_ID")
    lock.write_text(json.dumps(said))
    os.utime(lock, (lock.stat().st_mtime - 301,) * 2)
    DirectoryLock(tmp_path).release()
    # A time in the future says nothing; what is documented is waited for from now on.
    lock.write_text(json.dumps(said))
    os.utime(lock, (time.time() + 1e6,) * 2)
    with pytest.raises(axrt.ConfigError, match="is written to by process 1 on another"):
        DirectoryLock(tmp_path)
    assert lock.stat().st_mtime <= time.time() + 1
    os.utime(lock, (lock.stat().st_mtime - 301,) * 2)
    DirectoryLock(tmp_path).release()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]

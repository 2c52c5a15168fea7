"""`axrt inspect` asks a run that is under way, in which one rank has stopped."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from .mpirun import Ended, run
from .test_offload import ranks_of
from .test_runs import begin, end


def inspect(folder: Path, *arguments: str) -> Ended:
    return run([sys.executable, "-m", "axrt", "inspect", "out", *arguments], 60, cwd=folder)


def answers(folder: Path) -> dict[int, dict[str, Any]]:
    asked = inspect(folder, "--json")
    assert asked.code == 0, asked.err
    return {one["rank"]: one for one in json.loads(asked.out)}


def test_the_one_that_everyone_waits_for_is_named(tmp_path: Path) -> None:
    job = begin(tmp_path, 2, "model.layers=2")
    try:
        found = answers(tmp_path)
        assert sorted(found) == [0, 1]
        assert all(one["size"] == 2 for one in found.values())
        asked = inspect(tmp_path, "--stacks")
        assert asked.out.count("thread MainThread:") == 2
        by_number = {one["rank"]: one["pid"] for one in found.values()}
        assert set(by_number.values()) == set(ranks_of(job.pid))
        os.kill(by_number[1], signal.SIGSTOP)
        time.sleep(1)
        asked = inspect(tmp_path)
        os.kill(by_number[1], signal.SIGCONT)
        assert "1     no answer" in asked.out
        assert "rank 0 waits in the end for rank 1, which has given no answer" in asked.out
        assert not (tmp_path / "out" / ".inspect").exists()
    finally:
        code, _, err = end(job, signal.SIGUSR1)
    assert code == 75, err


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_same_is_told_when_the_patience_ends(tmp_path: Path) -> None:
    told: list[str] = []
    settings = ("model.layers=4", "run.patience_s=4", "run.steps=100000")
    with begin(tmp_path, 3, *settings) as job:
        found = answers(tmp_path)
        os.kill(found[2]["pid"], signal.SIGSTOP)
        assert job.stderr is not None
        reading = threading.Thread(target=told.extend, args=(job.stderr,))
        reading.start()
        # Open MPI's mpirun says nothing before it has ended, and waits for every rank.
        deadline = time.monotonic() + 120
        while not has_ended(found[0]["pid"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.kill(found[2]["pid"], signal.SIGKILL)
        assert job.wait(timeout=150) != 0
        reading.join()
    err = "".join(told)
    assert "has shown no sign of life" in err
    assert "2     no answer" in err
    assert "wait in the end for rank 2, which has given no answer" in err


def test_a_directory_of_no_run_is_said(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    asked = inspect(tmp_path, "--within", "0.5")
    assert (asked.code, list((tmp_path / "out").iterdir())) == (69, []), "nothing is left there"
    assert "nobody answers in out within 0.5 s; expected" in asked.err


def test_of_a_run_that_has_ended_its_state_is_said(tmp_path: Path) -> None:
    run = tmp_path / "out"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": 1.5}\n')
    (run / "config.toml").write_text("[run]\nsteps = 4\n")
    asked = inspect(tmp_path, "--within", "0.5")
    assert asked.code == 69
    assert "nobody answers in out within 0.5 s, and its run is at step 4, done; expe" in asked.err

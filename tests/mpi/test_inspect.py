"""`axrt inspect` asks a run that is under way, in which one rank has stopped.

Nothing else asks ranks of another process, nor shows that what inspection says is said by itself
when the patience ends. One job is asked for all of it.
"""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from axrt.cli import main

from .runs import LIMIT_S, begin, ranks_of

# Steps in which ranks mostly sleep, so that they leave the machine to whoever asks.
SLOW = """
import time
from torch import nn
import axrt
from axrt.models.gpt import gpt

class Sleep(nn.Module):
    def forward(self, value):
        time.sleep(0.02)
        return value

def model(config):
    of = gpt(config)
    return axrt.PipelineModule([*of.layers[:-1], axrt.LayerSpec(Sleep), of.layers[-1]], of.loss_fn)
"""
# An answer takes a tenth of a second, and the patience is longer than all that is asked meanwhile.
WITHIN, PATIENCE = "3", "run.patience_s=8"


def inspect(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["inspect", str(folder / "out"), *arguments])


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_one_that_everyone_waits_for_is_named_also_when_the_patience_ends(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    (tmp_path / "slow.py").write_text(SLOW)
    with begin(tmp_path, 3, "model.layers=2", "model.factory=slow:model", PATIENCE) as job:
        asked = inspect(tmp_path, "--json", "--within", "60")
        assert asked.exit_code == 0, asked.output
        found = {one["rank"]: one for one in json.loads(asked.output)}
        assert sorted(found) == [0, 1, 2]
        assert all(one["size"] == 3 for one in found.values())
        assert {one["pid"] for one in found.values()} == set(ranks_of(job.pid))
        stacks = inspect(tmp_path, "--stacks", "--within", "60").output
        assert stacks.count("thread MainThread:") == 3

        os.kill(found[2]["pid"], signal.SIGSTOP)
        said = inspect(tmp_path, "--within", WITHIN).output
        assert "2     no answer" in said
        assert "in the end for rank 2, which has given no answer" in said
        assert not (tmp_path / "out" / ".inspect").exists()

        assert job.stderr is not None
        reading = threading.Thread(target=told.extend, args=(job.stderr,))
        reading.start()
        # Open MPI's mpirun says nothing before it has ended, and waits for every rank.
        deadline = time.monotonic() + LIMIT_S
        while not has_ended(found[0]["pid"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.kill(found[2]["pid"], signal.SIGKILL)
        assert job.wait(timeout=LIMIT_S) != 0
        reading.join()
    err = "".join(told)
    assert "has shown no sign of life" in err
    assert "2     no answer" in err
    assert "wait in the end for rank 2, which has given no answer" in err


def test_a_directory_of_no_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    asked = CliRunner().invoke(main, ["inspect", "out", "--within", "0.5"])
    assert (asked.exit_code, list(Path("out").iterdir())) == (69, []), "nothing is left there"
    assert "nobody answers in out within 0.5 s; expected" in asked.output


def test_of_a_run_that_has_ended_its_state_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    Path("out/metrics.jsonl").write_text('{"step": 4, "loss": 1.5}\n')
    Path("out/config.toml").write_text("[run]\nsteps = 4\n")
    asked = CliRunner().invoke(main, ["inspect", "out", "--within", "0.5"])
    assert asked.exit_code == 69
    assert (
        "nobody answers in out within 0.5 s, and its run is at step 4, done; expe" in asked.output
    )

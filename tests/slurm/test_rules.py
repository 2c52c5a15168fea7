"""What scripts/slurm/pretrain.sbatch does after each end of a step; stand-ins for srun and
scontrol, so no Slurm is needed."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ..mpi.mpirun import ROOT

SCRIPT = ROOT / "scripts" / "slurm" / "pretrain.sbatch"
# The step that trains is the one with --mpi. It waits for a signal where it is asked to.
SRUN = """#!/bin/bash
case "$*" in *--mpi=*) ;; *) exit 0 ;; esac
trap 'got=1' USR1
[ -z "$STANDIN_WAITS" ] || touch ready
while [ -n "$STANDIN_WAITS" ] && { [ -z "$got" ] || [ ! -e all ]; }; do sleep 0.02; done
[ -z "$STANDIN_AXRT" ] || echo "$STANDIN_AXRT" > "$AXRT_EXIT_FILE"
exit "$STANDIN_SRUN"
"""
SCONTROL = '#!/bin/sh\necho "$@" >> told\n'


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)


def ended(folder: Path, srun: int, axrt: int | None, *told: signal.Signals) -> tuple[int, bool]:
    """With which code the script ends, and whether it has queued the job again."""
    standin = {
        "STANDIN_SRUN": str(srun),
        "STANDIN_AXRT": "" if axrt is None else str(axrt),
        "STANDIN_WAITS": "yes" if told else "",
    }
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    for left in ("told", "ready", "all"):
        (folder / left).unlink(missing_ok=True)
    script = subprocess.Popen(
        ["bash", str(SCRIPT), "tiny.toml", "runs/mine"],
        cwd=folder,
        env={**os.environ, **standin, **job, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
    )
    if told:
        while not (folder / "ready").exists():
            time.sleep(0.01)
        for one in told:
            script.send_signal(one)
            time.sleep(0.005)  # so that the shell hears them in this order
        (folder / "all").touch()
    code = script.wait(120)
    return code, (folder / "told").exists() and (folder / "told").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    "key", ["checkpoint.resume=runs/mine/checkpoints/step-00000100", "run.out=elsewhere"]
)
def test_what_would_go_back_at_every_start_is_refused(tmp_path: Path, key: str) -> None:
    ended = subprocess.run(
        ["bash", str(SCRIPT), "tiny.toml", "runs/mine", "optimizer.lr=1", key],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert (
        "checkpoint.resume and run.out are set by this script; go back by hand, once"
        in ended.stderr
    )


@pytest.mark.parametrize(
    ("srun", "axrt", "code", "again"),
    [
        (0, 0, 0, False),  # done
        (143, 0, 0, False),  # done, but a rank was slow to leave
        (0, None, 0, True),  # nobody has said that all is done
        (2, 2, 2, False),
        (137, 2, 2, False),
        (137, 70, 70, False),  # failed, and srun has killed the others
        (143, 75, 75, True),  # saved, and a rank was slow to leave
        (130, 130, 130, False),  # interrupted, nothing to save to
        (137, 69, 69, True),
        (137, None, 137, True),
        (139, None, 139, True),
        (1, None, 1, False),  # of srun itself
        (127, None, 127, False),  # no such command
        (14, None, 14, True),  # Slurm was faster than the shell of the rank that was lost
        (14, 137, 137, True),
        (14, 1, 1, False),  # a rank's shell has said that Python could not start
    ],
)
def test_the_code_of_axrt_decides_and_without_one_the_signal_that_srun_tells(
    tmp_path: Path, srun: int, axrt: int | None, code: int, again: bool
) -> None:
    assert ended(tmp_path, srun, axrt) == (code, again)


@pytest.mark.parametrize(
    ("told", "srun", "axrt", "expected"),
    [
        (signal.SIGUSR1, 75, 75, (75, True)),
        (signal.SIGUSR1, 137, None, (137, True)),  # it met ranks that were still starting
        (signal.SIGUSR1, 0, 0, (0, False)),  # it met the last step
        (signal.SIGUSR1, 137, 70, (70, False)),
        (signal.SIGTERM, 75, 75, (75, False)),  # Slurm itself decides
        (signal.SIGTERM, 137, None, (137, False)),
    ],
)
def test_a_signal_to_the_script_reaches_the_step(
    tmp_path: Path, told: signal.Signals, srun: int, axrt: int | None, expected: tuple[int, bool]
) -> None:
    assert ended(tmp_path, srun, axrt, told) == expected


def test_a_job_that_slurm_ends_is_not_queued_again_though_it_sends_both_signals(
    tmp_path: Path,
) -> None:
    assert ended(tmp_path, 75, 75, signal.SIGTERM, signal.SIGUSR1) == (75, False)
    assert ended(tmp_path, 75, 75, signal.SIGUSR1, signal.SIGTERM) == (75, False)


def test_a_rank_may_be_lost_three_times_at_one_checkpoint_and_again_at_the_next(
    tmp_path: Path,
) -> None:
    latest = tmp_path / "runs" / "mine" / "checkpoints" / "latest"
    latest.parent.mkdir(parents=True)
    found = []
    for checkpoint in ("step-00000010", "step-00000020"):
        latest.write_text(f"{checkpoint}\n")
        found.append([ended(tmp_path, 137, None)[1] for _ in range(4)])
    assert found == [[True, True, True, False]] * 2

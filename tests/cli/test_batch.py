"""`axrt slurm` and `axrt pbs`: what their scripts ask for. tests/slurm submits one."""

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main

from .test_train import in_a_directory

__all__ = ["in_a_directory"]  # a fixture


def axrt(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("kind", ["slurm", "pbs"])
def test_a_script_asks_for_what_was_said_and_bash_reads_it(kind: str, in_a_directory: Path) -> None:
    result = axrt(
        *(kind, "tiny.toml", "model.width=16", "model.layers=10", "--nodes=3"),
        "run.out=my runs/one",
        *("--gpus-per-node=4", "--cores-per-rank=8", "--time=02:00:00", "--partition=fast"),
        *("--account=me", "--module=cuda/12", "--module=mpi", "--python=/env/bin/python"),
        "--dry-run",
    )
    assert result.exit_code == 0, result.output
    asked = {
        "slurm": [
            *("--nodes=3", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=8"),
            *("--time=02:00:00", "--partition=fast", "--account=me", "--requeue"),
        ],
        "pbs": [
            *("-l select=3:mpiprocs=4:ncpus=32:ngpus=4", "-l walltime=02:00:00"),
            *("-q fast", "-A me", "mpirun -n 12"),
        ],
    }[kind]
    for words in (*asked, "module load cuda/12", "module load mpi", "/env/bin/python"):
        assert words in result.output, words
    lines = result.output.splitlines()
    doctor = next(n for n, line in enumerate(lines) if "axrt doctor" in line)
    train = next(n for n, line in enumerate(lines) if "axrt train" in line)
    assert doctor < train
    assert "'my runs/one'" in result.output or "'run.out=my runs/one'" in result.output
    checked = subprocess.run(["bash", "-n"], input=result.output, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert not list(in_a_directory.glob("**/*.sbatch"))


def test_the_script_is_kept_where_nobody_can_submit_it(
    monkeypatch: pytest.MonkeyPatch, in_a_directory: Path
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = axrt("pbs", "tiny.toml")
    assert "out.pbs is written; there is no qsub here" in result.output
    assert (in_a_directory / "out.pbs").read_text().startswith("#!/usr/bin/env bash\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("tiny.toml", "model.widht=8"), "did you mean model.width?"),
        (("tiny.toml", "checkpoint.resume=auto"), "checkpoint.resume is set by the script"),
        (("nowhere.toml",), "nowhere.toml"),
        (("tiny.toml", "--nodes=4"), "axrt: on 4 ranks: 3 layers cannot fill 4 stages"),
        (
            ("tiny.toml", "model.layers=9", "--nodes=2", "--gpus-per-node=4", "parallel.data=3"),
            "axrt: on 8 ranks: 8 ranks do not factor into",
        ),
    ],
)
def test_what_cannot_train_is_not_submitted(arguments: tuple[str, ...], text: str) -> None:
    result = axrt("slurm", *arguments)
    assert (result.exit_code, text in result.output) == (2, True), result.output


@pytest.mark.parametrize("more", ["schedule.policy=on_the_nodes:Mine", "run.survive=true"])
def test_what_is_known_on_the_nodes_alone_is_not_looked_at(more: str) -> None:
    result = axrt("slurm", "tiny.toml", "--nodes=4", more, "--dry-run")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        *(("90", 5400), ("90:30", 5430), ("12:00:00", 43200), ("100:00:01", 360001)),
        *(("2-03", 183600), ("1-00:30", 88200), ("0-01:02:03", 3723)),
        *(("foo", 0), ("", 0), ("1:2:3:4", 0), ("-5", 0), ("12h", 0), ("00:00:00", 0)),
    ],
)
def test_a_time_limit_is_one_of_slurms(time: str, seconds: int) -> None:
    result = axrt("pbs", "tiny.toml", f"--time={time}", "--dry-run")
    if seconds:
        hours, minutes = divmod(seconds // 60, 60)
        assert f"-l walltime={hours:02}:{minutes:02}:{seconds % 60:02}\n" in result.output
        return
    assert result.exit_code == 2
    assert f"--time {time!r}; expected a time limit" in result.output
    assert axrt("slurm", "tiny.toml", f"--time={time}", "--dry-run").exit_code == 2


def test_a_job_of_pbs_is_asked_to_save_before_its_time_is_over(in_a_directory: Path) -> None:
    """Of its two seconds the first one: that is the time in which it saves."""
    tools = {
        "mpirun": "exit 0",
        "python": "trap 'echo asked; exit 75' USR1\nfor _ in {1..500}; do sleep 0.02; done",
    }
    for name, script in tools.items():
        (in_a_directory / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (in_a_directory / name).chmod(0o755)
    made = axrt("pbs", "tiny.toml", "--time=0:02", "--python=./python", "--dry-run").output
    variables = {"PATH": f"{in_a_directory}:{os.environ['PATH']}", "PBS_O_WORKDIR": "."}
    ran = subprocess.run(["bash", "-c", made], env=variables, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (75, "asked\n"), ran.stderr

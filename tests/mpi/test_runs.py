"""`axrt train` on a job of ranks: trained on four, interrupted, gone on with on two, read by
one."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axrt.checkpoint.folder import checkpoint_in
from axrt.checkpoint.manifest import Manifest
from axrt.scheduler.timeline import Timeline

from ..cli.test_train import TINY
from ..sweeps import first
from .mpirun import COMPILES, environment, is_open_mpi, launcher, mpirun, run

ENDLESS = "run.steps=100000"


def lines(run_directory: Path) -> list[dict[str, float]]:
    try:
        return [
            json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()
        ]
    except OSError:
        return []


def write_files(folder: Path) -> None:
    """Write the settings of a tiny model, and text to train it on."""
    (folder / "tiny.toml").write_text(TINY)
    (folder / "text.txt").write_text("all work and no play " * 20)


def begin(folder: Path, ranks: int, *overrides: str) -> subprocess.Popen[str]:
    """Start a run that goes on until it is told to end, and wait for its first steps."""
    write_files(folder)
    job = subprocess.Popen(
        [
            launcher(),
            "-n",
            str(ranks),
            sys.executable,
            "-m",
            "axrt",
            "train",
            "tiny.toml",
            ENDLESS,
            *overrides,
        ],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while max((line["step"] for line in lines(folder / "out")), default=0) < 10:
        if job.poll() is not None or time.monotonic() > deadline:
            job.terminate()
            raise AssertionError(f"the run does not run: {job.communicate(timeout=10)}")
        time.sleep(0.05)
    return job


def end(job: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, str]:
    job.send_signal(number)
    out, err = job.communicate(timeout=60)
    return job.returncode, out, err


def test_four_ranks_train_are_interrupted_two_go_on_and_one_generates(tmp_path: Path) -> None:
    layout = ("model.layers=2", "schedule.microbatches=2", "schedule.global_batch=4")
    job = begin(tmp_path, 4, *layout, "parallel.pipe=2", "parallel.data=2", "optimizer.clip=1")
    code, out, err = end(job, signal.SIGUSR1)
    assert code == 75, err
    checkpoint = checkpoint_in(tmp_path / "out")
    step = Manifest.read(checkpoint).step
    assert step >= 10
    assert (
        f"interrupted after step {step}; configuration and metrics are in out, the checkpoint in "
        f"{checkpoint.relative_to(tmp_path)}" in out
    )
    assert "go on with: mpirun -n 4 axrt train out/config.toml checkpoint.resume=auto" in out
    assert err.count("Traceback") == 0

    more = (
        "checkpoint.resume=auto",
        "schedule.policy=auto",
        "run.trace_steps=2",
        f"run.steps={step + 5}",
        "run.log_every=1",
        "parallel.data=1",
        "schedule.microbatches=4",
    )
    ended = mpirun(2, ["-m", "axrt", "train", "out/config.toml", *more], cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert f"going on from {checkpoint.relative_to(tmp_path)} at step {step}" in ended.out
    assert "auto chose " in ended.out
    assert "timeline of 2 steps in out/timeline.svg" in ended.out
    line = Timeline.from_json((tmp_path / "out" / "timeline.json").read_text())
    assert {task.microbatch // 4 for _, task, _, _ in line.computing()} == {step + 1, step + 2}
    assert 0 < line.utilisation < 1
    assert [
        line["step"] for line in lines(tmp_path / "out") if "loss" in line and line["step"] > step
    ] == [step + k for k in range(1, 6)]
    assert Manifest.read(checkpoint_in(tmp_path / "out")).samples == 4 * (step + 5)

    told = run(
        [sys.executable, "-m", "axrt", "generate", "out", "--prompt", "all ", "--tokens", "20"],
        60,
        tmp_path,
    )
    assert told.code == 0, told.err
    assert told.out.startswith("all ")


def test_a_pipeline_writes_what_one_process_does(tmp_path: Path) -> None:
    """Of a model whose embedding and head are tied; then ranks have no layer left."""
    write_files(tmp_path)
    train = ["-m", "axrt", "train", "tiny.toml", "model.tied=true", "run.steps=8"]
    train += ["checkpoint.every=4"]
    ended = mpirun(1, train, cwd=tmp_path)
    assert ended.code == 0, ended.err
    (tmp_path / "prompts").write_text("all\nwork and no play\n\nno\n")
    command = ["-m", "axrt", "generate", "out", "--prompts", "prompts", "--tokens", "12"]
    alone = run([sys.executable, *command], 60, tmp_path)
    several = mpirun(3, command, cwd=tmp_path)
    assert (several.code, several.out) == (0, alone.out), several.err
    assert len(alone.out.splitlines()) == 3
    newest, before = tmp_path / "out/checkpoints/step-00000008", several.out
    damaged = newest / "layer-0002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    older = mpirun(3, command, cwd=tmp_path)
    assert older.code == 0, older.err
    assert older.err.count("damaged, and not taken: ") == 1, "all ranks take the same one"
    assert older.out == run([sys.executable, *command], 60, tmp_path).out != before
    refused = mpirun(5, command, cwd=tmp_path)
    assert refused.code == 2
    assert "layers" in refused.err


def test_ctrl_c_saves_where_the_launcher_waits_and_harms_no_checkpoint_where_it_does_not(
    tmp_path: Path,
) -> None:
    job = begin(tmp_path, 2, "model.layers=2", "checkpoint.every=5")
    code, out, err = end(job, signal.SIGINT)
    step = Manifest.read(checkpoint_in(tmp_path / "out")).step
    assert step >= 5
    if is_open_mpi():  # its mpirun ends the ranks half a second later, done or not
        assert step % 5 == 0 or f"interrupted after step {step}" in out
    else:
        assert code == 75, err
        assert f"interrupted after step {step}" in out


@pytest.mark.parametrize("number", first([signal.SIGINT, signal.SIGUSR1]))
def test_a_signal_to_a_group_with_loader_workers_saves_without_a_launcher(
    tmp_path: Path, number: signal.Signals
) -> None:
    write_files(tmp_path)
    command = [
        sys.executable,
        "-m",
        "axrt",
        "train",
        "tiny.toml",
        ENDLESS,
        "data.workers=2",
        "checkpoint.every=0",
    ]
    job = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while len(lines(tmp_path / "out")) < 3 and job.poll() is None:
        time.sleep(0.05)
    os.killpg(job.pid, number)
    out, err = job.communicate(timeout=60)
    assert err == ""
    assert job.returncode == 75
    assert f"interrupted after step {Manifest.read(checkpoint_in(tmp_path / 'out')).step}" in out


@pytest.mark.parametrize("ranks", first([3, 1]))
def test_doctor_looks_at_all_ranks_and_measures_between_them(ranks: int) -> None:
    ended = mpirun(ranks, ["-m", "axrt", "doctor", "--json"])
    found = json.loads(ended.out)
    assert len(found["ranks"]) == ranks
    assert [facts["mpi"]["rank"] for facts in found["ranks"]] == list(range(ranks))
    assert [(link["source"], link["target"]) for link in found["links"]] == [
        (rank, rank + 1) for rank in range(ranks - 1)
    ]
    assert all(link["gb_per_s"] > 0 for link in found["links"])
    assert not [finding for finding in found["findings"] if finding["level"] == "problem"]


SLOW_START = """
import time
from torch import nn
from torch._dynamo.backends.registry import register_backend
import axrt
from axrt.models.gpt import gpt

class Slow(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        print("waiting", flush=True)
        time.sleep(60)

@register_backend
def stuck(graph, inputs):
    print("waiting", flush=True)
    time.sleep(60)

def slow(config):
    return axrt.PipelineModule([axrt.LayerSpec(Slow)] * 2, nn.functional.mse_loss)

def quick(config):
    return gpt(config)
"""


@pytest.mark.parametrize(
    "settings",
    [["model.factory=slow:slow"], ["model.factory=slow:quick", "run.compile=stuck"]],
    ids=["building", "compiling"],
)
def test_ctrl_c_before_the_first_step_ends_at_once(tmp_path: Path, settings: list[str]) -> None:
    """There is nothing to save."""
    write_files(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW_START)
    command = [launcher(), "-n", "2", sys.executable, "-m", "axrt", "train", "tiny.toml"]
    job = subprocess.Popen(
        [*command, *settings],
        cwd=tmp_path,
        env=environment({"AXRT_EXIT_FILE": str(tmp_path / "code"), COMPILES: "yes"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    while job.stdout.readline() != "waiting\n":
        assert job.poll() is None, job.communicate()
    began = time.monotonic()
    end(job, signal.SIGINT)
    assert time.monotonic() - began < 20
    if not is_open_mpi():  # its mpirun ends the ranks half a second later, done or not
        assert (tmp_path / "code").read_text() == "130\n"
    assert not (tmp_path / "out").exists()


SLOW_STEPS = """
import time
from torch import nn
import axrt
from axrt.models.gpt import gpt

class Slow(nn.Module):
    calls = 0

    def forward(self, value):
        Slow.calls += 1
        if Slow.calls > 5:  # the first ones are not of steps: operations are counted
            print("in a step", flush=True)
            time.sleep(60)
        return value

def model(config):
    of = gpt(config)
    return axrt.PipelineModule([*of.layers[:-1], axrt.LayerSpec(Slow), of.layers[-1]], of.loss_fn)
"""


def test_ctrl_c_twice_ends_a_step_that_lasts(tmp_path: Path) -> None:
    """The first one waits for the end of the step; one more than a second later does not."""
    write_files(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW_STEPS)
    command = [sys.executable, "-m", "axrt", "train", "tiny.toml", "model.factory=slow:model"]
    job = subprocess.Popen(
        [*command, "run.eval_every=0", "data.held_out=0"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    while job.stdout.readline() != "in a step\n":
        assert job.poll() is None, job.communicate()
    job.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(2.0)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=20)
    assert job.returncode == 130


def test_a_start_says_where_it_comes_from_and_its_command_repeats_it(tmp_path: Path) -> None:
    write_files(tmp_path)
    if shutil.which("git") is None:
        pytest.skip("no git here")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path))
    plain = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    for words in (("init", "-q"), ("add", "tiny.toml"), ("commit", "-qm", "first")):
        subprocess.run([*git, *words], check=True, env=plain)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    settings = ["run.seed=5", "run.log_every=1"]
    assert mpirun(2, ["-m", "axrt", "train", "tiny.toml", *settings], cwd=tmp_path).code == 0
    (tmp_path / "tiny.toml").write_text(TINY + "# changed\n")
    (start,) = (tmp_path / "out/starts.jsonl").read_text().splitlines()
    told = json.loads(start)
    assert told["commit"] == commit
    assert told["directory"] == str(tmp_path)
    assert told["hosts"] == [socket.gethostname()] * 2
    assert len(set(told["pids"])) == 2
    assert (told["seed"], told["step"], told["schedule"]["policy"]) == (5, 0, "zb-h1")
    assert told["versions"].keys() == {"python", "torch", "numpy", "axrt"}
    assert told["command"] == "mpirun -n 2 axrt train tiny.toml run.seed=5 run.log_every=1"
    words = told["command"].split()[4:]
    assert mpirun(2, ["-m", "axrt", *words, "run.out=again"], cwd=tmp_path).code == 0
    assert losses(tmp_path / "again") == losses(tmp_path / "out")
    again = json.loads((tmp_path / "again/starts.jsonl").read_text())
    assert again["commit"] == f"{commit}+", "a file has changed since"


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run) if "loss" in line]


def test_a_run_with_more_ranks_than_cores_says_so(tmp_path: Path) -> None:
    write_files(tmp_path)
    on_one_core = ["import os, runpy", "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"]
    (tmp_path / "one.py").write_text("\n".join([*on_one_core, "runpy.run_module('axrt')\n"]))
    said = mpirun(2, ["one.py", "train", "tiny.toml"], cwd=tmp_path)
    assert said.code == 0, said.err
    assert "2 ranks share 1 cores: they take turns" in said.err + said.out

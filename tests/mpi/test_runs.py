"""`axrt train` on a job of ranks: killed or interrupted in its midst, gone on with in another
layout, and held beside the same run in peace.

Nothing else kills ranks that hold state, weights or activations on a disk or on the host, or in
shards; nor sends signals to a launcher, or to ranks that build, compile or compute. Each of those
is a job of its own. All runs that go on, or that nobody disturbs, have one job (`trials.py`).
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from axrt.checkpoint.folder import checkpoint_in
from axrt.checkpoint.manifest import Manifest
from axrt.scheduler.simulation.timeline import Timeline

from ..cli.test_train import TINY
from ..sweeps import first, is_full
from .jobs import ends
from .mpirun import Ended, environment, is_open_mpi, launcher
from .runs import (
    ENDLESS,
    LIMIT_S,
    TRAIN,
    alone,
    begin,
    files_in,
    last_told,
    lines,
    ranks_of,
    told,
    write_files,
)
from .trials import Trial

EVERY, STEPS = 5, 14
LAYOUT = (
    *("model.layers=3", "memory.bucket_mb=0.05", "optimizer.clip=0.5", "run.log_every=1"),
    f"checkpoint.every={EVERY}",
    "run.eval_every=7",
)
NARROW = ("precision.weights=bfloat16", "precision.gradients=weights")
REPLICAS = ("parallel.data=2", "schedule.microbatches=2")
DISK = "memory.scratch=disk:scratch"


@dataclass(frozen=True)
class Run:
    """A run that is killed and goes on.

    Args:
        both: settings that it shares with a run which nobody disturbs.
        away: settings by which ranks hold something elsewhere.
        later: settings with which it goes on.
        ranks: number of ranks.
    """

    both: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    ranks: int = 2

    @property
    def is_on_disk(self) -> bool:
        return DISK in self.away


BY_STAGE = ("schedule.policy=breadth-first", "memory.offload_parameters=true", "memory.gathered=1")
SHARDS = ("parallel.data=2", *NARROW)
WIDE = (
    "model.width=128"  # so large that weights land where layers read them, or where gradients are
)
WHOLE = ("memory.zero=0", "memory.reductions=0")
RUNS = {
    "all that a rank has is on a disk, in shards": Run(
        (*NARROW, *REPLICAS),
        (
            *("memory.offload=stream", DISK, *BY_STAGE, "schedule.chunks=4"),
            *("memory.zero=3", "memory.offload_activations=6"),
        ),
    ),
    "steps and activations are on the host": Run(
        (*NARROW, "schedule.policy=gpipe", "schedule.microbatches=8"),
        ("memory.offload=cpu", "memory.offload_activations=3"),
        ("memory.offload=stream",),
    ),
}
MORE = {
    "state is on a disk": Run(away=("memory.offload=stream", DISK)),
    "weights are on a disk": Run(
        NARROW, ("memory.offload=stream", DISK, *BY_STAGE, "schedule.chunks=2")
    ),
    "activations are on a disk": Run(
        (
            *("model.layers=4", "schedule.microbatches=8"),
            *("schedule.policy=adaptive", "schedule.max_held=6"),
        ),
        (DISK, "memory.offload_activations=4"),
    ),
    "steps on the host": Run(away=("memory.offload=stream",), later=("memory.offload=cpu",)),
    "state in shards": Run(SHARDS, ("memory.zero=1",), WHOLE, 4),
    "weights in shards that come and go": Run(
        (*SHARDS, WIDE, "schedule.policy=breadth-first", "schedule.chunks=2"),
        ("memory.zero=3", "memory.reductions=1", "memory.gathered=1"),
        WHOLE,
        4,
    ),
    "gradients in shards of groups": Run(
        (*SHARDS, WIDE, "parallel.data=4", "parallel.group=2"),
        ("memory.zero=2",),
        WHOLE,
        4,
    ),
}


def folder_of_files() -> Path:
    folder = Path(mkdtemp())
    write_files(folder)
    return folder


@dataclass(frozen=True)
class GoneOn:
    """Where a run was killed and has gone on, and what was found.

    Args:
        folder: directory of the files; runs are below it.
        files: files without a name that ranks had open on the disk, before they were killed.
        left: names in the directory on the disk, after that.
    """

    folder: Path
    files: int
    left: int


def killed(run: Run) -> GoneOn:
    """Start it, and kill a rank when it has saved."""
    folder = folder_of_files()
    scratch = folder / "scratch"
    scratch.mkdir()
    job = begin(folder, run.ranks, *LAYOUT, *run.both, *run.away, steps=EVERY + 2)
    files = sum(len(files_in(scratch, rank)) for rank in ranks_of(job.pid))
    os.kill(ranks_of(job.pid)[run.ranks // 2], signal.SIGKILL)
    job.communicate(timeout=LIMIT_S)
    return GoneOn(folder, files, len(list(scratch.iterdir())))


def trials_of(name: str, run: Run, folder: Path) -> list[Trial]:
    """The run that nobody disturbs, and the one that was killed, which goes on. In the full run
    also one that holds elsewhere what the killed one does, and is not killed."""
    steps, again = f"run.steps={STEPS}", "checkpoint.resume=auto"
    train = ("train", "tiny.toml", steps, *LAYOUT, *run.both)
    on = ("train", "out/config.toml", again)
    words = {
        "plain": (*train, "run.out=plain"),
        **({"quiet": (*train, *run.away, "run.out=quiet")} if is_full() else {}),
        "goes on": (*on, f"run.steps={STEPS - 2}"),
        "goes on in another way": (*on, steps, *run.later),
    }
    return [Trial(f"{name}: {what}", of, str(folder)) for what, of in words.items()]


# What else runs on the two ranks of one job.

START, CROWDED, GOES_ON = "a start", "on one core", "what was interrupted goes on"
SETTINGS = ("run.seed=5", "run.log_every=1")


@dataclass(frozen=True)
class Interrupted:
    """A run that was interrupted."""

    folder: Path
    step: int
    code: int
    out: str
    err: str


@cache
def interrupted() -> Interrupted:
    """Two replicas that Ctrl-C ends, where the launcher waits for them."""
    folder = Path(mkdtemp())
    settings = ("model.layers=2", "optimizer.clip=1", *REPLICAS, "schedule.global_batch=4")
    job = begin(folder, 2, *settings)
    # mpirun of Open MPI ends ranks half a second after Ctrl-C, done or not
    job.send_signal(signal.SIGUSR1 if is_open_mpi() else signal.SIGINT)
    out, err = job.communicate(timeout=LIMIT_S)
    step = Manifest.read(checkpoint_in(folder / "out")).step
    return Interrupted(folder, step, job.returncode, out, err)


@cache
def a_git() -> Path | None:
    """A repository with the settings, and its files; None where there is no git."""
    if shutil.which("git") is None:
        return None
    folder = folder_of_files()
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder))
    plain = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    for words in (("init", "-q"), ("add", "tiny.toml"), ("commit", "-qm", "first")):
        subprocess.run([*git, *words], check=True, env=plain)
    return folder


@cache
def all_killed() -> dict[str, GoneOn]:
    return {name: killed(run) for name, run in RUNS.items()}


@cache
def on_two_ranks() -> dict[str, Ended]:
    """The ends of all that runs on the two ranks of one job."""
    of_killed = [
        trial
        for name, at in all_killed().items()
        for trial in trials_of(name, RUNS[name], at.folder)
    ]
    was = interrupted()
    more = (
        *("checkpoint.resume=auto", "schedule.policy=auto", "run.trace_steps=2"),
        *(f"run.steps={was.step + 5}", "run.log_every=1"),
        *("parallel.data=1", "schedule.microbatches=4"),
    )
    others = [
        Trial(GOES_ON, ("train", "out/config.toml", *more), str(was.folder)),
        Trial(CROWDED, ("train", "tiny.toml"), str(folder_of_files()), cores=1),
    ]
    if folder := a_git():
        others.append(Trial(START, ("train", "tiny.toml", *SETTINGS), str(folder)))
    return dict(ends(2, (*of_killed, *others)))


def check(name: str, run: Run, at: GoneOn, ended: dict[str, Ended]) -> None:
    for trial in trials_of(name, run, at.folder):
        assert ended[trial.name].code == 0, (trial.name, ended[trial.name].err)
    for words in ("goes on", "goes on in another way"):
        gone_on = ended[f"{name}: {words}"]
        assert "going on from" in gone_on.out + gone_on.err, "the kill came too late"
    assert at.left == 0, "nothing is left on the disk"
    assert at.files == run.ranks * run.is_on_disk, "each rank has one file, which has no name"
    plain = told(at.folder / "plain")
    assert [line["step"] for line in plain] == list(range(1, STEPS + 1))
    assert not is_full() or told(at.folder / "quiet") == plain
    found = last_told(at.folder / "out")
    assert [found[line["step"]] for line in plain] == plain


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed_goes_on_with_the_bits_of_one_that_holds_all_on_its_ranks(
    name: str,
) -> None:
    check(name, RUNS[name], all_killed()[name], on_two_ranks())


@pytest.mark.sweep
@pytest.mark.parametrize("name", MORE)
def test_more_runs_that_were_killed_go_on_with_the_same_bits(name: str) -> None:
    run = MORE[name]
    at = killed(run)
    check(name, run, at, dict(ends(run.ranks, tuple(trials_of(name, run, at.folder)))))


def test_a_run_that_is_interrupted_saves_says_how_to_go_on_and_does() -> None:
    """Two replicas end, a pipeline of two ranks goes on, and one process writes a text."""
    was = interrupted()
    checkpoint = was.folder / f"out/checkpoints/step-{was.step:08}"
    assert was.code == 75, was.err
    assert was.step >= 10
    assert (
        f"interrupted after step {was.step}; configuration and metrics are in out, the checkpoint "
        f"in {checkpoint.relative_to(was.folder)}" in was.out
    )
    assert "go on with: mpirun -n 2 axrt train out/config.toml checkpoint.resume=auto" in was.out
    assert was.err.count("Traceback") == 0

    ended = on_two_ranks()[GOES_ON]
    assert ended.code == 0, ended.err
    assert f"going on from {checkpoint.relative_to(was.folder)} at step {was.step}" in ended.out
    assert "schedule  " in ended.out
    assert " ms a step expected, ranks busy " in ended.out
    assert "timeline of 2 steps in out/timeline.svg" in ended.out
    line = Timeline.from_json((was.folder / "out" / "timeline.json").read_text())
    traced = {was.step + 1, was.step + 2}
    assert {task.microbatch // 4 for _, task, _, _ in line.computing()} == traced
    assert 0 < line.utilisation < 1
    steps = [of["step"] for of in lines(was.folder / "out") if "loss" in of]
    assert [step for step in steps if step > was.step] == [was.step + k for k in range(1, 6)]
    assert Manifest.read(checkpoint_in(was.folder / "out")).samples == 4 * (was.step + 5)
    text = alone(was.folder, "generate", "out", "--prompt", "all ", "--tokens", "20")
    assert text.startswith("all ")


def test_a_start_says_where_it_comes_from_and_its_command_repeats_it() -> None:
    folder = a_git()
    if folder is None:
        pytest.skip("no git here")
    assert on_two_ranks()[START].code == 0, on_two_ranks()[START].err
    head = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    commit = subprocess.check_output(head, text=True).strip()
    (tmp := folder / "tiny.toml").write_text(TINY + "# changed\n")
    (start,) = (folder / "out/starts.jsonl").read_text().splitlines()
    said = json.loads(start)
    assert said["commit"] == commit
    assert said["directory"] == str(folder)
    assert said["hosts"] == [socket.gethostname()] * 2
    assert len(set(said["pids"])) == 2
    assert (said["seed"], said["step"], said["schedule"]["policy"]) == (5, 0, "zb-h1")
    assert said["versions"].keys() == {"python", "torch", "numpy", "axrt"}
    assert said["command"] == "mpirun -n 2 axrt train tiny.toml run.seed=5 run.log_every=1"
    alone(folder, *said["command"].split()[4:], "run.out=again")
    assert told(folder / "again") == told(folder / "out")
    again = json.loads((folder / "again/starts.jsonl").read_text())
    assert again["commit"] == f"{commit}+", f"{tmp} has changed since"


def test_a_run_with_more_ranks_than_cores_says_so() -> None:
    ended = on_two_ranks()[CROWDED]
    assert ended.code == 0, ended.err
    assert "2 ranks share 1 core: they take turns" in ended.err + ended.out


@pytest.mark.sweep  # of MPICH's, a run that is interrupted says it above
def test_ctrl_c_harms_no_checkpoint_where_the_launcher_does_not_wait(tmp_path: Path) -> None:
    job = begin(tmp_path, 2, "model.layers=2", f"checkpoint.every={EVERY}")
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=LIMIT_S)
    step = Manifest.read(checkpoint_in(tmp_path / "out")).step
    assert step >= EVERY, err
    assert step % EVERY == 0 or f"interrupted after step {step}" in out


def test_a_signal_to_any_rank_ends_the_run_in_order(tmp_path: Path) -> None:
    job = begin(tmp_path, 2, "model.layers=2", "checkpoint.every=0")
    (start,) = map(json.loads, (tmp_path / "out/starts.jsonl").read_text().splitlines())
    os.kill(start["pids"][1], signal.SIGUSR1)
    out, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 75, err
    assert f"interrupted after step {Manifest.read(checkpoint_in(tmp_path / 'out')).step}" in out


# Without a launcher, or before the first step.


@pytest.mark.parametrize("number", first([signal.SIGINT, signal.SIGUSR1]))
def test_a_signal_to_a_group_with_loader_workers_saves_without_a_launcher(
    tmp_path: Path, number: signal.Signals
) -> None:
    write_files(tmp_path)
    job = subprocess.Popen(
        [sys.executable, *TRAIN, ENDLESS, "data.workers=1", "checkpoint.every=0"],
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
    out, err = job.communicate(timeout=LIMIT_S)
    assert err == ""
    assert job.returncode == 75
    assert f"interrupted after step {Manifest.read(checkpoint_in(tmp_path / 'out')).step}" in out


SLOW_START = '''
import time
from torch import nn
import axrt
from axrt.models.gpt import gpt

def last():
    """For ever, in short pieces. A signal that comes right before the system call of a sleep is
    heard when that ends."""
    while True:
        time.sleep(0.01)

class Slow(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        print("waiting\\n", end="", flush=True)  # in one go: the other rank prints it, too
        last()

def stuck(graph, inputs):
    print("waiting", flush=True)
    last()

def slow(config):
    return axrt.PipelineModule([axrt.LayerSpec(Slow)] * 2, nn.functional.mse_loss)

def quick(config):
    from torch._dynamo.backends.registry import register_backend
    register_backend(stuck)
    return gpt(config)
'''


def begun(folder: Path, command: list[str], line: str) -> "subprocess.Popen[str]":
    """Start `axrt train` with other words, and wait for a line."""
    job = subprocess.Popen(
        [*command, "run.eval_every=0", "data.held_out=0"],
        cwd=folder,
        env=environment({"AXRT_EXIT_FILE": str(folder / "code")}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    # Two ranks may print at once, one in the other's line.
    while line.strip() not in job.stdout.readline():
        assert job.poll() is None, job.communicate()
    return job


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, ["model.factory=slow:slow"]),
        (1, ["model.factory=slow:quick", "run.compile=stuck"]),
        pytest.param(2, ["model.factory=slow:quick", "run.compile=stuck"], marks=pytest.mark.sweep),
    ],
    ids=["building", "compiling alone", "compiling"],
)
def test_ctrl_c_before_the_first_step_ends_at_once(
    tmp_path: Path, ranks: int, settings: list[str]
) -> None:
    """There is nothing to save, and what it is at lasts for ever."""
    write_files(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW_START)
    launched = [launcher(), "-n", str(ranks)] if ranks > 1 else []
    command = [*launched, sys.executable, *TRAIN, *settings]
    job = begun(tmp_path, command, "waiting\n")
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=LIMIT_S)
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
            time.sleep(1000)
        return value

def model(config):
    of = gpt(config)
    return axrt.PipelineModule([*of.layers[:-1], axrt.LayerSpec(Slow), of.layers[-1]], of.loss_fn)
"""


def test_ctrl_c_twice_ends_a_step_that_lasts(tmp_path: Path) -> None:
    """The first one waits for the end of the step; one more than a second later does not."""
    write_files(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW_STEPS)
    command = [sys.executable, *TRAIN, "model.factory=slow:model"]
    job = begun(tmp_path, command, "in a step\n")
    job.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(2.0)
    # A rank that is given no core hears the first one late, and one within a second of that is
    # taken for the same.
    for _ in range(10):
        job.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=LIMIT_S / 10)
            break
    assert job.returncode == 130

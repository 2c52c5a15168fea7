"""scripts/slurm/pretrain.sbatch under a real Slurm: whatever ends it early, it ends with the bits
of a run that nothing has ended.

Nothing else has a real srun and slurmctld: test_rules.py tries what the script decides, with
stand-ins. All of it is `long`, since jobs start and end in Slurm's own time: a killed rank, a
launch within an allocation and a job by `axrt slurm` run in `.ci/run`, and the rest, which takes
the same ways, in the full run.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pytest
from safetensors.torch import load_file

from axrt.checkpoint.folder import checkpoint_in
from axrt.checkpoint.manifest import Manifest

from ..cli.test_train import TINY
from ..mpi.mpirun import ROOT, environment, is_open_mpi
from ..mpi.runs import alone
from ..sweeps import first
from .cluster import Cluster

pytestmark = pytest.mark.long
STEPS, EVERY = 30, 6
# Hangs. Slurm looks every two seconds, and a job of its own takes half a minute.
LIMIT_S, ENDS_S = 300.0, 600.0
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
CONFIG = (
    TINY.replace("steps = 4", f"steps = {STEPS}")
    .replace("log_every = 2", "log_every = 1")
    .replace("eval_every = 2", "eval_every = 10")
    + f"every = {EVERY}\n[optimizer]\nlr = 1e-2\nclip = 1.0\n"  # the section before is [checkpoint]
).replace("[model]\nlayers = 1", '[model]\nlayers = 2\ndropout = 0.1\nfactory = "slow:build"')
# The first start of a job is slow, so that whatever befalls it does so in its middle. Bits do not
# depend on that.
SLOW = """
import os
import time

from axrt import PipelineModule
from axrt.model import cross_entropy
from axrt.models.gpt import gpt

def slowly(outputs, targets):
    if "BROKEN" in os.environ:
        raise RuntimeError("the loss has had enough")
    if "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(float(os.environ.get("SLOW_S", 0)))
    return cross_entropy(outputs, targets)

def build(config):
    return PipelineModule(gpt(config).layers, slowly, partition_method="parameters")
"""


@dataclass(frozen=True)
class Job:
    """One of pretrain.sbatch, in a directory of its own; its run is there in `run`."""

    cluster: Cluster
    number: str
    folder: Path

    @classmethod
    def submit(
        cls, cluster: Cluster, folder: Path, *options: str, keys: tuple[str, ...] = (), **extra: str
    ) -> Self:
        write(folder)
        known = {
            "AXRT_PYTHON": sys.executable,
            "AXRT_SRUN_MPI": "pmix" if is_open_mpi() else "pmi2",
            "SLOW_S": "0.15",
            "MPIR_CVAR_CH4_NETMOD": "ofi",  # UCX may hang at the start: docs/slurm.md
        }
        script = str(ROOT / "scripts" / "slurm" / "pretrain.sbatch")
        told = cluster.run(
            "sbatch",
            "--parsable",
            "--exclusive",
            *options,
            script,
            "tiny.toml",
            "run",
            *keys,
            cwd=folder,
            extra=known | extra,
        )
        assert told.isdigit(), told
        return cls(cluster, told, folder)

    @property
    def log(self) -> str:
        with suppress(OSError):
            return (self.folder / f"axrt-{self.number}.log").read_text()
        return ""

    @property
    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    @property
    def steps_done(self) -> float:
        return max((line["step"] for line in lines(self.folder / "run")), default=0)

    def until(self, fact: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait for what must come."""
        deadline = time.monotonic() + limit_s
        while not fact():
            assert time.monotonic() < deadline, f"{self.cluster.job(self.number)}\n{self.log}"
            assert self.state not in OVER or fact(), self.log
            time.sleep(0.1)

    def until_middle(self) -> None:
        """Its first start has saved once, and done some steps more."""
        self.until(lambda: self.steps_done >= EVERY + 2)

    def until_ended(self) -> dict[str, str]:
        self.until(lambda: self.state in OVER, ENDS_S)
        return self.cluster.job(self.number)

    def pid_of(self, rank: int) -> int:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                found = process.environ()
                if (found.get("SLURM_JOB_ID"), found.get("SLURM_PROCID")) == (
                    self.number,
                    str(rank),
                ) and process.cmdline()[1:3] == [
                    "-m",
                    "axrt",
                ]:
                    return process.pid
        raise AssertionError(f"rank {rank} does not run\n{self.log}")


def write(folder: Path) -> None:
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "slow.py").write_text(SLOW)
    (folder / "text.txt").write_text("all work and no play " * 20)


def lines(run: Path) -> list[dict[str, float]]:
    with suppress(OSError):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return []


def numbers(run: Path) -> dict[tuple[str, float], set[float]]:
    """What metrics say of each step, every value they have ever said; without times."""
    found: dict[tuple[str, float], set[float]] = {}
    for line in lines(run):
        for name in line.keys() & {"loss", "val_loss", "grad_norm", "lr"}:
            found.setdefault((name, line["step"]), set()).add(line[name])
    return found


def tensors(run: Path) -> dict[str, tuple[object, ...]]:
    """Weights and the optimizer's state in the last checkpoint, as bits."""
    files = [
        (file.name, load_file(file)) for file in sorted(checkpoint_in(run).glob("*.safetensors"))
    ]
    return {
        f"{file} {name}": (t.dtype, t.shape, t.numpy().tobytes())
        for file, held in files
        for name, t in held.items()
    }


def assert_same_bits(run: Path, quiet: Path) -> None:
    assert Manifest.read(checkpoint_in(run)).step == STEPS
    assert numbers(run) == numbers(quiet)
    found, expected = tensors(run), tensors(quiet)
    assert found.keys() == expected.keys()
    assert {name.split("-")[0] for name in found} == {"layer", "optimizer"}
    assert not [name for name in found if found[name] != expected[name]]


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="axrt-slurm-") as folder,
        Cluster(Path(folder), environment()) as cluster,
    ):
        if is_open_mpi() and (told := cluster.run("srun", "--nodes=2", "--mpi=pmix", "true")):
            pytest.skip(f"no pmix in this Slurm (apt-get install libpmix-dev): {told}")
        yield cluster


@pytest.fixture(scope="session")
def quiet(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing ends early, in this process and without Slurm."""
    folder = tmp_path_factory.mktemp("quiet")
    write(folder)
    alone(folder, "train", "tiny.toml", "run.out=run")
    return folder / "run"


@pytest.fixture(autouse=True)
def nothing_is_left(slurm: Cluster) -> Iterator[None]:
    yield
    slurm.cancel_all()


TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
ONE_NODE = ("--nodes=1", "--ntasks-per-node=2")


def assert_saved_and_gone_on(job: Job, asked: str) -> None:
    """It ended in the middle because of this signal, and its second start went on from there to the
    end."""
    said = job.log.split("interrupted after step ")
    assert len(said) == 2, job.log
    step = int(said[1].split(";")[0])
    assert 0 < step < STEPS
    assert f"after SIG{asked}, its ranks with 75" in job.log
    assert f"going on from run/checkpoints/step-{step:08} at step {step}" in job.log
    assert (job.folder / "run.exit").read_text() == "0\n"


@pytest.mark.sweep  # the grace of a preemption takes the same way, and test_rules.py
def test_a_run_that_its_time_limit_ends_is_saved_queued_again_and_ends_with_the_bits_of_a_quiet_one(
    slurm: Cluster, quiet: Path, tmp_path: Path
) -> None:
    # A minute is the least limit that there is. Slurm looks every 30 s, so the signal comes 25 to
    # 55 s after the start.
    job = Job.submit(
        slurm,
        tmp_path,
        *TWO_NODES,
        "--cpus-per-task=2",
        "--time=1",
        "--signal=B:USR1@5",
        SLOW_S="0.6",
    )
    ended = job.until_ended()
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("COMPLETED", "1", "0:0"), (
        job.log
    )
    assert_saved_and_gone_on(job, "USR1")
    assert "queued again: it is saved" in job.log
    assert_same_bits(tmp_path / "run", quiet)


@pytest.mark.sweep
@pytest.mark.parametrize(("partition", "asked"), [("grace", "USR1"), ("main", "TERM")])
def test_a_preempted_run_is_saved_queued_again_and_ends_with_the_bits_of_a_quiet_one(
    slurm: Cluster, quiet: Path, tmp_path: Path, partition: str, asked: str
) -> None:
    job = Job.submit(slurm, tmp_path, *TWO_NODES, f"--partition={partition}")
    job.until_middle()
    slurm.run(
        "sbatch",
        "--partition=first",
        "--exclusive",
        "--nodes=2",
        "--output=/dev/null",
        "--wrap=true",
    )
    ended = job.until_ended()
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("COMPLETED", "1", "0:0"), (
        job.log
    )
    assert_saved_and_gone_on(job, asked)
    assert_same_bits(tmp_path / "run", quiet)


def test_a_killed_rank_ends_its_step_at_once_and_the_run_goes_on_with_the_bits_of_a_quiet_one(
    slurm: Cluster, quiet: Path, tmp_path: Path
) -> None:
    job = Job.submit(slurm, tmp_path, *ONE_NODE)
    job.until_middle()
    os.kill(job.pid_of(1), signal.SIGKILL)
    job.until(lambda: "srun ended with code" in job.log)  # sooner than KillWait
    ended = job.until_ended()
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("COMPLETED", "1", "0:0"), (
        job.log
    )
    assert "queued again: a rank was lost" in job.log
    assert_same_bits(tmp_path / "run", quiet)


def test_axrt_launch_starts_srun_again_within_an_allocation(
    slurm: Cluster, quiet: Path, tmp_path: Path
) -> None:
    write(tmp_path)
    library = "pmix" if is_open_mpi() else "pmi2"
    axrt = f"{sys.executable} -m axrt"
    srun = f"srun --mpi={library} --kill-on-bad-exit=1 -n 2"
    number = slurm.run(
        *("sbatch", "--parsable", "--exclusive", *ONE_NODE, "--output=axrt-%j.log"),
        f"--wrap={axrt} launch -- {srun} {axrt} train tiny.toml run.out=run",
        cwd=tmp_path,
        extra={"SLOW_S": "0.05", "MPIR_CVAR_CH4_NETMOD": "ofi"},
    )
    job = Job(slurm, number, tmp_path)
    job.until_middle()
    os.kill(job.pid_of(1), signal.SIGKILL)
    ended = job.until_ended()
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("COMPLETED", "0", "0:0"), (
        job.log
    )
    assert job.log.count("axrt launch: start") == 2, job.log
    assert_same_bits(tmp_path / "run", quiet)


def test_axrt_slurm_submits_a_script_that_looks_at_the_ranks_and_trains(
    slurm: Cluster, quiet: Path, tmp_path: Path
) -> None:
    write(tmp_path)
    told = slurm.run(
        *(sys.executable, "-m", "axrt", "slurm", "tiny.toml", "run.out=run", "--nodes=1"),
        *("--ranks-per-node=2", f"--mpi={'pmix' if is_open_mpi() else 'pmi2'}", "--time=10:00"),
        cwd=tmp_path,
        extra={"MPIR_CVAR_CH4_NETMOD": "ofi"},
    )
    job = Job(slurm, told.split()[-1], tmp_path)
    ended = job.until_ended()
    assert ended["JobState"] == "COMPLETED", job.log
    assert "2 ranks" in job.log.split("pretrain: start 1")[0], "the doctor comes first"
    assert_same_bits(tmp_path / "run", quiet)


@pytest.mark.sweep  # as test_rules.py has it
def test_a_cancelled_run_is_saved_and_stays_away(slurm: Cluster, tmp_path: Path) -> None:
    job = Job.submit(slurm, tmp_path, *TWO_NODES)
    job.until_middle()
    slurm.run("scancel", job.number)
    job.until(lambda: "srun ended with" in job.log)
    ended = job.until_ended()
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), job.log
    assert Manifest.read(checkpoint_in(tmp_path / "run")).step > EVERY
    assert "queued again" not in job.log


@pytest.mark.parametrize(
    ("keys", "extra", "code", "text"),
    first(
        [
            (("model.widht=8",), {}, 2, "there is no key model.widht; did you mean model.width?"),
            ((), {"BROKEN": "yes"}, 70, "RuntimeError: the loss has had enough"),
        ]
    ),
)
def test_what_another_start_would_meet_again_is_not_queued_again(
    slurm: Cluster,
    tmp_path: Path,
    keys: tuple[str, ...],
    extra: dict[str, str],
    code: int,
    text: str,
) -> None:
    job = Job.submit(slurm, tmp_path, *TWO_NODES, keys=keys, **extra)
    ended = job.until_ended()
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == (
        "FAILED",
        "0",
        f"{code}:0",
    ), job.log
    assert text in job.log
    assert "queued again" not in job.log

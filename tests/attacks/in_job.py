"""A training whose ranks are killed one after the other, in one job that goes on without them.

python -m tests.attacks.in_job [--kills 200] [--hasty 0.3] [--memory] [--ranks 6] [--seed 0]
                               [--folder DIR]

It takes the mpirun of this environment, which must be Open MPI's. Each job has two replicas of two
stages and spares. Ranks are killed at moments that the seed draws until one is left; that one gets
further and ends by SIGUSR1, and the next job goes on. At last the run is trained to its end in
peace. The loss of every step must be that of a quiet run, but for the order of sums: no further
from it than three times what another layout's quiet run is, since such differences grow with the
run. No job may stand still, and none may end with another code than 75. There are two exceptions,
which are counted, and the next job goes on: Open MPI 5.0.11 itself may abort a job, once in some
2,400 kills so far, and it can crash where a rank is killed while others recover (`--hasty`).

A long storm may be stopped between jobs, by Ctrl-C, and go on later in its `--folder`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import click
import psutil

from tests.mpi.mpirun import environment, launcher

from .storm import CONFIG

LAYOUT = ("parallel.pipe=2", "parallel.data=2", "schedule.policy=1f1b", "schedule.microbatches=2")
_ALONE = ("parallel.pipe=1", "parallel.data=1", "schedule.microbatches=4")  # the same samples
_TOLD = "storm.json"  # in the folder
_ABORTED = "Send error after request freed"  # said by the library, whoever the error handler is
_MOST_ABORTED = 0.01  # of the kills; more than that is no rare fault of the library
_TAIL_BYTES = 4096  # has the last line of metrics
_STANDS_STILL_S, _PEACE_STEPS = 240.0, 20  # starts take a minute on a machine that has more to do


def losses(run: Path) -> dict[int, float]:
    """The losses by step; of a step that ran again the last."""
    try:
        text = (run / "metrics.jsonl").read_text()
    except OSError:
        return {}
    whole = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["step"]: line["loss"] for line in whole if "loss" in line}


class Job:
    """A job that goes on with the run in `folder / "out"`."""

    def __init__(self, folder: Path, ranks: int, *settings: str, run: str = "out") -> None:
        self._run = folder / run
        config = self._run / "config.toml"
        file = config if config.exists() else folder / "storm.toml"
        train = ["-m", "axrt", "train", str(file), f"run.out={run}", "checkpoint.resume=auto"]
        command = [launcher(), "--with-ft", "ulfm", "-n", str(ranks), sys.executable, *train]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *LAYOUT, *settings],
                cwd=folder,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def step(self) -> int:
        """The step of the last whole line."""
        try:
            with (self._run / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                steps = re.findall(rb'"step": (\d+)[^\n]*\n', file.read())
        except OSError:
            return 0
        return int(steps[-1]) if steps else 0

    def ranks(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self._process.pid).children())
        except psutil.Error:
            return []

    def gets_to(self, step: int) -> bool:
        """Wait for a step, which must come while the job runs. Returns False where it has ended."""
        since, before = time.monotonic(), self.step
        while self.step < step:
            if self.step != before:
                since, before = time.monotonic(), self.step
            if self._process.poll() is not None:
                return False
            if time.monotonic() - since > _STANDS_STILL_S:
                raise AssertionError(f"the job stands still at step {self.step}:\n{self.said()}")
            time.sleep(0.02)
        return True

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGUSR1)
        return self.end()

    def end(self) -> int:
        try:
            return self._process.wait(timeout=_STANDS_STILL_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end:\n{self.said()}") from None

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@dataclass
class Storm:
    """What has happened.

    Args:
        kills: ranks killed while the job trained.
        hasty: ranks killed while the others recovered from the one before.
        jobs: jobs that were started.
        aborted: jobs that Open MPI itself has aborted.
        ended: jobs that ended after a hasty kill, and did not go on.
        took_s: seconds that jobs took.
    """

    kills: int = 0
    hasty: int = 0
    jobs: int = 0
    aborted: int = 0
    ended: int = 0
    took_s: float = 0.0

    @classmethod
    def of(cls, folder: Path) -> "Storm":
        """What has happened in a folder before."""
        told = folder / _TOLD
        return cls(**json.loads(told.read_text())) if told.exists() else cls()

    def tell(self, folder: Path) -> None:
        """Note it for a storm that goes on."""
        (folder / _TOLD).write_text(json.dumps(asdict(self)))

    def __str__(self) -> str:
        return (
            f"{self.kills} kills and {self.hasty} while others recovered, in {self.jobs} jobs, of "
            f"which Open MPI aborted {self.aborted} and {self.ended} ended after such a one"
        )


def strike(job: Job, kills: int, hasty: float, random: Random, storm: Storm) -> None:
    """Kill ranks of a job, one after the other, and end it."""
    goes_on, was_hasty = job.gets_to(job.step + 2), False
    while goes_on and kills:
        now = random.random() < hasty
        if not now:
            goes_on = job.gets_to(job.step + random.randrange(2, 8))
        ranks = job.ranks()
        if not goes_on or len(ranks) < 2:
            break
        time.sleep(random.random() * 0.5)
        with suppress(ProcessLookupError):
            os.kill(random.choice(ranks).pid, signal.SIGKILL)
        was_hasty |= now
        storm.hasty, storm.kills, kills = storm.hasty + now, storm.kills + (not now), kills - 1
    if not (goes_on and job.gets_to(job.step + 3)):
        job.end()
        if _ABORTED in job.said():
            storm.aborted += 1
            job.log.replace(job.log.with_name(f"log-of-aborted-{storm.jobs}"))
        elif was_hasty:
            storm.ended += 1
        else:
            raise AssertionError(f"the job has ended:\n{job.said()}")
    elif (code := job.interrupt()) != 75:
        raise AssertionError(f"code {code}, and 75 was expected:\n{job.said()}")


def _furthest(found: dict[int, float], expected: dict[int, float]) -> float:
    """The largest difference of two losses of a step, as a share."""
    return max(abs(found[step] - loss) / loss for step, loss in expected.items())


@click.command()
@click.option("--kills", default=200, show_default=True, type=click.IntRange(1))
@click.option("--ranks", default=6, show_default=True, type=click.IntRange(4))
@click.option(
    "--hasty",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="share of the kills while others recover from the one before",
)
@click.option("--memory", is_flag=True, help="keep a copy of every step on two hosts in memory")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="where it is kept, and goes on; by default it is removed at the end",
)
def main(
    kills: int, ranks: int, hasty: float, memory: bool, seed: int, folder: Path | None
) -> None:
    """Kill ranks of jobs that go on, and compare with a quiet run."""
    with ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        where.mkdir(exist_ok=True)
        (where / "text.txt").write_text("all work and no play makes a dull toy. " * 60)
        (where / "storm.toml").write_text(CONFIG)
        settings = ["run.survive=true", *(in_memory(where / "shm", ranks) if memory else [])]
        storm = Storm.of(where)
        while storm.kills + storm.hasty < kills:
            began_s = time.monotonic()
            storm.jobs += 1
            job = Job(where, ranks, *settings)
            strike(job, ranks - 1, hasty, Random(f"{seed} {storm.jobs}"), storm)
            storm.took_s += time.monotonic() - began_s
            storm.tell(where)
            click.echo(f"{storm}, step {job.step}", err=True)
        sys.exit(compare(where, storm))


def in_memory(shm: Path, ranks: int) -> list[str]:
    """Settings that keep a copy of every step on two hosts."""
    shm.mkdir(exist_ok=True)
    hosts = ",".join(str(rank % 2) for rank in range(ranks))
    return [
        "checkpoint.memory_every=1",
        f"checkpoint.memory_dir={shm}",
        f"run.host_of={hosts}",
    ]


def compare(folder: Path, storm: Storm) -> bool:
    """Train to the end in peace, and compare with a quiet run. Returns that a loss is too far from
    it, or that too many jobs were aborted."""
    last = max(losses(folder / "out")) + _PEACE_STEPS
    for run, on, layout in (("out", 4, ()), ("quiet", 4, ()), ("alone", 1, _ALONE)):
        job = Job(folder, on, *layout, f"run.steps={last}", run=run)
        job.gets_to(last)
        assert job.end() == 0, job.said()
    found, quiet, alone = (losses(folder / run) for run in ("out", "quiet", "alone"))
    assert sorted(found) == sorted(quiet) == list(range(1, last + 1))
    worst, usual = _furthest(found, quiet), _furthest(alone, quiet)
    click.echo(
        f"{storm}; {storm.took_s:.0f} s: {last} steps, each with the loss of a quiet run within "
        f"{worst:.1e}; a quiet run on one rank: {usual:.1e}"
    )
    too_many = storm.aborted > 1 + _MOST_ABORTED * (storm.kills + storm.hasty)
    return too_many or worst > max(3 * usual, 1e-6)


if __name__ == "__main__":
    main()

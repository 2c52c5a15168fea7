"""Two GPTs and a traced model on two ranks: what steps of each layout take beside what is
predicted from costs measured in the same round; see scripts/bench_plans.

In each round the link and the memory of this machine are measured, then costs of layers, one
process alone; each layout is predicted from them, and trained, in an order drawn anew. The choice
is the layout that is predicted to be the fastest. Where a machine changes its speed between the
measurement of costs and a run, predictions are off by as much.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
import tomli_w
import torch

ROOT = Path(__file__).parents[2]
MODELS: dict[str, dict[str, Any]] = {
    "wide GPT": {"layers": 4, "width": 384, "heads": 6, "context": 128},
    "deep GPT": {"layers": 12, "width": 192, "heads": 4, "context": 128},
    "traced GPT-2": {
        "factory": "examples.traced_gpt2:model",
        "layers": 6,
        "width": 256,
        "heads": 4,
        "context": 128,
    },
}
SAMPLES = 2  # of a microbatch
WAYS = {"pipeline": (1, 2), "replicas": (1, 1), "team": (2, 1)}  # members and ranks of a pipeline
STEPS, WARM = 12, 4  # of a run, and those before the first that counts
LINK = """
import time
from mpi4py import MPI
world, other = MPI.COMM_WORLD, 1 - MPI.COMM_WORLD.rank
def takes(size, turns):
    memory = bytearray(size)
    world.Barrier()
    began = time.perf_counter()
    for _ in range(turns):
        if world.rank:
            world.Recv(memory, other); world.Send(memory, other)
        else:
            world.Send(memory, other); world.Recv(memory, other)
    return (time.perf_counter() - began) / turns / 2
takes(1 << 20, 20)
latency, large = takes(8, 2000), takes(1 << 22, 50)
if not world.rank:
    print(latency, (1 << 22) / (large - latency))
"""


class Machine(NamedTuple):
    """What a round has measured of this machine."""

    latency_s: float
    link: float  # bytes a second between two ranks, one way at a time
    memory: float  # bytes a second that are read and written

    def write(self, file: Path) -> None:
        """Write it as the file of a cluster. Costs are measured, so operations do not count."""
        of_device = {"share": 1.0, "memory": 8e9, "bandwidth": self.memory}
        link = {"latency": self.latency_s, "bandwidth": self.link, "shared": False}
        sections = {
            "cluster": {"nodes": 1, "devices": 2},
            "device": {**of_device, "operations": {"float32": 1e11}},
            "links": {"node": link},
        }
        file.write_text(tomli_w.dumps(sections))


def ran(*command: object) -> str:
    """What a command prints; it may end with 1, as one does where nothing fits."""
    words = [str(word) for word in command]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.stdout


def measured(mpirun: str) -> Machine:
    latency, link = map(float, ran(mpirun, "-n", 2, sys.executable, "-c", LINK).split())
    one, other = torch.ones(1 << 25), torch.ones(1 << 25)
    takes = []
    for _ in range(5):
        began = time.perf_counter()
        other.copy_(one)
        takes.append(time.perf_counter() - began)
    return Machine(latency, link, 2 * other.nbytes / min(takes))


def predicted(file: Path, costs: Path, cluster: Path, ways: Sequence[str]) -> dict[str, Any]:
    """The fastest layout of each way, with what a step of it is predicted to take."""
    over = ["--over", "parallel.tensor=1,2", "--over", "parallel.pipe=1,2"]
    over += ["--over", f"schedule.microbatch_size={SAMPLES}", "--costs", str(costs), "--json"]
    rows = json.loads(ran(sys.executable, "-m", "axrt", "sweep", cluster, file, *over))
    found = {}
    for way in ways:
        tensor, pipe = WAYS[way]
        texts = {f"parallel.tensor={tensor}", f"parallel.pipe={pipe}"}
        found[way] = next(row for row in rows if row.get("chosen") and texts <= set(row["over"]))
    return found


def trained(mpirun: str, settings: dict[str, Any], directory: Path) -> float:
    """The median of what steps of a run take, in seconds."""
    file = directory.with_suffix(".toml")
    file.write_text(tomli_w.dumps(settings))
    ran("rm", "-rf", directory)
    ran(mpirun, "-n", 2, sys.executable, "-m", "axrt", "train", file, f"run.out={directory}")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    times: list[float] = [json.loads(line)["time_s"] for line in lines]
    return statistics.median(b - a for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False))


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


@click.command()
@click.option("--mpirun", required=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(MODELS)), help="these models alone")
@click.argument("directory", type=click.Path(path_type=Path), default=Path("runs/plans"))
def main(mpirun: str, rounds: int, only: tuple[str, ...], directory: Path) -> None:
    """Print a row for each model and layout."""
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    print("| model | layout | a step, ms | measured by predicted | slower than the fastest |")
    print("|---|---|---|---|---|")
    for name, model in MODELS.items():
        if only and name not in only:
            continue
        file = directory / f"{name.replace(' ', '-')}.toml"
        run = {"steps": STEPS, "log_every": 1, "eval_every": 0, "device": "cpu", "progress": "off"}
        settings = {
            "model": model,
            "schedule": {"microbatches": 8, "microbatch_size": SAMPLES},
            "data": {"held_out": 0.0},
            "checkpoint": {"dir": ""},
            "run": run,
        }
        file.write_text(tomli_w.dumps(settings))
        ways = [way for way in WAYS if way != "team" or "factory" not in model]
        costs, cluster = file.with_suffix(".json"), directory / "cluster.toml"
        taken: dict[str, list[float]] = {way: [] for way in ways}
        ratios: dict[str, list[float]] = {way: [] for way in ways}
        slower: dict[str, list[float]] = {way: [] for way in ways}
        chosen = dict.fromkeys(ways, 0)
        for number in range(rounds):
            measured(mpirun).write(cluster)
            degrees = "1,2" if "team" in ways else "1"
            sizes = ("--tensor", degrees, "--samples", SAMPLES, "--out", costs)
            ran(sys.executable, "-m", "axrt", "profile", file, *sizes)
            rows = predicted(file, costs, cluster, ways)
            steps = {}
            for way in Random(number).sample(ways, len(ways)):
                steps[way] = trained(mpirun, rows[way]["set"], directory / f"{file.stem}-{way}")
            chosen[min(ways, key=lambda way: rows[way]["step_s"])] += 1
            for way in ways:
                taken[way].append(steps[way] * 1e3)
                ratios[way].append(steps[way] / rows[way]["step_s"])
                slower[way].append(steps[way] / min(steps.values()))
        for way in ways:
            of_way = f"{way}, chosen {chosen[way]} of {rounds} times"
            times = (spread(taken[way]), spread(ratios[way]), spread(slower[way]))
            print(f"| {name} | {of_way} | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    main()

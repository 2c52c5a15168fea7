"""The table of work as the rules make it: what each kind of task needs, tells and opens; see
scripts/table_of_work.

A middle stage of three is looked at, and the first one for what is there alone, in runs that have
one feature each. What is so in some of the runs alone names them in brackets.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as with_
from pathlib import Path

import click

from axrt.scheduler.bucket import copies_by_pipe
from axrt.scheduler.job import Job, StageCopy
from axrt.scheduler.placement import placement_by_name
from axrt.scheduler.planning.shards import with_shards
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.rules import Row, StageHere, features_of
from axrt.scheduler.stash_places import least_places
from axrt.scheduler.task import AnyKind, Counts, Task

FILE = Path(__file__).resolve().parents[2] / "scheduler" / "rules" / "__init__.py"
BEGIN, END = "# The table of work (scripts/table_of_work):", "# The end of the table."
STAGES, MICROBATCHES = 3, 4


def _job(policy: str = "1f1b", placement: str = "linear", chunks: int = 0) -> Job:
    where = placement_by_name(placement, STAGES, chunks)
    return Job(where, policy_by_name(policy), MICROBATCHES)


def runs() -> dict[str, Job]:
    """A job for each feature, by a short name."""
    whole, split = _job(), _job("zb-h1")
    by_stage = _job("breadth-first", "looped", 2)
    two = with_(whole, replicas=2)
    return {
        "plain": whole,
        "split": split,
        "recompute": with_(whole, recomputed=dict.fromkeys(range(STAGES), 1)),
        "clip": with_(whole, votes=True),
        "replicas": two,
        "groups": with_(whole, replicas=4, group=2),
        "library": with_(two, by_library=True),
        "offload": with_(whole, slots=3),
        "host": with_(whole, host_slots=3),
        "zero 1": with_shards(two, 1),
        "zero 3": with_shards(with_(by_stage, replicas=2), 3),
        "weights": with_shards(with_(by_stage, slots=3), 0, offloads_weights=True),
        "refreshes": with_(whole, lag=1),
        "kfac": with_(whole, votes=True, lag=1, preconditions=True),
        "stash": with_(_job("gpipe"), held_on_device=least_places(1)),
    }


@dataclass
class Seen:
    """What the rows of a kind say, with the runs in which they say so."""

    runs: set[str] = field(default_factory=set)
    needs: dict[str, set[str]] = field(default_factory=dict)
    then: dict[str, set[str]] = field(default_factory=dict)
    queue: str = ""


def seen(jobs: Mapping[str, Job]) -> dict[AnyKind, Seen]:
    """The kinds in the order in which the features make them."""
    found: dict[AnyKind, Seen] = {}
    for name, job in jobs.items():
        rows = [(1, row) for row in _rows(job, 1)]
        kinds = {row.kind for _, row in rows}
        rows += [(0, row) for row in _rows(job, 0) if row.kind not in kinds]
        for stage, row in rows:
            of = found.setdefault(row.kind, Seen())
            of.runs.add(name)
            of.queue = row.queue.value
            for text in _needs(row):
                of.needs.setdefault(text, set()).add(name)
            for text in _then(row, stage):
                of.then.setdefault(text, set()).add(name)
    return found


def _rows(job: Job, stage: int) -> Iterator[Row]:
    copies = copies_by_pipe(stage, 0, job.pipes)
    here = StageHere(job, StageCopy(0, stage), (copies,))
    for feature in features_of(job):
        yield from feature(here)


def _needs(row: Row) -> Iterator[str]:
    for need in row.needs:
        yield need.counter.value
    if row.takes:
        yield f"a free {row.takes.value}"


def _then(row: Row, stage: int) -> Iterator[str]:
    if row.sends:
        yield f"sends {row.sends.meaning.value}"
    last = MICROBATCHES - 1 if row.kind.counts is Counts.MICROBATCHES else 0
    task = Task(row.kind, stage, last, row.bucket or 0)
    after = [*row.then(task), *(row.completes(task, 0) if row.completes else ())]
    for meaning in dict.fromkeys(message.meaning.value for message in after):
        yield f"at the end of a step sends {meaning}" if last else f"sends {meaning}"
    for opening in row.opens:
        yield f"opens {opening.gate.value}"
    if row.frees:
        yield f"frees a {row.frees.value}"


def _told(texts: Mapping[str, set[str]], of: set[str]) -> str:
    """Texts, each with the runs that it is of where it is not of all of them."""
    parts = []
    for text, names in texts.items():
        others = of - names
        if not others:
            parts.append(text)
        elif len(others) < len(names):
            parts.append(f"{text} [not {', '.join(sorted(others))}]")
        else:
            parts.append(f"{text} [{', '.join(sorted(names))}]")
    return "; ".join(parts)


def drawn() -> list[str]:
    """The table, as lines of comments."""
    lines = [BEGIN, "#"]
    for kind, of in seen(runs()).items():
        text = f"needs {_told(of.needs, of.runs) or 'nothing'}"
        if of.then:
            text += f" | {_told(of.then, of.runs)}"
        if of.queue != "compute":
            text += f" | on {of.queue}"
        head = f"#   {kind.value:<9} "
        lines += textwrap.wrap(
            text, 100, initial_indent=head, subsequent_indent="#" + " " * 13, break_on_hyphens=False
        )
    return [*lines, "#", END]


def laid_in(text: str, table: Iterable[str]) -> str:
    """The file with the table in place of the one that it has."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n".join(table) + after


@click.command()
@click.option("--write", is_flag=True, help="lay it into scheduler/rules/__init__.py")
def main(write: bool) -> None:
    """Print the table of work."""
    table = drawn()
    if write:
        FILE.write_text(laid_in(FILE.read_text(), table))
    print("\n".join(table))


if __name__ == "__main__":
    main()

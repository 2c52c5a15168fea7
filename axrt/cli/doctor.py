"""`axrt doctor`: is this machine, or this job, fit for training."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # --help needs no torch
    from axrt.doctor.facts import Facts
    from axrt.doctor.findings import Finding
    from axrt.doctor.links import Link

_MARKS = {"OK": "OK      ", "warning": "warning ", "problem": "PROBLEM "}


@click.command(short_help="Look at this machine, or this job, and say what is wrong.")
@click.option("--json", "as_json", is_flag=True, help="facts, links and findings as JSON")
def doctor(as_json: bool) -> None:
    """Look at Python, torch, MPI, cores and memory, and say what to do about what is wrong.

    \b
    on one rank:   axrt doctor
    on a job:      mpirun -n 4 axrt doctor      (also measures between ranks)

    Leaves with code 1 where there is a problem, and 0 otherwise.
    """
    from axrt.doctor.facts import look
    from axrt.doctor.findings import Level, examine

    mine = look()
    everyones, links = _gathered(mine)
    if (mine.mpi is not None and mine.mpi.rank > 0) or (
        mine.launcher is not None and mine.launcher.rank > 0
    ):
        return
    findings = examine(everyones, links)
    click.echo(
        _as_json(everyones, links, findings)
        if as_json
        else "\n".join(f"{_MARKS[f.level.value]}{f.topic}: {f.text}" for f in findings)
    )
    sys.exit(any(finding.level is Level.PROBLEM for finding in findings))


def _gathered(mine: "Facts") -> "tuple[list[Facts], list[Link]]":
    """The facts of all ranks, in the order of ranks, and the links between them, on rank 0."""
    if mine.mpi is None or mine.mpi.size == 1:
        return [mine], []
    from mpi4py import MPI

    from axrt.doctor.links import measure

    everyones: list[Facts] | None = MPI.COMM_WORLD.gather(mine)
    return everyones or [mine], measure(MPI.COMM_WORLD)


def _as_json(ranks: "list[Facts]", links: "list[Link]", findings: "list[Finding]") -> str:
    told: dict[str, Any] = {
        "ranks": [asdict(facts) for facts in ranks],
        "links": [link._asdict() for link in links],
        "findings": [
            {"level": finding.level.value, "topic": finding.topic, "text": finding.text}
            for finding in findings
        ],
    }
    return json.dumps(told, indent=1)

"""`axrt inspect`: what each rank of a run does at the moment, and who everyone waits for."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from axrt.exit_codes import Exit
from axrt.observe.asking import asked, table
from axrt.observe.inspection import Answer
from axrt.observe.metrics import is_run
from axrt.observe.origin import processes_of

from .refusal import errors_as_lines
from .runs import row_of


@click.command(short_help="Say what each rank of a run does, and who is waited for.")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--stacks", is_flag=True, help="the Python stacks of each rank, too")
@click.option(
    "--within",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="seconds in which ranks answer",
)
@click.option("--json", "as_json", is_flag=True, help="answers as JSON; null is no answer")
def inspect(run: Path, stacks: bool, within: float, as_json: bool) -> None:
    """Ask the ranks of RUN, a directory that `axrt train` writes to, what they do.

    It asks by a file, from any machine that sees the directory. Nothing is stopped.

    \b
    axrt inspect runs/mine --stacks
    """
    with errors_as_lines():
        answers = asked(run, stacks, within)
    if not answers:
        click.echo(
            f"axrt inspect: nobody answers in {run} within {within:g} s{_state_of(run)}; expected "
            "the directory of a run that is under way",
            err=True,
        )
        sys.exit(Exit.LOST_PEER)
    if as_json:
        size = next(iter(answers.values())).size
        of_all = [asdict(answers[rank]) if rank in answers else None for rank in range(size)]
        click.echo(json.dumps(of_all, indent=1))
        return
    _show(answers, processes_of(run))


def _state_of(run: Path) -> str:
    if not is_run(run):
        return ""
    row = row_of(run)
    return f", and its run is at step {row['step']}, {row['state']}"


def _show(answers: dict[int, Answer], processes: list[str]) -> None:
    for line in table(answers, processes):
        click.echo(line)
    for rank, answer in sorted(answers.items()):
        for thread, stack in answer.stacks.items():
            click.echo(f"\nrank {rank}, {answer.host}, process {answer.pid}, thread {thread}:")
            click.echo(stack.rstrip())

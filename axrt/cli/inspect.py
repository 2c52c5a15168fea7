"""`axrt inspect`: what each rank of a run does at the moment, and who everyone waits for."""

import json
import shutil
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from axrt.checkpoint.durable import write_durably
from axrt.exit_codes import Exit
from axrt.observe.culprits import verdicts
from axrt.observe.inspection import FOLDER, QUESTION, Answer

_LOOK_S = 0.1


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
@click.option("--json", "as_json", is_flag=True, help="answers as JSON")
def inspect(run: Path, stacks: bool, within: float, as_json: bool) -> None:
    """Ask the ranks of RUN, a directory that `axrt train` writes to, what they do.

    It asks by a file, from any machine that sees the directory. Nothing is stopped.
    """
    answers = _asked(run, stacks, within)
    if not answers:
        click.echo(
            f"axrt inspect: nobody answers in {run} within {within:g} s; expected the directory of "
            "a run that is under way",
            err=True,
        )
        sys.exit(Exit.LOST_PEER)
    if as_json:
        click.echo(json.dumps([answers[rank] for rank in sorted(answers)], indent=1))
        return
    _show({rank: _answer(of) for rank, of in answers.items()})


def _asked(run: Path, stacks: bool, within: float) -> dict[int, dict[str, Any]]:
    """The answers by rank; those that had come in time."""
    name = uuid.uuid4().hex
    folder = run / FOLDER / name
    folder.mkdir(parents=True)
    try:
        question = json.dumps({"name": name, "stacks": stacks})
        write_durably(folder / QUESTION, question.encode())
        until, answers = time.monotonic() + within, dict[int, dict[str, Any]]()
        while time.monotonic() < until:
            for file in folder.glob("rank-????"):
                answer = json.loads(file.read_text(encoding="utf-8"))
                answers[answer["rank"]] = answer
            if answers and len(answers) == next(iter(answers.values()))["size"]:
                break
            time.sleep(_LOOK_S)
        return answers
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # others may be asking
            folder.parent.rmdir()


def _answer(values: dict[str, Any]) -> Answer:
    return Answer(**{**values, "owing": tuple(values["owing"])})


def _show(answers: dict[int, Answer]) -> None:
    size = next(iter(answers.values())).size
    click.echo("rank  state     since      task          lacks")
    for rank in range(size):
        answer = answers.get(rank)
        if answer is None:
            click.echo(f"{rank:<5} no answer")
            continue
        since = f"{answer.since_s:.1f} s"
        click.echo(
            f"{rank:<5} {answer.state:<9} {since:<10} {answer.task:<13} {answer.lacks}".rstrip()
        )
    for text in verdicts(answers, size):
        click.echo(text)
    for rank, answer in sorted(answers.items()):
        for thread, stack in answer.stacks.items():
            click.echo(f"\nrank {rank}, {answer.host}, process {answer.pid}, thread {thread}:")
            click.echo(stack.rstrip())

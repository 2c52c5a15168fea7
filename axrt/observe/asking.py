"""Asks all ranks of a run what they do, and shows what they have answered."""

# `axrt inspect` asks by a file, because a signal may end a rank in the wrong moment, and a port is
# one more thing that a cluster forbids. The loop answers where it waits, since only it may read the
# brain; a thread answers for a long task.

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from axrt.checkpoint.durable import write_durably
from axrt.errors import ConfigError

from .culprits import verdicts
from .inspection import FOLDER, QUESTION, Answer

_LOOK_S = 0.1


def asked(
    run: Path, stacks: bool, within_s: float, meanwhile: Callable[[], None] = lambda: None
) -> dict[int, Answer]:
    """The answers by rank; those that had come in time.

    Args:
        stacks: True to ask for Python stacks, too.
        within_s: seconds in which ranks answer.
        meanwhile: function that is called between two looks.
    Raises:
        ConfigError: no question can be written to the run.
    """
    folder = run / FOLDER / uuid.uuid4().hex
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; expected a directory that you may write to: "
            f"questions to the ranks of a run are files in {run / FOLDER}"
        ) from None
    try:
        write_durably(folder / QUESTION, json.dumps({"stacks": stacks}).encode())
        until, answers = time.monotonic() + within_s, dict[int, Answer]()
        while time.monotonic() < until:
            meanwhile()
            for file in folder.glob("rank-????"):
                if answer := Answer.read(file):
                    answers[answer.rank] = answer
            if answers and len(answers) == next(iter(answers.values())).size:
                break
            time.sleep(_LOOK_S)
        return answers
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # others may be asking
            folder.parent.rmdir()


def table(answers: Mapping[int, Answer], processes: Sequence[str] = ()) -> Iterator[str]:
    """Lines with what each rank does, and who everyone waits for in the end.

    Args:
        processes: where each rank is, for those that have not; () where that is not known.
    """
    size, members = max((answer.size, answer.members) for answer in answers.values())
    yield f"rank  {'member  ' * (members > 1)}state     since      task          lacks"
    for rank in range(size):
        answer = answers.get(rank)
        name = f"{rank:<5}" + f" {rank % members:<7}" * (members > 1)
        if answer is None:
            where = processes[rank] if len(processes) == size else ""
            yield f"{name} no answer {where}".rstrip()
            continue
        since = f"{answer.since_s:.1f} s"
        lacks = _shortened(answer.lacks)
        line = f"{name} {answer.state:<9} {since:<10} {answer.task:<13} {lacks}"
        yield line.rstrip()
    yield from verdicts(dict(answers), size)


def _shortened(lacks: str) -> str:
    """The first of what a rank lacks, and how much more there is; `--json` has all."""
    first, *more = lacks.split("; ")
    return f"{first}, and {len(more)} more" if more else first

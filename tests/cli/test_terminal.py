"""What a person sees at a terminal, a real one of the system."""

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path
from typing import IO

import pyte
import pytest

from ..sweeps import first
from .test_train import environment, in_a_directory

__all__ = ["in_a_directory"]  # a fixture


def at_a_terminal(words: list[str], stdout: IO[bytes] | None = None, columns: int = 140) -> str:
    """What a command shows at a terminal, whose output it has but for what goes elsewhere."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, columns))
    job = subprocess.Popen(
        [sys.executable, "-m", "axrt", *words],
        stdout=stdout or theirs,
        stderr=theirs,
        env={**environment(), "TERM": "xterm", "COLUMNS": ""},
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the last one has closed it
        pass
    os.close(ours)
    assert job.wait(300) == 0, shown.decode()
    return shown.decode()


def test_the_bar_of_prepare_is_at_the_terminal_where_its_output_is_a_file(tmp_path: Path) -> None:
    Path("large.txt").write_text("all work and no play\n" * 50_000)
    with Path("said").open("wb") as said:
        shown = at_a_terminal(["prepare", "large.txt", "--out", "made"], stdout=said)
    assert "tokens" in shown
    assert re.search(r"\x1b\[(2K|1A)", shown), "a bar that grows"
    assert "made.bin: 1,0" in Path("said").read_text()


@pytest.mark.parametrize("columns", first([60, 80, 200]))
def test_a_training_has_one_display_as_wide_as_the_terminal_and_leaves_no_lock(
    columns: int,
) -> None:
    """It moves while the training does. In the end, as a terminal shows it, no line is left over
    from an earlier state."""
    asked = ["optimizer.clip=1.0", "run.log_every=1", "run.steps=30", "run.eval_every=0"]
    shown = at_a_terminal(["train", "tiny.toml", *asked], columns=columns)
    assert re.search(r"\x1b\[(2K|1A)", shown), "lines are drawn over"
    for text in ("30/30", "loss ", "lr ", "norm ", "tokens/s", "MFU ", "device "):
        assert text in shown
    assert not re.search(r"(?<![\d,])0 tokens/s", shown)
    assert screen(shown, columns).count("30/30") == 1
    assert screen(shown, columns).count("lr ") == 1
    assert not re.search(r"\d+/30 (?<!30/30 )", screen(shown, columns))
    locks = [Path(name).read_bytes() for name in ("out/.lock", "out/checkpoints/.lock")]
    assert locks == [b"", b""]
    watched = at_a_terminal(["watch", "out"], columns=columns)
    assert screen(watched, columns).count("30/30") == 1


def screen(shown: str, columns: int) -> str:
    """What a terminal has on its screen after all that."""
    found = pyte.HistoryScreen(columns, 30, history=10_000)
    pyte.Stream(found).feed(shown)
    above = ["".join(line[place].data for place in range(columns)) for line in found.history.top]
    return "\n".join([*above, *found.display])

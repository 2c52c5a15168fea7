"""What a person sees at a terminal, a real one of the system."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import IO

from .test_train import environment, in_a_directory

__all__ = ["in_a_directory"]  # a fixture


def at_a_terminal(words: list[str], stdout: IO[bytes] | None = None) -> str:
    """What a command shows at a terminal, whose output it has but for what goes elsewhere."""
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-m", "axrt", *words],
        stdout=stdout or theirs,
        stderr=theirs,
        env={**environment(), "TERM": "xterm", "COLUMNS": "140"},
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the last one has closed it
        pass
    os.close(ours)
    assert job.wait(60) == 0, shown.decode()
    return shown.decode()


def test_a_training_has_one_display_that_moves_at_a_terminal() -> None:
    shown = at_a_terminal(["train", "tiny.toml", "optimizer.clip=1.0", "run.log_every=1"])
    assert re.search(r"\x1b\[(2K|1A)", shown), "lines are drawn over"
    for text in ("4/4", "loss ", "lr ", "norm ", "tokens/s", "MFU ", "device "):
        assert text in shown
    assert not re.search(r"(?<![\d,])0 tokens/s", shown)


def test_the_bar_of_prepare_is_at_the_terminal_where_its_output_is_a_file(tmp_path: Path) -> None:
    Path("large.txt").write_text("all work and no play\n" * 50_000)
    with Path("said").open("wb") as said:
        shown = at_a_terminal(["prepare", "large.txt", "--out", "made"], stdout=said)
    assert "tokens" in shown
    assert re.search(r"\x1b\[(2K|1A)", shown), "a bar that grows"
    assert "made.bin: 1,0" in Path("said").read_text()

"""The commands of docs/tutorial.md run, one after the other, with a smaller model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..mpi.mpirun import environment, launcher
from .pages import PAGES, Block, blocks

# What the page has, and what the test takes.
SMALLER = (
    ("layers = 4", "layers = 2"),
    ("width = 128", "width = 32"),
    ("heads = 4", "heads = 2"),
    ("context = 128", "context = 32"),
    ("steps = 100", "steps = 4"),
    ("every = 50", "every = 2"),
    ("run.steps=150", "run.steps=6"),
    ("warmup_steps = 20", "warmup_steps = 1"),
    ("eval_every = 50", "eval_every = 2"),
    ("1024", "300"),
    ("--tokens 40", "--tokens 16"),  # within the context, which axrt then moves along
    ("new_tokens=40", "new_tokens=16"),
)
SAVED = {"toml": "tutorial.toml", "python": "write.py"}


@pytest.mark.sweep
def test_the_tutorial_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    (tmp_path / "docs").symlink_to(PAGES)
    extra = environment()
    path = f"{tools(tmp_path / 'bin')}:{extra['PATH']}"
    printed: dict[str, str] = {}
    for block in blocks("tutorial"):
        if block.language in SAVED:
            (tmp_path / SAVED[block.language]).write_text(smaller(block.text))
        elif block.language == "console" and "not run" not in block.before:
            for command in block.commands():
                ended = subprocess.run(
                    ["bash", "-c", smaller(command)],
                    cwd=tmp_path,
                    env={**extra, "PATH": path},
                    capture_output=True,
                    text=True,
                    timeout=600,
                    check=False,
                )
                assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
                printed[" ".join(command.split()[:2])] = ended.stdout
    assert re.search(r"^4/4 .*done.*runs/tutorial", printed["axrt runs"], re.MULTILINE)
    assert printed["python write.py"].strip() == printed["axrt generate"].strip()
    page = (PAGES / "tutorial.md").read_text()
    assert all(taken in page for taken, _ in SMALLER), "a size of the page has changed"


def smaller(text: str) -> str:
    for taken, instead in SMALLER:
        text = text.replace(taken, instead)
    return text


def tools(folder: Path) -> Path:
    """A directory with the axrt of this checkout, its Python and the mpirun that goes with it."""
    folder.mkdir()
    for name, command in (
        ("python", sys.executable),
        ("axrt", f"{sys.executable} -m axrt"),
        ("mpirun", launcher()),
    ):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
    return folder


def test_a_block_is_cut_into_its_commands() -> None:
    block = Block("console", "$ one \\\n    two   # why\nprinted\n$ three\n", "", "page")
    assert block.commands() == ["one     two   # why", "three"]

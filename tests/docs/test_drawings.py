"""The drawings of docs/ are what their commands draw."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from axrt.cli import main

from .pages import PAGES, blocks

DRAWN = "docs/drawings/"
COMMANDS = [
    command
    for block in blocks("how-it-works")
    if block.language == "console"
    for command in block.commands()
    if DRAWN in command
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_draws_its_picture_anew(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    name = words[-1].removeprefix(DRAWN)
    drawn = CliRunner().invoke(main, [*words[1:-1], str(tmp_path / name)])
    assert drawn.exit_code == 0, drawn.output
    anew = (tmp_path / name).read_text()
    assert anew == (PAGES / "drawings" / name).read_text(), f"draw it anew: {command}"


def test_every_drawing_has_a_command_and_is_shown() -> None:
    there = {path.name for path in (PAGES / "drawings").iterdir()}
    assert {Path(command.split()[-1]).name for command in COMMANDS} == there
    shown = re.findall(r"\]\(drawings/([\w.-]+)\)", (PAGES / "how-it-works.md").read_text())
    assert set(shown) == there

"""Commands of the pages that call scripts: the script is there, has the options, and is listed."""

import os
import re
from pathlib import Path

import pytest

from .pages import PAGES, blocks, codes

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    file.name: file
    for file in (ROOT / "scripts").iterdir()
    if file.is_file() and os.access(file, os.X_OK)
}
NAMES = ["README", *sorted(page.stem for page in PAGES.glob("*.md"))]
TO_OTHERS = ("test", "test_queues")  # their arguments go to pytest


def behind(script: Path) -> str:
    """The script, and the Python that it runs: files by their path, modules by name."""
    text = script.read_text()
    paths = [ROOT / name for name in re.findall(r"\S+\.py\b", text)]
    for name in re.findall(r'-m "?([a-z]\w*(?:\.\w+)*)', text):
        for base in (ROOT, ROOT / "scripts", ROOT / "scripts/benchmarks"):
            place = base.joinpath(*name.split("."))
            paths += [place.with_suffix(".py"), *place.glob("**/*.py")]
    return "\n".join([text, *(path.read_text() for path in paths if path.is_file())])


def calls(page: str) -> list[tuple[str, str]]:
    """Each script that a page calls, with its arguments."""
    commands = [one for block in blocks(page) for one in block.commands()]
    text = "\n".join([*commands, *codes(page)])
    return re.findall(r"(?:^|[ ;])scripts/(\w+)((?: [^\n#|;]*)?)", text, re.MULTILINE)


@pytest.mark.parametrize("page", NAMES)
def test_scripts_that_are_called_have_their_options(page: str) -> None:
    for name, arguments in calls(page):
        assert name in SCRIPTS or (ROOT / "scripts" / name).is_dir() or name == "environment", name
        if name in SCRIPTS and name not in TO_OTHERS:
            for option in re.findall(r" (--[a-z][\w-]*)", arguments.partition(" -- ")[0]):
                assert option in behind(SCRIPTS[name]), f"scripts/{name} {option}"


def test_every_script_is_listed_with_what_it_does() -> None:
    text = (PAGES / "install.md").read_text()
    assert set(SCRIPTS) == set(re.findall(r"^\| `scripts/(\w+)` \|", text, re.MULTILINE))

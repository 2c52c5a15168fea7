"""The site builds, and every page is in it."""

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click
import pytest

import axrt
from axrt.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `scripts/docs` builds it."""
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("site")
    words = re.search(r'^exec "\$python" (.* docs) docs/_build/html', script(), re.MULTILINE)
    assert words
    built = subprocess.run(
        [sys.executable, *words[1].split(), str(folder), "-d", str(folder / "doctrees")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder


def script() -> str:
    return (ROOT / "scripts" / "docs").read_text()


def test_the_site_builds_with_warnings_as_errors(site: Path) -> None:
    assert " -n -W " in script()
    assert (site / "index.html").exists()


def test_every_page_of_the_folder_is_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page.name


def test_the_tables_of_keys_are_those_of_the_code(reference: ModuleType) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert reference.with_key_tables(page) == page, "scripts/docs --keys writes them anew"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/reference.py."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("reference")


def test_the_reference_has_every_public_name_and_every_attribute_of_the_engine(site: Path) -> None:
    page = (site / "api.html").read_text()
    told = set(re.findall(r'id="(axrt\.[\w.]+)"', page))
    assert {f"axrt.{name}" for name in axrt.__all__} <= told
    of_engine = {name for name in dir(axrt.Engine) if not name.startswith("_")}
    assert {f"axrt.Engine.{name}" for name in of_engine} <= told
    for argument in list(inspect.signature(axrt.PipelineModule).parameters)[1:]:
        assert f"<strong>{argument}</strong>" in page


def test_the_reference_has_every_command_with_every_option(site: Path) -> None:
    page = (site / "commands.html").read_text()
    for command in commands():
        assert f">{command.command_path}<" in page
        for option in command.command.params:
            if isinstance(option, click.Option):
                assert option.opts[-1] in page, command.command_path


def commands() -> list[click.Context]:
    """Every command that is no group of others."""
    found = []
    todo = [click.Context(main, info_name="axrt")]
    while todo:
        of = todo.pop()
        if isinstance(of.command, click.Group):
            for name in of.command.list_commands(of):
                inner = of.command.get_command(of, name)
                assert inner is not None
                todo.append(click.Context(inner, info_name=name, parent=of))
        else:
            found.append(of)
    return found

"""The site builds, and every page is in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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

"""Figures that do not depend on a machine are those that their command prints."""

import os
import subprocess
import sys

from .pages import ROOT, text_of


def test_the_tables_of_one_step_are_those_that_the_study_prints() -> None:
    printed = subprocess.run(
        [sys.executable, "scripts/benchmarks/schedules.py", "--table", "published"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    page = text_of("study")
    tables = page[page.index("## One step") : page.index("## Eight steps")]
    shown = [line for line in tables.splitlines() if line.startswith("|")]
    meanings = shown.index(rows[0])  # the first table says what columns mean
    assert shown[meanings:] == rows

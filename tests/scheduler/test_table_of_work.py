"""The table of work that stands above the rules is the one that they make."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "structure"))

import table_of_work  # noqa: E402


def test_the_table_above_the_rules_is_drawn_from_them() -> None:
    text = table_of_work.FILE.read_text()
    drawn = table_of_work.laid_in(text, table_of_work.drawn())
    assert drawn == text, "scripts/table_of_work --write lays it in anew"


def test_every_kind_of_work_stands_in_it() -> None:
    from axrt.scheduler.task import Kind

    table = "\n".join(table_of_work.drawn())
    missing = [kind for kind in Kind if f"#   {kind.value} " not in table]
    assert missing == []

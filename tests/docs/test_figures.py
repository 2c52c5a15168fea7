"""Tables of benchmarks stand in the pages as the benchmarks have written them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS, FIGURES = ROOT / "docs", ROOT / "docs" / "figures"
sys.path.insert(0, str(DOCS))
from figures import laid_in, names  # noqa: E402

PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_of_its_files(page: Path) -> None:
    text = page.read_text()
    assert laid_in(text, FIGURES) == text, "scripts/figures lays them in anew"


def test_every_file_is_shown_or_named_and_says_where_it_comes_from() -> None:
    texts = [page.read_text() for page in PAGES]
    shown = set().union(*map(names, texts))
    assert shown <= {file.name for file in FIGURES.glob("*.md")}
    for file in FIGURES.glob("*.md"):
        is_named = re.compile(rf"(?<![\w-]){re.escape(file.name)}")
        assert file.name in shown or any(map(is_named.search, texts)), file.name
    for file in FIGURES.glob("*.md"):
        first = file.read_text().partition("\n")[0]
        assert re.match(
            r"<!-- \S.* - \d{4}-\d\d-\d\d, \w+, \d+ cores, Python \S+, torch \S+ -->", first
        )


def test_figures_of_the_readme_are_those_of_a_benchmark() -> None:
    number = re.compile(r"\d[\d,]*(?:\.\d+)?(?<!,)")
    texts = [file.read_text() for file in FIGURES.glob("*.md")]
    rows = [row for row in (ROOT / "README.md").read_text().splitlines() if "`bench_" in row]
    assert len(rows) > 5
    for row in rows:
        *_, of, beside, script, _ = row.split("|")
        mine = [text for text in texts if script.strip(" `") in text.partition("\n")[0]]
        assert set(number.findall(f"{of} {beside}")) <= set(number.findall(" ".join(mine))), row


def test_what_a_command_prints_is_kept_and_laid_in(tmp_path: Path) -> None:
    end = "<!-- end of figures -->\n"
    page = f"A\n<!-- figures/one.md -->\nold\n{end}B\n<!-- figures/one.md:2 -->\n{end}"
    (tmp_path / "one.md").write_text("<!-- x -->\n\n| a |\n|---|\n\nwords\n\n| b |\n|---|\n| 2 |\n")
    found = laid_in(page, tmp_path)
    assert found.count("| a |\n|---|\n") == 1
    assert "old" not in found
    assert found.index("| a |") < found.index("B") < found.index("| b |\n|---|\n| 2 |\n")
    assert laid_in(found, tmp_path) == found
    with pytest.raises(ValueError, match="one.md has no table 3"):
        laid_in(page.replace(":2", ":3"), tmp_path)
    (tmp_path / "one.md").write_text("<!-- bench --fast - 2026-01-02, abc, 2 cores -->\n\n12 us\n")
    found = laid_in(page.replace(":2", ""), tmp_path)
    assert "```text\n12 us\n```\n\n`bench --fast`: 2026-01-02, abc, 2 cores.\n" in found
    told = subprocess.run([ROOT / "scripts" / "figures", "--help"], capture_output=True, text=True)
    assert told.stdout.startswith("Runs a benchmark, keeps what it prints")

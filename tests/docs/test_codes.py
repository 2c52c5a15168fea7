"""The tables of exit codes have the codes that axrt ends with."""

import re

import pytest

from axrt.exit_codes import Exit

from .pages import text_of


@pytest.mark.parametrize("page", ["reliability", "slurm"])
def test_a_page_has_every_exit_code(page: str) -> None:
    section = text_of(page).partition("## Exit codes\n")[2].partition("\n\n## ")[0]
    table = section[section.index("| code |") :].partition("\n\n")[0]
    codes = {
        int(code) for row in table.splitlines() for code in re.findall(r"\d+", row.split("|")[1])
    }
    assert {code.value for code in Exit} <= codes
    if page == "reliability":
        assert codes == {code.value for code in Exit}

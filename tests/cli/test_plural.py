"""One of anything is said in the singular, whatever command says it."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from axrt.cli import main
from axrt.scheduler.plural import plural

from .test_train import TINY

ONE = "schedule.microbatches=1 run.steps=1 run.trace_steps=1 data.held_out=0 data.source=one.txt"
ONE_OF = re.compile(r"(?<![\d.,])1 (?!is\b|has\b|pass\b|us\b|ms\b|this\b|across\b)([a-z]+s)\b")


@pytest.mark.parametrize(
    "command",
    [
        "prepare one.txt --out one --tokenizer bytes",
        f"memory tiny.toml --ranks 1 {ONE}",
        f"memory tiny.toml --ranks 3 {ONE}",
        f"train -v tiny.toml {ONE}",
        "simulate --ranks 1 --microbatches 1",
        "simulate --ranks 1 --microbatches 1 --policy 1f1b",
        "doctor",
    ],
)
def test_one_is_singular(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "one.txt").write_text("all work and no play")
    result = CliRunner().invoke(main, command.split())
    assert result.output
    assert ONE_OF.findall(result.output) == [], result.output


def test_plurals() -> None:
    counted = [plural(number, "microbatch") for number in (0, 1, 2)]
    assert counted == ["0 microbatches", "1 microbatch", "2 microbatches"]
    assert [plural(12573, noun) for noun in ("copy", "day", "box")] == [
        "12,573 copies",
        "12,573 days",
        "12,573 boxes",
    ]

"""A preparation begins, goes on, is made already, or is refused."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main
from axrt.data.preparation import Beginning, Order, beginning, differences
from axrt.errors import ConfigError, DataError

MADE_OF = {"sources": [["a", 1, 10], ["b", 2, 20]], "tokenizer": "bytes", "field": "text"}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, []),
        ({"field": "body"}, ["field 'text' -> 'body'"]),
        ({"skip_empty": True}, ["skip_empty None -> True"]),
        ({"sources": [["a", 1, 11], ["c", 2, 20]]}, ["a has changed", "c is new", "b is gone"]),
        ({"sources": [["b", 2, 20], ["a", 1, 10]]}, ["the order of the sources"]),
        (
            {"sources": [[name, 1, 1] for name in "abcdef"]},
            ["a has changed", "b has changed", "c is new", "3 more files differ"],
        ),
    ],
)
def test_what_differs_is_named(now: dict[str, object], said: list[str]) -> None:
    assert differences(MADE_OF, {**MADE_OF, **now}) == said


def axrt(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["prepare", "a.jsonl", "--out", "out", *arguments])


def files() -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in Path().glob("out*")}


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(40)))


@pytest.mark.parametrize("options", [(), ("--train-tokenizer", "300", "--held-out", "0.2")])
def test_what_is_made_is_not_made_again(options: tuple[str, ...]) -> None:
    first = axrt(*options)
    before = files()
    again = axrt(*options)
    assert again.output == "out.bin is already made; --force makes it anew\n" + first.stdout
    assert files() == before
    anew = axrt(*options, "--force")
    assert anew.stdout == first.stdout
    assert {name: data for name, (_, data) in files().items()} == {
        name: data for name, (_, data) in before.items()
    }
    assert files()["out.bin"][0] > before["out.bin"][0]


def test_what_is_made_otherwise_is_refused_and_stays() -> None:
    axrt()
    before = files()
    for options, said in (
        (("--held-out", "0.2"), "held_out 0.0 -> 0.2"),
        (("--train-tokenizer", "300"), "tokenizer 'bytes' -> 'one of 300 tokens, made from the"),
        ((), "a.jsonl has changed"),
    ):
        if not options:
            Path("a.jsonl").write_text(json.dumps({"text": "another"}))
        refused = axrt(*options)
        assert refused.exit_code == 2
        assert f"axrt: out.bin was made otherwise: {said}" in refused.output
        assert "or --force to make it anew" in refused.output
        assert files() == before
    assert axrt("--force").exit_code == 0
    assert len(Path("out.bin").read_bytes()) == len("another") + 1


def test_a_file_of_other_tools_is_not_written_over() -> None:
    Path("out.bin").write_bytes(b"1234")
    assert "out.bin is there, and axrt prepare has not made it" in axrt().output
    Path("out.json").write_text("{}")
    assert "expected what `axrt prepare` writes" in axrt().output
    assert Path("out.bin").read_bytes() == b"1234"


def test_one_that_was_begun_goes_on_with_force_too_and_files_that_are_lost_are_made() -> None:
    order = Order(Path("out"), ("a.jsonl",), "bytes")
    made_of = order.made_of()
    assert beginning(order, made_of, False) is Beginning.ANEW
    axrt()
    assert beginning(order, made_of, False) is Beginning.MADE
    assert beginning(order, made_of, True) is Beginning.ANEW
    os.remove("out.idx")
    assert beginning(order, made_of, False) is Beginning.ANEW
    order.partial.mkdir()
    order.plan.write_text(json.dumps(made_of))
    assert {beginning(order, made_of, force) for force in (False, True)} == {Beginning.GOING_ON}
    order.plan.write_text(json.dumps({**made_of, "field": "body"}))
    assert beginning(order, made_of, True) is Beginning.ANEW
    with pytest.raises(
        ConfigError, match="out.partial was begun otherwise: field 'body' -> 'text'"
    ):
        beginning(order, made_of, False)


def test_a_source_is_not_written_over_by_what_is_told_of_its_tokens() -> None:
    Path("out.json").write_text('[{"text": "a"}]')
    with pytest.raises(DataError, match="out.json: "):
        beginning(Order(Path("out"), ("out.json",), "bytes"), {}, False)

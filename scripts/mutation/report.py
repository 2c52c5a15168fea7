"""The report of a measurement, in Markdown: shares by folder, and each fault with its end."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from .measure import Result
from .trial import Outcome

EQUIVALENT = Path(__file__).with_name("equivalent.txt")


def read_equivalent(file: Path = EQUIVALENT) -> dict[str, str]:
    """The faults that change nothing: the reason of each, by its key."""
    lines = (line.split(maxsplit=1) for line in file.read_text().splitlines())
    return {words[0]: words[1] for words in lines if len(words) == 2 and words[0] != "#"}


def report(
    results: Collection[Result], equivalent: Mapping[str, str], took: str, tests: str
) -> str:
    """The page.

    Args:
        results: of all faults that were planted.
        equivalent: reasons of those that change nothing, by key.
        took, tests: what the head says of the time, and of the suite.
    """
    counted = [result for result in results if result.key not in equivalent]
    found = [result for result in counted if result.is_found]
    missed = [result for result in counted if not result.is_found]
    alike = [result for result in results if result.key in equivalent]
    return "\n".join(
        [
            "# What the tests detect",
            "",
            f"{tests} {took}",
            "",
            *_shares(counted, Counter(result.folder for result in alike)),
            "",
            "## Not found",
            "",
            *[f"- {_told(result)}" for result in sorted(missed, key=_place)],
            "",
            "## Change nothing",
            "",
            *[f"- {_told(one)}: {equivalent[one.key]}" for one in sorted(alike, key=_place)],
            "",
            "## Found",
            "",
            *[f"- {_told(one)}, by {one.ended.test}" for one in sorted(found, key=_place)],
            "",
        ]
    )


def _shares(counted: Sequence[Result], alike: Mapping[str, int]) -> Iterable[str]:
    yield "| folder | planted | found | of them hung | share | change nothing, beside these |"
    yield "|---|---|---|---|---|---|"
    for folder in dict.fromkeys(result.folder for result in counted):
        yield _row(folder, [one for one in counted if one.folder == folder], alike.get(folder, 0))
    yield _row("all", counted, sum(alike.values()))


def _row(folder: str, results: Sequence[Result], alike: int) -> str:
    found = sum(result.is_found for result in results)
    hung = sum(result.ended.outcome is Outcome.HUNG for result in results)
    share = f"{found / len(results):.0%}"
    return f"| {folder} | {len(results)} | {found} | {hung} | {share} | {alike} |"


def _told(result: Result) -> str:
    change = f"`{result.before}` -> `{result.after}`"
    ended = result.ended
    ran = f", {ended.tests} of {result.candidates} tests, {ended.cpu_s:.0f} s"
    ran = "" if ended.outcome is Outcome.NOT_REACHED else ran
    where = f"{result.place} in {result.function or 'the module'}, {result.operator}"
    return f"{ended.outcome}{ran}: {where}: {change} ({result.key})"


def _place(result: Result) -> tuple[str, int]:
    file, _, line = result.place.rpartition(":")
    return (file, int(line))

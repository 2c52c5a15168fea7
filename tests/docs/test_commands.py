"""Commands of the pages: each has a subcommand, options and keys that exist."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields

import click
import pytest

from axrt import Config
from axrt.cli import main
from axrt.cli.simulate.command import simulate_command
from axrt.cli.simulate.world import World
from axrt.scheduler.simulation.timeline import Timeline

from .pages import PAGES, blocks, codes, text_of

NAMES = ["README", *sorted(page.stem for page in PAGES.glob("*.md"))]
KEYS = {section: set(keys) for section, keys in Config().as_dict().items()}
KEYS["world"] = {item.name for item in fields(World)}
OVERRIDES = ("train", "memory", "slurm", "pbs", "simulate")  # take section.key=value
PROCESSES = ("axrt witness",)  # names of processes, and no commands
FILES = ("json", "py")  # whose ends look like keys


def in_consoles(page: str) -> Iterator[str]:
    for block in blocks(page):
        if block.language == "console":
            yield from block.commands()


@pytest.mark.parametrize("page", NAMES)
def test_what_is_read_behind_a_training_is_what_it_has_written(page: str) -> None:
    """Without `run.out` a number is added to the name where a run of that name exists."""
    for block in blocks(page):
        wrote: set[str] | None = None
        for command in block.commands():
            read = set(re.findall(r"(?:draw|--like|report|watch|generate) (runs/\w+)", command))
            assert wrote is None or read <= wrote, command
            if " train examples/" in command:
                wrote = (wrote or set()) | set(re.findall(r"run\.out=(\S+)", command))


def in_lines(page: str) -> Iterator[str]:
    """Commands between backticks, within prose."""
    for code in codes(page):
        if re.match(r"(mpirun .* |srun .* )?axrt [a-z]", code) and code not in PROCESSES:
            yield code


def calls(command: str) -> Iterator[list[str]]:
    """The arguments of each axrt in a command line."""
    if "axrt" not in command:
        return
    words = shlex.split(command.replace("\\|", "|"), comments=True)
    places = [
        place for place, word in enumerate(words) if word.endswith("axrt") and "=" not in word
    ]
    for place, end in zip(places, [*places, None][1:], strict=True):
        if words[place + 1 : place + 2] and not words[place + 1].startswith("/"):
            yield words[place + 1 : end]


@pytest.mark.parametrize("page", NAMES)
def test_commands_of_a_page_exist_with_their_options(page: str) -> None:
    for command in [*in_consoles(page), *in_lines(page)]:
        for words in calls(command):
            check(words, command)


def check(words: list[str], command: str) -> None:
    of: click.Command = main
    context = click.Context(main, info_name="axrt")
    while isinstance(of, click.Group):
        if not words or words[0].startswith("-") or words[0].isupper():
            return
        found = of.get_command(context, words[0])
        assert found is not None, f"no command {words[0]}: {command}"
        name, words, of = words[0], words[1:], found
        context = click.Context(of, info_name=name, parent=context)
    parser = of.make_parser(context)
    try:
        _, rest, _ = parser.parse_args([word for word in words if word != "..."])
    except click.BadOptionUsage:  # prose may leave a value away
        rest = []
    except click.UsageError as error:
        pytest.fail(f"{command}: {error.message}")
    for word in rest if context.info_name in OVERRIDES else ():
        if found_key := re.match(r"(\w+)\.(\w+)=", word):
            assert found_key[2] in KEYS.get(found_key[1], ()), f"no key {word}: {command}"


@pytest.mark.parametrize("page", NAMES)
def test_keys_that_a_page_names_exist(page: str) -> None:
    sections = "|".join(KEYS)
    for code in codes(page):
        for section, key in re.findall(rf"(?<![\w./\"-])({sections})\.([a-z]\w*)(?![\w(./])", code):
            known = key in KEYS[section] or key in FILES
            assert known or is_of_another_tool(page, code), f"{section}.{key} of {code}"


def is_of_another_tool(page: str, code: str) -> bool:
    """It stands in the first column of a table of another tool's names."""
    rows = [row for row in text_of(page).splitlines() if row.startswith("| ")]
    return page == "coming-from" and any(f"`{code}`" in row.split("|")[1] for row in rows)


def test_the_guide_has_every_option_of_simulate_in_one_row() -> None:
    section = text_of("command-line").partition("## Simulating")[2].partition("\n## ")[0]
    modes, options = section.partition("| options |")[::2]
    named = [
        re.findall(r"`(--[\w-]+)", row.split("|")[1])
        for row in options.splitlines()
        if row.startswith("| `--")
    ]
    found = [option for row in named for option in row]
    every = {option for of in simulate_command.params for option in of.opts if "--" in option}
    assert sorted(found) == sorted(set(found))
    assert every == set(found) | set(re.findall(r"(--[a-z][\w-]*)", modes))


def test_the_guide_has_every_key_of_a_simulated_world_in_one_row() -> None:
    table = text_of("command-line").partition("| keys of `[world]` |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    found = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    assert sorted(found) == sorted(item.name for item in fields(World))


def test_the_guide_has_every_field_of_a_timeline() -> None:
    table = text_of("command-line").partition("| field of `timeline.json` |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert named == set(json.loads(Timeline(1, 1).to_json()))

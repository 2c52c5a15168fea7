"""What the reference takes from the code: a table of keys for each section of the configuration,
and the help of every command.

The tables are in configuration.md, where GitHub shows them, too: `scripts/docs --keys` writes them
anew, and a test holds them equal. The commands are laid into commands.md when the site is built.
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from math import log2
from pathlib import Path
from typing import Any, get_type_hints

import click
from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))

from axrt.cli import main as axrt_command  # noqa: E402
from axrt.config import Config  # noqa: E402

COMMANDS = "<!-- commands -->"  # where they go

# Pages that say more about a key.
_MORE = {
    "model.factory": "command-line.md#a-model-of-your-own",
    "data.source": "command-line.md#data",
    "data.weights": "command-line.md#several-sources",
    "data.tokenizer": "command-line.md#preparing-text",
    "data.document_end": "models.md#documents",
    "data.masked": "models.md#prompts",
    "parallel.group": "schedules.md#sums-in-groups",
    "schedule.policy": "schedules.md#policies",
    "schedule.also": "schedules.md#a-policy-of-your-own",
    "schedule.placement": "schedules.md#placements",
    "schedule.fill": "tensor-parallelism.md#filling-or-waiting",
    "schedule.share": "schedules.md#shared-microbatches",
    "schedule.order": "schedules.md#orders",
    "memory.recompute": "techniques.md#recomputation",
    "memory.offload": "memory.md#offload",
    "memory.offload_activations": "memory.md#activations-in-scratch",
    "memory.offload_parameters": "memory.md#weights-in-scratch",
    "memory.zero": "memory.md#shards-over-replicas",
    "memory.gathered": "memory.md#weights-that-come-and-go",
    "memory.reductions": "memory.md#gradients-that-are-let-go",
    "memory.device_gb": "memory.md#a-limit",
    "precision.compute": "techniques.md#autocast",
    "precision.weights": "techniques.md#narrow-weights",
    "checkpoint.background": "checkpoints.md#saves-beside-training",
    "checkpoint.memory_every": "checkpoints.md#copies-in-memory",
    "checkpoint.resume": "checkpoints.md#going-on",
    "run.deterministic": "schedules.md#shared-microbatches",
    "run.compile": "techniques.md#compiled-layers",
    "run.survive": "reliability.md#in-the-same-job",
    "run.cuda_aware": "clusters.md#cuda-aware-mpi",
    "run.patience_s": "reliability.md#signs-of-life",
    "run.tensorboard": "command-line.md#metrics-elsewhere",
    "run.wandb": "command-line.md#metrics-elsewhere",
    "run.trace_steps": "command-line.md#timelines",
}
_NAMES = ("axrt ", "float16", "llama3", "auto ")  # which begin no sentence with a capital
_LISTED_ELSEWHERE = ("schedule.policy",)  # too many choices for a row


def key_table(section: str) -> str:
    """The table of a section: key, default, meaning."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for item in fields(get_type_hints(Config)[section]):
        key = f"{section}.{item.name}"
        words = " ".join(_meaning(key, item.metadata))
        rows.append(f"| `{key}` | `{_toml(item.default)}` | {words} |")
    return "\n".join(rows) + "\n"


def _meaning(key: str, of: Any) -> Iterator[str]:
    # a word in quotes as TOML has it, but not the apostrophe of a genitive
    said = re.sub(r"(?<!\w)'([^'\n]*)'(?!\w)", r'`"\1"`', of["meaning"]).replace("|", "\\|")
    yield (said if said.startswith(_NAMES) else said[0].upper() + said[1:]) + "."
    if of["choices"] and key not in _LISTED_ELSEWHERE:
        yield f"One of {', '.join(f'`{_toml(choice)}`' for choice in of['choices'])}."
    least, most = of["least"], of["most"]
    bounds = [f"at least {_number(least)}"] if least else []
    bounds += [f"at most {_number(most)}"] if most is not None and most < 2**62 else []
    if bounds:
        yield f"{' and '.join(bounds).capitalize()}."
    if key in _MORE:
        yield f"[More]({_MORE[key]})."


def _number(value: float) -> str:
    power = log2(abs(value))
    return f"`2**{power:.0f}`" if power.is_integer() and abs(power) > 10 else f"{value:,.10g}"


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def with_key_tables(page: str) -> str:
    """The page of the configuration with the table of every section made anew."""
    for section in get_type_hints(Config):
        rows = re.compile(
            rf"^\| key \| default \| meaning \|\n\|---\|---\|---\|\n(?:\| `{section}\..*\n)+",
            re.MULTILINE,
        )
        page, found = rows.subn(key_table(section).replace("\\", r"\\"), page)
        assert found == 1, f"{found} tables of [{section}] in the page; expected one"
    return page


def commands() -> str:
    """Every command with what its help says, in Markdown."""
    context = click.Context(axrt_command, info_name="axrt")
    return "\n".join(
        line for name in axrt_command.list_commands(context) for line in _of(name, context)
    )


def _of(name: str, parent: click.Context) -> Iterator[str]:
    command = parent.command.get_command(parent, name)  # type: ignore[attr-defined]
    context = click.Context(command, info_name=name, parent=parent)
    deep = context.command_path.count(" ")
    yield f"{'#' * (deep + 1)} {context.command_path}\n"
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```\n"
    yield from _help(command.help or command.short_help or "")
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            yield from _of(inner, context)
        return
    yield "| option | default | meaning |\n|---|---|---|"
    for option in command.get_params(context):
        if isinstance(option, click.Option) and not option.hidden:
            yield _row(option, context)
    yield ""


def _help(text: str) -> Iterator[str]:
    """Paragraphs of a docstring; those that click must not wrap are commands."""
    for paragraph in re.split(r"\n\s*\n", text.strip().replace("\f", "")):
        if paragraph.lstrip().startswith("\b"):
            yield (
                "```text\n"
                + textwrap.dedent(paragraph.lstrip().removeprefix("\b").lstrip("\n")).rstrip()
                + "\n```\n"
            )
        else:
            yield " ".join(paragraph.split()) + "\n"


def _row(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None
    names, _ = record
    extra = option.get_help_extra(context)
    default = extra.get("default", "")
    meaning = (option.help or "").replace("|", "\\|")
    others = [extra["range"]] if "range" in extra else []
    others += ["required"] * option.required
    words = "; ".join(filter(None, [meaning, *others]))
    shown = f"`{default}`" if default else ""
    return f"| `{names.replace('|', ' or ').removesuffix(' RANGE')}` | {shown} | {words} |"


def _lay_in(app: Sphinx, name: str, source: list[str]) -> None:
    if COMMANDS in source[0]:
        source[0] = source[0].replace(COMMANDS, commands())


def _as_rst(app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are nearly reStructuredText: this makes them so, before napoleon reads them."""
    text = "\n".join(lines)
    text = re.sub(
        r"^```(\w+)\n(.*?)^```$",
        lambda code: f".. code-block:: {code[1]}\n\n{textwrap.indent(code[2], '    ')}",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    text = re.sub(
        r"(?<!`)(`[^`\n]+`)(\w?)", lambda of: of[1] + (rf"\ {of[2]}" if of[2] else ""), text
    )  # a plural
    text = re.sub(r"(?<![\w`*])(\*{1,2})(?=\w+[,:])", lambda stars: r"\*" * len(stars[1]), text)
    lines[:] = text.split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _lay_in)
    app.connect("autodoc-process-docstring", _as_rst, priority=400)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    PAGE = HERE / "configuration.md"
    PAGE.write_text(with_key_tables(PAGE.read_text()))

"""Damages files that a run leaves and goes on from, one after the other; the damage is found, or
does not matter, and never a traceback.

python -m tests.attacks.files [--tries 1000] [--seed 0]

In a checkpoint everything must be found: the run then goes on from the one before. What other files
say may change, and is either refused in one line, with code 2, or harmless.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
from click.testing import CliRunner, Result

from axrt.checkpoint.folder import candidates_in
from axrt.cli import main as axrt
from tests.checkpoint.damage import ON_BYTES, ON_FILES
from tests.cli.test_train import TINY

CHECKPOINT = "out/checkpoints/step-00000004"
IN_A_CHECKPOINT = (
    "manifest.json",
    "layer-0001.safetensors",
    "optimizer-0001.safetensors",
    "optimizer-0000.safetensors",
)
BESIDE = (
    "out/checkpoints/latest",
    "out/checkpoints/.lock",
    "out/.lock",
    "out/config.toml",
    "out/metrics.jsonl",
)
GIVEN = ("tokens.bin", "tokens.idx", "order.csv", "out/timeline.json")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(axrt, list(arguments))


def prepare(folder: Path) -> None:
    """A run with two checkpoints and all that a run may read."""
    (folder / "tiny.toml").write_text(TINY)
    (folder / "text.txt").write_text("all work and no play " * 20)
    tokens = np.arange(400, dtype=np.int32) % 256
    tokens.tofile(folder / "tokens.bin")
    head = (
        b"MMIDIDX\x00\x00"
        + (1).to_bytes(8, "little")
        + bytes([4])
        + (2).to_bytes(8, "little")
        + (3).to_bytes(8, "little")
    )
    (folder / "tokens.idx").write_bytes(head + np.array([150, 250], np.int32).tobytes() + bytes(40))
    with inside(folder):
        result = run(
            "train",
            "tiny.toml",
            "checkpoint.every=2",
            "checkpoint.keep=0",
            "run.trace_steps=2",
            "run.steps=4",
        )
        assert result.exit_code == 0, result.output
        result = run(
            "simulate",
            "--policy",
            "1f1b",
            "--ranks",
            "1",
            "--microbatches",
            "2",
            "--write-order",
            "order.csv",
        )
        assert result.exit_code == 0, result.output


@contextmanager
def inside(folder: Path) -> Any:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def go_on(*overrides: str) -> Result:
    return run(
        "train",
        "out/config.toml",
        "checkpoint.resume=auto",
        "run.steps=5",
        "run.trace_steps=0",
        *overrides,
    )


def check_checkpoint(name: str) -> str:
    """The damaged newest one is named, and the run goes on from the one before; it is set aside,
    and step 4 is saved anew."""
    result = go_on("checkpoint.every=2")
    assert result.exit_code == 0, result.output
    assert "damaged, and not taken" in result.output, result.output
    assert "going on from out/checkpoints/step-00000002 at step 2" in result.output, result.output
    assert [one.step for one in candidates_in(Path("out/checkpoints"))] == [5, 4, 2]
    return "found"


def check_beside(name: str) -> str:
    result = go_on()
    assert result.exit_code in (0, 2, 70), result.output
    assert result.exit_code != 0 or name == "out/config.toml" or "at step 4" in result.output, (
        result.output
    )
    return "refused" if result.exit_code else "harmless"


def check_given(name: str) -> str:
    if name == "out/timeline.json":
        result = run("draw", name, "picture.svg")
    elif name == "order.csv":
        result = run(
            "train",
            "tiny.toml",
            "schedule.policy=fixed",
            "schedule.order=order.csv",
            "run.out=given",
            "run.steps=1",
        )
    else:
        result = run(
            "train",
            "tiny.toml",
            "data.source=tokens.bin",
            "model.vocab=256",
            "run.out=given",
            "run.steps=1",
        )
    assert result.exit_code in (0, 2), result.output
    return "refused" if result.exit_code else "harmless"


def attempt(
    whole: Path, random: Random, files: tuple[str, ...], damages: Any, check: Callable[[str], str]
) -> tuple[str, str]:
    """One file of a copy is damaged and used; (file, what came of it)."""
    # an empty file has no bit to flip
    name = random.choice([name for name in files if (whole / name).stat().st_size])
    copy = whole.with_name("copy")
    shutil.copytree(whole, copy)
    try:
        with inside(copy):
            what = random.choice(damages)(Path(name), random)
            try:
                return Path(name).name, check(name)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from error
    finally:
        shutil.rmtree(copy)


def attack(folder: Path, tries: int, seed: int, say: bool) -> Counter[tuple[str, str]]:
    """How often which file was damaged, and what came of it."""
    whole, random, outcomes = folder / "whole", Random(seed), Counter[tuple[str, str]]()
    whole.mkdir()
    prepare(whole)
    in_checkpoint = tuple(f"{CHECKPOINT}/{name}" for name in IN_A_CHECKPOINT)
    kinds = (
        (in_checkpoint, ON_FILES, check_checkpoint),
        (BESIDE, ON_BYTES, check_beside),
        (GIVEN, ON_BYTES, check_given),
    )
    for number in range(tries):
        outcomes[attempt(whole, random, *kinds[number % len(kinds)])] += 1
        if say and (number + 1) % 100 == 0:
            click.echo(f"{number + 1} files damaged")
    return outcomes


@click.command()
@click.option("--tries", default=1000, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(tries: int, seed: int) -> None:
    """Damage files of a run and go on from them."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = attack(Path(folder), tries, seed, say=True)
    for (name, outcome), count in sorted(outcomes.items()):
        click.echo(f"{name:32} {outcome:10} {count:5}")


if __name__ == "__main__":
    main()

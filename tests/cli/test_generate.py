"""`axrt generate`: what a checkpoint goes on with."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

from axrt.cli import main
from axrt.data.tokenizer import ByteTokenizer
from axrt.errors import ConfigError
from axrt.generation.generation import Choice, Stage
from axrt.generation.loading import layers_of_rank

from ..models.writing import written
from .test_train import axrt, environment, in_a_directory

__all__ = ["in_a_directory"]  # a fixture


def generate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["generate", *arguments])


def test_a_run_goes_on_from_a_prompt_and_repeats_itself() -> None:
    assert axrt("tiny.toml", "run.steps=30", "optimizer.lr=0.05").exit_code == 0
    one, two = (
        generate("out", "--prompt", "all work", "--tokens", "30", "--seed", "3") for _ in range(2)
    )
    assert one.exit_code == 0, one.output
    assert one.output.startswith("all work")
    assert one.output == two.output
    assert (
        one.output
        != generate("out", "--prompt", "all work", "--tokens", "30", "--seed", "4").output
    )
    greedy = generate(
        "out/checkpoints/step-00000030", "--prompt", "all", "--tokens", "12", "--temperature", "0"
    ).output
    assert greedy == generate("out", "--prompt", "all", "--tokens", "12", "--top-k", "1").output


def test_text_comes_as_it_is_written() -> None:
    axrt("tiny.toml", "run.steps=1")
    command = [sys.executable, "-m", "axrt", "generate", "out", "--prompt", "all"]
    with subprocess.Popen(
        [*command, "--tokens", "4000"], stdout=subprocess.PIPE, env=environment()
    ) as job:  # fewer than what a buffer holds back
        assert job.stdout is not None
        assert os.read(job.stdout.fileno(), 20).startswith(b"all")
        time.sleep(0.05)
        assert len(os.read(job.stdout.fileno(), 4000)) < 3500, "the rest is not there yet"
        job.kill()


def test_a_model_of_token_files_takes_and_gives_numbers() -> None:
    (np.arange(400) % 50).astype(np.uint16).tofile("tokens.bin")
    result = axrt("tiny.toml", "data.source=tokens.bin", "model.vocab=50")
    assert result.exit_code == 0, result.output
    told = generate("out", "--prompt", "4 5", "--tokens", "5")
    assert len(told.output.split()) == 7
    assert all(0 <= int(word) < 50 for word in told.output.split())
    refused = generate("out", "--prompt", "4 50")
    assert "--prompt has token 50; expected tokens from 0 to 49" in refused.stderr
    assert refused.stdout == "", "the prompt is not shown first"
    assert "--prompt has token -1; expected" in generate("out", "--prompt", "-1").output
    assert "expected numbers of tokens" in generate("out", "--prompt", "four").output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("nowhere",), 2, "nowhere does not exist"),
        (("out", "--prompt", ""), 2, "--prompt is empty"),
        (("out", "--prompt", "x", "--prompts", "text.txt"), 2, "--prompt and --prompts are both"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], code: int, text: str) -> None:
    axrt("tiny.toml", "run.steps=1")
    result = generate(*arguments)
    assert result.exit_code == code
    assert text in result.stderr
    assert result.stdout == ""


def test_more_ranks_than_layers_are_told_to_be_fewer() -> None:
    axrt("tiny.toml", "run.steps=1")
    with pytest.raises(ConfigError, match=r"8 ranks for the \d+ layers of .* Start at most \d+"):
        layers_of_rank(Path("out/checkpoints/step-00000001"), 0, 8)


class Successor(nn.Module):
    """Says that the next token is one more."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= 4
        return 100.0 * nn.functional.one_hot((tokens + 1) % 10, 10).float()


CHOICES = [Choice(0.0), Choice(1.0), Choice(1.0, 1), Choice(0.5, 3), Choice(1.0, 0, 0.5)]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_sampling_follows_the_logits_within_the_context(choice: Choice) -> None:
    tokens = written(Stage(Successor(), 4), [3], 12, 4, choice, keeps=False)
    assert tokens == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("choice", "among"),
    [
        (Choice(1.0), {0, 1, 2, 3}),
        (Choice(1.0, top_k=2), {0, 1}),
        (Choice(1.0, top_p=0.6), {0, 1}),  # 0.5 is not enough
        (Choice(1.0, top_p=0.5), {0}),
        (Choice(1.0, top_k=3, top_p=0.84), {0, 1}),  # 0.5 and 0.3 of 0.95
        (Choice(0.2, top_p=0.9), {0}),  # colder, and so surer
    ],
    ids=str,
)
def test_the_next_token_is_one_of_the_likeliest(choice: Choice, among: set[int]) -> None:
    logits, random = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.Generator().manual_seed(0)
    assert {choice.of(logits, random) for _ in range(400)} == among


def test_a_file_of_prompts_gets_a_line_for_each(in_a_directory: Path) -> None:
    axrt("tiny.toml", "run.steps=1")
    (in_a_directory / "prompts").write_text("all\nwork\n")
    result = generate("out", "--prompts", "prompts", "--tokens", "4", "--temperature", "0")
    found = [json.loads(line) for line in result.output.splitlines()]
    assert [one["prompt"] for one in found] == ["all", "work"]
    alone = generate("out", "--prompt", "work", "--tokens", "4", "--temperature", "0").output
    assert "work" + found[1]["text"] == alone.removesuffix("\n")
    assert "tokens/s" in generate("out", "--tokens", "3", "--speed").output


def test_characters_of_several_bytes_are_shown_whole() -> None:
    decode = ByteTokenizer().decoder()
    assert decode(300) == "\N{REPLACEMENT CHARACTER}"
    assert [decode(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]


def test_a_checkpoint_stays_readable_when_the_run_has_moved(in_a_directory: Path) -> None:
    axrt("tiny.toml", "run.steps=1", "checkpoint.dir=kept/here")
    Path("out").rename("elsewhere")
    assert generate("elsewhere", "--tokens", "3").exit_code == 0


def test_prompts_come_by_a_shells_pipe_and_not_by_one_that_nobody_may_write_to() -> None:
    axrt("tiny.toml", "run.steps=1")
    reads, writes = os.pipe()
    os.write(writes, b"all work\n")
    os.close(writes)
    piped = generate("out", "--prompts", f"/dev/fd/{reads}", "--tokens", "2")
    assert piped.exit_code == 0, piped.output
    os.close(reads)
    os.mkfifo("named")
    for name, kind in (("named", "a pipe"), ("/dev/zero", "a device")):
        refused = generate("out", "--prompts", name, "--tokens", "2")
        assert refused.exit_code == 2
        assert f"it is {kind}" in refused.output

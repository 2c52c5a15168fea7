"""The command itself: what it says of its commands, and what it imports for them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from axrt.cli import main
from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts

from .test_train import axrt, in_a_directory

__all__ = ["in_a_directory"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
SCREEN = 50
WITHOUT_TORCH = (
    ("--help",),
    ("simulate", "--policy", "1f1b", "--ranks", "2", "--microbatches", "2"),
    ("simulate", "--search", "--ranks", "2", "--microbatches", "2", "--json"),
    ("draw", "--help"),
    ("doctor", "--help"),
    ("train", "--keys"),
)
HEAVY = frozenset(["torch", "numpy", "mpi4py"])
# What a start has no use for. Torch imports the first ones when something asks for them: an
# optimizer of its own, numbers drawn on the meta device, fake tensors.
UNUSED = frozenset(
    [
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.onnx",
        "sympy",
        "numpy.random",
        "mpi4py.MPI",
        "rich",
        "tokenizers",
        "transformers",
    ]
)
COMMAND = "from axrt.cli import main; main(sys.argv[1:], standalone_mode=False)"
STEPS = """
import axrt.cli.train.process, torch
from axrt.config import Config
from axrt.engine import initialize
from axrt.models.registry import model_of

tokens = torch.zeros(1, 8, dtype=torch.int64)
for optimizer in ("adamw", "adam", "sgd"):
    config = Config.read("tiny.toml", [f"optimizer.name={optimizer}"])
    with initialize(model_of(config), config=config) as engine:
        engine.train_batch(iter([(tokens, tokens)] * 2))
"""


def test_what_is_said_of_a_command_is_what_it_says_of_itself() -> None:
    context = click.Context(main)
    text = main.get_help(context)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        assert f"{name}  " in text
        assert command.get_short_help_str(limit=100) in text


def names_of(group: click.Group, *before: str) -> Iterator[tuple[str, ...]]:
    """The words of each command, that of the group first."""
    yield before
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from names_of(command, *before, name)
        else:
            yield (*before, name)


@pytest.mark.parametrize("name", [*names_of(main)], ids=" ".join)
def test_help_fits_a_screen_and_shows_an_example(name: tuple[str, ...]) -> None:
    said = CliRunner().invoke(main, [*name, "--help"], terminal_width=100).output
    assert len(said.splitlines()) <= SCREEN, said
    example = f"axrt {' '.join(name)} " if name else "axrt train "
    _, usage, about = said.partition("Usage:")
    assert example in about.partition("\n")[2].partition("Options:")[0], usage


def test_former_options_of_simulate_say_which_key_they_are() -> None:
    for option, key in (("--copy-costs", "world.copy_costs"), ("--straggler", "world.stragglers")):
        said = CliRunner().invoke(main, ["simulate", "--policy", "1f1b", option, "1"])
        assert said.exit_code == 2
        assert f"{option} is gone: expected " in said.output
        assert key in said.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str) -> None:
    asked = {"_AXRT_COMPLETE": f"{shell}_source"}
    said = CliRunner().invoke(main, [], prog_name="axrt", env=asked).output
    assert "axrt" in said
    words = {"_AXRT_COMPLETE": "bash_complete", "COMP_WORDS": "axrt pre", "COMP_CWORD": "1"}
    assert "prepare" in CliRunner().invoke(main, [], prog_name="axrt", env=words).output


def test_a_simulation_along_a_table_needs_no_torch(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(CostTable({1: (LayerCosts(1, 1, 1, 1, 1, 0.0),) * 4}).to_json())
    asked = ("simulate", "--costs", str(costs), "--ranks", "2", "--microbatches", "4", "--plan")
    assert not HEAVY & imported_by(COMMAND, *asked)


@pytest.mark.parametrize("arguments", WITHOUT_TORCH, ids=" ".join)
def test_what_computes_nothing_starts_without_torch(arguments: tuple[str, ...]) -> None:
    assert not HEAVY & imported_by(COMMAND, *arguments)


def test_a_launcher_starts_without_torch() -> None:
    assert "torch" not in imported_by(COMMAND, "launch", "--help")


def test_a_rank_trains_without_what_torch_imports_for_compilers() -> None:
    """The main rank of `axrt train` has it once it predicts memory, with fake tensors."""
    assert not UNUSED & imported_by(STEPS, beside="torch")


def test_a_model_goes_on_from_a_prompt_without_what_torch_imports_for_compilers() -> None:
    assert axrt("tiny.toml", "run.steps=1").exit_code == 0
    asked = ("generate", "out", "--prompt", "all", "--tokens", "2")
    assert not UNUSED & imported_by(COMMAND, *asked, beside="torch")


def imported_by(code: str, *arguments: str, beside: str = "sys") -> set[str]:
    """The modules that a process has at its end, without those that `beside` imports by itself."""
    script = (
        f"import sys, {beside}\nbefore = set(sys.modules)\n{code}\n"
        "print('', *(set(sys.modules) - before), sep='\\n')"
    )
    asked = [sys.executable, "-c", script, *arguments]
    ran = subprocess.run(asked, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.splitlines())


def test_modules_are_attributes_of_the_package_as_soon_as_they_are_asked_for() -> None:
    code = (
        "import axrt; print(axrt.errors.ConfigError.__name__, axrt.Config.__name__)\n"
        "print(hasattr(axrt, 'nothing'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "ConfigError Config\nFalse\n"


def test_names_of_commands_complete_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr("axrt.cli.import_module", imported.append)
    words = {"_AXRT_COMPLETE": "bash_complete", "COMP_WORDS": "axrt ", "COMP_CWORD": "1"}
    said = CliRunner().invoke(main, [], prog_name="axrt", env=words).output.split()
    assert {f"plain,{name}" for name in main.list_commands(click.Context(main))} == set(said)
    words["COMP_WORDS"] = "axrt --ver"
    assert "plain,--version" in CliRunner().invoke(main, [], prog_name="axrt", env=words).output
    assert imported == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [("trian", "did you mean train?"), ("xyzzy", "axrt --help lists those that there are")],
)
def test_a_misspelled_command_is_told_its_nearest(name: str, hint: str) -> None:
    result = CliRunner().invoke(main, [name])
    assert result.exit_code == 2
    assert f"there is no command {name!r}; {hint}" in result.output


@pytest.mark.parametrize("command", ["train", "memory", "profile", "slurm"])
def test_a_shell_completes_keys(command: str) -> None:
    def completed(word: str) -> set[str]:
        words = {"COMP_WORDS": f"axrt {command} my.toml {word}", "COMP_CWORD": "3"}
        asked = {"_AXRT_COMPLETE": "bash_complete", **words}
        said = CliRunner().invoke(main, [], prog_name="axrt", env=asked).output
        return {line.partition(",")[2] for line in said.split()}

    assert completed("schedule.po") == {"schedule.policy="}
    assert completed("run.transport=m") == {"run.transport=mpi"}, "of shells that keep words whole"
    assert completed("no.such") == set()


CUT = {
    "schedule.po": "schedule.policy=",
    "schedule.policy =": "1f1b",
    "schedule.policy = zb-": "zb-h1 zb-h2 zb-v",
    "model.layers = 4 run.transport = m": "mpi",
    "model.layers = 4": "",
}


def test_bash_completes_what_stands_behind_the_cut_at_an_equals_sign(tmp_path: Path) -> None:
    """With the words as bash has them in COMP_WORDS."""
    called = "from axrt.cli import main; main(prog_name='axrt')"
    (tmp_path / "axrt").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{called}" "$@"\n')
    (tmp_path / "axrt").chmod(0o755)
    asked = "".join(
        f"COMP_WORDS=(axrt train my.toml {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        'COMPREPLY=(); _axrt_completion axrt 2>/dev/null; echo "${COMPREPLY[@]}"\n'
        for words in CUT
    )
    script = (
        f'PATH="$PWD:$PATH"\neval "$(_AXRT_COMPLETE=bash_source axrt)"\n{asked}'
        "declare -f _axrt_completion | grep -c nospace"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    *answers, nospace = ran.stdout.splitlines()
    assert nospace == "1", "no blank behind a key"
    for said, (words, found) in zip(answers, CUT.items(), strict=True):
        assert set(found.split()) <= set(said.split()), (words, ran.stderr)
        assert found or not said

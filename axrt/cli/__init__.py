"""The `axrt` command. Each subcommand has a module that is imported when it is called: most need
torch, some do not."""

import gc
import io
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

import click
from click.shell_completion import CompletionItem, add_completion_class

from .overrides import Bash

add_completion_class(Bash)

# Each command with its module, its name there, and what --help says of it.
_COMMANDS = {
    "prepare": ("prepare", "prepare_command", "Turn text into a token file to train on."),
    "train": ("train.command", "train", "Train a model, alone or on the ranks of a job."),
    "launch": ("launch", "launch", "Start a job, and start it again when it is lost."),
    "slurm": ("batch", "slurm_command", "Write and submit a batch script for Slurm."),
    "pbs": ("batch", "pbs_command", "Write and submit a batch script for PBS."),
    "generate": ("generate", "generate", "Let a trained model go on from a prompt."),
    "import": ("import_model", "import_command", "Make a run of a model of transformers."),
    "export": ("export_model", "export_command", "Write a trained model for transformers."),
    "inspect": (
        "inspect",
        "inspect",
        "Say what each rank of a run does, and who is waited for.",
    ),
    "watch": ("watch", "watch", "Follow a run that is under way."),
    "report": ("report", "report", "Write a page about a run."),
    "runs": ("runs", "runs", "List the runs in a directory."),
    "checkpoint": ("checkpoint", "checkpoint", "List, verify and show checkpoints of a run."),
    "simulate": (
        "simulate.command",
        "simulate_command",
        "Show what a schedule would do, or compare all.",
    ),
    "profile": (
        "profile",
        "profile",
        "Measure what each layer costs, for plans and simulations.",
    ),
    "plan": ("plan", "plan", "Choose the layout of a run on a cluster."),
    "sweep": ("sweep", "sweep", "Choose layouts over values of keys of a cluster, or of a run."),
    "check-policy": ("check_policy", "check_policy", "Try a policy of your own on many schedules."),
    "memory": ("memory", "memory", "Say what each rank of a run will hold, and what would help."),
    "draw": ("draw", "draw_command", "Draw the timeline of a run, or of a simulation."),
    "doctor": ("doctor", "doctor", "Look at this machine, or this job, and say what is wrong."),
}


class _Commands(click.Group):
    """Commands by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(_imported(f"{__name__}.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, _COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "axrt --help lists those that there are"
            ctx.fail(f"there is no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names that fit and the options of the group; no command is imported for its name."""
        options = click.Command.shell_complete(self, ctx, incomplete)
        fitting = (name for name in _COMMANDS if name.startswith(incomplete))
        return [CompletionItem(name, help=_COMMANDS[name][2]) for name in fitting] + options

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, said) for name, (_, _, said) in _COMMANDS.items()])


def _imported(name: str) -> ModuleType:
    """A module, imported while no garbage is collected.

    What torch's modules make stays. Going through it again and again, and once more when the
    process ends, takes a third of the time that torch takes to import.
    """
    if name in sys.modules or not gc.isenabled():
        return import_module(name)
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


@click.group(cls=_Commands, context_settings={"max_content_width": 100})
@click.version_option(package_name="axrt")
def main() -> None:
    """Train large neural networks with a message-driven pipeline.

    \b
      axrt train FILE.toml                  on one rank
      mpirun -n 4 axrt train FILE.toml      on four
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files need not be UTF-8
        sys.stdout.reconfigure(errors="surrogateescape")
    sys.path.append(os.getcwd())  # for what users have written, as `python -m` has it

"""The `axrt` command; one module a subcommand."""

import click

from .checkpoint import checkpoint
from .doctor import doctor
from .draw import draw_command
from .generate import generate
from .simulate import simulate_command
from .train import train


@click.group()
@click.version_option(package_name="axrt")
def main() -> None:
    """Train large neural networks with a message-driven pipeline."""


for command in (train, generate, checkpoint, simulate_command, draw_command, doctor):
    main.add_command(command)

"""The `axrt` command; one module a subcommand."""

import click

from .train import train


@click.group()
@click.version_option(package_name="axrt")
def main() -> None:
    """Train large neural networks with a message-driven pipeline."""


main.add_command(train)
